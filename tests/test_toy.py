"""The toy CMDPs: the optimum is what brute force finds, the oracle attains it, and the logged data do not."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from qpt.envs import make_env
from qpt.envs.toy import OraclePolicy, Toy, stitching, tradeoff
from qpt.evaluation import episode_seeds, evaluate

TOYS = [stitching(0), stitching(4), tradeoff(0), tradeoff(1)]


def brute_force(toy: Toy, stages: int, place: int, budget: int) -> float:
    """The best safe return of the last `stages` stages by trying every sequence of moves."""
    best = -np.inf
    for moves in itertools.product(range(toy.moves), repeat=stages):
        at, gained, spent = place, 0.0, 0
        for t, move in zip(range(toy.horizon - stages, toy.horizon), moves, strict=True):
            gained += toy.rewards[t, at, move]
            spent += toy.costs[t, at, move]
            at = toy.following[t, at, move]
        if spent <= budget:
            best = max(best, gained)
    return best


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_values_are_those_of_brute_force(toy: Toy) -> None:
    stages = 7
    for place in range(0, len(toy.start), 5):
        for budget in (0, 1, 3, 6):
            expected = brute_force(toy, stages, place, budget)
            assert toy.values[toy.horizon - stages, place, budget] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_the_oracle_attains_the_optimum_in_the_environment_and_the_limit_binds(toy: Toy) -> None:
    limits = (0.0, *toy.cost_limits, float(toy.costs.sum()))
    episodes = evaluate(OraclePolicy(toy), toy.task(), episodes=12, cost_limits=limits, workers=0)
    assert (episodes.costs <= episodes.cost_limit).all()
    env = make_env(toy.task())
    for number, limit, gained in zip(episodes.episode, episodes.cost_limit, episodes.returns, strict=True):
        first, _ = env.reset(seed=episode_seeds(0, 0, int(number))[0])
        place = int(np.abs(toy.features[0] - first).sum(axis=1).argmin())
        budget = int(min(limit, toy.values.shape[2] - 1))
        assert gained == pytest.approx(toy.values[0, place, budget], rel=1e-6)
    optima = [toy.optimal_return(limit) for limit in limits]
    assert optima[-1] == pytest.approx(toy.optimal_return(float("inf")))
    assert all(toy.optimal_return(limit) < 0.98 * optima[-1] for limit in toy.cost_limits)
    assert optima == sorted(optima)


@pytest.mark.parametrize("seed", range(20))
def test_no_logged_safe_episode_of_stitching_comes_near_the_optimum(seed: int) -> None:
    toy = stitching(seed)
    data = toy.dataset(300, seed)
    for limit in (0.0, *toy.cost_limits):
        assert data.reward_frontier([limit])[0] <= 0.8 * toy.optimal_return(limit)
    # Yet both halves are there, one of them early in safe company and the other late.
    half = toy.horizon // 2
    early = np.add.reduceat(data.costs, np.sort([*data.offsets[:-1], *(data.offsets[:-1] + half)]))[::2]
    late = data.episode_costs - early
    assert ((early == 0) & (late > 0)).any()
    assert ((early > 0) & (late == 0)).any()


@pytest.mark.parametrize("seed", range(20))
def test_tradeoff_rises_with_the_limit_and_its_data_waste_their_budget(seed: int) -> None:
    toy = tradeoff(seed)
    data = toy.dataset(300, seed)
    optima = np.array([toy.optimal_return(limit) for limit in range(73)])
    steps = np.diff(optima)
    assert (steps >= 0).all()
    assert (optima[2:] > optima[:-2]).all()  # the last step to full speed takes two units
    assert steps.max() < 0.06 * optima[-1]  # smooth: no single unit of budget matters much
    assert data.reward_frontier(toy.cost_limits).max() < optima[-1]
    assert (data.reward_frontier(toy.cost_limits) <= 0.95 * optima[np.array(toy.cost_limits, int)]).all()
    assert len(np.unique(data.episode_costs)) > 40


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_logged_episodes_are_what_the_environment_does(toy: Toy) -> None:
    data = toy.dataset(12, seed=3)
    env = toy.env()
    for e in range(len(data)):
        rows = slice(data.offsets[e], data.offsets[e + 1])
        env.reset(seed=0)
        env.place = int(np.abs(toy.features[0] - data.observations[rows][0]).sum(axis=1).argmin())
        for i in range(rows.start, rows.stop):
            _, reward, terminated, truncated, info = env.step(data.actions[i])
            assert reward == pytest.approx(float(data.rewards[i]), rel=1e-6)
            assert info["cost"] == data.costs[i]
            assert (terminated, truncated) == (False, bool(data.timeouts[i]))
        np.testing.assert_array_equal(toy.features[toy.horizon, env.place], data.final_observations[e])
    assert toy.dataset(12, seed=3).fingerprint == data.fingerprint
    assert toy.dataset(12, seed=4).fingerprint != data.fingerprint


def test_policy_values_are_those_of_many_episodes() -> None:
    toy = stitching(4)
    rng = np.random.default_rng(0)
    policy = rng.dirichlet(np.ones(toy.moves), size=toy.rewards.shape[:2])
    returns, costs = toy.policy_values(policy)
    gained, spent = np.zeros(4000), np.zeros(4000)
    place = rng.choice(len(toy.start), p=toy.start, size=4000)
    expected = toy.start @ returns[0], toy.start @ costs[0]
    for t in range(toy.horizon):
        move = (rng.random(4000)[:, None] > policy[t, place].cumsum(axis=1)).sum(axis=1).clip(max=toy.moves - 1)
        gained += toy.rewards[t, place, move]
        spent += toy.costs[t, place, move]
        place = toy.following[t, place, move]
    assert gained.mean() == pytest.approx(expected[0], abs=4 * gained.std() / 4000**0.5)
    assert spent.mean() == pytest.approx(expected[1], abs=4 * spent.std() / 4000**0.5)


def test_an_action_stands_for_the_band_it_lies_in() -> None:
    toy = tradeoff(0)
    grid = np.linspace(-1, 1, 2001)
    for move in range(toy.moves):
        inside = [a for a in grid if toy.move_of(a) == move]
        assert np.mean(inside) == pytest.approx(toy.centre(move), abs=1e-3)
        assert len(inside) == pytest.approx(2001 / toy.moves, abs=2)
    assert (toy.move_of(-1.0), toy.move_of(1.0)) == (0, toy.moves - 1)


@pytest.mark.parametrize("make", [stitching, tradeoff])
def test_observations_tell_states_apart_and_tasks_travel(make) -> None:  # type: ignore[no-untyped-def]
    toy = make(2)
    for stage in toy.features:
        assert len(np.unique(stage, axis=0)) == len(stage)
    again = pickle.loads(pickle.dumps(toy.task())).env_factory().toy
    np.testing.assert_array_equal(again.rewards, toy.rewards)
    assert not np.array_equal(make(3).rewards, toy.rewards)
