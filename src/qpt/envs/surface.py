"""The one surface: what every simulator looks like from outside, in one flat wrapper (a stack of them costs time)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from qpt.errors import QptError

Array = NDArray[np.float32]
SEEDS = 2**31 - 1  # every simulator takes seeds below this


@dataclass(frozen=True)
class Simulator:
    """A simulator as its adapter hands it over; `env` is the bare one."""

    env: Any
    observation_dim: int
    action_dim: int
    reset: Callable[[int | None], tuple[Any, dict[str, Any]]]
    step: Callable[[Array], tuple[Any, ...]]  # Gymnasium's five, or Safety-Gymnasium's six with the cost third
    close: Callable[[], None]
    render: Callable[[], Any] | None = None
    always_seed: bool = True  # reset() without a seed draws one from the wrapper's own generator


@contextlib.contextmanager
def own_numpy_state(seed: int | None) -> Iterator[None]:
    """Let a simulator that draws from numpy's global state do so from `seed`, and give the caller's state back."""
    callers = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(seed)  # noqa: NPY002
        yield
    finally:
        np.random.set_state(callers)  # noqa: NPY002


class SafeEnv(gymnasium.Env[Array, Array]):
    """A Gymnasium environment with float32 observations, actions in [-1, 1] and a float in `info["cost"]`."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (Gymnasium's own convention)

    def __init__(self, simulator: Simulator, horizon: int | None, *, name: str, render: bool = False) -> None:
        self.simulator = simulator.env  # the bare environment
        self.name = name
        self.horizon = horizon
        self.render_mode = "rgb_array" if render else None
        self.observation_dim, self.action_dim = simulator.observation_dim, simulator.action_dim
        self.observation_space = Box(-np.inf, np.inf, (self.observation_dim,), np.float32)
        self.action_space = Box(-1.0, 1.0, (self.action_dim,), np.float32)
        self._simulator = simulator
        self._step = simulator.step
        self._observation_shape, self._action_shape = (self.observation_dim,), (self.action_dim,)
        self._low, self._high = np.full((2, self.action_dim), [[-1], [1]], np.float32)  # faster than two numbers
        self._last = float("inf") if horizon is None else horizon
        self._steps = 0
        self._running = False
        self._closed = False

    def limit_to(self, horizon: int) -> None:
        """Cut episodes off after so many steps, if they would go on for longer."""
        self._last = min(self._last, horizon)
        self.horizon = int(self._last)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode. The same seed gives the same episode; without one, the last seed's sequence goes on."""
        del options  # no simulator has any
        if seed is not None and not 0 <= seed < SEEDS:
            raise QptError(f"the seed {seed} is out of range; choose one from 0 to {SEEDS - 1}")
        super().reset(seed=seed)
        if seed is None and self._simulator.always_seed:
            seed = int(self.np_random.integers(SEEDS))
        observation, info = self._reset(None if seed is None else int(seed))
        self._steps, self._running = 0, True
        out = np.empty(self._observation_shape, np.float32)
        self._observe(observation, out)
        return out, info

    def _reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        wanted = "write it as reset(self, *, seed=None, options=None), to give (observation, info)"
        try:
            result = self._simulator.reset(seed)
        except TypeError as error:
            if "unexpected keyword argument 'seed'" not in str(error):
                raise
            raise QptError(f"reset() of {self.name} takes no seed; {wanted}") from error
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise QptError(f"reset() of {self.name} gives no observation and info; {wanted}")
        return result[0], result[1]

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, np.float32)
        if action.shape != self._action_shape:
            raise QptError(f"{self.name} takes actions of shape {self._action_shape}, not {action.shape}")
        action = np.minimum(np.maximum(action, self._low), self._high)
        if not math.isfinite(action.dot(action)):  # one number: cheaper than np.isfinite
            raise QptError(f"{self.name}: the action {action.tolist()} is not a number; check the policy that gave it")
        observation = np.empty(self._observation_shape, np.float32)
        return observation, *self.advance(action, observation)

    def advance(self, action: Array, out: Array) -> tuple[float, bool, bool, dict[str, Any]]:
        """`step` for a caller that sees to it that the action is float32, in [-1, 1] and nobody else's.

        The observation is written to `out`.
        """
        if not self._running:
            raise QptError(f"{self.name}: there is no running episode; call reset() before step()")
        result = self._step(action)
        count = len(result) if isinstance(result, (tuple, list)) else 1
        if count not in (5, 6):
            raise QptError(
                f"step() of {self.name} must give five values, not {count}; write it for Gymnasium, to give "
                "(observation, reward, terminated, truncated, info)"
            )
        if not isinstance(result[-1], dict):
            raise QptError(f'{self.name} gives an info that is no dict; make it one, with the cost in info["cost"]')
        if count == 6:
            observation, reward, cost, terminated, truncated, info = result
        else:
            observation, reward, terminated, truncated, info = result
            try:
                cost = info["cost"]
            except KeyError:
                raise QptError(f'{self.name} gives no cost; put one into info["cost"] at every step') from None
        reward, cost = self._number("reward", reward), self._number("cost", cost)
        info["cost"] = cost
        if not (cost >= 0 and math.isfinite(cost + reward)):
            why = "costs must not be negative" if cost < 0 else "what is not a number would count as no cost"
            raise QptError(
                f"{self.name} gave a reward of {reward} and a cost of {cost} at step {self._steps}; mend it: {why}"
            )
        self._steps += 1
        terminated = bool(terminated)
        truncated = not terminated and (bool(truncated) or self._steps >= self._last)
        self._running = not (terminated or truncated)
        self._observe(observation, out)
        return reward, terminated, truncated, info

    def _number(self, what: str, value: Any) -> float:
        try:
            if np.ndim(value) == 0:  # older versions of numpy take an array of one for a number
                return float(value)
        except (TypeError, ValueError):
            pass
        raise QptError(f"{self.name} gave a {what} of {value!r} at step {self._steps}; make it a single number")

    def _observe(self, observation: Any, out: Array) -> None:
        shape = observation.shape if type(observation) is np.ndarray else np.shape(observation)
        if shape != self._observation_shape:
            raise QptError(f"{self.name} gave an observation of shape {shape}, not {self._observation_shape}")
        out[:] = observation  # a copy: simulators may reuse theirs
        if np.count_nonzero(np.isfinite(out)) < len(out):  # twice as fast as all()
            raise QptError(
                f"{self.name} gave an observation with a value that is not finite, after {self._steps} steps of an "
                "episode; mend it: no policy can decide by that"
            )

    def render(self) -> NDArray[np.uint8]:
        """One RGB picture of the present state, [height, width, 3]."""
        if self._simulator.render is None:
            raise QptError(f"{self.name} cannot draw; make it with make_env(task, render=True)")
        try:
            frame = self._simulator.render()
        except NotImplementedError:  # Gymnasium's own, where an environment has none
            frame = None
        if frame is None:
            raise QptError(f'{self.name} gave no picture; make the environment with render_mode="rgb_array"')
        return np.ascontiguousarray(frame, np.uint8)

    def close(self) -> None:
        self._running = False
        if not self._closed:
            self._closed = True
            self._simulator.close()


def wrap_env(env: Any, horizon: int | None = None, *, name: str | None = None) -> SafeEnv:
    """Put an environment of one's own behind the surface; Box actions with finite bounds are rescaled to [-1, 1].

    `env` is any Gymnasium environment with `info["cost"]`, or one whose step gives Safety-Gymnasium's six values.
    """
    if isinstance(env, SafeEnv):
        if horizon is not None:
            env.limit_to(horizon)
        return env
    name = name or type(getattr(env, "unwrapped", env)).__name__
    observations, actions = getattr(env, "observation_space", None), getattr(env, "action_space", None)
    if not isinstance(observations, Box) or len(observations.shape) != 1:
        raise QptError(
            f"{name} has observations {observations}, not a flat Box; use gymnasium.wrappers.FlattenObservation"
        )
    if not isinstance(actions, Box) or len(actions.shape) != 1:
        raise QptError(f"{name} has actions {actions}, but only flat Box (continuous) action spaces can be used")
    if not np.issubdtype(actions.dtype, np.floating):
        raise QptError(
            f"{name} has actions of type {actions.dtype} ({actions}), which would cut off what a policy gives; "
            "make its action_space a Box of np.float32"
        )
    if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all()):
        raise QptError(f"{name} has actions without finite bounds ({actions}); give its action_space a low and a high")
    dtype, low, high = actions.dtype, actions.low.astype(np.float64), actions.high.astype(np.float64)

    def scaled_step(action: Array) -> tuple[Any, ...]:
        scaled = low + 0.5 * (action.astype(np.float64) + 1.0) * (high - low)
        result: tuple[Any, ...] = env.step(np.clip(scaled, low, high).astype(dtype))
        return result

    same = dtype == np.float32 and bool((low == -1).all() and (high == 1).all())
    simulator = Simulator(
        env=env,
        observation_dim=observations.shape[0],
        action_dim=actions.shape[0],
        reset=lambda seed: env.reset(seed=seed),
        step=env.step if same else scaled_step,
        close=env.close,
        render=getattr(env, "render", None),
        always_seed=False,
    )
    return SafeEnv(simulator, horizon, name=name, render=getattr(env, "render_mode", None) == "rgb_array")
