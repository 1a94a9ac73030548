"""Record a given policy: a checkpoint's, a behaviour policy, or a function of observations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qpt.behaviour import PREFIX
from qpt.collect import spool
from qpt.collect.learn import check_numbers
from qpt.collect.record import WANTED, Progress, Recorded, provenance
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.tasks import Task


def record_policy(
    policy: str,
    task: Task,
    folder: str | Path,
    *,
    trajectories: int | None = None,
    cost_limits: Sequence[float] = (),
    cost_cap: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    command: str = "",
    report: Progress = lambda *_: None,
    chunk: int = 100,
) -> Recorded:
    """Record what `load_policy` loads, or "module:function", a function of observations [n, S].

    The episodes of a policy that takes any limit are spread evenly over the cost limits (the task's own by default).
    No two share a seed of the simulator. Nothing is filtered; with a cost cap, episodes that cost more are left out.
    Finished chunks are kept, so that an interrupted recording goes on.
    """
    from qpt.evaluation import check, evaluate  # not needed by the worker processes

    wanted = WANTED if trajectories is None else trajectories
    if wanted < 1:
        raise QptError(f"at least one trajectory must be wanted, not {wanted}")
    check_numbers(seed, workers)
    if cost_cap is not None and not 0 <= cost_cap < float("inf"):
        raise QptError(f"the cost cap must be a number of at least 0, not {cost_cap:g}")
    agent = _policy(policy)
    trained = getattr(agent, "trained_limit", None) if agent.limit_mode == "trained" else None
    limits = tuple(cost_limits) or (task.cost_limits if trained is None else (float(trained),))
    check(agent, task, wanted, np.array(limits, np.float64), seed, workers, None)
    agent.reset(len(limits), cost_limits=np.array(limits), seeds=np.arange(len(limits)))  # may refuse a limit
    if agent.limit_mode != "live":  # every limit would give the same episodes
        limits = limits[:1]
    folder = Path(folder)
    weights = dict(getattr(agent, "sha256", None) or {})  # the checkpoint at that path may change meanwhile
    what = {"policy": policy, "weights": weights, "limits": list(limits), "seed": seed, "wanted": wanted}
    with spool.claimed(folder, {"task": task.name, "horizon": task.horizon, **what, "chunk": chunk}):
        play = partial(evaluate, agent, task, workers=workers, record=True)
        _record_chunks(folder, play, limits, wanted, chunk, seed, report)
        log = spool.log(folder, wanted)
        kept = np.flatnonzero(log.costs <= (np.inf if cost_cap is None else cost_cap))
        if len(kept) == 0:
            raise QptError(f"no recorded episode stays within the cost cap of {cost_cap:g}; raise it, or leave it out")
        chosen = spool.gather(folder, kept)
    info = {
        **provenance(task, command),
        "seed": seed,
        "policy": policy,
        **({} if agent.limit_mode == "ignored" else {"cost_limits": list(limits)}),
        "method": "episodes of a given policy",
        "recorded_episodes": wanted,
        "simulator_steps": int(log.lengths.sum()),
    }
    return Recorded(replace(chosen, info=info), wanted, int(log.lengths.sum()), 0.0)


def _record_chunks(
    folder: Path,
    play: Callable[..., Any],
    limits: Sequence[float],
    wanted: int,
    size: int,
    seed: int,
    report: Progress,
) -> None:
    """Play the wanted episodes, spread over the limits, in chunks of `size` that each have one limit and a seed.

    (An evaluation at several limits gives them the same seeds of the simulator, to compare them: here those would be
    copies.) Chunks that are there already are not played.
    """
    shares = [wanted // len(limits) + (k < wanted % len(limits)) for k in range(len(limits))]
    todo = [
        (limit, min(size, share - start))
        for start in range(0, max(shares), size)
        for limit, share in zip(limits, shares, strict=True)
        if start < share
    ]
    told = 0
    for number, (limit, count) in enumerate(todo):
        if not spool.chunk(folder, told).exists():
            own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)
            data: Trajectories = play(episodes=count, cost_limits=(limit,), seed=own).trajectories
            spool.append_trajectories(folder, told, data)
        told += count
        report(told, wanted)


def _policy(name: str) -> Any:
    from qpt.evaluation import CallablePolicy

    if name.startswith(PREFIX) or Path(name).exists():
        return importlib.import_module("qpt.policy").load_policy(name)
    module, _, function = name.partition(":")
    if not module or not function:
        raise QptError(f"there is no policy {name!r}; give the folder of a checkpoint or module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return CallablePolicy(getattr(importlib.import_module(module), function), name)
    except (ImportError, AttributeError) as error:
        raise QptError(f"the policy {name!r} cannot be imported: {error}") from error
