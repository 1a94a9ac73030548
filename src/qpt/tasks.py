"""The registry of tasks: the 38 of DSRL, and those a user adds in Python or in a TOML file."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from qpt.errors import QptError

Suite = Literal["bullet", "safety-gymnasium", "metadrive", "custom"]


@dataclass(frozen=True)
class Augmentation:
    """CDT's published relabelling constants of a task; None everywhere means: choose from the data."""

    degree: int | None = None
    max_reward: float | None = None
    max_reward_decrease: float | None = None


# The modules that a suite's simulator consists of.
SIMULATORS = {
    "bullet": ("bullet_safety_gym", "pybullet"),
    "safety-gymnasium": ("safety_gymnasium", "mujoco"),
    "metadrive": ("metadrive", "panda3d"),
}


@dataclass(frozen=True)
class Task:
    """Facts of one task. Only `name` is needed to train from a file; a simulator or factory is needed to evaluate."""

    name: str
    suite: Suite = "custom"
    env_id: str | None = None  # the simulator's own id
    env_factory: Callable[[], Any] | None = field(default=None, compare=False)  # for tasks of one's own
    observation_dim: int | None = None  # as in the data set
    simulator_observation_dim: int | None = None  # where the simulator differs from the published data (MetaDrive)
    action_dim: int | None = None
    horizon: int | None = None  # steps after which an episode is cut off
    reward_min: float | None = None  # DSRL's constants of the normalised return
    reward_max: float | None = None
    cost_max: float | None = None  # the largest episode cost in the published data
    binary_costs: bool = False
    trajectories: int | None = None  # in the published file
    data_file: str | None = None
    data_urls: tuple[str, ...] = ()
    cost_limits: tuple[float, ...] = (10.0, 20.0, 40.0)  # DSRL's evaluation thresholds
    paper_cost_limit: float = 10.0
    targets: tuple[tuple[float, float], ...] = ()  # CDT's published (return, cost) pairs
    augmentation: Augmentation = Augmentation()
    paper_steps: int = 100_000

    @property
    def simulator_installed(self) -> bool:
        """Whether the task can be run here, found out without importing its simulator."""
        modules = SIMULATORS.get(self.suite, ())
        here = self.env_id is not None and bool(modules) and all(map(importlib.util.find_spec, modules))
        return self.env_factory is not None or here

    @property
    def env_observation_dim(self) -> int | None:
        """The length of the observations that the simulator gives."""
        return self.simulator_observation_dim or self.observation_dim

    @property
    def has_simulator(self) -> bool:
        return self.env_id is not None or self.env_factory is not None

    def normalized_return(self, episode_return: float) -> float:
        """(R - R_min) / (R_max - R_min), as in DSRL; NaN where the task has no range."""
        if self.reward_min is None or self.reward_max is None or self.reward_max <= self.reward_min:
            return float("nan")
        return (episode_return - self.reward_min) / (self.reward_max - self.reward_min)

    def normalized_cost(self, episode_cost: float, cost_limit: float) -> float:
        """Cost over limit, as in DSRL; one is added to both where the limit is 0."""
        epsilon = 1.0 if cost_limit == 0 else 0.0
        return (episode_cost + epsilon) / (cost_limit + epsilon)


@functools.cache
def dsrl_tasks() -> dict[str, Task]:
    """The 38 tasks of DSRL, in the order of the paper's main table."""
    rows = json.loads(resources.files("qpt").joinpath("tasks.json").read_text(encoding="utf-8"))
    tasks = (_task_from(row, "tasks.json") for row in rows)
    return {task.name: task for task in tasks}


_registered: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task of one's own known by name, for this process; a name of DSRL's cannot be taken."""
    _check_name(task.name)
    _registered[task.name] = task
    return task


def _check_name(name: str, where: str = "") -> None:
    if not name:
        raise QptError("a task needs a name")
    if name in dsrl_tasks():
        raise QptError(f"the name {name!r}{where} belongs to a DSRL task; give your task another name")


def load_tasks(path: str | Path) -> list[Task]:
    """Read and register tasks of one's own from a TOML file with one [[task]] table each.

    The keys are the fields of Task; `env = "module:function"` names a factory that makes the environment. Either all
    tasks of the file are registered or, where one has a defect, none.
    """
    path = Path(path)
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("task", [])
    except OSError as error:
        raise QptError(f"the task file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QptError(f"the task file {path} is not valid TOML: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise QptError(f"the task file {path} has no [[task]] table; give at least one, with a name")
    tasks = [_task_from(row, str(path)) for row in rows]  # all are looked at before any is registered
    names = [task.name for task in tasks]
    for name in names:
        _check_name(name, f" in {path}")
        if names.count(name) > 1:
            raise QptError(f"the task file {path} has two tasks {name!r}; give each a name of its own")
    return [register_task(task) for task in tasks]


def all_tasks() -> dict[str, Task]:
    """Every known task by name: DSRL's, the registered ones, and those of the file that QPT_TASKS names."""
    file = os.environ.get("QPT_TASKS")
    if file:
        _load_once(file)
    return {**dsrl_tasks(), **_registered}


def get_task(name: str) -> Task:
    """The task of that name; an unknown name gets an error that suggests the nearest one."""
    tasks = all_tasks()
    if name in tasks:
        return tasks[name]
    near = [t for t in tasks if t.lower() == name.lower()] or get_close_matches(name, tasks, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "`qpt tasks` lists them all."
    raise QptError(f"there is no task {name!r}; {hint}")


@functools.cache
def _load_once(path: str) -> None:
    load_tasks(path)


def factory_from(reference: str) -> Callable[[], Any]:
    """The callable that "module:function" names; imported when called, so that training never needs it."""
    module, _, name = reference.partition(":")
    if not module or not name:
        raise QptError(f"{reference!r} does not name a factory; write it as module:function")
    return functools.partial(_make_from, module, name)  # unlike a closure, it can be sent to a worker process


def _make_from(module: str, name: str) -> Any:
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise QptError(f"the environment factory '{module}:{name}' cannot be imported: {error}") from error
    return target()


def _task_from(row: dict[str, Any], where: str) -> Task:
    row = dict(row)
    if not isinstance(row.get("name"), str) or not row["name"]:
        raise QptError(f"a task in {where} has no name; give it one")
    unknown = set(row) - {f.name for f in fields(Task)} - {"env"} | set(row) & {"env_factory"}
    if unknown:
        raise QptError(
            f"task {row['name']!r} in {where} has unknown keys: {', '.join(sorted(unknown))}; see docs/tasks.md"
        )
    try:
        _check(row)
        if "env" in row:
            row["env_factory"] = factory_from(row.pop("env"))
        for key in ("data_urls", "cost_limits"):
            if key in row:
                row[key] = tuple(row[key])
        if "targets" in row:
            row["targets"] = tuple((float(r), float(c)) for r, c in row["targets"])
        if "augmentation" in row:
            row["augmentation"] = Augmentation(**row["augmentation"])
        return Task(**row)
    except (TypeError, ValueError) as error:
        raise QptError(f"task {row['name']!r} in {where} cannot be read: {error}") from error


def _check(row: dict[str, Any]) -> None:
    """A wrong type is told here, by the key's name, and not later in the middle of a run."""

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    def count(value: Any) -> bool:
        return number(value) and isinstance(value, int) and value > 0

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)

    def limits(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(number(v) and v >= 0 for v in value)

    def pairs(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(p, list) and len(p) == 2 and all(map(number, p)) for p in value
        )

    def constants(value: Any) -> bool:
        degree = value.get("degree", 0) if isinstance(value, dict) else None
        return isinstance(degree, int) and degree >= 0 and all(map(number, value.values()))

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(("env_id", "data_file", "env"), (lambda v: isinstance(v, str) and bool(v), "a text")),
        **dict.fromkeys(("reward_min", "reward_max", "cost_max"), (number, "a number")),
        **dict.fromkeys(
            ("observation_dim", "simulator_observation_dim", "action_dim", "horizon", "trajectories", "paper_steps"),
            (count, "a positive whole number"),
        ),
        "suite": (lambda v: v in get_args(Suite), f"one of {', '.join(get_args(Suite))}"),
        "binary_costs": (lambda v: isinstance(v, bool), "true or false"),
        "data_urls": (texts, "a list of texts"),
        "paper_cost_limit": (lambda v: number(v) and v >= 0, "a number that is not negative"),
        "cost_limits": (limits, "a list of numbers that are not negative"),
        "targets": (pairs, "a list of [return, cost] pairs"),
        "augmentation": (constants, "a table of numbers, its degree a whole one"),
    }
    for key, (holds, wanted) in rules.items():
        if row.get(key) is not None and not holds(row[key]):
            raise ValueError(f"{key} must be {wanted}, not {row[key]!r}")
    low, high = row.get("reward_min"), row.get("reward_max")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"reward_min ({low:g}) must lie below reward_max ({high:g})")
