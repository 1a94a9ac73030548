"""A whole collection: plan, run or go on, filter, describe."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qpt import __version__
from qpt.collect import spool
from qpt.collect.filter import grid_filter
from qpt.collect.schedules import Plan, plans
from qpt.collect.workers import Report, run_all
from qpt.data.trajectories import Trajectories
from qpt.envs import make_env
from qpt.envs.vector import portable
from qpt.errors import QptError
from qpt.tasks import Task, dsrl_tasks, factory_from
from qpt.writing import alone, check_folder, write_whole

PACKAGES = {  # whose versions the data depend on
    "bullet": ("bullet_safety_gym", "pybullet"),
    "safety-gymnasium": ("safety-gymnasium", "mujoco"),
    "metadrive": ("metadrive-simulator", "panda3d"),
}
LOCK = ".lock"


@dataclass(frozen=True)
class Collected:
    """The data set, and what it was chosen from."""

    trajectories: Trajectories
    recorded: int  # episodes within the cap
    steps: int  # of the simulator


def collect(
    task: Task,
    folder: str | Path,
    *,
    trajectories: int | None = None,
    cost_cap: float | None = None,
    seed: int = 0,
    runs: int | None = None,
    steps: int | None = None,
    schedule: Path | None = None,
    workers: int | None = None,
    command: str = "",
    report: Report | None = None,
) -> Collected:
    """Train PPO-Lagrangian policies on the task along its schedules, record what they do, and choose from it.

    `folder` is where the runs keep finished episodes and their state; with one of an earlier call that was interrupted,
    the collection goes on from there and ends with the same result. The data depend on the seed, the schedule and the
    versions of the simulator and numpy, not on the number of workers. (`workers=0` stays in this process, where linear
    algebra may use several threads: slower on a busy machine, and rounded differently.)
    """
    cap = check_cap(task, cost_cap)
    wanted = check_wanted(trajectories, task)
    check_numbers(seed, workers)
    todo = plans(task.name, cap, seed=seed, runs=runs, steps=steps, file=schedule)
    folder = Path(folder)
    plan = {"task": task.name, "horizon": task.horizon, "cap": cap, "plans": [p.to_json() for p in todo]}
    folders = [folder / f"run-{plan.number}" for plan in todo]
    if workers is None:
        workers = min(cores(), len(todo)) if portable(task) or os.environ.get("QPT_TASKS") else 0
    taken = dict.fromkeys(range(len(todo)), 0)

    def listen(number: int, message: dict[str, Any]) -> None:
        taken[number] = message.get("steps", taken[number])
        if report is not None:
            report(number, message)

    with _claimed(folder, plan):
        run_all(task, todo, cap, folders, workers, listen)
        chosen, recorded = choose(folders, task, cap, wanted, seed)
    notes = {
        **provenance(task, command),
        "seed": seed,
        "cost_cap": cap,
        "schedules": json.dumps([_short(plan) for plan in todo]),
        "method": "PPO-Lagrangian with a curriculum over cost limits; training and mean-action episodes; grid filter",
        "recorded_episodes": recorded,
        "simulator_steps": sum(taken.values()),
    }
    return Collected(replace(chosen, info={**chosen.info, **notes}), recorded, sum(taken.values()))


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
    report: Callable[[int, int], None] | None = None,
    chunk: int = 100,
) -> Collected:
    """Record a given policy: the folder of a checkpoint, or "module:function" for a function of observations [n, S].

    The episodes of a policy that takes any limit are spread evenly over the cost limits (the task's own by default).
    No two share a seed of the simulator. Nothing is filtered; with a cost cap, dearer episodes are left out. Finished
    chunks are kept, so that an interrupted recording goes on.
    """
    from qpt.evaluation import check, evaluate  # not needed by the worker processes

    wanted = check_wanted(trajectories, task)
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
    with _claimed(folder, {"task": task.name, "horizon": task.horizon, **what, "chunk": chunk}):
        play = partial(evaluate, agent, task, workers=workers, record=True)
        _record_chunks(folder, play, limits, wanted, chunk, seed, report)
        everything = spool.gather([folder])
    kept = np.flatnonzero(everything.episode_costs <= (np.inf if cost_cap is None else cost_cap))
    if len(kept) == 0:
        raise QptError(f"no recorded episode stays within the cost cap of {cost_cap:g}; raise it, or leave it out")
    notes = {
        **provenance(task, command),
        "seed": seed,
        "policy": policy,
        **({} if agent.limit_mode == "ignored" else {"cost_limits": list(limits)}),
        "method": "episodes of a given policy",
        "recorded_episodes": len(everything),
        "simulator_steps": everything.steps,
    }
    return Collected(replace(everything.select(kept), info=notes), len(everything), everything.steps)


def choose(folders: list[Path], task: Task, cap: float, wanted: int, seed: int) -> tuple[Trajectories, int]:
    """DSRL's filter over all that the runs recorded, and how much that was.

    What earns less than anything published goes first, where enough is left without it.
    """
    rows = [row for folder in folders for row in spool.summary(folder)]
    if not rows:
        raise QptError("no episode within the cost cap was recorded; raise the cap, or collect for longer")
    returns, costs, lengths = (np.array(column) for column in zip(*rows, strict=True))
    index = np.arange(len(rows))
    if task.reward_min is not None and (returns >= task.reward_min).sum() >= wanted:
        index = np.flatnonzero(returns >= task.reward_min)
    kept = index[grid_filter(returns[index], costs[index], lengths[index], cap, wanted, seed)]
    return spool.gather(folders, kept), len(rows)


def _record_chunks(
    folder: Path,
    play: Callable[..., Any],
    limits: Sequence[float],
    wanted: int,
    size: int,
    seed: int,
    report: Callable[[int, int], None] | None,
) -> None:
    """Play the wanted episodes, spread over the limits, in chunks of `size` that each have one limit and a seed.

    (An evaluation at several limits gives them the same seeds of the simulator, to compare them: here those would be
    copies.) Chunks that are there already are not played.
    """
    done = {int(path.name.split("-")[0]) for path in spool.chunks(folder)}
    shares = [wanted // len(limits) + (k < wanted % len(limits)) for k in range(len(limits))]
    todo = [
        (limit, min(size, share - start))
        for start in range(0, max(shares), size)
        for limit, share in zip(limits, shares, strict=True)
        if start < share
    ]
    told = 0
    for number, (limit, count) in enumerate(todo):
        if number not in done:
            own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)
            data: Trajectories = play(episodes=count, cost_limits=(limit,), seed=own).trajectories
            arrays = {name: getattr(data, name) for name in (*spool.STEPS, "final_observations", "lengths")}
            unknown = {"env_seed": np.full(len(data), -1), "mean_action": np.zeros(len(data), bool)}
            spool.append_arrays(folder, number, {**arrays, **unknown})
        told += count
        if report is not None:
            report(told, wanted)


def own_task(reference: str, horizon: int | None, cost_cap: float | None) -> Task:
    """The task of "module:factory", an environment of one's own; its module may lie in the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    if horizon is not None and horizon < 1:
        raise QptError(f"an episode has at least one step; give a larger --horizon than {horizon}")
    factory_from(reference)  # says what is wrong with the text
    factory = partial(_imported, reference)
    task = Task(name=reference.replace(":", "."), env_factory=factory, horizon=horizon, cost_max=cost_cap)
    make_env(task).close()  # a defect is told here, and not by every worker
    return task


def _imported(reference: str) -> Any:
    return factory_from(reference)()


def check_cap(task: Task, cost_cap: float | None) -> float:
    cap = task.cost_max if cost_cap is None else cost_cap
    if cap is None:
        raise QptError(f"{task.name} has no largest cost to collect up to; give one with --cost-cap")
    if not 0 < cap < float("inf"):
        raise QptError(f"the cost cap must be a positive number, not {cap:g}")
    return float(cap)


def check_wanted(trajectories: int | None, task: Task) -> int:
    wanted = trajectories if trajectories is not None else task.trajectories or 1000
    if wanted < 1:
        raise QptError(f"at least one trajectory must be wanted, not {wanted}")
    return wanted


def check_numbers(seed: int, workers: int | None) -> None:
    if not 0 <= seed < 2**63:  # the file has room for no more
        raise QptError(f"a seed is a whole number from 0 to 2**63 - 1, not {seed}; choose another")
    if workers is not None and workers < 0:
        raise QptError(f"there cannot be {workers} workers; give 0 to stay in this process, or leave it out")


def provenance(task: Task, command: str) -> dict[str, Any]:
    """What to write into the file, so that nobody takes the data for others or cannot make them again."""
    published = task.name in dsrl_tasks()
    versions = {"qpt": __version__, "numpy": np.__version__, "python": platform.python_version()}
    for package in PACKAGES.get(task.suite, ("gymnasium",)):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    note = "collected with qpt, not DSRL's published data: surrogate" if published else "collected with qpt"
    return {
        "task": task.name,
        "note": note,
        **({"surrogate": True} if published else {}),
        "command": command,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def remove(folder: Path) -> None:
    """Delete a collection's folder, once its data set is written."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _claimed(folder: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Take a new folder, or one that was begun with the same plan; nobody else may work in it meanwhile."""
    file, text = folder / "plan.json", json.dumps(plan, indent=1)
    ours = not folder.exists() or file.exists() or (folder.is_dir() and {p.name for p in folder.iterdir()} <= {LOCK})
    if not ours:
        raise QptError(f"{folder} exists and is no collection of ours; choose another --out or move it away")
    check_folder(folder)
    with alone(folder / LOCK, f"collecting into {folder}"):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            if not _empty(folder):
                raise QptError(
                    f"{folder} holds a collection that was begun with other settings; finish it with the command it "
                    "was begun with, or delete that folder to begin anew"
                )
            write_whole(file, text)
        yield


def _empty(folder: Path) -> bool:
    """Whether nothing was recorded yet: a command that was refused must not stand in the way of the corrected one."""
    return all(
        path.name in ("plan.json", LOCK) or (path.is_dir() and not any(path.iterdir())) for path in folder.iterdir()
    )


def _short(plan: Plan) -> dict[str, Any]:
    """A plan without the settings that are as always."""
    usual = type(plan.settings)()
    own = {k: v for k, v in vars(plan.settings).items() if v != getattr(usual, k)}
    penalty = {} if plan.penalty is None else {"penalty": asdict(plan.penalty)}
    return {"run": plan.number, "steps": plan.steps, "limits": [list(p) for p in plan.limits], **penalty, **own}


def _policy(name: str) -> Any:
    from qpt.evaluation import CallablePolicy

    if Path(name).exists():
        policy: Any = importlib.import_module("qpt.policy").load_policy(name)
        return policy
    module, _, function = name.partition(":")
    if not module or not function:
        raise QptError(f"there is no policy {name!r}; give the folder of a checkpoint or module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return CallablePolicy(getattr(importlib.import_module(module), function), name)
    except (ImportError, AttributeError) as error:
        raise QptError(f"the policy {name!r} cannot be imported: {error}") from error
