# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernel behind `qpt.nets.norm`, as an operator that torch.compile knows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile
PROGRAMS = 792  # at most: six for every processor of an H100 or H200, so that few sums are left to be added
LAUNCH: dict[str, Any] = {"STAGES": 3, "num_warps": 4}  # tiles on their way while one is computed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def standard(x, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows with mean 0 and variance 1, and what they were multiplied by."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)[:, None]
    return centred * scale, scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rows_back(x, grad, gain, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of rows that are normed, and what the gain gets of it; the shift gets `grad`."""
    normed, scale = standard(x, eps, D)
    passed = grad * gain
    mean, slope = (tl.sum(passed, 1) / D)[:, None], (tl.sum(passed * normed, 1) / D)[:, None]
    return (passed - mean - normed * slope) * scale, grad * normed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, gain_ptr, dx_ptr, sums_ptr, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, d = tl.program_id(0), tl.arange(0, D)
    gain = tl.load(gain_ptr + d).to(tl.float32)[None, :]
    gains, shifts = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        rows = (turn * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS)
        places, inside = rows.to(tl.int64)[:, None] * D + d[None, :], (rows < count)[:, None]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        dx, more = rows_back(x, grad, gain, eps, D)
        gains += more
        shifts += grad
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptr + program * 2 * D + d, tl.sum(gains, 0))
    tl.store(sums_ptr + program * 2 * D + D + d, tl.sum(shifts, 0))


def _share(x: Tensor) -> tuple[int, int]:
    """Programs, and tiles that each of them takes."""
    tiles = -(-x.numel() // (x.shape[-1] * ROWS))
    turns = -(-tiles // PROGRAMS)
    return -(-tiles // turns), turns


@torch.library.custom_op("qpt::norm_back", mutates_args=())
def norm_back(grad: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradient of a layer norm's input [..., D], and parts [P, 2, D], whose sum is that of gain and shift."""
    grad, x = grad.contiguous(), x.contiguous()
    width, (programs, turns) = x.shape[-1], _share(x)
    dx, sums = torch.empty_like(x), x.new_empty((programs, 2, width), dtype=torch.float32)
    sizes = {"D": width, "ROWS": ROWS, "TURNS": turns}
    _back[(programs,)](grad, x, gain, dx, sums, x.numel() // width, eps, **sizes, **LAUNCH)
    return dx, sums


@norm_back.register_fake
def _(grad: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sums = x.new_empty((_share(x)[0], 2, x.shape[-1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums
