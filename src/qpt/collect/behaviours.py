"""What acts while a data set is recorded: something that begins an episode and then gives its actions, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qpt.behaviour import Actor
from qpt.envs.surface import SafeEnv

Float32s = npt.NDArray[np.float32]
Act = Callable[[Float32s], Float32s]  # from an observation [S] to an action [A], which is clipped to [-1, 1]


class Behaviour(Protocol):
    """It travels to worker processes. An episode depends on its seed, and on nothing that was played before."""

    @property
    def noise(self) -> float:
        """How much noise it acts with; 0: none."""

    def begin(self, env: SafeEnv, seed: int) -> tuple[Float32s, Act]:
        """Reset the environment for one episode; its first observation, and what acts in it."""


@dataclass(frozen=True)
class Snapshot:
    """A learned policy with so many times the noise that it learned with."""

    actor: Actor
    noise: float

    def begin(self, env: SafeEnv, seed: int) -> tuple[Float32s, Act]:
        draw, std = np.random.default_rng([seed, 1]).standard_normal, np.float32(self.noise) * self.actor.std
        observation, _ = env.reset(seed=seed)

        def act(observation: Float32s) -> Float32s:
            mean: Float32s = self.actor(observation[None])[0]
            return mean + std * draw(len(mean), np.float32) if self.noise else mean

        return observation, act
