"""What each of the eight baselines reaches on toys whose best safe return is known, after a short training.

A level is a floor: the share of the exact optimum at a limit, with the mean cost within that limit (CPQ: nearly).
Floors lie below the worst of the measured instances by a margin (see LEVELS). Every row must also earn more than a
random policy and than cloning all the data do within its limit: nothing, where their mean cost exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from qpt.algorithms.base import Spec, algorithm_classes
from qpt.data.trajectories import Trajectories
from qpt.envs import toy as toys
from qpt.envs.toy import Toy
from qpt.evaluation import evaluate
from qpt.policy import Policy

Measured = tuple[float, float]  # mean return and mean cost


@dataclass(frozen=True)
class Level:
    method: str
    limits: tuple[float, ...]
    shares: tuple[float, ...]  # at least so much of the optimum at each limit
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "tradeoff"
    slack: float = 0.0  # mean cost allowed beyond the limit, for those that come to lie on it or do not quite keep it


# fmt: off
# Measured on five instances each (0 to 4; the instance is also the seed of data and training), 48 episodes a limit, on
# a CPU: the range of the share of the optimum, and of the mean cost. Slow all the way is the least that a policy can
# earn (0.64 to 0.66 of the optimum at 6, 0.52 at 12): a row at that level shows that it keeps the limit, and no more.
# Cloning all data is medium all the way: cost 24, twice the limit; a random policy costs 32. Settings were chosen on
# instance 0, those of CPQ on four of the five.
CRITICS: dict[str, Any] = {"batch_size": 64, "width": 32, "vae_width": 32, "samples": 4, "ema": 0.95}
LEVELS = [
    # 0.64 to 0.66 and 0.52, all at cost 0: the cheap episodes, averaged, are slow all the way.
    Level("bc-safe", (6.0, 12.0), (0.6, 0.5), {"steps": 600, "batch_size": 256, "width": 64}),
    # 0.85 to 0.90 @ 6.0 and 0.83 to 0.92 @ 11.9 to 12.0: it spends its budget to the end, but not where it pays most.
    Level("cdt", (6.0, 12.0), (0.8, 0.78), {
        "steps": 600, "batch_size": 64, "context": 4, "width": 32, "layers": 1, "heads": 2, "dropout": 0.0,
        "attention_dropout": 0.0, "lr": 1e-3, "warmup": 100}, slack=0.25),
    # 0.78 to 0.82 @ 9.3 to 10.3. With the published reach of 0.05 it cannot leave what is usual in the data.
    Level("bcq-lag", (12.0,), (0.72,), CRITICS | {"steps": 600, "lr": 3e-3, "reach": 0.5}),
    # 0.70 to 0.78 @ 8.1 to 13.5, one of five beyond its limit: the limit is held against what lies ahead of each state,
    # whatever was spent before. After 1000 steps, two of five are beyond (up to 16).
    Level("cpq", (12.0,), (0.62,), CRITICS | {"steps": 1600, "actor_lr": 1e-3}, slack=2.0),
    # 0.70 to 0.83 @ 4.0 to 6.6. With the published alpha its multiplier has not fallen far enough: 0.52 @ 0.
    Level("coptidice", (12.0,), (0.68,), {
        "steps": 800, "batch_size": 128, "width": 32, "lr": 3e-3, "reward_scale": 1.0, "alpha": 0.1}),
    # 1.00 @ 0 everywhere: the best return without any cost.
    Level("fisor", (0.0,), (0.95,), {
        "steps": 500, "batch_size": 128, "width": 32, "policy_width": 32, "blocks": 1, "lr": 2e-3, "critic_lr": 2e-3,
        "ema_rate": 0.02}, slack=0.1),
    # 0.79 to 0.85 @ 4.0 to 4.9 and 0.77 to 0.81 @ 8.2 to 9.5.
    Level("caps", (6.0, 12.0), (0.72, 0.7), {
        "steps": 600, "batch_size": 128, "width": 32, "lr": 2e-3, "target_rate": 0.05}),
]
# fmt: on


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logged(toy: Toy, seed: int) -> Trajectories:
    """300 episodes; as the stage is observed and nothing follows the last one, an episode's end is terminal."""
    data = toy.dataset(300, seed)
    return replace(data, terminals=data.timeouts, timeouts=data.terminals)


def learned(
    toy: Toy, instance: int, method: str, limits: tuple[float, ...], settings: dict[str, Any]
) -> list[Measured]:
    """Mean return and cost at each limit; a method whose policies are made for one limit is trained for each."""
    method_class, config_class = algorithm_classes(method)
    data, found = logged(toy, instance), []
    policy: Policy | None = None
    for limit in limits:
        if policy is None or policy.limit_mode == "trained":
            torch.manual_seed(instance)
            config = replace(config_class(), **settings)
            if hasattr(config, "cost_limit"):
                config = replace(config, cost_limit=limit)
            algorithm = method_class(config, Spec.from_data(data, task=toy.task()))
            sampler = algorithm.make_sampler(data, torch.device("cpu"), instance)
            algorithm.train()
            for _ in range(config.steps):
                algorithm.update(sampler.sample())
            policy = Policy(algorithm, trained_limit=getattr(config, "cost_limit", None))
        table = evaluate(policy, toy.task(), episodes=48, cost_limits=(limit,), seed=instance, workers=0)
        found.append((float(table.returns.mean()), float(table.costs.mean())))
    return found


@cache
def cloned(kind: str, instance: int) -> Measured:
    """Cloning of every episode."""
    toy: Toy = getattr(toys, kind)(instance)
    settings = {"mode": "all", "steps": 600, "batch_size": 256, "width": 64}
    return learned(toy, instance, "bc-safe", toy.cost_limits[:1], settings)[0]


def drawn(toy: Toy) -> Measured:
    """A random policy, exactly."""
    returns, costs = toy.policy_values(np.full(toy.rewards.shape, 1 / toy.moves))
    return float(toy.start @ returns[0]), float(toy.start @ costs[0])


def within(measured: Measured, limit: float) -> float:
    """The return, or nothing where the mean cost exceeds the limit."""
    return measured[0] if measured[1] <= limit else 0.0


def check(level: Level, instance: int) -> None:
    toy: Toy = getattr(toys, level.kind)(instance)
    found = learned(toy, instance, level.method, level.limits, level.settings)
    for limit, share, mine in zip(level.limits, level.shares, found, strict=True):
        assert mine[1] <= limit + level.slack
        assert mine[0] >= share * toy.optimal_return(limit)
        for other in (drawn(toy), cloned(level.kind, instance)):
            assert mine[0] > within(other, limit)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.method)
def test_reaches_its_level(level: Level) -> None:
    check(level, 0)


@pytest.mark.slow
@pytest.mark.parametrize("instance", [1, 2, 3, 4])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.method)
def test_reaches_its_level_on_other_instances(level: Level, instance: int) -> None:
    check(level, instance)


def test_tradeoff_hides_from_oasis_what_was_done() -> None:
    """Why OASIS has no row: it reads actions, rewards and costs from two states in a row, and here the next state is
    the same whatever is done. Trained on Tradeoff-0 for 1400 steps it does as cloning does: 24 at a limit of 12.
    """
    data = logged(toys.tradeoff(0), 0)
    inner = ~data.terminals
    before, after = data.observations[inner], data.observations[1:][inner[:-1]]
    pairs, pair_of_step = np.unique(np.concatenate([before, after], 1), axis=0, return_inverse=True)
    assert len(pairs) == len(np.unique(before, axis=0))  # the next state adds nothing
    means = np.array([data.costs[inner][pair_of_step.ravel() == i].mean() for i in range(len(pairs))])
    left = np.mean((data.costs[inner] - means[pair_of_step.ravel()]) ** 2) / data.costs[inner].var()
    assert left > 0.8  # of the variance of costs, after the best that a labeler can do
