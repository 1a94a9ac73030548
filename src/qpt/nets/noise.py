"""Noise that depends on the episode's seed and step alone: a decision does not depend on the rest of the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: the increment of splitmix64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift; torch's is arithmetic


def _hash(x: Tensor) -> Tensor:
    """splitmix64's finaliser: neighbouring counters give unrelated 64-bit values."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def episode_uniform(seeds: Tensor, steps: Tensor, count: int, stream: int = 0) -> Tensor:
    """Uniform numbers in (0, 1), a fixed function of (seed, step, position, stream): [n], [n] -> [n, count] float64."""
    key = _hash(seeds.long() * _GAMMA + stream + 1)
    key = _hash(key + (steps.long() + 1) * _GAMMA)
    bits = _hash(key[:, None] + torch.arange(1, count + 1, device=seeds.device) * _GAMMA)
    return (_shift(bits, 11).double() + 0.5) * 2.0**-53


def episode_normal(seeds: Tensor, steps: Tensor, count: int, stream: int = 0) -> Tensor:
    """Standard normal numbers by the same rule (Box and Muller's transform): [n], [n] -> [n, count] float64."""
    half = (count + 1) // 2
    u = episode_uniform(seeds, steps, 2 * half, stream)
    radius, angle = torch.sqrt(-2 * torch.log(u[:, :half])), 2 * math.pi * u[:, half:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)[:, :count]
