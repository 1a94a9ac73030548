"""Behaviour policies: the small networks that datasets are recorded with, in one safetensors file a task.

Each comes with what it earns and costs in its simulator, measured in episodes that it was not chosen by: material to
check off-policy estimates against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError
from qpt.tasks import get_task

Float32s = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
WEIGHTS = ("w1", "b1", "w2", "b2", "w3", "b3")  # stored in half precision
EXACT = ("mean", "inverse_std", "std")  # of the observations, and of the actions' noise
PREFIX = "behaviour:"


@dataclass
class Actor:
    """Two hidden layers of tanh: mean actions [n, A] of raw observations [n, S]."""

    p: dict[str, Any]
    mean: Float32s  # [S] of the observations
    inverse_std: Float32s  # [S]
    std: Float32s  # [A] of the noise that it learned with

    def __call__(self, observations: Float32s) -> Float32s:
        x = np.minimum(np.maximum((observations - self.mean) * self.inverse_std, -10), 10)
        p = self.p
        result: Float32s = np.tanh(np.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]
        return result

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As it is stored."""
        weights = {name: np.asarray(self.p[name], np.float16) for name in WEIGHTS}
        return {**weights, **{name: np.asarray(getattr(self, name), np.float32) for name in EXACT}}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Actor:
        return cls({name: arrays[name].astype(np.float32) for name in WEIGHTS}, *(arrays[name] for name in EXACT))


@dataclass(frozen=True, eq=False)
class Snapshots:
    """A task's behaviour policies, by rising cost."""

    task: str
    cap: float  # the largest cost of an episode that they were chosen for
    actors: tuple[Actor, ...]
    table: tuple[Mapping[str, Any], ...]  # of each: run, steps, and what it does with and without noise
    provenance: Mapping[str, Any]
    sha256: str  # of the file


def snapshots_of(task: str) -> Path | None:
    """The file of a task's behaviour policies that comes with the package, if there is one."""
    path = Path(__file__).parent / "collect" / "snapshots" / f"{task}.safetensors"
    return path if path.is_file() else None


def read_snapshots(path: Path) -> Snapshots:
    """Read a file that `qpt collect learn` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            facts = file.metadata() or {}
            stacked = {name: file.get_tensor(name) for name in (*WEIGHTS, *EXACT)}
        table = tuple(json.loads(facts["snapshots"]))
        actors = tuple(Actor.from_arrays({k: v[i] for k, v in stacked.items()}) for i in range(len(table)))
        provenance, cap = json.loads(facts["provenance"]), float(json.loads(facts["cost_cap"]))
        return Snapshots(facts["task"], cap, actors, table, provenance, sha256(path.read_bytes()).hexdigest())
    except (OSError, SafetensorError, KeyError, ValueError, IndexError) as error:
        raise QptError(f"{path} holds no behaviour policies that can be read ({error})") from error


class BehaviourPolicy:
    """One of them, for `qpt.evaluate` and all else that asks a policy for actions; each episode has noise of its own.

    `known` says what it does: means and standard deviations of return and cost over episodes in the simulator, under
    "noisy" (noise 1) and "mean_action" (noise 0).
    """

    limit_mode = "ignored"
    algorithm = "behaviour"

    def __init__(self, snapshots: Snapshots, number: int, noise: float = 1.0) -> None:
        if not 0 <= noise < float("inf"):
            raise QptError(f"the noise is a number of at least 0, in units of what was learned with, not {noise:g}")
        self._snapshots, self.number, self.noise = snapshots, number, noise
        self.actor, self.known = snapshots.actors[number], snapshots.table[number]
        self.task, self.checkpoint = snapshots.task, f"{PREFIX}{snapshots.task}/{number}"
        self.sha256 = {f"{snapshots.task}.safetensors": snapshots.sha256}
        self.observation_dim, self.action_dim = len(self.actor.mean), len(self.actor.std)

    def fork(self) -> BehaviourPolicy:
        return BehaviourPolicy(self._snapshots, self.number, self.noise)

    def reset(self, n: int, *, cost_limits: Any, seeds: Ints) -> None:
        self._rngs: list[Any] = [None] * n
        self.restart(np.arange(n), cost_limits=cost_limits, seeds=seeds)

    def restart(self, indices: Ints, *, cost_limits: Any, seeds: Ints) -> None:  # noqa: ARG002
        for i, seed in zip(indices.tolist(), np.asarray(seeds).tolist(), strict=True):
            self._rngs[i] = np.random.default_rng([seed, 1])

    def act(self, observations: Float32s, active: Flags) -> Float32s:
        actions = self.actor(observations)
        if self.noise:
            std = np.float32(self.noise) * self.actor.std
            for i in np.flatnonzero(active).tolist():
                actions[i] += std * self._rngs[i].standard_normal(len(std), np.float32)
        return np.minimum(np.maximum(actions, np.float32(-1)), np.float32(1))

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        pass

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}


def load_behaviour(name: str, noise: float = 1.0, **others: Any) -> BehaviourPolicy:
    """The policy of "behaviour:TASK/NUMBER"; `noise` in units of what it learned with."""
    if others:
        raise QptError(f"a behaviour policy has no setting {next(iter(others))!r}; it has noise alone")
    task, _, number = name.removeprefix(PREFIX).partition("/")
    path = snapshots_of(get_task(task).name)
    if path is None:
        raise QptError(f"there are no behaviour policies of {task} in this version of qpt")
    found = read_snapshots(path)
    if not number.isdecimal() or int(number) >= len(found.table):
        last = f"{PREFIX}{task}/{len(found.table) - 1}"
        raise QptError(f"the behaviour policies of {task} are {PREFIX}{task}/0 to {last}; {name} is none of them")
    return BehaviourPolicy(found, int(number), noise)
