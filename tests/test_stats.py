"""Statistics against SciPy, closed forms and slow, obvious loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from qpt import stats
from qpt.errors import QptError


@pytest.mark.parametrize(("k", "n"), [(0, 20), (1, 20), (10, 20), (19, 20), (20, 20), (3, 7), (180, 200)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_proportions_agree_with_scipy(k: int, n: int, confidence: float) -> None:
    result = scipy_stats.binomtest(k, n)
    wilson = result.proportion_ci(confidence, method="wilson")
    exact = result.proportion_ci(confidence, method="exact")
    assert stats.wilson_interval(k, n, confidence) == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    assert stats.clopper_pearson(k, n, confidence) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_bootstrap_mean_agrees_with_scipy_and_with_the_normal_interval() -> None:
    values = np.random.default_rng(0).exponential(size=80)
    ours = stats.bootstrap_mean_interval(values, samples=20_000)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.02)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert ours[1] - ours[0] == pytest.approx(2 * half, rel=0.05)


def test_bootstrap_does_not_depend_on_how_the_draws_are_portioned() -> None:
    wide = np.random.default_rng(1).normal(size=3000)  # 10,000 draws of 3000 come in several portions
    low, high = stats.bootstrap_mean_interval(wide)
    half = 1.96 * wide.std() / math.sqrt(len(wide))
    assert (low, high) == pytest.approx((wide.mean() - half, wide.mean() + half), abs=0.1 * half)
    assert stats.bootstrap_mean_interval(wide) == (low, high)
    assert stats.bootstrap_mean_interval(wide, seed=1) != (low, high)


def test_grouped_bootstrap_agrees_with_a_slow_loop() -> None:
    rng = np.random.default_rng(2)
    groups = np.repeat([3, 1, 7, 9], [5, 10, 7, 4])
    values = rng.normal(size=26) + groups
    slow = []
    for _ in range(8000):
        means = []
        for name in rng.choice([3, 1, 7, 9], size=4):
            inside = values[groups == name]
            means.append(rng.choice(inside, size=len(inside)).mean())
        slow.append(np.mean(means))
    expected = tuple(np.quantile(slow, [0.025, 0.975]))
    assert stats.bootstrap_mean_interval(values, groups=groups, samples=20_000) == pytest.approx(expected, abs=0.12)
    # Seeds that differ make the interval far wider than their episodes alone suggest.
    plain = stats.bootstrap_mean_interval(values)
    grouped = stats.bootstrap_mean_interval(values, groups=groups)
    assert grouped[1] - grouped[0] > 1.5 * (plain[1] - plain[0])


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for i in range(400):
        low, high = stats.bootstrap_mean_interval(rng.normal(size=40), samples=400, seed=i)
        hits += low <= 0 <= high
    assert 0.90 <= hits / 400 <= 0.98


def test_intervals_over_few_seeds_cover_less_than_they_say() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(400):
        values = rng.normal(scale=4, size=(3, 1)) + rng.normal(scale=4, size=(3, 20))  # seeds differ as episodes do
        _, (low, high) = stats.mean_over_seeds(values.ravel(), np.repeat([0, 1, 2], 20), samples=400)
        hits += low <= 0 <= high
    assert 0.65 < hits / 400 < 0.88  # 0.78: what the caveat says
    assert "78 % with 3" in stats.caveat(3)
    assert "nothing about the next seed" in stats.caveat(1)
    assert stats.caveat(10) == ""


@pytest.mark.parametrize("n", [4, 8, 20, 100])
def test_iqm_is_scipys_trimmed_mean_where_quarters_are_whole(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    assert stats.iqm(values) == pytest.approx(scipy_stats.trim_mean(values, 0.25), abs=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30))
@settings(deadline=None)
def test_iqm_is_the_trimmed_mean_of_every_value_written_four_times(values: list[float]) -> None:
    assert stats.iqm(values) == pytest.approx(scipy_stats.trim_mean(np.repeat(values, 4), 0.25), abs=1e-9)


def test_iqm_interval_agrees_with_scipy() -> None:
    values = np.random.default_rng(5).normal(size=40)
    theirs = scipy_stats.bootstrap((values,), stats.iqm, n_resamples=5000, method="percentile", vectorized=False, rng=1)
    interval = theirs.confidence_interval
    assert stats.iqm_interval(values) == pytest.approx((interval.low, interval.high), abs=0.05)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12))
@settings(deadline=None)
def test_probability_of_improvement_counts_all_pairs(a: list[int], b: list[int]) -> None:
    pairs = [1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b]
    assert stats.probability_of_improvement(a, b) == pytest.approx(np.mean(pairs))
    u = scipy_stats.mannwhitneyu(a, b).statistic
    assert stats.probability_of_improvement(a, b) == pytest.approx(u / (len(a) * len(b)))


def test_nothing_is_said_of_an_improvement_that_is_no_number() -> None:
    for a, b in (([1.0, math.nan], [0.0]), ([1.0], [0.0, math.nan])):
        assert math.isnan(stats.probability_of_improvement(a, b))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_cvar_is_the_least_of_its_variational_form(costs: list[float], alpha: float) -> None:
    # CVaR = min over v of v + E[(C - v)+] / alpha, and the minimum lies at one of the costs.
    array = np.array(costs)
    expected = min(v + np.maximum(array - v, 0).mean() / alpha for v in costs)
    assert stats.cvar(costs, alpha) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_paired_difference_sees_what_unpaired_spread_hides() -> None:
    seeds = np.random.default_rng(6).normal(scale=100, size=10)
    low, high = stats.paired_difference_interval(seeds + 1 + np.linspace(-0.5, 0.5, 10), seeds)
    assert 0 < low < 1 < high
    with pytest.raises(QptError, match="as many values"):
        stats.paired_difference_interval([1, 2], [1, 2, 3])


def test_the_mean_over_seeds_is_of_their_means_and_needs_a_few_values() -> None:
    values, seeds = [1.0, 2.0, 3.0, 10.0], ["a", "a", "a", "b"]
    mean, interval = stats.mean_over_seeds(values, seeds)
    assert mean == 6.0  # not the mean of the four
    assert interval == stats.bootstrap_mean_interval(values, groups=seeds)
    mean, (low, high) = stats.mean_over_seeds([0.0, 0.0], ["a", "b"])
    assert mean == 0.0
    assert math.isnan(low)
    assert math.isnan(high)


def test_safe_is_said_of_a_whole_interval() -> None:
    assert stats.verdict((3.0, 10.0), 10.0) == "safe"
    assert stats.verdict((3.0, 10.1), 10.0) == "unclear"
    assert stats.verdict((10.0, 12.0), 10.0) == "unclear"
    assert stats.verdict((10.1, 12.0), 10.0) == "unsafe"
    assert stats.verdict((math.nan, math.nan), 10.0) == "unclear"


def test_checkpoints_are_selected_by_return_among_the_safe_else_by_cost() -> None:
    rows = [{"return": 9, "cost": 30}, {"return": 5, "cost": 10}, {"return": 7, "cost": 8}, {"return": 1, "cost": 0}]
    assert stats.select_checkpoint(rows, 10) == 2
    assert stats.select_checkpoint(rows, 40) == 0
    assert stats.select_checkpoint(rows[:2], 5) == 1
    assert stats.select_checkpoint([{"return": 5, "cost": 3}, {"return": 5, "cost": 1}], 5) == 1
    with pytest.raises(QptError, match="no checkpoint"):
        stats.select_checkpoint([], 5)


def test_checkpoints_whose_numbers_are_none_are_passed_over() -> None:
    pairs = ((math.nan, 1), (3, 4), (9, math.nan), (math.nan, 0))
    rows = [{"return": value, "cost": cost} for value, cost in pairs]
    assert stats.select_checkpoint(rows, 10) == 1
    assert stats.select_checkpoint(rows, 2) == 1
    with pytest.raises(QptError, match="that are numbers"):
        stats.select_checkpoint([rows[0], rows[2]], 10)


def test_wrong_arguments_get_one_sentence() -> None:
    for call in (
        lambda: stats.bootstrap_mean_interval([]),
        lambda: stats.bootstrap_mean_interval([1.0], confidence=95),
        lambda: stats.bootstrap_mean_interval([1.0, 2.0], groups=[0]),
        lambda: stats.wilson_interval(5, 4),
        lambda: stats.clopper_pearson(0, 0),
        lambda: stats.cvar([1.0], 0),
    ):
        with pytest.raises(QptError):
            call()
    assert all(map(math.isnan, stats.bootstrap_mean_interval([1.0, math.nan])))
