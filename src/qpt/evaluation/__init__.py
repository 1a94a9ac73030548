"""Run a policy in a simulator: many episodes side by side, a batched decision for all of them, one row an episode."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from qpt.envs import one_per_process
from qpt.envs.vector import EnvPool, portable
from qpt.episodes import Episodes, provenance
from qpt.errors import QptError
from qpt.evaluation.lockstep import Run, episode_seeds
from qpt.evaluation.policies import CallablePolicy, ConstantPolicy, EpisodePolicy, Floats, RandomPolicy
from qpt.tasks import Task, get_task

__all__ = [
    "CallablePolicy",
    "ConstantPolicy",
    "EpisodePolicy",
    "Episodes",
    "RandomPolicy",
    "check",
    "episode_seeds",
    "evaluate",
]

HALVED = 8  # slots from which on they are two batches


def evaluate(
    policy: EpisodePolicy,
    task: Task | str,
    *,
    episodes: int = 20,
    cost_limits: Sequence[float] = (10.0,),
    seed: int = 0,
    workers: int | None = None,
    slots: int | None = None,
    progress: bool = False,
    record: bool = False,
    step_timeout: float = 120.0,
) -> Episodes:
    """Run `episodes` episodes at each cost limit and return one row for each.

    `slots` episodes advance together and one `policy.act` of constant shape [slots, S] serves them; a policy that can
    `fork` has two batches of half the rows, each with workers of its own where there are two or more, so that neither
    waits for the other. Episode e always runs in row e mod slots, its environment is seeded by (seed, number) alike for
    every limit, and its noise by (seed, place of the limit, number): the rows depend neither on the number of workers
    nor on timing, bit for bit, as long as a row of the policy does not depend on what stands in the others. A worker
    that dies, hangs (`step_timeout` seconds for one step) or raises is replaced and its episodes are run again from
    their start.
    `workers=None` takes one process a core, or none where the task's factory cannot be sent to another process.
    """
    task = get_task(task) if isinstance(task, str) else task
    limits = np.asarray(cost_limits, np.float64).reshape(-1)
    check(policy, task, episodes, limits, seed, workers, slots)
    total = episodes * len(limits)
    single = one_per_process(task)
    fork = None if single else getattr(type(policy), "fork", None)  # of its class: a wrapper must say so itself
    # Fixed numbers, so that results do not depend on the machine. A network gains from many rows (64 environments of
    # Bullet take 2 GB of memory); in two batches of 24, each round is long enough for what it costs by itself.
    slots = min(total, slots or (8 if single else 48 if fork else 64))
    policies = [policy, fork(policy)] if fork and slots >= HALVED else [policy]
    if workers is None:
        workers = min(_cores(), slots) if portable(task) else 0
    began = time.time()
    with (
        EnvPool(task, slots, workers, groups=len(policies), step_timeout=step_timeout) as pool,
        _bar(progress, task, total) as show,
    ):
        run = Run(policies, pool, episodes, limits, seed, record)
        while run.tick():
            show(run)
        show(run)
    number = np.tile(np.arange(episodes), len(limits))
    limit = np.repeat(limits, episodes)
    named = {"task": task.name, "algorithm": getattr(policy, "algorithm", type(policy).__name__)}
    named["checkpoint"] = str(getattr(policy, "checkpoint", None) or "")
    return Episodes(
        **{name: np.full(total, text) for name, text in named.items()},
        seed=np.full(total, seed, np.int64),
        cost_limit=limit,
        episode=number,
        returns=run.returns,
        costs=run.costs,
        lengths=run.lengths,
        ended_by=np.where(run.terminal, "terminal", "timeout"),
        fallback_share=run.fallback,
        normalized_return=np.array([task.normalized_return(float(r)) for r in run.returns]),
        normalized_cost=np.array(
            [task.normalized_cost(float(c), float(k)) for c, k in zip(run.costs, limit, strict=True)]
        ),
        provenance={
            **provenance(),
            "task": task.name,
            "seed": seed,
            "sha256": dict(getattr(policy, "sha256", None) or {}),  # of the files that it was loaded from
            "limit_mode": policy.limit_mode,
            "trained_limit": getattr(policy, "trained_limit", None),
            "surrogate_data": bool(getattr(policy, "surrogate", False)),  # never DSRL's own
            "workers": workers,
            "slots": slots,
            "batches": len(policies),
            "seconds": round(time.time() - began, 3),
            "incidents": run.incidents,
        },
        trajectories=run.trajectories() if record else None,
    )


def check(
    policy: EpisodePolicy, task: Task, episodes: int, limits: Floats, seed: int, workers: int | None, slots: int | None
) -> None:
    """Refuse what `evaluate` cannot do with these arguments, in a sentence."""
    for needed in ("limit_mode", "observation_dim"):
        if not hasattr(policy, needed):
            raise QptError(
                f"a {type(policy).__name__} has no {needed}, which a policy needs; give it one, as docs/evaluation.md "
                "shows, or put a function of observations into CallablePolicy"
            )
    if not task.has_simulator:
        raise QptError(
            f'task {task.name!r} has no simulator; give it an env_factory, or env = "module:function" in its TOML table'
        )
    if episodes < 1 or not len(limits):
        raise QptError("an evaluation needs at least one episode and one cost limit")
    if not (np.isfinite(limits) & (limits >= 0)).all():
        raise QptError(f"cost limits are finite and not negative; these are {limits.tolist()}")
    if len(np.unique(limits)) < len(limits):
        raise QptError(f"each cost limit is evaluated once; these are {limits.tolist()}")
    if not 0 <= seed < 2**63:  # the table has room for no more
        raise QptError(f"a seed is a whole number from 0 to 2**63 - 1, not {seed}; choose another")
    if (workers or 0) < 0 or (slots is not None and slots < 1):
        raise QptError("the number of workers must not be negative, and slots must be at least 1")
    expected, found = policy.observation_dim, task.env_observation_dim
    if expected is not None and found is not None and expected != found:
        raise QptError(
            f"the policy takes observations of length {expected}, but the simulator of {task.name} gives {found}; "
            "evaluate it in the simulator that its data come from, or train on data of this one"
        )
    longest = getattr(policy, "horizon", None)
    if getattr(policy, "past_horizon", None) == "error" and longest and (task.horizon or 0) > longest:
        raise QptError(
            f"the policy was trained for episodes of {longest} steps, but {task.name} has {task.horizon}; "
            "evaluate it in its own task, or load it with past_horizon='clamp'"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _bar(wanted: bool, task: Task, total: int) -> Iterator[Callable[[Run], None]]:
    """A progress bar on stderr: episodes, steps/s, mean return and cost so far."""
    if not wanted:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(task.name, total=total, text="starting")
        began, last = time.perf_counter(), 0.0

        def show(run: Run) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last < 0.1 and run.finished < total:
                return
            last = now
            text = f"{run.steps / (now - began):.0f} steps/s"
            if run.finished:
                text += f"  return {run.returns[run.done].mean():.1f}  cost {run.costs[run.done].mean():.1f}"
            bar.update(line, completed=run.finished, text=text)

        yield show
