"""From all snapshots of a task's runs to the few that together cover the plane of cost and return, in one file.

The snapshots' own statistics, one rollout each, give a short list; its members are played again with the weights as
they will be stored, in half precision. Those numbers decide who stays, and fresh episodes say what those who stay do:
numbers that they were not chosen by.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.behaviour import Actor
from qpt.collect import spool
from qpt.collect.behaviours import Snapshot
from qpt.collect.filter import careful_cost
from qpt.collect.recorder import play_episodes
from qpt.collect.runner import episodes_summary
from qpt.collect.workers import Payload, Pool, Report, received, sendable
from qpt.envs import make_env
from qpt.envs.surface import SEEDS
from qpt.errors import QptError
from qpt.tasks import Task
from qpt.writing import alone, check_folder, write_whole

Floats = npt.NDArray[np.float64]
Facts = dict[str, Any]

BYTES = 400_000  # of a task's snapshots
MOST = 32  # snapshots of a task
BEYOND = 1.15  # of the cap: what costs more on average has hardly an episode within it
ROUNDS = {"short": (4, 4), "long": (20, 10)}  # noisy and mean-action episodes of each on the short list, and chosen


def harvest(
    task: Task,
    cap: float,
    folder: Path,
    workers: int,
    notes: Facts,
    until: float = math.inf,
    tell: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Choose from what the runs in `folder` have learned so far, into a file beside it; None if the time was too short.

    What was played for it is kept and not played again.
    """
    target = folder.with_name(f"{folder.name}.safetensors")
    check_folder(folder)
    with alone(folder / ".harvest", f"choosing snapshots in {folder}"):
        paths = sorted(folder.glob("run-*/snapshots/*.npz"))
        if not paths:
            raise QptError(f"nothing was learned yet in {folder}; learn for longer")
        facts = [spool.load(path, ())[1] for path in paths]
        sizes = spool.load(paths[0])[0].values()
        count = min(MOST, BYTES // sum(array.nbytes for array in sizes))
        low, high = _range(task, facts)
        played: dict[int, Facts] = {}
        listed = cover([(f["noisy"], f["mean_action"]) for f in facts], cap, low, high, 2 * count)
        for stage in ROUNDS:
            tell(f"{task.name}: playing {len(listed)} of {len(paths)} snapshots")
            played = _play(task, folder, {i: paths[i] for i in listed}, facts, stage, workers, until)
            if len(played) < len(listed):
                tell(f"{task.name}: the time is over, {len(played)} of {len(listed)} snapshots are played")
                return None
            if stage == "short":
                rows = [(played[i]["noisy"], played[i]["mean_action"]) for i in listed]
                listed = [listed[k] for k in cover(rows, cap, low, high, count)]
        listed.sort(key=lambda i: (played[i]["noisy"]["cost"], played[i]["noisy"]["return"], i))
        table = [
            {**facts[i], "learned": {k: facts[i][k] for k in ("noisy", "mean_action")}, **played[i]} for i in listed
        ]
        actors = [spool.load(paths[i])[0] for i in listed]
        for row, arrays in zip(table, actors, strict=True):
            row["std"] = arrays["std"].tolist()
        stacked = {name: np.stack([arrays[name] for arrays in actors]) for name in actors[0]}
        metadata = {
            "task": task.name,
            "note": f"behaviour policies of {task.name}, learned with qpt in its simulator",
            "cost_cap": json.dumps(cap),
            "provenance": json.dumps(notes),
            "snapshots": json.dumps(table),
        }
        try:
            from safetensors.numpy import save
        except ImportError:
            tell(f"{task.name}: all is played; safetensors is not installed here: run this with --finish where it is")
            return None
        content = save(stacked, metadata)
        write_whole(target, content)
    tell(f"{task.name}: wrote {target}, {len(listed)} of {len(paths)} snapshots, {len(content) / 1000:.0f} kB")
    return target


def cover(rows: Sequence[tuple[Facts, Facts]], cap: float, low: float, high: float, count: int) -> list[int]:
    """Up to `count` of the policies, each of which is a pair of means (with noise and without): first the best within
    several costs, low ones above all, then, one by one, what lies farthest from all that were chosen.
    """
    costs = np.array([[fact["cost"] for fact in row] for row in rows])  # [n, 2]
    returns = np.array([[fact["return"] for fact in row] for row in rows])
    inside = costs <= BEYOND * cap
    careful = careful_cost(cap)
    bounds = [careful, cap, 0.5 * cap, 0.5 * careful, 0.25 * cap, careful, 0.75 * cap, 0.25 * careful, 0.125 * cap]
    bounds += [careful, 0.375 * cap, 0.625 * cap, 0.875 * cap, cap]
    chosen: list[int] = []
    for bound in bounds[: max(1, count // 2)]:
        best = np.where(costs <= bound, returns, -np.inf).max(1)
        best[chosen] = -np.inf
        if np.isfinite(best.max()):
            chosen.append(int(best.argmax()))
    points = np.stack([costs / cap, (returns - low) / max(high - low, 1e-9)], -1)  # [n, 2, 2]
    away = np.full(inside.shape, np.inf)
    for i in chosen:
        away = np.minimum(away, _distance(points, points[i][inside[i]]))
    while len(chosen) < min(count, int(inside.any(1).sum())):
        gain = np.where(inside, away, -1.0).max(1)
        gain[chosen] = -1.0
        chosen.append(int(gain.argmax()))
        away = np.minimum(away, _distance(points, points[chosen[-1]][inside[chosen[-1]]]))
    return chosen


def _distance(points: Floats, to: Floats) -> Floats:
    """How far each of the points [n, 2, 2] is from the nearest of `to` [k, 2]."""
    result: Floats = np.linalg.norm(points[:, :, None] - to, axis=-1).min(-1)
    return result


def _range(task: Task, facts: Sequence[Facts]) -> tuple[float, float]:
    """The returns that the plane spans: those of the published data, or what was reached."""
    if task.reward_min is not None and task.reward_max is not None:
        return task.reward_min, task.reward_max
    returns = [fact[kind]["return"] for fact in facts for kind in ("noisy", "mean_action")]
    return min(returns), max(returns)


def _play(
    task: Task, folder: Path, paths: dict[int, Path], facts: Sequence[Facts], stage: str, workers: int, until: float
) -> dict[int, Facts]:
    """What these snapshots do, played where it is not known yet; the time may be too short for all of them."""
    results = {}
    for i, path in paths.items():  # named after their content as well: a run may have been learned anew
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        results[i] = folder / "played" / f"{facts[i]['run']}-{facts[i]['iteration']:06d}-{digest}-{stage}.json"
    payload = sendable(task, workers)
    jobs = [partial(_play_one, payload, paths[i], results[i], stage, until) for i in paths if not results[i].exists()]
    with Pool(workers) as pool:
        pool.run(jobs, lambda *_: None)
    return {i: json.loads(file.read_text(encoding="utf-8")) for i, file in results.items() if file.exists()}


def _play_one(payload: Payload, source: Path, target: Path, stage: str, until: float, report: Report) -> None:
    """Play one snapshot's episodes, with the noise that it learned with and without any."""
    if time.time() >= until:
        return
    arrays, facts = spool.load(source)
    counts = ROUNDS[stage]
    key = [facts["run"], facts["iteration"], list(ROUNDS).index(stage)]
    seeds = np.random.default_rng(key).integers(SEEDS, size=sum(counts)).tolist()
    env = make_env(received(payload))
    try:
        parts = ((1.0, seeds[: counts[0]]), (0.0, seeds[counts[0] :]))
        found = {}
        for name, (noise, own) in zip(("noisy", "mean_action"), parts, strict=True):
            behaviour = Snapshot(name, Actor.from_arrays(arrays), noise)
            rollout = play_episodes(env, [(behaviour, seed) for seed in own])
            found[name] = episodes_summary(rollout.returns, rollout.episode_costs, rollout.lengths)
            report({"progress": True})
    finally:
        env.close()
    write_whole(target, json.dumps(found), spool.ADVICE)
