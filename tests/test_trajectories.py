"""Trajectories against slow, obvious loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qpt.data.trajectories import Trajectories, _finals
from qpt.errors import QptError

Episode = dict[str, np.ndarray]


def episodes_of(data: Trajectories) -> list[Episode]:
    """One dict of float64 arrays an episode, cut by a loop."""
    return [
        {
            **{
                name: getattr(data, name)[start:end].astype(np.float64)
                for name in ("observations", "actions", "rewards", "costs", "terminals", "timeouts")
            },
            "final": data.final_observations[number],
        }
        for number, (start, end) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True))
    ]


def arrays(lengths: list[int], seed: int = 0, tail: int = 0, whole_costs: bool = True) -> dict[str, np.ndarray]:
    """Random steps; each episode ends by a terminal or a timeout, and `tail` steps of an unfinished one follow."""
    rng = np.random.default_rng(seed)
    n = sum(lengths) + tail
    ends = np.cumsum(lengths) - 1
    by_terminal = rng.random(len(lengths)) < 0.5
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    terminals[ends[by_terminal]] = True
    timeouts[ends[~by_terminal]] = True
    observations = rng.normal(size=(n, 3)).astype(np.float32)
    following = np.concatenate([observations[1:], rng.normal(size=(1, 3)).astype(np.float32)])
    following[ends] = rng.normal(size=(len(lengths), 3))
    costs = rng.integers(0, 3, n) if whole_costs else rng.exponential(size=n)
    return {
        "observations": observations,
        "next_observations": following,
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": (10 * rng.normal(size=n)).astype(np.float32),
        "costs": costs.astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def same(a: Trajectories, b: Trajectories) -> bool:
    names = ("observations", "actions", "rewards", "costs", "terminals", "timeouts", "offsets", "final_observations")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


cases = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 2**31), st.integers(0, 4), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_cutting_and_sums(case: tuple[list[int], int, int, bool]) -> None:
    lengths, seed, tail, whole = case
    given_arrays = arrays(lengths, seed, tail, whole)
    data = Trajectories.from_arrays(**given_arrays)
    assert data.lengths.tolist() == lengths
    assert len(data) == len(lengths)
    assert data.steps == sum(lengths)
    assert data.info.get("dropped_steps", 0) == tail
    assert "next_observations" not in data.info

    start = 0
    following = data.next_observations()
    for number, length in enumerate(lengths):
        rewards = [float(x) for x in given_arrays["rewards"][start : start + length]]
        costs = [float(x) for x in given_arrays["costs"][start : start + length]]
        assert data.returns[number] == pytest.approx(sum(rewards), abs=1e-9)
        assert data.episode_costs[number] == pytest.approx(sum(costs), abs=1e-9)
        for t in range(length):
            i = start + t
            assert data.returns_to_go[i] == pytest.approx(sum(rewards[t:]), rel=1e-6, abs=1e-5)
            assert data.costs_to_go[i] == pytest.approx(sum(costs[t:]), rel=1e-6, abs=1e-6)
            assert data.costs_to_go[i] >= 0
            assert data.episode_of_step[i] == number
            assert data.step_in_episode[i] == t
            assert np.array_equal(following[i], given_arrays["next_observations"][i])
            assert np.array_equal(data.actions[i], given_arrays["actions"][i])
        start += length


@settings(max_examples=60, deadline=None)
@given(cases, st.data())
def test_selection(case: tuple[list[int], int, int, bool], draw: st.DataObject) -> None:
    data = Trajectories.from_arrays(**arrays(*case))
    picks = draw.draw(st.lists(st.integers(-len(data), len(data) - 1), min_size=1, max_size=15))
    chosen = episodes_of(data.select(picks))
    every = episodes_of(data)
    assert len(chosen) == len(picks)
    for found, pick in zip(chosen, picks, strict=True):
        for name, values in every[pick].items():
            assert np.array_equal(found[name], values)


@settings(max_examples=60, deadline=None)
@given(cases, st.lists(st.floats(-5, 60), min_size=1, max_size=8))
def test_frontier(case: tuple[list[int], int, int, bool], limits: list[float]) -> None:
    data = Trajectories.from_arrays(**arrays(*case))
    pairs = list(zip(data.episode_costs.tolist(), data.returns.tolist(), strict=True))
    limits = [*limits, pairs[0][0]]  # also one that is met exactly
    for limit, best in zip(limits, data.reward_frontier(limits), strict=True):
        safe = [r for c, r in pairs if c <= limit]
        assert best == (max(safe) if safe else -np.inf)
        index = data.best_safe_episode(limit)
        assert (index is None) == (not safe)
        if index is not None:
            assert pairs[index][0] <= limit
            assert pairs[index][1] == best
    pareto = data.pareto_episodes().tolist()
    beaten = [any(c2 <= c and r2 >= r and (c2 < c or r2 > r) for c2, r2 in pairs) for c, r in pairs]
    assert {pairs[i] for i in pareto} == {pair for pair, lost in zip(pairs, beaten, strict=True) if not lost}
    assert [pairs[i][0] for i in pareto] == sorted(pairs[i][0] for i in pareto)


def test_nothing_is_within_a_limit_that_is_no_number() -> None:
    data = Trajectories.from_arrays(**arrays([4, 3]))
    assert data.reward_frontier([np.nan, np.inf]).tolist() == [-np.inf, data.returns.max()]


@settings(max_examples=40, deadline=None)
@given(cases, st.floats(0.01, 0.99), st.integers(0, 99))
def test_split_and_concatenate(case: tuple[list[int], int, int, bool], fraction: float, seed: int) -> None:
    data = Trajectories.from_arrays(**arrays(*case), info={"seeds": list(range(len(case[0])))})
    assert same(Trajectories.concatenate([data]), data)
    if len(data) < 2:
        with pytest.raises(QptError, match="at least two"):
            data.split(fraction, seed)
        return
    first, second = data.split(fraction, seed)
    assert len(first) == min(max(round(fraction * len(data)), 1), len(data) - 1)
    order = first.info["seeds"] + second.info["seeds"]
    assert sorted(order) == list(range(len(data)))
    again = Trajectories.concatenate([first, second])
    assert again.info["seeds"] == order
    assert same(again, data.select(order))
    assert same(again.select(np.argsort(order)), data)


def test_statistics() -> None:
    data = Trajectories.from_arrays(**arrays([4, 6, 2], seed=3))
    facts = data.statistics([0.0, 5.0, 100.0])
    every = episodes_of(data)
    returns, costs = [e["rewards"].sum() for e in every], [e["costs"].sum() for e in every]
    assert (facts["episodes"], facts["steps"], facts["observation_dim"], facts["action_dim"]) == (3, 12, 3, 2)
    assert facts["return"] == pytest.approx({"min": min(returns), "mean": sum(returns) / 3, "max": max(returns)})
    assert facts["cost"] == pytest.approx({"min": min(costs), "mean": sum(costs) / 3, "max": max(costs)})
    assert facts["length"] == {"min": 2, "mean": 4, "max": 6}
    assert facts["ended_by_terminal"] == pytest.approx(sum(e["terminals"][-1] for e in every) / 3)
    for row in facts["limits"]:
        safe = [r for r, c in zip(returns, costs, strict=True) if c <= row["cost_limit"]]
        assert row["share_within"] == pytest.approx(len(safe) / 3)
        assert row["best_safe_return"] == (pytest.approx(max(safe)) if safe else None)


def test_sums_of_a_long_data_set_do_not_drift() -> None:
    lengths = [1000] * 300
    given_arrays = arrays(lengths, whole_costs=False)
    data = Trajectories.from_arrays(**given_arrays)
    for number in (0, 150, 299):
        start = number * 1000
        slow = np.cumsum(given_arrays["rewards"][start : start + 1000].astype(np.float64)[::-1])[::-1]
        np.testing.assert_allclose(data.returns_to_go[start : start + 1000], slow, rtol=1e-6, atol=1e-5)


def test_one_surrogate_makes_all_a_surrogate() -> None:
    real = Trajectories.from_arrays(**arrays([3]), info={"note": "logged", "task": "x"})
    fake = Trajectories.from_arrays(**arrays([2]), info={"note": "made up", "surrogate": True, "task": "x"})
    both = Trajectories.concatenate([real, fake])
    assert both.is_surrogate
    assert both.info == {"task": "x", "note": "logged; made up", "surrogate": True}
    assert fake.select([0]).is_surrogate
    assert fake.statistics()["surrogate"] is True
    assert "surrogate" not in real.statistics()


def test_data_cannot_be_changed_behind_its_back() -> None:
    given_arrays = arrays([4, 3])
    data = Trajectories.from_arrays(**given_arrays)
    before = data.observations.copy()
    given_arrays["observations"][:] = 0
    assert np.array_equal(data.observations, before)
    for name in (
        "observations",
        "actions",
        "rewards",
        "costs",
        "terminals",
        "timeouts",
        "offsets",
        "final_observations",
    ):
        with pytest.raises(ValueError, match="read-only"):
            getattr(data, name)[0] = 1


def test_fingerprint_tells_data_apart() -> None:
    one = Trajectories.from_arrays(**arrays([4, 3]))
    assert one.fingerprint == Trajectories.from_arrays(**arrays([4, 3])).fingerprint
    changed = arrays([4, 3])
    changed["costs"][2] += 1
    assert one.fingerprint != Trajectories.from_arrays(**changed).fingerprint
    assert one.fingerprint != one.select([1, 0]).fingerprint


def test_columns_and_kinds_of_flags() -> None:
    plain = arrays([4, 3], tail=2)
    expected = Trajectories.from_arrays(**plain)
    columns = {k: v[:, None] if v.ndim == 1 else v for k, v in plain.items()}
    assert same(Trajectories.from_arrays(**columns), expected)
    for kind in (np.int8, np.uint8, np.int64, np.float32, np.float64):
        flags = {k: plain[k].astype(kind) for k in ("terminals", "timeouts")}
        assert same(Trajectories.from_arrays(**{**plain, **flags}), expected)
    doubles = {k: v.astype(np.float64) for k, v in plain.items()}
    assert same(Trajectories.from_arrays(**doubles), expected)
    lists = {k: v.tolist() for k, v in plain.items()}
    assert same(Trajectories.from_arrays(**lists), expected)
    finals = plain.pop("next_observations")[expected.offsets[1:] - 1]
    assert same(Trajectories.from_arrays(**plain, final_observations=finals), expected)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 9, 100])
def test_next_observations_that_do_not_follow_are_counted(block: int) -> None:
    given_arrays = arrays([5, 4], seed=2)
    given_arrays["next_observations"][[0, 2, 6]] += 1
    data = Trajectories.from_arrays(**given_arrays)
    assert "3 rows differ" in data.info["next_observations"]
    done = given_arrays["terminals"] | given_arrays["timeouts"]
    finals, differing = _finals("next", given_arrays["next_observations"], given_arrays["observations"], done, block)
    assert differing == 3
    assert np.array_equal(finals, given_arrays["next_observations"][[4, 8]])


def test_missing_finals_are_said() -> None:
    given_arrays = arrays([5, 4])
    del given_arrays["next_observations"]
    data = Trajectories.from_arrays(**given_arrays)
    assert np.array_equal(data.final_observations, given_arrays["observations"][[4, 8]])
    assert "stands in" in data.info["final_observations"]


def spoil(**changes: object) -> dict[str, object]:
    given_arrays: dict[str, object] = dict(arrays([4, 3]))
    return {**given_arrays, **changes}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"observations": np.zeros(7)}, r"observations has shape \[7\]"),
        ({"observations": np.zeros((7, 2, 2))}, r"observations has shape \[7, 2, 2\]"),
        ({"observations": np.zeros((0, 3))}, "no steps"),
        ({"observations": np.zeros((7, 0)), "next_observations": np.zeros((7, 0))}, "at least one column"),
        ({"observations": np.full((7, 3), np.nan)}, "observations holds 21 NaN or infinite values, the first in row 0"),
        (
            {"rewards": np.array([0, 0, np.inf, 0, 0, np.nan, 0])},
            "rewards holds 2 NaN or infinite values, the first in row 2",
        ),
        ({"rewards": np.full(7, 1e300)}, "rewards holds 7 NaN or infinite"),
        (
            {"next_observations": np.array([[0, 0, 0]] * 6 + [[0, np.nan, 0]])},
            "next_observations holds 1 NaN .* in row 6",
        ),
        ({"next_observations": np.zeros((6, 3))}, r"next_observations has shape \[6, 3\]"),
        ({"actions": np.zeros((6, 2))}, "actions has 6 rows but observations has 7"),
        ({"actions": np.full((7, 2), 1.5)}, "largest magnitude is 1.5"),
        (
            {"actions": np.arange(7) % 2},
            "actions are stored as int64 and look like discrete ones; qpt is for continuous",
        ),
        ({"actions": np.ones((7, 1), np.uint8)}, "actions are stored as uint8 and look like discrete ones"),
        ({"actions": np.eye(7, dtype=bool)}, "actions are stored as bool and look like discrete ones"),
        ({"actions": [[0, 1]] * 7}, "actions are stored as int64 and look like discrete ones"),
        ({"costs": -np.ones(7)}, "must not be negative"),
        ({"costs": np.array(["a"] * 7)}, "only numbers"),
        ({"terminals": np.full(7, 2)}, "other than 0 and 1"),
        ({"terminals": np.full(7, np.nan)}, "other than 0 and 1"),
        ({"terminals": np.zeros((7, 2))}, r"terminals has shape \[7, 2\]"),
        ({"terminals": np.zeros(7), "timeouts": np.zeros(7)}, "no episode is complete"),
        ({"final_observations": np.zeros((3, 3))}, "final_observations has 3 rows but there are 2 episodes"),
        ({"observations": [[0.0, 1.0, 2.0]] * 6 + [[0.0]]}, "rows of observations differ in length; give every step"),
        ({"actions": [[0.0]] * 6 + [[0.0, 1.0]]}, "rows of actions differ in length"),
        ({"terminals": [[0]] * 6 + [[0, 1]], "timeouts": None}, "rows of terminals differ in length"),
        ({"next_observations": [[0.0, 1.0, 2.0]] * 6 + [[0.0]]}, "rows of next_observations differ in length"),
        ({"action_bound": np.nan}, "above 0, not nan"),
        ({"action_bound": 0.0}, "above 0, not 0"),
        ({"final_observations": np.zeros((2, 4))}, "have 3 columns but the observations after them have 4"),
    ],
)
def test_defects(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(QptError, match=sentence):
        Trajectories.from_arrays(**spoil(**change))  # type: ignore[arg-type]


def test_floats_that_happen_to_be_whole_numbers_are_actions() -> None:
    assert Trajectories.from_arrays(**spoil(actions=np.ones((7, 2)))).action_dim == 2  # type: ignore[arg-type]


def test_action_bound_can_be_lifted() -> None:
    wide = spoil(actions=np.full((7, 2), 1.5))
    assert Trajectories.from_arrays(**wide, action_bound=None).actions.max() == 1.5  # type: ignore[arg-type]
    assert Trajectories.from_arrays(**wide, action_bound=1.5).actions.max() == 1.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("picks", "sentence"),
    [
        ([], "no episode is left"),
        ([False, False], "no episode is left"),
        ([True], "mask has 1 entries for 2"),
        ([2], "there are 2 episodes"),
        ([-3], "there are 2 episodes"),
        ([0.5], "whole numbers"),
        ([[0, 1]], "whole numbers"),
    ],
)
def test_bad_selections(picks: list[object], sentence: str) -> None:
    with pytest.raises(QptError, match=sentence):
        Trajectories.from_arrays(**arrays([4, 3])).select(picks)  # type: ignore[arg-type]


def test_bad_splits_and_parts() -> None:
    data = Trajectories.from_arrays(**arrays([4, 3]))
    with pytest.raises(QptError, match="between 0 and 1"):
        data.split(1.0)
    with pytest.raises(QptError, match="at least 0, not -1"):
        data.split(0.5, seed=-1)
    with pytest.raises(QptError, match="nothing to concatenate"):
        Trajectories.concatenate([])
    narrow = spoil(actions=np.zeros((7, 1)))
    with pytest.raises(QptError, match="differ in the size"):
        Trajectories.concatenate([data, Trajectories.from_arrays(**narrow)])  # type: ignore[arg-type]
