"""Record: play a task's behaviours, choose evenly from what they did, and describe the dataset that comes of it.

Every behaviour is played first; then, round by round, those that are likely to fill what is thin: rare cells of the
plane of cost and return, episodes of low cost, and the best returns at each cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.collect import spool
from qpt.collect.behaviours import Behaviours, behaviours
from qpt.collect.filter import BINS, careful_cost, cells, grid_filter
from qpt.collect.learn import check_cap, check_numbers, versions
from qpt.collect.recorder import play_episodes
from qpt.collect.runner import HORIZON
from qpt.collect.workers import Payload, Pool, Report, cores, received, sendable
from qpt.data.trajectories import Trajectories
from qpt.envs import make_env
from qpt.envs.surface import SEEDS, SafeEnv
from qpt.envs.vector import portable
from qpt.errors import QptError
from qpt.tasks import Task, dsrl_tasks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # (episodes played, episodes to play)

WANTED = 500  # trajectories, unless told otherwise
PLAYED = 2.0  # episodes played for each that is wanted
FIRST = 0.3  # of which so many in the first round, in which every behaviour has its turn
ROUNDS = 6  # after the first
PATIENCE = 2  # so many times as many episodes are played where too few stay within the cap
CHUNK = 2000  # steps of a job, about
CAREFUL_SHARE = 0.2  # of the episodes at low cost, up to which those are worth more
TOP = 0.05  # of the range of returns: what is as near to the best of its cost counts double


@dataclass(frozen=True)
class Recorded:
    """The dataset, and what it was chosen from."""

    trajectories: Trajectories
    played: int  # episodes
    steps: int  # of the simulator
    core_seconds: float  # of processor time, over all calls that it took


def record(
    task: Task,
    folder: str | Path,
    *,
    snapshots: Path | None = None,
    trajectories: int | None = None,
    cost_cap: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    command: str = "",
    report: Progress = lambda *_: None,
) -> Recorded:
    """Play the task's behaviours (of the file `snapshots`, by default those that come with qpt) and choose episodes.

    `folder` keeps the episodes meanwhile; a call that was interrupted goes on from there. The data depend on the
    behaviours, the seed, the numbers asked for and the versions of the simulator and numpy, not on `workers`.
    """
    check_numbers(seed, workers)
    wanted = WANTED if trajectories is None else trajectories
    if wanted < 1:
        raise QptError(f"at least one trajectory must be wanted, not {wanted}")
    found = behaviours(task, snapshots)
    cap = check_cap(task, found.cap if cost_cap is None else cost_cap)
    folder = Path(folder)
    if workers is None:
        workers = cores() if portable(task) else 0
    plan = {
        "task": task.name, "horizon": task.horizon, "cap": cap, "seed": seed, "wanted": wanted,
        "behaviours": len(found.all), "versions": versions(task), **found.provenance,
    }  # fmt: skip
    with spool.claimed(folder, plan), Pool(workers) as pool, _holding():
        log = _play_rounds(task, folder, found, snapshots, cap, wanted, seed, pool, report)
        kept = _choose(task, log, cap, wanted, seed)
        chosen = spool.gather(folder, kept)
        core_seconds = spool.core_seconds(folder)
    names = [found.all[b].name for b in log.behaviour[kept]]
    info = {
        **chosen.info,
        "behaviour": names,
        **provenance(task, command),
        "seed": seed,
        "cost_cap": cap,
        "method": "episodes of behaviour policies of many kinds, with several levels of noise; grid filter",
        **found.provenance,
        "recorded_episodes": len(log.costs),
        "simulator_steps": int(log.lengths.sum()),
    }
    return Recorded(replace(chosen, info=info), len(log.costs), int(log.lengths.sum()), core_seconds)


def provenance(task: Task, command: str) -> dict[str, Any]:
    """What to write into the file, so that nobody takes the data for others or cannot make them again."""
    published = task.name in dsrl_tasks()
    note = "collected with qpt, not DSRL's published data: surrogate" if published else "collected with qpt"
    return {
        "task": task.name,
        "note": note,
        **({"surrogate": True} if published else {}),
        "command": command,
        "versions": versions(task),
    }


# -- playing -----------------------------------------------------------------------------------------------------------


def _play_rounds(
    task: Task, folder: Path, found: Behaviours, file: Path | None, cap: float, wanted: int, seed: int, pool: Pool,
    report: Progress,
) -> spool.Log:  # fmt: skip
    """Play until there are enough episodes; what each of them brought."""
    arms = len(found.all)
    total = max(int(PLAYED * wanted), arms)
    log, counts = spool.Log.empty(), np.full(arms, max(1, int(FIRST * total / arms)))
    while counts.any():
        _play(task, folder, file, cap, seed, pool, np.repeat(np.arange(arms), counts), len(log.costs), total, report)
        log = spool.log(folder, len(log.costs) + int(counts.sum()))
        if len(log.costs) >= total and (log.costs <= cap).sum() < wanted:
            total = max(total, int(PATIENCE * PLAYED * wanted))
        low, high = _range(task, log)
        share = min(-(-int((1 - FIRST) * PLAYED * wanted) // ROUNDS), total - len(log.costs))
        counts = allocate(log, arms, cap, low, high, task.reward_min, share)
    return log


def _play(
    task: Task, folder: Path, file: Path | None, cap: float, seed: int, pool: Pool, todo: Ints, begun: int, total: int,
    report: Progress,
) -> None:  # fmt: skip
    """Play these behaviours, as episodes numbered from `begun` on, in chunks; those that are there already are not."""
    payload, size = sendable(task, pool.workers), max(1, CHUNK // (task.horizon or HORIZON))
    pieces = {begun + k: todo[k : k + size].tolist() for k in range(0, len(todo), size)}
    missing = {k: piece for k, piece in pieces.items() if not spool.chunk(folder, k).exists()}
    at = begun + len(todo) - sum(map(len, missing.values()))

    def listen(_: int, message: dict[str, Any]) -> None:
        nonlocal at
        at += message.get("episodes", 0)
        report(at, max(total, begun + len(todo)))

    jobs = [partial(_play_chunk, payload, file, folder, k, piece, seed, cap) for k, piece in missing.items()]
    pool.run(jobs, listen)


def allocate(log: spool.Log, arms: int, cap: float, low: float, high: float, least: float | None, count: int) -> Ints:
    """How often to play each behaviour next, so that the plane fills where it is thin.

    An episode is worth 1 / (1 + episodes in its cell), more if its cost is low and such episodes are few, or if its
    return is among the best at its cost; nothing beyond the cap or below `least`. A behaviour is worth what its
    episodes are worth on average, with those counted that were given out already.
    """
    within = (log.costs <= cap) & (True if least is None else log.returns >= least)
    column, row = cells(log.returns, log.costs, cap, low, high)
    cell, careful = column * BINS + row, log.costs <= careful_cost(cap)
    best = np.full(BINS, -np.inf)
    np.maximum.at(best, column[within], log.returns[within])
    worth = np.where(within, np.where(log.returns >= best[column] - TOP * (high - low), 2.0, 1.0), 0.0)
    if careful[within].sum() < CAREFUL_SHARE * within.sum():
        worth[careful] *= 3.0
    filled = np.bincount(cell[within], minlength=BINS**2).astype(np.float64)
    played = np.bincount(log.behaviour, minlength=arms)
    result = np.zeros(arms, np.int64)
    for _ in range(count):
        gain = np.bincount(log.behaviour, worth / (1.0 + filled[cell]), arms) / np.maximum(played, 1)
        chosen = int(gain.argmax())
        result[chosen] += 1
        own = (log.behaviour == chosen) & within
        np.add.at(filled, cell[own], 1.0 / played[chosen])
    return result


def _range(task: Task, log: spool.Log) -> tuple[float, float]:
    """The returns that the plane spans."""
    if task.reward_min is not None and task.reward_max is not None:
        return task.reward_min, task.reward_max
    return float(log.returns.min()), float(log.returns.max())


def _play_chunk(
    payload: Payload, file: Path | None, folder: Path, start: int, piece: Sequence[int], seed: int, cap: float,
    report: Report,
) -> None:  # fmt: skip
    """Play a few episodes, numbered from `start` on, of these behaviours and write them down."""
    began, task = time.process_time(), received(payload)
    env, found = _held(task), behaviours(task, file)
    numbers = np.arange(start, start + len(piece))
    seeds = [int(np.random.SeedSequence((seed, n)).generate_state(1)[0] % SEEDS) for n in numbers.tolist()]
    rollout = play_episodes(env, [(found.all[b], s) for b, s in zip(piece, seeds, strict=True)])
    spool.append(folder, start, rollout, np.array(piece), cap, time.process_time() - began)
    report({"progress": True, "episodes": len(piece)})


_ENVS: dict[str, SafeEnv] = {}  # of this process: making one takes longer than an episode


def _held(task: Task) -> SafeEnv:
    if task.name not in _ENVS:
        _ENVS[task.name] = make_env(task)
    return _ENVS[task.name]


@contextmanager
def _holding() -> Iterator[None]:
    """Close what was made in this process, where there are no workers."""
    try:
        yield
    finally:
        while _ENVS:
            _ENVS.popitem()[1].close()


# -- choosing ----------------------------------------------------------------------------------------------------------


def _choose(task: Task, log: spool.Log, cap: float, wanted: int, seed: int) -> Ints:
    """DSRL's filter; what earns less than anything published goes first, where enough is left without it."""
    index = np.arange(len(log.costs))
    if task.reward_min is not None and ((log.returns >= task.reward_min) & (log.costs <= cap)).sum() >= wanted:
        index = np.flatnonzero(log.returns >= task.reward_min)
    return index[grid_filter(log.returns[index], log.costs[index], log.lengths[index], cap, wanted, seed)]
