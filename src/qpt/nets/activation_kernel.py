# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The way back through bias and activation as one Triton kernel, in an operator that torch.compile knows.

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
DENSITY = tl.constexpr(0.3989422804014327)  # of the standard normal at 0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tail(x):  # type: ignore[no-untyped-def]
    """The share of a standard normal beyond |x|, as in `qpt.nets.pointwise`."""
    u = tl.abs(x)
    rest = -0.4595262408256531 + u * (-0.052220940589904785 + u * (0.007229659240692854 - u * 0.0004925123648718))
    return tl.exp2(-1.0000032186508179 + u * (-1.1510181427001953 + u * rest))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mish(x):  # type: ignore[no-untyped-def]
    """Value and slope, as in `qpt.nets.pointwise`."""
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
    n = e * (e + 2)
    root = tl.rsqrt(n + 2)
    r = root * root
    return x * (n * r), r * (n + 4 * x * (e * (e + 1) * r))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gelu(x):  # type: ignore[no-untyped-def]
    """Value and slope, as in `qpt.nets.pointwise`."""
    beyond = tail(x)
    below = tl.where(x < 0, beyond, 1 - beyond)
    return tl.maximum(x, 0.0) - tl.abs(x) * beyond, below + x * DENSITY * tl.exp2(x * x * (-0.5 * LOG2_E))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    z_ptr, bias_ptr, grad_ptr, dz_ptr, active_ptr, sums_ptr, count,
    KIND: tl.constexpr, AGAIN: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
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
        if KIND == "mish":
            active, slope = _mish(x)
        else:
            active, slope = _gelu(x)
        dz = grad * slope
        sums += dz
        tl.store(dz_ptr + first + places, dz.to(tl.bfloat16), mask=inside)
        if AGAIN:
            tl.store(active_ptr + first + places, active.to(tl.bfloat16), mask=inside)
    tl.store(sums_ptr + (member * programs + program) * W + columns, tl.sum(sums, 0), mask=known)


def back(z: Tensor, bias: Tensor, grad: Tensor, kind: str, again: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of z [E, M, W] by that of act(z + bias), act(z + bias) `again` (or nothing), gradient of bias [E, W].

    z and grad in bf16, W a multiple of 16 up to 1024; bias in float32, and its gradient from unrounded numbers;
    the activation is "mish" or "gelu".
    """
    dz, active, sums = _parts(z, bias, grad, kind, again)
    return dz, active, sums.sum(1)  # out here, where the compiler can join it with others of its size


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
    (members, count, width), (rows, columns, programs) = z.shape, _sizes(z)
    dz, sums = _head_outputs(z)
    sizes = {"W": width, "COLUMNS": columns, "ROWS": rows, "STEPS": triton.cdiv(count, rows * programs)}
    _head_back[(programs, members)](z, bias, weight, grad, dz, sums, count, **sizes, **LAUNCH)
    return dz, sums


@head_back.register_fake
def _(z: Tensor, bias: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _head_outputs(z)


def _head_outputs(z: Tensor) -> tuple[Tensor, Tensor]:
    members, _, width = z.shape
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    return dz, z.new_empty((members, _sizes(z)[2], 2, width), dtype=torch.float32)


@torch.library.custom_op("qpt::activation_back", mutates_args=())
def _parts(z: Tensor, bias: Tensor, grad: Tensor, kind: str, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the sums of every program, [E, P, W]."""
    z, bias, grad = z.contiguous(), bias.contiguous(), grad.contiguous()
    (members, count, width), (rows, columns, programs) = z.shape, _sizes(z)
    out = _outputs(z, again)
    sizes = {"W": width, "COLUMNS": columns, "ROWS": rows, "STEPS": triton.cdiv(count, rows * programs)}
    _back[(programs, members)](z, bias, grad, *out, count, KIND=kind, AGAIN=again, **sizes, **LAUNCH)
    return out


@_parts.register_fake
def _(z: Tensor, bias: Tensor, grad: Tensor, kind: str, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(z, again)


def _sizes(z: Tensor) -> tuple[int, int, int]:
    """Rows and columns of a tile, and programs for each member."""
    members, count, width = z.shape
    columns = triton.next_power_of_2(width)
    rows = TILE // columns
    return rows, columns, min(max(PROGRAMS // members, 1), triton.cdiv(count, rows))


def _outputs(z: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    members, _, width = z.shape
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    active = torch.empty_like(dz) if again else z.new_empty(0)
    return dz, active, z.new_empty((members, _sizes(z)[2], width), dtype=torch.float32)
