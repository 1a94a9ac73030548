"""What acts while a dataset is recorded: something that begins an episode and then gives its actions, one by one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qpt.behaviour import Actor, read_snapshots, snapshots_of
from qpt.envs.surface import SafeEnv
from qpt.errors import QptError
from qpt.tasks import Task

Float32s = npt.NDArray[np.float32]
Act = Callable[[Float32s], Float32s]  # from an observation [S] to an action [A], which is clipped to [-1, 1]

NOISES = (0.0, 0.5, 1.0, 2.0)  # times what a snapshot learned with


class Behaviour(Protocol):
    """One way to act in a task. An episode depends on its seed, and on nothing that was played before."""

    @property
    def name(self) -> str:
        """Which one it is; written into the dataset for every episode."""

    def begin(self, env: SafeEnv, seed: int) -> tuple[Float32s, Act]:
        """Reset the environment for one episode; its first observation, and what acts in it."""


@dataclass(frozen=True)
class Snapshot:
    """A learned policy with so many times the noise that it learned with."""

    name: str
    actor: Actor
    noise: float

    def begin(self, env: SafeEnv, seed: int) -> tuple[Float32s, Act]:
        draw, std = np.random.default_rng([seed, 1]).standard_normal, np.float32(self.noise) * self.actor.std
        observation, _ = env.reset(seed=seed)

        def act(observation: Float32s) -> Float32s:
            mean: Float32s = self.actor(observation[None])[0]
            return mean + std * draw(len(mean), np.float32) if self.noise else mean

        return observation, act


@dataclass(frozen=True, eq=False)
class Behaviours:
    """All ways to act that a task's dataset is recorded with."""

    all: tuple[Behaviour, ...]
    cap: float | None  # the cost they were made for
    provenance: dict[str, Any]  # what they are, for the dataset


@functools.lru_cache(maxsize=1)
def behaviours(task: Task, file: Path | None = None) -> Behaviours:
    """The behaviours of a task, always in the same order: the snapshots of `file`, by default the package's own."""
    path = file or snapshots_of(task.name)
    if path is None:
        raise QptError(
            f"there are no behaviour policies of {task.name} yet; learn some with `qpt collect learn {task.name}` and "
            "name the file that it writes with --snapshots"
        )
    found = read_snapshots(path)
    if found.task != task.name:
        raise QptError(f"{path} holds the behaviour policies of {found.task}, not of {task.name}")
    return Behaviours(
        tuple(
            Snapshot(f"{number}, noise {noise:g}", actor, noise)
            for number, actor in enumerate(found.actors)
            for noise in NOISES
        ),
        found.cap,
        {"snapshots_sha256": found.sha256, "learning": json.dumps(found.provenance)},
    )
