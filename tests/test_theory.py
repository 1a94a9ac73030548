"""The theorem's quantities: against enumeration of every episode, and the counter-examples by hand."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest

from qpt.cli import main
from qpt.errors import QptError
from qpt.experiments import theory
from qpt.experiments.theory_cmdp import (
    CMDP,
    Exact,
    Floats,
    Problem,
    best_values,
    conditioned_policy,
    near_deterministic,
    penalised_policy,
    return_distribution,
    solve,
)


def random_cmdp(seed: int, states: int = 2, actions: int = 2, horizon: int = 3) -> tuple[CMDP, Floats]:
    rng = np.random.default_rng(seed)
    outcomes = rng.dirichlet(np.full(states * 4, 0.3), size=(states, actions)).reshape(states, actions, states, 2, 2)
    return CMDP(outcomes, horizon), rng.dirichlet(np.ones(actions), size=states)


def episodes(cmdp: CMDP, state: int, steps: int):  # type: ignore[no-untyped-def]
    """Every sequence of (action, next state, reward, cost) from a state, with the probability of its outcomes."""
    s, a = cmdp.outcomes.shape[:2]
    for sequence in itertools.product(itertools.product(range(a), range(s), (0, 1), (0, 1)), repeat=steps):
        at, chance = state, 1.0
        for action, following, r, c in sequence:
            chance *= cmdp.outcomes[at, action, following, r, c]
            at = following
        if chance > 0:
            yield sequence, chance


def chance_of_actions(sequence, state: int, policy) -> float:  # type: ignore[no-untyped-def]
    at, earned, spent, chance = state, 0, 0, 1.0
    for t, (action, following, r, c) in enumerate(sequence):
        chance *= policy(t, at, earned, spent)[action]
        at, earned, spent = following, earned + r, spent + c
    return chance


def totals(sequence) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    return sum(x[2] for x in sequence), sum(x[3] for x in sequence)


# -- against enumeration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_quantities_equal_those_of_enumerated_episodes(seed: int) -> None:
    cmdp, behaviour = random_cmdp(seed)
    all_episodes = list(episodes(cmdp, 0, 3))
    weights = [p * chance_of_actions(q, 0, lambda _t, s, *_: behaviour[s]) for q, p in all_episodes]
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    coverage = np.zeros((4, 4))
    for (sequence, _), weight in zip(all_episodes, weights, strict=True):
        coverage[totals(sequence)] += weight
    target = np.unravel_index(coverage.argmax(), coverage.shape)
    problem = Problem(cmdp, behaviour, int(target[0]), int(target[1]), 0.7, 1.3)
    exact = solve(problem)
    assert exact.alpha_joint == pytest.approx(coverage[target], abs=1e-12)
    assert exact.alpha_reward == pytest.approx(coverage[target[0]].sum(), abs=1e-12)
    assert exact.alpha_cost == pytest.approx(coverage[:, target[1]].sum(), abs=1e-12)

    # the conditioned policy's first step is the share of the behaviour's episodes that meet both targets
    share = np.zeros(2)
    for (sequence, _), weight in zip(all_episodes, weights, strict=True):
        share[sequence[0][0]] += weight if totals(sequence) == tuple(target) else 0
    distribution = return_distribution(cmdp, behaviour)
    plain = conditioned_policy(distribution, behaviour, problem.return_target, problem.cost_target)
    np.testing.assert_allclose(plain[0, 0, 0, 0], share / share.sum(), atol=1e-12)

    # and what both policies bring is the sum over all episodes
    for policy, played in (
        (plain, exact.plain),
        (penalised_policy(cmdp, plain, 0.7, 1.3), exact.penalised),
    ):
        chances = [p * chance_of_actions(q, 0, lambda *at, table=policy: table[at]) for q, p in all_episodes]
        sums = np.array([totals(q) for q, _ in all_episodes])
        np.testing.assert_allclose(np.array(chances) @ sums, [played.reward, played.cost], atol=1e-12)
        _, reward, _ = cmdp.nominal
        for t in range(3):
            greedy = 0.0
            for (sequence, _), chance in zip(all_episodes, chances, strict=True):
                at = 0 if t == 0 else sequence[t - 1][1]
                greedy += chance * (reward[at, sequence[t][0]] == reward[at].max())
            assert played.best_reward[t] == pytest.approx(greedy, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_best_values_equal_the_best_of_all_policies(seed: int) -> None:
    cmdp, _ = random_cmdp(seed, horizon=2)
    found = []
    for first, second in itertools.product(range(2), itertools.product(range(2), repeat=2)):

        def policy(t: int, s: int, *_: int, first: int = first, second: tuple[int, ...] = second) -> Floats:
            return np.eye(2)[first if t == 0 else second[s]]

        rows = [(p * chance_of_actions(q, 0, policy), *totals(q)) for q, p in episodes(cmdp, 0, 2)]
        found.append(np.array([(w * r, w * c) for w, r, c in rows]).sum(0))
    most, least = best_values(cmdp)
    assert most == pytest.approx(max(f[0] for f in found), abs=1e-12)
    assert least == pytest.approx(min(f[1] for f in found), abs=1e-12)


def test_the_penalised_policy_minimises_the_penalised_divergence() -> None:
    """π̂ ∝ π_DT exp(α1 Q^r - α2 Q^c): no other last step has a lower KL - α1 E Q^r + α2 E Q^c."""
    cmdp, behaviour = random_cmdp(1, actions=3, horizon=1)
    table = np.broadcast_to(behaviour[None, :, None, None], (1, 2, 2, 2, 3)).copy()
    tilted = penalised_policy(cmdp, table, 2.0, 3.0)[0, 0, 0, 0]
    q = np.einsum("axrc,r->a", cmdp.outcomes[0], [0, 2.0]) - np.einsum("axrc,c->a", cmdp.outcomes[0], [0, 3.0])

    def objective(p: Floats) -> float:
        return float((p * (np.log(p / behaviour[0]) - q)).sum())

    rng = np.random.default_rng(0)
    assert all(objective(tilted) <= objective(other) + 1e-12 for other in rng.dirichlet(np.ones(3), size=500))
    np.testing.assert_allclose(penalised_policy(cmdp, table, 0.0, 0.0), table, atol=1e-15)


def test_epsilon_is_the_chance_of_anything_but_the_nominal_outcome() -> None:
    cmdp = near_deterministic([[0, 1], [1, 0]], [[1, 0], [0, 1]], [[0, 0], [1, 1]], 4, epsilon=0.07)
    assert cmdp.epsilon == pytest.approx(0.07, abs=1e-12)
    np.testing.assert_array_equal(cmdp.nominal[0], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(cmdp.nominal[1], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(cmdp.nominal[2], [[0, 0], [1, 1]])
    with pytest.raises(QptError, match="add up to 1"):
        CMDP(cmdp.outcomes * 0.5, 4)


# -- the counter-examples, by hand -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples() -> dict[str, tuple[theory.CounterExample, Exact]]:
    return {e.name: (e, solve(e.problem)) for e in theory.counter_examples()}


def test_every_counter_example_breaks_what_it_says(examples: dict[str, tuple[theory.CounterExample, Exact]]) -> None:
    for example, exact in examples.values():
        assert example.true(exact) > example.claimed(exact) + 1e-6, example.name


def test_the_cost_step_has_the_wrong_sign(examples: dict[str, tuple[theory.CounterExample, Exact]]) -> None:
    example, e = examples["cost step: sign"]
    # one step, costs 0 and 1, swapped with probability 1/10; given cost 0, the free one was taken 9 times in 10
    assert (e.epsilon, e.alpha_cost) == pytest.approx((0.1, 0.5))
    np.testing.assert_allclose([e.plain.least_cost[0], e.penalised.least_cost[0]], [0.9, 1.0], atol=1e-12)
    assert (e.plain.cost, e.penalised.cost) == pytest.approx((0.9 * 0.1 + 0.1 * 0.9, 0.1), abs=1e-12)
    assert e.sigma_cost == pytest.approx(0.1, abs=1e-12)
    as_written = [(e.penalised.least_cost[0] - e.plain.least_cost[0]) * c for c in (0, 1)]
    assert min(as_written) >= 0 > example.true(e)  # the printed expression cannot equal the difference
    assert (example.claimed(e), example.true(e)) == pytest.approx((-0.1, -0.08), abs=1e-12)  # nor is it below -H σ


def test_the_reward_step_needs_every_reward_to_be_1(examples: dict[str, tuple[theory.CounterExample, Exact]]) -> None:
    example, e = examples["reward step: r_t = 1"]
    assert (e.epsilon, e.alpha_reward) == (0, 0.75)
    np.testing.assert_allclose(e.plain.best_reward, [2 / 3, 5 / 6, 5 / 6], atol=1e-12)
    np.testing.assert_allclose(e.penalised.best_reward, [1, 1, 1], atol=1e-12)
    assert e.sigma_reward == pytest.approx(1 / 6, abs=1e-12)
    assert (e.plain.reward, e.penalised.reward) == pytest.approx((1, 1), abs=1e-12)
    assert (example.claimed(e), example.true(e)) == pytest.approx((-0.5, 0), abs=1e-12)


@pytest.mark.parametrize("signal", ["reward", "cost"])
def test_a_negative_bound_contradicts_the_best_policy(
    signal: theory.Signal, examples: dict[str, tuple[theory.CounterExample, Exact]]
) -> None:
    _, e = examples[f"negative {signal} bound"]
    assert e.epsilon == 0
    assert e.bound(signal) == pytest.approx(-0.5, abs=1e-12)
    assert e.gap(signal) == pytest.approx(1, abs=1e-12)  # it can never be below 0
    best = (e.best_reward, e.penalised.reward) if signal == "reward" else (e.penalised.cost, e.least_cost)
    assert best == pytest.approx((2, 1), abs=1e-12)


def test_the_dead_end_breaks_the_theorem_with_both_targets_too() -> None:
    """Near-deterministic and conditioned on both: Q differs by O(ε), which a large weight turns into O(1)."""
    noise = np.zeros((3, 2, 3, 2, 2))
    noise[:2, :, 1] = noise[2, :, 2] = noise[0, 1, 2] = 1  # the place that follows is certain
    noise[0, 0, :, :, 1] = noise[1, :, :, :, 1] = 0  # the dead end costs nothing, being alive costs now and then
    noise[0, 1, 1] = 0
    cmdp = near_deterministic(
        [[1, 2], [1, 1], [2, 2]], [[1, 0], [0, 0], [1, 0]], np.zeros((3, 2)), 3, epsilon=1e-4, noise=noise
    )
    e = solve(Problem(cmdp, np.full((3, 2), 0.5), 1, 0, reward_weight=0.0, cost_weight=1e7))
    assert e.epsilon == pytest.approx(1e-4)
    assert e.alpha_joint > 0.74
    assert e.bound("reward") < -0.49
    assert e.gap("reward") > 0.99


def test_the_lemma_needs_the_best_target(examples: dict[str, tuple[theory.CounterExample, Exact]]) -> None:
    _, e = examples["lemma: target below V*"]
    assert (e.alpha_reward, e.lemma("reward"), e.gap("reward", penalised=False)) == (0.5, 0, 1)


def test_coverage_of_each_target_alone_is_not_enough(
    examples: dict[str, tuple[theory.CounterExample, Exact]],
) -> None:
    _, e = examples["coverage of each target alone"]
    assert (e.alpha_reward, e.alpha_cost, e.alpha_joint) == pytest.approx((0.5, 0.5, 0.01), abs=1e-12)
    assert e.bound("reward") == pytest.approx(0.03 * (2 + 3), abs=1e-12)
    assert e.gap("reward") == pytest.approx(0.98 - 0.5, abs=1e-12)


# -- what does hold ----------------------------------------------------------------------------------------------------


def test_without_noise_a_consistent_pair_of_targets_leaves_the_penalty_nothing_to_choose() -> None:
    """Every episode that meets both targets has the same sums, so Q is the same for all actions it may take."""
    base = theory.road(horizon=5, epsilon=0.0).cmdp
    for target in ((5, 0), (3, 2), (2, 1)):
        p = Problem(base, np.full((2, 3), 1 / 3), *target, reward_weight=50.0, cost_weight=50.0)
        e = solve(p)
        assert e.alpha_joint > 0
        np.testing.assert_allclose(e.penalised.best_reward, e.plain.best_reward, atol=1e-12)
        assert (e.penalised.reward, e.penalised.cost) == pytest.approx(target, abs=1e-12)


@pytest.mark.parametrize("seed", range(1000, 1080))
def test_the_repaired_bound_holds_in_random_problems(seed: int) -> None:
    problem = theory.random_problem(seed, as_printed=False)
    assert problem is not None
    e = solve(problem)
    for signal in theory.SIGNALS:
        assert e.gap(signal) >= -1e-12
        assert e.gap(signal) <= e.repaired(signal) + 1e-12
    # its second step: some action pays and some is free everywhere, so a step's mean is P_t but for ε
    slack = 2 * e.epsilon * e.horizon + 1e-12
    assert e.plain.reward - e.penalised.reward <= -e.horizon * e.sigma_reward + slack
    assert e.penalised.cost - e.plain.cost <= -e.horizon * e.sigma_cost + slack


def test_the_road_gains_from_the_penalty_and_stays_below_its_bounds() -> None:
    e = solve(theory.road())
    for signal in theory.SIGNALS:
        assert 0 < e.gap(signal) < e.gap(signal, penalised=False) < e.lemma(signal) < e.horizon


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "theory", "--out", str(tmp_path), "--problems", "20"]) == 0
    text = capsys.readouterr().out
    assert "coverage of each target alone" in text
    assert "0.48" in text
    for name in ("bounds.png", "random.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "counter-examples.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [e.name for e in theory.counter_examples()]
    assert all(float(row["true"]) > float(row["claimed"]) for row in rows)
    with (tmp_path / "sweeps.csv").open(encoding="utf-8") as file:
        sweeps = list(csv.DictReader(file))
    assert {row["sweep"] for row in sweeps} >= {"epsilon", "coverage", "H, behaviour fixed", "penalty"}
    for row in sweeps:
        assert float(row["reward_gap_penalised"]) <= float(row["reward_bound_repaired"])
        assert float(row["cost_gap_penalised"]) <= float(row["cost_bound_repaired"])
