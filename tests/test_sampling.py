"""Samplers against slow references: what is drawn, how often, and that a generator's state resumes it bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from helpers import tiny_data
from qpt.data.augment import Relabelled
from qpt.data.sampling import (
    TransitionBatch,
    TransitionSampler,
    Weighting,
    WindowBatch,
    WindowSampler,
)
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError

CONTEXT = 7  # longer than some of the episodes below


def uneven(seed: int = 0) -> Trajectories:
    """Episodes of 1 to 12 steps; every observation begins with its row, so that a draw can be traced back."""
    rng = np.random.default_rng(seed)
    lengths = np.array([3, 1, 12, 6, 7, 2, 9, 8, 5, 11])
    n = int(lengths.sum())
    last = np.zeros(n, bool)
    last[np.cumsum(lengths) - 1] = True
    terminal = last & (rng.random(n) < 0.5)
    return Trajectories.from_arrays(
        observations=np.column_stack([np.arange(n), rng.normal(size=(n, 2))]),
        actions=rng.uniform(-1, 1, (n, 2)),
        rewards=rng.normal(size=n),
        costs=rng.gamma(1.0, 2.0, n),
        terminals=terminal,
        timeouts=last & ~terminal,
        final_observations=rng.normal(size=(len(lengths), 3)) - 1000,
    )


def relabelled() -> Relabelled:
    """Four relabelled episodes, two of them of the same base, with shifts that tell them apart."""
    base = np.array([2, 6, 2, 1])
    return Relabelled(
        base,
        np.array([100.5, 200.25, 300.125, 400.75], np.float32),
        np.array([1.5, 0.5, 9.25, 30.0], np.float32),
        np.zeros(4),
        np.zeros(4),
        "paper",
        0.0,
    )


def table(data: Trajectories, extra: Relabelled | None) -> list[tuple[int, float, float]]:
    """Every episode that can be drawn: (base, shift of the return-to-go, shift of the cost-to-go)."""
    rows = [(e, 0.0, 0.0) for e in range(len(data))]
    if extra is not None:
        shifts = zip(extra.base, extra.return_shift, extra.cost_shift, strict=True)
        rows += [(int(base), float(by_return), float(by_cost)) for base, by_return, by_cost in shifts]
    return rows


def slow_weights(
    data: Trajectories, rows: list[tuple[int, float, float]], weighting: Weighting, ceiling: float
) -> list[float]:
    weights = []
    for base, _, shift in rows:
        part = slice(data.offsets[base], data.offsets[base + 1])
        if weighting == "low-cost":
            weights.append(max(ceiling - (sum(map(float, data.costs[part])) + shift), 0.0))
        else:
            weights.append(float(part.stop - part.start) if weighting == "length" else 1.0)
    return weights


def slow_window(data: Trajectories, episode: tuple[int, float, float], start: int) -> dict[str, Any]:
    """One window by slicing and summing, field by field."""
    base, return_shift, cost_shift = episode
    first, last = int(data.offsets[base]) + start, int(data.offsets[base + 1])
    stop = min(first + CONTEXT, last)
    missing = CONTEXT - (stop - first)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])

    rtg = np.array([sum(map(float, data.rewards[i:last])) + return_shift for i in range(first, stop)])
    ctg = np.array([sum(map(float, data.costs[i:last])) + cost_shift for i in range(first, stop)])
    return {
        "observations": padded(data.observations[first:stop]),
        "actions": padded(data.actions[first:stop]),
        "rewards": padded(data.rewards[first:stop]),
        "costs": padded(data.costs[first:stop]),
        "return_to_go": padded(rtg),
        "cost_to_go": padded(ctg),
        "terminals": padded(data.terminals[first:stop].astype(np.float32)),
        "timeouts": padded(data.timeouts[first:stop].astype(np.float32)),
        "steps": np.arange(start, start + CONTEXT),
        "mask": np.arange(CONTEXT) < stop - first,
    }


def traced(data: Trajectories, rows: list[tuple[int, float, float]], batch: WindowBatch) -> list[tuple[int, int]]:
    """(entry of `rows`, start) of each window: the first observation tells the row, the return-to-go the shift."""
    found = []
    for row, to_go in zip(batch.observations[:, 0, 0].long().tolist(), batch.return_to_go[:, 0].tolist(), strict=True):
        base = int(np.searchsorted(data.offsets, row, side="right")) - 1
        own = float(data.returns_to_go[row])
        entry = min((i for i, r in enumerate(rows) if r[0] == base), key=lambda i: abs(rows[i][1] - (to_go - own)))
        found.append((entry, row - int(data.offsets[base])))
    return found


@pytest.mark.parametrize("weighting", ["uniform", "length", "low-cost"])
def test_window_content_is_that_of_slicing(weighting: Weighting) -> None:
    data, extra = uneven(), relabelled()
    rows = table(data, extra)
    batch = WindowSampler(data, 600, CONTEXT, relabelled=extra, weighting=weighting, seed=3).sample()
    places = traced(data, rows, batch)
    assert {entry for entry, _ in places} == set(range(len(rows)))  # every kind is among those compared
    assert not batch.mask.all()
    for i, (entry, start) in enumerate(places):
        wanted = slow_window(data, rows[entry], start)
        for name, values in batch._asdict().items():
            got = values[i].numpy()
            if name in ("return_to_go", "cost_to_go"):  # sums in another order
                np.testing.assert_allclose(got, wanted[name], rtol=1e-5, atol=1e-4, err_msg=name)
            else:
                np.testing.assert_array_equal(got, wanted[name], err_msg=name)


@pytest.mark.parametrize("with_relabelled", [False, True])
@pytest.mark.parametrize(("weighting", "ceiling"), [("uniform", 70.0), ("length", 70.0), ("low-cost", 22.0)])
def test_windows_are_distributed_like_the_slow_reference(
    weighting: Weighting, ceiling: float, with_relabelled: bool
) -> None:
    """Chi-square of (episode, start) counts against P = weight / Σ weights × 1 / length."""
    data, extra = uneven(1), relabelled() if with_relabelled else None
    rows = table(data, extra)
    weights = slow_weights(data, rows, weighting, ceiling)
    assert len(set(weights)) > 1 or weighting == "uniform"
    if weighting == "low-cost":
        assert 0.0 in weights  # some episodes are never drawn
    sampler = WindowSampler(data, 50_000, CONTEXT, relabelled=extra, weighting=weighting, cost_ceiling=ceiling, seed=11)
    batch = sampler.sample()
    counts: dict[tuple[int, int], int] = {}
    for place in traced(data, rows, batch):
        counts[place] = counts.get(place, 0) + 1
    seen, expected = [], []
    for entry, (base, _, _) in enumerate(rows):
        length = int(data.lengths[base])
        for start in range(length):
            share = weights[entry] / sum(weights) / length
            count = counts.pop((entry, start), 0)
            if share == 0:
                assert count == 0
            else:
                seen.append(count)
                expected.append(share * sampler.batch_size)
    assert not counts  # nothing outside an episode
    assert chisquare(seen, expected).pvalue > 1e-3


def test_the_chi_square_test_would_notice_a_wrong_weighting() -> None:
    """Guards the test above: "length" draws are rejected as "uniform" ones."""
    data = uneven(1)
    rows = table(data, None)
    places = traced(data, rows, WindowSampler(data, 50_000, CONTEXT, weighting="length", seed=11).sample())
    counts = np.bincount([entry for entry, _ in places], minlength=len(rows))
    assert chisquare(counts, np.full(len(rows), 50_000 / len(rows))).pvalue < 1e-12


def test_low_cost_weighting_uses_the_relabelled_cost() -> None:
    """A relabelled episode whose target is above the ceiling is never drawn, although its base is."""
    data = tiny_data(episodes=6)
    shifts = np.full(4, 1000.0, np.float32)
    extra = Relabelled(np.array([0, 1, 2, 3]), shifts, shifts, np.zeros(4), np.zeros(4), "paper", 0.0)
    batch = WindowSampler(data, 2000, 3, relabelled=extra, weighting="low-cost", seed=0).sample()
    assert batch.cost_to_go.max() < 500
    seen = WindowSampler(data, 2000, 3, relabelled=extra, weighting="uniform", seed=0).sample()
    assert seen.cost_to_go.max() > 500


def test_no_episode_below_the_ceiling_is_an_error() -> None:
    with pytest.raises(QptError, match="every episode costs"):
        WindowSampler(uneven(), 4, 2, weighting="low-cost", cost_ceiling=0.0)
    with pytest.raises(QptError, match="no weighting"):
        WindowSampler(uneven(), 4, 2, weighting="high-cost")  # type: ignore[arg-type]


def test_transitions_are_those_of_the_data() -> None:
    data = uneven(2)
    batch = TransitionSampler(data, 3000, seed=5).sample()
    rows = batch.observations[:, 0].long().numpy()
    assert set(rows.tolist()) == set(range(data.steps))
    following = data.next_observations()
    for i, row in enumerate(rows.tolist()):
        base = int(np.searchsorted(data.offsets, row, side="right")) - 1
        wanted = {
            "observations": data.observations[row],
            "actions": data.actions[row],
            "rewards": data.rewards[row],
            "costs": data.costs[row],
            "next_observations": following[row],
            "terminals": np.float32(data.terminals[row]),
            "timeouts": np.float32(data.timeouts[row]),
            "steps": row - data.offsets[base],
        }
        for name, value in wanted.items():
            np.testing.assert_array_equal(getattr(batch, name)[i].numpy(), value, err_msg=name)
        to_go = sum(map(float, data.costs[row : data.offsets[base + 1]]))
        assert batch.cost_to_go[i].item() == pytest.approx(to_go, rel=1e-5, abs=1e-4)


def test_transitions_are_uniform_over_steps() -> None:
    data = uneven(2)
    batch = TransitionSampler(data, 50_000, seed=6).sample()
    counts = np.bincount(batch.observations[:, 0].long().numpy(), minlength=data.steps)
    assert chisquare(counts).pvalue > 1e-3


def same(one: WindowBatch | TransitionBatch, other: WindowBatch | TransitionBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["window", "transition"])
def test_resumes_bit_for_bit_from_its_state(kind: str) -> None:
    data = uneven()

    def make(seed: int) -> WindowSampler | TransitionSampler:
        if kind == "window":
            return WindowSampler(data, 32, CONTEXT, relabelled=relabelled(), weighting="length", seed=seed)
        return TransitionSampler(data, 32, seed=seed)

    first = make(1)
    for _ in range(3):
        first.sample()
    state = first.state_dict()
    ahead = [first.sample() for _ in range(4)]
    assert not same(ahead[0], ahead[1])
    other = make(2)
    assert not same(other.sample(), ahead[0])
    other.load_state_dict(state)
    assert all(same(other.sample(), batch) for batch in ahead)


def test_draws_do_not_depend_on_the_global_generator() -> None:
    data = uneven()
    torch.manual_seed(0)
    one = WindowSampler(data, 16, 4, seed=9).sample()
    torch.manual_seed(1)
    torch.rand(3)
    assert same(one, WindowSampler(data, 16, 4, seed=9).sample())
    before = torch.get_rng_state()
    TransitionSampler(data, 16, seed=9).sample()
    assert torch.equal(before, torch.get_rng_state())
