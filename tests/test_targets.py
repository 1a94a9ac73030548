"""n-step targets against a loop in float64, on random episodes cut into random windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qpt.algorithms.targets import expectile_loss, n_step_targets


def slow_targets(signal, bootstrap, length, ends, discount, n):
    """One window at a time, one position at a time, as the equation reads."""
    targets, valid = {}, []
    for p in range(length):
        total, j = 0.0, p
        while True:
            if j == length:  # went through the step that ended the episode
                break
            if j - p == n or (j == length - 1 and not ends):
                total += discount ** (j - p) * bootstrap[j]
                break
            total += discount ** (j - p) * signal[j]
            j += 1
        if p < length - 1 or ends:
            targets[p] = total
            valid.append(p)
    return targets, valid


@pytest.mark.parametrize("n", [1, 2, 5, 10, 99])
@pytest.mark.parametrize("discount", [1.0, 0.99, 0.5])
def test_targets_equal_the_loop(n: int, discount: float) -> None:
    rng = np.random.default_rng(n)
    b, k = 64, 10
    signal, bootstrap = rng.normal(size=(b, k)), rng.normal(size=(b, k))
    length = rng.integers(1, k + 1, b)
    mask = np.arange(k) < length[:, None]
    ends = rng.random(b) < 0.5
    ended = np.zeros((b, k))
    ended[np.arange(b), length - 1] = ends
    # what stands in the padding must not matter
    signal[~mask] = bootstrap[~mask] = 1e6
    y, valid = n_step_targets(
        torch.tensor(signal), torch.tensor(bootstrap), torch.tensor(mask), torch.tensor(ended), discount, n
    )
    for row in range(b):
        targets, positions = slow_targets(signal[row], bootstrap[row], length[row], ends[row], discount, n)
        assert valid[row].nonzero().flatten().tolist() == positions
        for p, target in targets.items():
            assert y[row, p].item() == pytest.approx(target, abs=1e-10)


def test_terminal_cost_is_learned_and_timeouts_bootstrap() -> None:
    cost = torch.tensor([[0.0, 0.0, 1.0]]).double()
    value = torch.full((1, 3), 7.0).double()
    mask = torch.ones(1, 3, dtype=torch.bool)
    y, valid = n_step_targets(cost, value, mask, torch.tensor([[0.0, 0.0, 1.0]]), 1.0, 10)
    assert y.tolist() == [[1.0, 1.0, 1.0]]  # the crash is seen, and nothing after it
    assert valid.all()
    y, valid = n_step_targets(cost, value, mask, torch.zeros(1, 3), 1.0, 10)
    assert y[0, :2].tolist() == [7.0, 7.0]
    assert valid.tolist() == [[True, True, False]]


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.8])
def test_expectile_loss_is_minimised_by_the_expectile(expectile: float) -> None:
    q = torch.tensor(np.random.default_rng(0).normal(size=1001))
    low, high = q.min(), q.max()
    for _ in range(80):  # the expectile solves τ E[(q - v)+] = (1 - τ) E[(v - q)+]: bisection
        v = (low + high) / 2
        excess = expectile * (q - v).clamp(min=0).mean() - (1 - expectile) * (v - q).clamp(min=0).mean()
        low, high = (v, high) if excess > 0 else (low, v)
    guess = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([guess], lr=0.5)
    for _ in range(500):
        optimizer.zero_grad()
        expectile_loss(q - guess, expectile).mean().backward()
        optimizer.step()
    assert guess.item() == pytest.approx(v.item(), abs=1e-6)
