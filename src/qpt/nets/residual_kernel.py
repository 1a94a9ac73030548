# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernel behind `qpt.nets.residual`, as an operator that torch.compile knows."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile
PROGRAMS = 528  # at most: four for every processor of an H100 or H200, so that few sums are left to be added
LAUNCH: dict[str, Any] = {"STAGES": 3, "num_warps": 4}  # tiles on their way while one is computed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def standard(x, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows with mean 0 and variance 1, and what they were multiplied by."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)[:, None]
    return centred * scale, scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def through(normed, scale, grad, gain, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of rows that `standard` made these of, given that of `normed * gain + shift`."""
    passed = grad * gain
    mean, slope = (tl.sum(passed, 1) / D)[:, None], (tl.sum(passed * normed, 1) / D)[:, None]
    return (passed - mean - normed * slope) * scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def kept(places, seed, limit):  # type: ignore[no-untyped-def]
    """Which numbers dropout leaves, as in `qpt.nets.pointwise`."""
    x = (places ^ seed).to(tl.uint32, bitcast=True) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32, bitcast=True) >= limit


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, gain_ptr, past_ptr, seed_ptr, dx_ptr, dropped_ptr, sums_ptr, count, eps, factor, limit,
    D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, d, seed = tl.program_id(0), tl.arange(0, D), tl.load(seed_ptr)
    gain = tl.load(gain_ptr + d).to(tl.float32)[None, :]
    gains, shifts = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    biases = tl.zeros((ROWS, D), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        rows = (turn * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS)
        places, inside = rows.to(tl.int64)[:, None] * D + d[None, :], (rows < count)[:, None]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        normed, scale = standard(x, eps, D)
        dx = through(normed, scale, grad, gain, D)
        gains += grad * normed
        shifts += grad
        dx += tl.load(past_ptr + places, mask=inside, other=0.0).to(tl.float32)
        dropped = tl.where(kept(rows[:, None] * D + d[None, :], seed, limit), dx * factor, 0.0)
        biases += dropped
        tl.store(dx_ptr + places, dx.to(tl.bfloat16), mask=inside)
        tl.store(dropped_ptr + places, dropped.to(tl.bfloat16), mask=inside)
    sums = sums_ptr + program * 3 * D + d
    tl.store(sums, tl.sum(gains, 0))
    tl.store(sums + D, tl.sum(shifts, 0))
    tl.store(sums + 2 * D, tl.sum(biases, 0))


def drop(rate: float) -> tuple[float, int]:
    """The factor of what stays, and from where on 24 bits say so."""
    return 1 / (1 - rate), math.ceil(rate * 2**24)


def _share(x: Tensor) -> tuple[int, int]:
    """Programs, and tiles that each of them takes."""
    tiles = -(-x.numel() // (x.shape[-1] * ROWS))
    turns = -(-tiles // PROGRAMS)
    return -(-tiles // turns), turns


def _sums(x: Tensor) -> Tensor:
    return x.new_empty((_share(x)[0], 3, x.shape[-1]), dtype=torch.float32)


@torch.library.custom_op("qpt::add_norm_back", mutates_args=())
def add_norm_back(
    past: Tensor, grad: Tensor, x: Tensor, gain: Tensor, eps: float, seed: Tensor, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x = a + dropout(b + bias) and norm(x) the gradients of a and of b, given those of x (`past`) and norm(x).

    Also parts [P, 3, D], whose sum is that of gain, shift and bias.
    """
    past, grad, x = past.contiguous(), grad.contiguous(), x.contiguous()
    width, (programs, turns) = x.shape[-1], _share(x)
    dx, dropped, sums = torch.empty_like(x), torch.empty_like(x), _sums(x)
    sizes = {"D": width, "ROWS": ROWS, "TURNS": turns}
    places = (grad, x, gain, past, seed, dx, dropped, sums, x.numel() // width)
    _back[(programs,)](*places, eps, *drop(rate), **sizes, **LAUNCH)
    return dx, dropped, sums


@add_norm_back.register_fake
def _(
    past: Tensor, grad: Tensor, x: Tensor, gain: Tensor, eps: float, seed: Tensor, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(dx), _sums(x)
