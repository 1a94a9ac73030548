"""Environments that misbehave on purpose; importable by worker processes."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from qpt.tasks import Task


class Walk(gymnasium.Env):  # type: ignore[type-arg]
    """A random walk with random lengths; `fault(env)` is called before every step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, fault: Any = None) -> None:
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        super().reset(seed=seed)
        self.seed, self.steps = seed, 0
        self.length = int(self.np_random.integers(3, 40))
        self.state = self.np_random.normal(size=3)
        return self.state.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        if self.fault is not None:
            self.fault(self)
        self.steps += 1
        self.state = np.tanh(self.state + 0.1 * self.np_random.normal(size=3) + float(np.sum(action)) * 0.1)
        cost = float(self.state[0] > 0)
        over = self.steps >= self.length
        return self.state.astype(np.float32), float(self.state.sum()), over, False, {"cost": cost}


def raises(env: Walk) -> None:
    if env.steps == 2:
        raise RuntimeError("the physics exploded")


def once(kind: str, folder: str, env: Walk) -> None:
    """Die, hang or raise at the third step of some episode, but only the first time."""
    if env.steps == 2:
        try:
            (Path(folder) / "done").touch(exist_ok=False)  # one process alone succeeds
        except FileExistsError:
            return
        if kind == "die":
            os.kill(os.getpid(), 9)
        if kind == "hang":
            time.sleep(600)
        raise RuntimeError("a glitch")


def slow(_: Walk) -> None:
    time.sleep(0.05)


def slow_when_odd(env: Walk) -> None:
    time.sleep(60.0 * ((env.seed or 0) % 2))


def walk(fault: Any = None) -> Walk:
    return Walk(fault)


class Blind(Walk):
    """Without an observation after the last step."""

    def step(self, action: Any) -> Any:
        seen, reward, over, *rest = super().step(action)
        return (np.full(3, np.nan) if over else seen, reward, over, *rest)


class Drawn(Walk):
    """With pictures."""

    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((16, 24, 3), 5 * self.steps, np.uint8)


def walk_task(fault: Any = None, **facts: Any) -> Task:
    """Episodes that end by a terminal after 3 to 39 steps, or by a timeout after 30."""
    defaults = {"observation_dim": 3, "action_dim": 2, "horizon": 30, "reward_min": -10.0, "reward_max": 10.0}
    return Task("Walk", env_factory=partial(walk, fault), **{**defaults, **facts})
