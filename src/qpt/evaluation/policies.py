"""What `evaluate` asks of a policy, and policies without learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


AHEAD = 64  # steps for which RandomPolicy draws at a time: a draw for each would cost more than the rest of it


class EpisodePolicy(Protocol):
    """What `evaluate` asks of a policy: n rows, each in an episode of its own. Noise comes from the row's seed.

    One with a method `fork()`, which gives another policy like it with rows of its own, is asked for two half batches,
    whichever is ready first: neither may depend on what the other was asked.
    """

    @property
    def limit_mode(self) -> str:
        """ "live": the limit is obeyed; "trained": it was fixed in training; "ignored": it plays no part."""

    @property
    def observation_dim(self) -> int | None:
        """The length of observations it takes; None: any."""

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:
        """Begin with n rows, each at the start of an episode."""

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:
        """The given rows begin a new episode."""

    def act(self, observations: Float32s, active: Flags) -> Float32s:
        """Actions [n, A] for observations [n, S]; rows that are not active hold zeros and are not used."""

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        """What the rows that were active in the last `act` earned."""

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        """Numbers [n] about each row's running episode, e.g. `fallback_share`."""


class CallablePolicy:
    """Any function of observations [n, S] that gives actions [n, A]; rows without an episode hold zeros.

    It may keep something between its calls, such as a random generator, so it is called for all rows at once.
    """

    limit_mode = "ignored"
    observation_dim = None

    def __init__(self, function: Callable[[Float32s], npt.ArrayLike], name: str | None = None) -> None:
        if not callable(function):
            kind = type(function).__name__
            raise QptError(f"the policy {name or function!r} is a {kind}; give a function of observations [n, S]")
        self.function = function
        self.algorithm = name or getattr(function, "__name__", "callable")

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:
        pass

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:
        pass

    def act(self, observations: Float32s, active: Flags) -> Float32s:  # noqa: ARG002
        return np.asarray(self.function(observations), np.float32)

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        pass

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}


class ConstantPolicy(CallablePolicy):
    """The same action at every step."""

    def __init__(self, action: npt.ArrayLike) -> None:
        row = np.asarray(action, np.float32).reshape(1, -1)
        super().__init__(lambda observations: np.repeat(row, len(observations), axis=0), "constant")

    def fork(self) -> ConstantPolicy:
        return self  # it keeps nothing


class RandomPolicy:
    """Uniform actions in [-1, 1], each episode from its own seed."""

    limit_mode = "ignored"
    observation_dim = None
    algorithm = "random"

    def __init__(self, action_dim: int) -> None:
        self.action_dim = action_dim

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        self.rngs = [np.random.default_rng(seed) for seed in seeds.tolist()]
        self.drawn = np.zeros((n, AHEAD, self.action_dim), np.float32)
        self.rows, self.used = np.arange(n), np.full(n, AHEAD)

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        for i, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
            self.rngs[i] = np.random.default_rng(seed)
        self.used[indices] = AHEAD

    def act(self, observations: Float32s, active: Flags) -> Float32s:  # noqa: ARG002
        for i in np.flatnonzero(active & (self.used == AHEAD)).tolist():
            self.drawn[i] = self.rngs[i].uniform(-1.0, 1.0, (AHEAD, self.action_dim))
            self.used[i] = 0
        actions: Float32s = self.drawn[self.rows, self.used % AHEAD]
        self.used += active
        return actions

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        pass

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}

    def fork(self) -> RandomPolicy:
        return RandomPolicy(self.action_dim)
