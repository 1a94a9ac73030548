"""Learn: PPO-Lagrangian runs along a task's schedule, and from all they pass through one small file of snapshots.

    python -m qpt.collect.learn TASK [TASK ...] [--out FOLDER] [--workers N] [--hours H]

is the same as `qpt collect learn`, for machines that have numpy, Gymnasium and a simulator alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qpt import __version__
from qpt.collect.harvest import harvest
from qpt.collect.runner import load_state, run
from qpt.collect.schedules import Plan, plans
from qpt.collect.spool import claimed
from qpt.collect.workers import Payload, Pool, Report, cores, received, sendable
from qpt.envs import make_env
from qpt.envs.vector import portable
from qpt.errors import QptError
from qpt.tasks import Task, factory_from, get_task

PACKAGES = {  # whose versions the data depend on
    "bullet": ("bullet_safety_gym", "pybullet"),
    "safety-gymnasium": ("safety-gymnasium", "mujoco"),
    "metadrive": ("metadrive-simulator", "panda3d"),
}


def learn(
    tasks: Sequence[Task],
    out: str | Path,
    *,
    seed: int = 0,
    runs: int | None = None,
    steps: int | None = None,
    schedule: Path | None = None,
    cost_cap: float | None = None,
    workers: int | None = None,
    hours: float | None = None,
    finish: bool = False,
    command: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Carry out the runs of the tasks' schedules and choose each task's snapshots: the files OUT/TASK.safetensors.

    What is learned lies in OUT/TASK/run-K and goes on from there when called again, with the same result: it depends on
    the seed, the schedule and the versions of the simulator and numpy, not on the number of workers. After `hours` all
    runs stop where they are; only tasks whose runs are complete get their file then. `finish` learns nothing more and
    chooses from what there is.
    """
    if hours is not None and not hours > 0:
        raise QptError(f"the hours to learn must be above 0, not {hours:g}")
    check_numbers(seed, workers)
    out, until = Path(out), math.inf if hours is None else time.time() + 3600 * hours
    caps = {task.name: check_cap(task, cost_cap) for task in tasks}
    todo = [
        _Run(task, plan, caps[task.name], out / task.name / f"run-{plan.number}")
        for task in tasks
        for plan in plans(task.name, caps[task.name], seed=seed, runs=runs, steps=steps, file=schedule)
    ]
    if workers is None:
        workers = cores() if all(map(portable, tasks)) else 0
    failure = None
    if not finish:
        with ExitStack() as stack:
            for one in todo:
                stack.enter_context(claimed(one.folder, one.what()))
            try:
                _carry_out(todo, workers, until, tell)
            except QptError as error:  # of one run: it must not hold up the other tasks
                failure = error
    ready = [t for t in tasks if finish or all(one.complete() for one in todo if one.task is t)]
    if len(ready) < len(tasks):
        tell(f"{len(ready)} of {len(tasks)} tasks are learned; run the same command again to go on")
    found = [harvest(t, caps[t.name], out / t.name, workers, _notes(t, todo, command), until, tell) for t in ready]
    if failure:
        raise failure
    return [path for path in found if path is not None]


@dataclass
class _Run:
    task: Task
    plan: Plan
    cap: float
    folder: Path
    last: dict[str, Any] = field(default_factory=dict)  # what it said last

    def what(self) -> dict[str, Any]:
        return {"task": self.task.name, "horizon": self.task.horizon, "cap": self.cap, "plan": self.plan.to_json()}

    def complete(self) -> bool:
        return bool(self.facts().get("steps", 0) >= self.plan.steps)

    def facts(self) -> dict[str, Any]:
        saved = load_state(self.folder)
        return saved[1] if saved else {}


def _carry_out(todo: list[_Run], workers: int, until: float, tell: Callable[[str], None]) -> None:
    """All runs, those first that were begun."""
    steps = {id(one): one.facts().get("steps", 0) for one in todo}
    todo = sorted((one for one in todo if steps[id(one)] < one.plan.steps), key=lambda one: steps[id(one)] == 0)
    done, began, told = dict(enumerate(steps[id(one)] for one in todo)), time.monotonic(), [time.monotonic()]
    before, total = sum(done.values()), sum(one.plan.steps for one in todo)

    def listen(number: int, message: dict[str, Any]) -> None:
        one = todo[number]
        name = f"{one.task.name}/{one.plan.number}"
        if "incident" in message:
            tell(f"{name}: {message['incident']}")
            return
        done[number] = message["steps"]
        one.last = message if "return" in message else one.last
        if message["steps"] >= one.plan.steps and one.last:
            tell(f"{name}: {_line(one)}, done")
        if time.monotonic() - told[0] > 60:
            told[0] = time.monotonic()
            speed = (sum(done.values()) - before) / (told[0] - began)
            active = [r for k, r in enumerate(todo) if r.last and done[k] < r.plan.steps]
            for r in active:
                tell(f"  {r.task.name}/{r.plan.number}: {_line(r)}")
            left = max(total - sum(done.values()), 0) / max(speed, 1e-9)
            tell(f"{sum(done.values()):,} of {total:,} steps, {speed:,.0f} steps/s, {left / 3600:.2f} h left")

    jobs = [
        partial(_learn_one, sendable(r.task, workers), r.plan, r.cap, r.folder, versions(r.task), until) for r in todo
    ]
    with Pool(workers) as pool:
        pool.run(jobs, listen)


def _learn_one(
    payload: Payload, plan: Plan, cap: float, folder: Path, versions: str, until: float, report: Report
) -> None:
    run(received(payload), plan, cap, folder, versions, report, until)


def _line(one: _Run) -> str:
    m = one.last
    return (
        f"{m['steps'] / one.plan.steps:.0%}, return {m['return']:.1f}, cost {m['cost']:.1f} (limit {m['limit']:.1f}), "
        f"multiplier {m['multiplier']:.2f}, {m['steps'] / max(m['times']['cpu'], 1e-9):,.0f} steps/s of processor time"
    )


def _notes(task: Task, todo: list[_Run], command: str) -> dict[str, Any]:
    """Where the snapshots of a task come from."""
    own = [(one, facts) for one in todo if one.task is task and (facts := one.facts())]
    return {
        "method": "PPO-Lagrangian with a curriculum over cost limits",
        "command": command,
        "seed": own[0][0].plan.seed if own else None,
        "versions": sorted({text for _, facts in own for text in facts["versions"]}),
        "core_hours": round(sum(facts["times"]["cpu"] for _, facts in own) / 3600, 3),  # of learning
        "simulator_steps": sum(facts["steps"] for _, facts in own),
        "complete": all(one.complete() for one in todo if one.task is task),
        "schedules": [{**_short(one.plan), "learned_steps": facts["steps"]} for one, facts in own],
    }


def _short(plan: Plan) -> dict[str, Any]:
    """A plan without the settings that are as always."""
    usual = type(plan.settings)()
    own = {k: v for k, v in vars(plan.settings).items() if v != getattr(usual, k)}
    penalty = {} if plan.penalty is None else {"penalty": asdict(plan.penalty)}
    return {"run": plan.number, "steps": plan.steps, "limits": [list(p) for p in plan.limits], **penalty, **own}


# -- what both stages check and note -----------------------------------------------------------------------------------


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


def check_numbers(seed: int, workers: int | None) -> None:
    if not 0 <= seed < 2**63:  # the file has room for no more
        raise QptError(f"a seed is a whole number from 0 to 2**63 - 1, not {seed}; choose another")
    if workers is not None and workers < 0:
        raise QptError(f"there cannot be {workers} workers; give 0 to stay in this process, or leave it out")


def versions(task: Task) -> str:
    """The versions that the outcome depends on."""
    found = {"qpt": __version__, "numpy": np.__version__, "python": platform.python_version()}
    for package in PACKAGES.get(task.suite, ("gymnasium",)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in found.items())


# -- command line ------------------------------------------------------------------------------------------------------


def main(args: Sequence[str] | None = None, program: str = "python -m qpt.collect.learn") -> int:
    """The command; argparse, so that nothing beyond numpy, Gymnasium and a simulator is needed."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Learn behaviour policies of tasks along their schedules, and keep the snapshots that together "
        "cover the plane of cost and return: OUT/TASK.safetensors. Run the same command again to go on.",
        epilog="example: qpt collect learn BallRun CarRun --workers 4 --hours 2",
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help="`qpt tasks` lists them")
    add("--env", metavar="MODULE:FACTORY", help="instead of tasks: an environment of your own that reports a cost")
    add("--out", type=Path, default=Path("learned"), metavar="FOLDER", help="default: learned")
    add("--seed", type=int, default=0, help="seed of everything (default: 0)")
    add("--runs", type=int, help="independent runs of each task; by default those of its schedule")
    add("--steps", type=int, help="simulator steps of each run; by default those of the schedule")
    add("--schedule", type=Path, metavar="FILE", help="a TOML file with schedules of your own")
    add("--workers", type=int, help="processes, one a run at a time; by default one per core, 0 for none")
    add("--hours", type=float, help="stop learning after this time, to go on later")
    add("--finish", action="store_true", help="learn nothing more: choose the snapshots from what there is")
    add("--horizon", type=int, help="cut episodes off after this many steps (for --env)")
    add("--cost-cap", type=float, help="the largest cost that matters; by default that of the published data")
    options = vars(parser.parse_args(args))
    names, env, horizon = options.pop("tasks"), options.pop("env"), options.pop("horizon")
    if bool(names) == bool(env):
        raise QptError("give either tasks (`qpt tasks` lists them) or --env module:factory")
    if names and horizon is not None:
        raise QptError("the horizon is part of a task; --horizon is for --env")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder, as with `python -m`
    tasks = [own_task(env, horizon, options["cost_cap"])] if env else [get_task(name) for name in dict.fromkeys(names)]
    words = sys.argv[1:] if args is None else args
    command = shlex.join(["qpt", "collect", "learn", *words])
    learn(tasks, **options, command=command, tell=lambda line: print(line, file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    from qpt.collect import learn as module  # by its name: worker processes look its functions up

    try:
        raise SystemExit(module.main())
    except QptError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
