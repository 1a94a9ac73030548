# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The way back through bias and mish as one Triton kernel, in operators that torch.compile knows.

The compiler would read the gradient a second time for the bias. Here a program keeps to its columns and walks over many
rows, so that the sums of its columns stay in registers and few of them are left to add.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # entries of a tile: whole rows
PROGRAMS = 528  # over all members: four for each of an H200's 132 processors, all there at once
LAUNCH: dict[str, Any] = {"STAGES": 3, "num_warps": 4}  # tiles on their way while one is computed

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mish(x):  # type: ignore[no-untyped-def]
    """Value and slope, as in `qpt.nets.pointwise`."""
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
    n = e * (e + 2)
    root = tl.rsqrt(n + 2)
    r = root * root
    return x * (n * r), r * (n + 4 * x * (e * (e + 1) * r))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    z_ptr, bias_ptr, grad_ptr, dz_ptr, sums_ptr, count,
    W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs, member = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places, known = rows[:, None] * W + columns[None, :], columns < W
    bias = tl.load(bias_ptr + member * W + columns, mask=known, other=0.0)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        first = (member.to(tl.int64) * count + start) * W
        inside = (start + rows < count)[:, None] & known[None, :]
        x = tl.load(z_ptr + first + places, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_ptr + first + places, mask=inside, other=0.0).to(tl.float32)
        _active, slope = _mish(x)
        dz = grad * slope
        sums += dz
        tl.store(dz_ptr + first + places, dz.to(tl.bfloat16), mask=inside)
    tl.store(sums_ptr + (member * programs + program) * W + columns, tl.sum(sums, 0), mask=known)


@torch.library.custom_op("qpt::mish_back", mutates_args=())
def back(z: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """By the gradient of mish(z + bias) that of z [E, M, W], and parts [E, P, W], whose sum over P is that of bias.

    z and grad in bf16, W a multiple of 16 up to 1024; bias [E, W] in float32, and its gradient from unrounded numbers.
    """
    z, bias, grad = z.contiguous(), bias.contiguous(), grad.contiguous()
    grid, sizes = _launch(z)
    dz, parts = _outputs(z)
    _back[grid](z, bias, grad, dz, parts, z.shape[1], **sizes, **LAUNCH)
    return dz, parts


@back.register_fake
def _(z: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(z)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _head_back(  # type: ignore[no-untyped-def]
    z_ptr, bias_ptr, weight_ptr, grad_ptr, dz_ptr, sums_ptr, count,
    W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs, member = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places, known = rows[:, None] * W + columns[None, :], columns < W
    bias = tl.load(bias_ptr + member * W + columns, mask=known, other=0.0)[None, :]
    weight = tl.load(weight_ptr + member * W + columns, mask=known, other=0.0)[None, :]
    biases, weights = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        first = member.to(tl.int64) * count + start
        there = start + rows < count
        inside = there[:, None] & known[None, :]
        x = tl.load(z_ptr + first * W + places, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_ptr + first + rows, mask=there, other=0.0)[:, None]
        active, slope = _mish(x)
        weights += grad * active
        dz = grad * (weight * slope)
        biases += dz
        tl.store(dz_ptr + first * W + places, dz.to(tl.bfloat16), mask=inside)
    sums = sums_ptr + (member * programs + program) * (2 * W) + columns
    tl.store(sums, tl.sum(biases, 0), mask=known)
    tl.store(sums + W, tl.sum(weights, 0), mask=known)


@torch.library.custom_op("qpt::mish_head_back", mutates_args=())
def head_back(z: Tensor, bias: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of values mish(z + bias) · weight: by their gradient [E, M] that of z [E, M, W], and parts [E, P, 2, W].

    z in bf16, all else in float32; the parts' sum over P is the gradient of bias and of weight, each [E, W].
    """
    z, bias, weight, grad = z.contiguous(), bias.contiguous(), weight.contiguous(), grad.contiguous()
    grid, sizes = _launch(z)
    dz, parts = _outputs(z, 2)
    _head_back[grid](z, bias, weight, grad, dz, parts, z.shape[1], **sizes, **LAUNCH)
    return dz, parts


@head_back.register_fake
def _(z: Tensor, bias: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(z, 2)


def _launch(z: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid (programs for each member, members), and the sizes of a tile."""
    members, count, width = z.shape
    columns = triton.next_power_of_2(width)
    rows = TILE // columns
    programs = min(max(PROGRAMS // members, 1), triton.cdiv(count, rows))
    steps = triton.cdiv(count, rows * programs)
    return (programs, members), {"W": width, "COLUMNS": columns, "ROWS": rows, "STEPS": steps}


def _outputs(z: Tensor, *sums: int) -> tuple[Tensor, Tensor]:
    members, _, width = z.shape
    parts = z.new_empty((members, _launch(z)[0][0], *sums, width), dtype=torch.float32)
    return torch.empty_like(z, memory_format=torch.contiguous_format), parts
