"""Play whole episodes and record them as executed: raw observations, clipped actions, terminals and timeouts apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.collect.behaviours import Behaviour
from qpt.envs.surface import SEEDS, SafeEnv
from qpt.errors import QptError

Float32s = npt.NDArray[np.float32]
LONGEST = 100_000  # steps after which an episode counts as endless


@dataclass(eq=False)
class Rollout:
    """Episodes one after the other; episode e has the steps offsets[e] to offsets[e + 1]."""

    observations: Float32s  # [N, S]
    drawn: Float32s  # [N, A] actions before clipping, for the learner
    actions: Float32s  # [N, A] as executed
    rewards: npt.NDArray[np.float64]  # [N]
    costs: npt.NDArray[np.float64]
    terminals: npt.NDArray[np.bool_]
    timeouts: npt.NDArray[np.bool_]
    final_observations: Float32s  # [E, S]
    offsets: npt.NDArray[np.int64]  # [E + 1]
    seeds: npt.NDArray[np.int64]  # [E] of the environment's reset
    mean_action: npt.NDArray[np.bool_]  # [E] played without noise
    watched: npt.NDArray[np.float64]  # [N] size of what was asked for of `info`, such as the speed; never recorded

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def returns(self) -> npt.NDArray[np.float64]:
        return np.add.reduceat(self.rewards, self.offsets[:-1])

    @property
    def episode_costs(self) -> npt.NDArray[np.float64]:
        return np.add.reduceat(self.costs, self.offsets[:-1])


@dataclass
class _Slot:
    """One environment's part of a rollout."""

    mean: bool
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    finals: list[Float32s] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    began: int = 0  # the row at which the running episode began


def play(
    envs: Sequence[SafeEnv],
    slots: int,
    quota: int,
    actor: Callable[[Float32s], Float32s],
    std: Float32s,
    rng: np.random.Generator,
    times: dict[str, float] | None = None,
    watch: Sequence[str] = (),
) -> Rollout:
    """Fill `slots` places with whole episodes of at least `quota` steps each; the last place acts with the mean action.

    As many places run side by side as there are environments, the others after them. `watch` names numbers in the
    environment's `info`, whose joint size (a speed, of its components) is handed on to the learner.
    """
    played = [_Slot(mean=i == slots - 1) for i in range(slots)]
    times = times if times is not None else {}
    for start in range(0, slots, len(envs)):
        _play_together(envs, played[start : start + len(envs)], quota, actor, std, rng, times, watch)
    return _joined(played)


def play_episodes(env: SafeEnv, episodes: Sequence[tuple[Behaviour, int]]) -> Rollout:
    """One episode after the other, each of which depends on its behaviour and its seed alone."""
    slot = _Slot(mean=False)
    for behaviour, seed in episodes:
        observation, act = behaviour.begin(env, seed)
        slot.seeds.append(seed)
        slot.began, ended = len(slot.rows), False
        while not ended:
            drawn = act(observation)  # [A]
            action = np.minimum(np.maximum(drawn, np.float32(-1)), np.float32(1))
            following, reward, terminated, truncated, info = env.step(action)
            slot.rows.append((observation, drawn, action, reward, info["cost"], terminated, truncated, 0.0))
            observation, ended = following, terminated or truncated
            _check_length(slot, env)
        slot.finals.append(observation)
    return _joined([slot])


def _check_length(slot: _Slot, env: SafeEnv) -> None:
    if len(slot.rows) - slot.began > LONGEST:
        raise QptError(f"an episode of {env.name} goes on after {LONGEST} steps; cut episodes off with --horizon")


def _play_together(
    envs: Sequence[SafeEnv], slots: list[_Slot], quota: int, actor: Any, std: Float32s, rng: np.random.Generator,
    times: dict[str, float], watch: Sequence[str],
) -> None:  # fmt: skip
    clock = time.thread_time
    noise_free = np.array([slot.mean for slot in slots])
    observations = np.stack([_begin(env, slot, rng) for env, slot in zip(envs, slots, strict=False)])  # [n, S]
    active = np.arange(len(slots))
    simulator = policy = 0.0
    while len(active):
        began = clock()
        seen = observations[active]
        drawn = actor(seen)
        noise = rng.standard_normal(drawn.shape, np.float32) * std
        noise[noise_free[active]] = 0
        drawn = drawn + noise
        actions = np.minimum(np.maximum(drawn, np.float32(-1)), np.float32(1))
        decided = clock()
        still = []
        for k, i in enumerate(active.tolist()):
            env, slot = envs[i], slots[i]
            observation, reward, terminated, truncated, info = env.step(actions[k])
            size = _size(info, watch, env.name) if watch else 0.0
            slot.rows.append((seen[k], drawn[k], actions[k], reward, info["cost"], terminated, truncated, size))
            if terminated or truncated:
                slot.finals.append(observation)
                if len(slot.rows) >= quota:
                    continue
                observation = _begin(env, slot, rng)
            else:
                _check_length(slot, env)
            observations[i] = observation
            still.append(i)
        active = np.array(still, np.int64)
        policy += decided - began
        simulator += clock() - decided
    times["policy"] = times.get("policy", 0.0) + policy
    times["simulator"] = times.get("simulator", 0.0) + simulator


def _begin(env: SafeEnv, slot: _Slot, rng: np.random.Generator) -> Float32s:
    slot.seeds.append(int(rng.integers(SEEDS)))
    slot.began = len(slot.rows)
    return env.reset(seed=slot.seeds[-1])[0]


def _size(info: dict[str, Any], watch: Sequence[str], name: str) -> float:
    try:
        return math.hypot(*(float(info[key]) for key in watch))
    except (KeyError, TypeError, ValueError):
        there = ", ".join(sorted(key for key, value in info.items() if isinstance(value, (int, float))))
        raise QptError(
            f"the schedule's penalty is on {' and '.join(watch)}, but the info of {name} has the numbers {there} alone"
        ) from None


def _joined(slots: Sequence[_Slot]) -> Rollout:
    rows = [row for slot in slots for row in slot.rows]
    seen, drawn, actions, rewards, costs, terminals, timeouts, watched = zip(*rows, strict=True)
    ends = np.flatnonzero(np.array(terminals) | np.array(timeouts)) + 1
    return Rollout(
        np.stack(seen),
        np.stack(drawn),
        np.stack(actions),
        np.array(rewards, np.float64),
        np.array(costs, np.float64),
        np.array(terminals, bool),
        np.array(timeouts, bool),
        np.stack([final for slot in slots for final in slot.finals]),
        np.concatenate([[0], ends]).astype(np.int64),
        np.array([seed for slot in slots for seed in slot.seeds], np.int64),
        np.array([slot.mean for slot in slots for _ in slot.seeds]),
        np.array(watched, np.float64),
    )
