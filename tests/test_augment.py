"""Relabelling: both rules against slow loops with the same random draws, and data that leave no frontier."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import bare_episodes, tiny_data
from qpt.algorithms.base import Spec, relabelled_windows
from qpt.algorithms.qpt_config import QPTConfig
from qpt.cli.data_augment import augment as command
from qpt.cli.data_augment import task_of
from qpt.data import read, write
from qpt.data.augment import Relabelled, augment, figure
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.tasks import Augmentation, Task, register_task

Rule = Literal["paper", "osrl"]
RULES: tuple[Rule, Rule] = ("paper", "osrl")


def cloud(n: int = 600, seed: int = 1) -> Trajectories:
    """Returns below a concave frontier; costs are whole numbers, as in most tasks, so that there are ties."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 81, n)
    return bare_episodes(costs, (300 + 50 * np.sqrt(costs)) * rng.beta(4, 1.2, n))


def rows(relabelled: Relabelled) -> list[tuple[int, float, float]]:
    return list(zip(relabelled.base, relabelled.target_cost, relabelled.target_return, strict=True))


# -- slow references ---------------------------------------------------------------------------------------------------


def slow_paper(data: Trajectories, fraction: float, max_reward: float, seed: int) -> list[tuple[int, float, float]]:
    """Algorithm 2, line by line."""
    rng = np.random.default_rng(seed)
    count = int(fraction * len(data))
    kappas = rng.uniform(min(data.episode_costs), max(data.episode_costs), count)
    uniforms = rng.uniform(size=count)
    result = []
    for kappa, uniform in zip(kappas, uniforms, strict=True):
        best = None
        for episode in range(len(data)):
            cost, value = data.episode_costs[episode], data.returns[episode]
            if cost <= kappa and (best is None or (value, -cost) > (data.returns[best], -data.episode_costs[best])):
                best = episode
        assert best is not None
        frontier = data.returns[best]
        if frontier < max_reward:
            result.append((best, kappa, frontier + uniform * (max_reward - frontier)))
    return result


def slow_osrl(
    data: Trajectories,
    fraction: float,
    max_reward: float,
    degree: int,
    decrease: float,
    margin: float,
    beta: float,
    seed: int,
) -> list[tuple[int, float, float]]:
    """OSRL's procedure in plain loops."""
    rng = np.random.default_rng(seed)
    costs, returns = [float(c) for c in data.episode_costs], [float(r) for r in data.returns]
    # the grid: at most 10 of each cell, those with the smallest random keys; none of cells with 2 or fewer
    keys = rng.random(len(data))
    cells: dict[tuple[int, int], list[int]] = {}
    for e in range(len(data)):
        x = min(int((costs[e] - min(costs)) // ((max(costs) - min(costs)) / 10)), 9)
        y = min(int((returns[e] - min(returns)) // ((max(returns) - min(returns)) / 50)), 49)
        cells.setdefault((x, y), []).append(e)
    kept = sorted(e for cell in cells.values() if len(cell) > 2 for e in sorted(cell, key=lambda e: keys[e])[:10])

    # the Pareto set and its polynomial
    def beaten(e: int) -> bool:
        return any(
            costs[o] <= costs[e] and returns[o] >= returns[e] and (costs[o], returns[o]) != (costs[e], returns[e])
            for o in kept
        )

    pareto = [e for e in kept if not beaten(e)]
    curve = np.polyfit([costs[e] for e in pareto], [returns[e] for e in pareto], degree)
    # the targets
    count = int(fraction * len(kept))
    low, high = min(costs[e] for e in kept), max(costs[e] for e in kept)
    kappas = np.linspace(low, high, count)
    uniforms, choices = rng.random(count), rng.random(count)
    result: list[tuple[int, float, float]] = []
    taken: set[int] = set()
    for kappa, uniform, choice in zip(kappas, uniforms, choices, strict=True):
        lowest = float(np.polyval(curve, kappa)) + margin
        if lowest >= max_reward:
            continue
        rho = lowest + uniform * (max_reward - lowest)
        safe = [e for e in kept if costs[e] <= kappa]
        nearest = min(safe, key=lambda e: math.hypot(costs[e] - kappa, returns[e] - rho))
        if nearest in taken:
            near = [e for e in kept if costs[e] <= costs[nearest] and returns[e] >= returns[nearest] - decrease]
            weights = [1 / (math.hypot(costs[e] - costs[nearest], returns[e] - returns[nearest]) + beta) for e in near]
            bar, total = choice * sum(weights), 0.0
            for e, weight in zip(near, weights, strict=True):
                total += weight
                if total > bar:
                    result.append((e, kappa, rho))
                    break
        else:
            taken.add(nearest)
            result.append((nearest, kappa, rho))
    return result


@pytest.mark.parametrize("max_reward", [900.0, 600.0, 450.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_papers_rule_is_algorithm_2(max_reward: float, seed: int) -> None:
    data = cloud()
    expected = slow_paper(data, 0.4, max_reward, seed)
    got = augment(data, rule="paper", fraction=0.4, max_reward=max_reward, seed=seed)
    assert [row[0] for row in rows(got)] == [row[0] for row in expected]
    np.testing.assert_allclose(np.array(rows(got)), np.array(expected), rtol=1e-12)
    assert got.skipped == int(0.4 * len(data)) - len(expected)
    assert (got.skipped > 0) == (max_reward < 800)


@pytest.mark.parametrize(("max_reward", "degree"), [(900.0, 0), (900.0, 2), (650.0, 1), (900.0, 3)])
@pytest.mark.parametrize("seed", [0, 7])
def test_osrls_rule_is_what_plain_loops_give(max_reward: float, degree: int, seed: int) -> None:
    data = cloud()
    expected = slow_osrl(data, 0.3, max_reward, degree, 60.0, 1.0, 1.0, seed)
    got = augment(
        data, rule="osrl", fraction=0.3, max_reward=max_reward, degree=degree, max_reward_decrease=60, seed=seed
    )
    assert len(expected) > 20
    assert [row[0] for row in rows(got)] == [row[0] for row in expected]
    np.testing.assert_allclose(np.array(rows(got)), np.array(expected), rtol=1e-9)


def test_crowded_cells_are_thinned_as_in_plain_loops() -> None:
    rng = np.random.default_rng(3)
    costs = rng.integers(0, 11, 500)
    data = bare_episodes(
        costs, 10.0 * costs + rng.integers(0, 3, 500) + rng.uniform(0, 0.01, 500)
    )  # 33 cells of about 15
    expected = slow_osrl(data, 0.5, 200.0, 1, 20.0, 1.0, 1.0, 5)
    got = augment(data, rule="osrl", fraction=0.5, max_reward=200, degree=1, max_reward_decrease=20, seed=5)
    assert len(got) < 0.45 * len(data)
    assert [row[0] for row in rows(got)] == [row[0] for row in expected]


def test_shared_episodes_are_given_away_in_proportion_to_nearness() -> None:
    """Three safer episodes at distances 0, 1 and 3 of the shared one: weights 1 : 1/2 : 1/4."""
    data = bare_episodes([5, 4, 2, 9], [100, 100, 100, 0])
    drawn = np.zeros(4)
    for seed in range(300):
        got = augment(data, rule="osrl", fraction=5.0, max_reward=200, degree=0, max_reward_decrease=1, seed=seed)
        expected = slow_osrl_bases(got, data)
        drawn += np.bincount(got.base[expected], minlength=4)
    np.testing.assert_allclose(drawn / drawn.sum(), np.array([4, 2, 1, 0]) / 7, atol=0.02)


def slow_osrl_bases(got: Relabelled, data: Trajectories) -> list[int]:
    """Rows whose nearest episode is number 0 and was taken before."""
    shared, taken = [], False
    for row, (_, kappa, rho) in enumerate(rows(got)):
        safe = [e for e in range(len(data)) if data.episode_costs[e] <= kappa]
        nearest = min(safe, key=lambda e: math.hypot(data.episode_costs[e] - kappa, data.returns[e] - rho))
        if nearest == 0:
            if taken:
                shared.append(row)
            taken = True
    return shared


# -- what always holds -------------------------------------------------------------------------------------------------


def check(data: Trajectories, got: Relabelled, min_reward: float = 1.0) -> None:
    """No NaN, safe bases, targets above the frontier, shifts that add up."""
    for array in (got.return_shift, got.cost_shift, got.target_return, got.target_cost):
        assert array.shape == (len(got),)
        assert np.isfinite(array).all()
    assert got.base.dtype == np.int64
    assert got.return_shift.dtype == got.cost_shift.dtype == np.float32
    assert math.isfinite(got.max_reward)
    costs, returns = data.episode_costs[got.base], data.returns[got.base]
    assert (costs <= got.target_cost).all()
    assert (got.cost_shift >= 0).all()
    assert (got.target_return <= got.max_reward + 1e-9 * abs(got.max_reward)).all()
    np.testing.assert_allclose(got.return_shift, got.target_return - returns, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(got.cost_shift, got.target_cost - costs, rtol=1e-6, atol=1e-30)
    if got.rule == "paper":
        frontier = data.reward_frontier(got.target_cost)
        assert (got.target_return >= frontier).all()
        np.testing.assert_array_equal(returns, frontier)
    else:
        assert got.fit is not None
        lowest = got.fit(got.target_cost) + min_reward
        assert (got.target_return >= lowest - 1e-9 * np.abs(lowest)).all()


points = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e4, width=32)),
        st.one_of(st.integers(-2, 2).map(float), st.floats(-1e4, 1e4, width=32)),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(
    points=points,
    rule=st.sampled_from(RULES),
    fraction=st.floats(0, 3),
    max_reward=st.one_of(st.none(), st.floats(-1e4, 2e4)),
    degree=st.one_of(st.none(), st.integers(0, 6)),
    decrease=st.one_of(st.none(), st.floats(0, 100)),
    seed=st.integers(0, 1000),
)
def test_degenerate_data_never_break_it(
    points: list[tuple[float, float]],
    rule: Rule,
    fraction: float,
    max_reward: float | None,
    degree: int | None,
    decrease: float | None,
    seed: int,
) -> None:
    data = bare_episodes(*zip(*points, strict=True))
    options: dict[str, Any] = {"max_reward": max_reward, "degree": degree, "max_reward_decrease": decrease}
    got = augment(data, rule=rule, fraction=fraction, seed=seed, **options)
    check(data, got)
    if rule == "paper":
        assert len(got) + got.skipped == int(fraction * len(data))
        if max_reward is None:
            assert got.skipped == 0
    again = augment(data, rule=rule, fraction=fraction, seed=seed, **options)
    assert rows(again) == rows(got)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("costs", "returns"),
    [([3], [7]), ([0, 0, 0], [1, 2, 3]), ([1, 2, 3], [5, 5, 5]), ([4] * 9, [2] * 9), ([0, 1], [0, 1])],
    ids=["one point", "one cost", "flat", "all equal", "two points"],
)
def test_small_frontiers_still_give_rows(rule: Rule, costs: list[float], returns: list[float]) -> None:
    data = bare_episodes(costs, returns)
    got = augment(data, rule=rule, fraction=4.0)
    check(data, got)
    assert len(got) == 4 * len(data)
    assert got.max_reward > max(returns)


def test_a_degree_above_the_points_is_lowered_and_told() -> None:
    data = bare_episodes(np.repeat([0, 5, 10], 5), np.repeat([10, 20, 40], 5))
    got = augment(data, rule="osrl", fraction=1.0, degree=4, max_reward=100)
    assert got.fit is not None
    assert got.fit.degree() == 2
    assert any("degree is 2 instead of 4" in note for note in got.notes)
    np.testing.assert_allclose(got.fit(np.array([0.0, 5.0, 10.0])), [10, 20, 40])


def test_the_automatic_degree_rises_everywhere() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = np.repeat(np.sort(rng.uniform(0, 80, 12)), 4)
        data = bare_episodes(costs, np.repeat(np.sort(rng.normal(0, 100, 12)), 4))
        got = augment(data, rule="osrl", fraction=0.5)
        assert got.fit is not None
        curve = got.fit(np.linspace(costs.min(), costs.max(), 1000))
        assert (np.diff(curve) >= -1e-6 * np.ptp(curve)).all()
        assert got.fit.degree() <= 4


def test_the_automatic_degree_follows_a_curved_frontier() -> None:
    costs = np.repeat(np.arange(0, 40.0), 3)
    data = bare_episodes(costs, 100 + 0.5 * costs**2)
    got = augment(data, rule="osrl", fraction=0.5)
    assert got.fit is not None
    assert got.fit.degree() >= 2
    np.testing.assert_allclose(got.fit(costs), 100 + 0.5 * costs**2, rtol=1e-6)


def test_lonely_episodes_are_used_when_there_are_no_others() -> None:
    data = bare_episodes([0, 20, 40, 80], [0, 100, 200, 400])
    got = augment(data, rule="osrl", fraction=1.0)
    assert len(got) == 4
    assert any("all episodes are used" in note for note in got.notes)


def test_a_max_reward_below_the_data_is_told_and_skipped() -> None:
    data = cloud()
    for rule in RULES:
        got = augment(data, rule=rule, max_reward=-1.0)
        assert len(got) == 0
        assert got.skipped > 0
        assert any("not above the best return" in note for note in got.notes)
        assert any("skipped" in note for note in got.notes)
        check(data, got)


def test_training_says_what_augmentation_could_not_do() -> None:
    data = tiny_data()
    spec = replace(Spec.from_data(data), augmentation=Augmentation(degree=2, max_reward=1.0, max_reward_decrease=1.0))
    with pytest.warns(UserWarning, match="augmentation: .* targets are skipped"):
        relabelled_windows(QPTConfig(batch_size=4), spec, data, torch.device("cpu"), 0)


def test_the_tasks_constants_are_used_unless_overridden() -> None:
    data, task = cloud(), Task("Own", augmentation=Augmentation(degree=1, max_reward=1234.0, max_reward_decrease=3.0))
    for rule in RULES:
        assert augment(data, rule=rule, task=task).max_reward == 1234
        assert augment(data, rule=rule, task=task, max_reward=999).max_reward == 999
    fits = [augment(data, rule="osrl", task=task, degree=degree).fit for degree in (None, 0)]
    assert [fit.degree() for fit in fits if fit is not None] == [1, 0]
    spread = float(np.ptp(data.returns))
    assert augment(data).max_reward == pytest.approx(data.returns.max() + 0.1 * spread)
    assert rows(augment(data, rule="osrl")) == rows(augment(data, rule="osrl", max_reward_decrease=0.2 * spread))
    assert augment(data, rule="osrl").max_reward == pytest.approx(data.returns.max() + 0.1 * spread + 1)


def test_seeds_differ_and_fraction_0_gives_none() -> None:
    data = cloud()
    for rule in RULES:
        assert rows(augment(data, rule=rule, seed=1)) != rows(augment(data, rule=rule, seed=2))
        assert len(augment(data, rule=rule, fraction=0)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "best"},
        {"fraction": -0.1},
        {"fraction": float("nan")},
        {"degree": -1},
        {"beta": 0.0},
        {"max_reward": float("inf")},
        {"min_reward": float("nan")},
        {"max_reward_decrease": float("nan")},
        {"max_reward_decrease": -1.0},
        {"seed": -1},
    ],
)
def test_wrong_arguments_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(QptError):
        augment(cloud(20), **wrong)


# -- picture and command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_picture_points_from_bases_to_pairs(rule: Rule) -> None:
    pytest.importorskip("matplotlib")
    data = cloud()
    got = augment(data, rule=rule, fraction=0.5)
    axes = figure(data, got, "title", arrows=25).axes[0]
    pairs = {(e, kappa, rho) for e, kappa, rho in rows(got)}
    assert len(axes.texts) == 25
    for arrow in axes.texts:
        starts = {(data.episode_costs[e], data.returns[e]) for e, kappa, rho in pairs if (kappa, rho) == arrow.xy}
        assert arrow.xyann in starts
    empty = augment(data, rule=rule, fraction=0)
    assert len(figure(data, empty).axes[0].texts) == 0


def test_the_command_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    write(cloud(100), tmp_path / "own.hdf5")
    command(str(tmp_path / "own.hdf5"), rule="osrl", out=tmp_path / "picture.png")
    printed = capsys.readouterr().out
    assert "constants chosen from the data" in " ".join(printed.split())
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QptError, match="arrows"):
        command(str(tmp_path / "own.hdf5"), arrows=-1)
    monkeypatch.setattr("qpt.tasks._registered", {})
    register_task(Task("Bare"))
    for task, said in (("Bare", "constants chosen from the data"), ("BallCircle", "constants of BallCircle")):
        command(str(tmp_path / "own.hdf5"), task=task)
        assert said in " ".join(capsys.readouterr().out.split())


def test_the_task_is_found_by_its_name_or_file() -> None:
    by_name, by_file = task_of("BallCircle"), task_of("some/where/SafetyBallCircle-v0-80-886.hdf5")
    assert by_name is by_file
    assert by_name is not None
    assert task_of("own.hdf5") is None


@pytest.mark.slow
@pytest.mark.skipif("QPT_EXTRA_DATA" not in os.environ, reason="QPT_EXTRA_DATA names a folder of data files")
@pytest.mark.parametrize("rule", RULES)
def test_larger_files_are_augmented(rule: Rule) -> None:
    files = sorted(Path(os.environ["QPT_EXTRA_DATA"]).glob("*.hdf5"))
    assert files
    for file in files:
        data = read(file)
        for task in (task_of(str(file)), None):
            got = augment(data, rule=rule, task=task)
            check(data, got)
            assert len(got) > 20
