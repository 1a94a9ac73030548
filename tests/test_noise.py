"""Noise is a function of (seed, step) alone, and looks normal."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats as scipy_stats

from qpt.nets.noise import episode_normal, episode_uniform


def splitmix(value: int) -> int:
    """The finaliser in plain Python integers modulo 2^64."""
    m = (1 << 64) - 1
    value &= m
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & m
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & m
    return value ^ (value >> 31)


def test_uniform_equals_integer_arithmetic() -> None:
    gamma = 0x9E3779B97F4A7C15
    seeds, steps = [0, 5, 2**40 + 3], [0, 7, 199]
    drawn = episode_uniform(torch.tensor(seeds), torch.tensor(steps), 3, stream=2)
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        key = splitmix(splitmix(seed * gamma + 3) + (step + 1) * gamma)
        for place in range(3):
            bits = splitmix(key + (place + 1) * gamma) >> 11
            assert drawn[row, place].item() == (bits + 0.5) * 2.0**-53


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds, steps = torch.arange(50), torch.arange(50) * 3
    together = episode_normal(seeds, steps, 9)
    alone = torch.cat([episode_normal(seeds[i : i + 1], steps[i : i + 1], 9) for i in range(50)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, episode_normal(seeds, steps + 1, 9))
    assert not torch.equal(together, episode_normal(seeds, steps, 9, stream=1))


def test_normal_is_normal() -> None:
    drawn = episode_normal(torch.arange(200), torch.zeros(200, dtype=torch.long), 101).numpy()
    assert scipy_stats.kstest(drawn.flatten(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn[:, :10].T) - np.eye(10)).max() < 0.35
