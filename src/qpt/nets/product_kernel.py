# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""Matrix products that end in an activation, or in its slope, as Triton kernels in operators that torch.compile knows.

A product alone is faster in cuBLAS, but then its result is written, read again for bias and activation, and backward
read again for the slope and once more for the bias's gradient. Here all of that happens to a tile while it is still in
registers. Operands are bf16, sums float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.activation_kernel import activation

# Rows, columns and inner numbers of a tile; stages are tiles of operands on their way.
AHEAD: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
BACK: dict[str, Any] = {"ROWS": 64, "COLUMNS": 128, "INNER": 64, "num_warps": 4, "num_stages": 3}
VALUE: dict[str, Any] = {"ROWS": 64, "INNER": 32, "num_warps": 4, "num_stages": 3}  # its columns are whole rows
VALUE_BACK: dict[str, Any] = {"STAGES": 3, "num_warps": 4}
TILE = 2048  # entries of a tile of `value_back`: whole rows
PROGRAMS = 528  # of `value_back`, over all members: four for each of an H200's 132 processors, all there at once


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, start, column, count,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Tile of x w at row `start` and at `column`; zero beyond the last row and the last column."""
    rows, columns, inner = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    x_ptr += start.to(tl.int64) * X_ROW
    w_ptr += column * W_OUT
    there, known = (start + rows < count)[:, None], (column + columns < N)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, INNER):
        x_here, w_here = there, known
        if K % INNER:
            x_here, w_here = there & (first + inner < K)[None, :], known & (first + inner < K)[:, None]
        x = tl.load(x_ptr + rows[:, None] * X_ROW + (first + inner)[None, :], mask=x_here, other=0.0)
        w = tl.load(w_ptr + (first + inner)[:, None] * W_IN + columns[None, :] * W_OUT, mask=w_here, other=0.0)
        total = tl.dot(x, w, total)
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _corner(N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of a program's tile: tiles of the same rows are neighbours, and find them in the cache."""
    across: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return program // across * ROWS, program % across * COLUMNS


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ahead(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, z_ptr, active_ptr, count, x_member, w_member,
    KIND: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    start, column = _corner(N, ROWS, COLUMNS)
    z = _product(
        x_ptr + member * x_member, w_ptr + member * w_member, start, column, count,
        K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    rows, columns = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    z += tl.load(bias_ptr + member * N + columns, mask=columns < N, other=0.0)[None, :]
    active, _ = activation(z, KIND)
    inside = (start + rows < count)[:, None] & (columns < N)[None, :]
    places = (member * count + start) * N + rows[:, None] * N + columns[None, :]
    tl.store(z_ptr + places, z.to(tl.bfloat16), mask=inside)
    tl.store(active_ptr + places, active.to(tl.bfloat16), mask=inside)


@torch.library.custom_op("qpt::product_ahead", mutates_args=())
def ahead(x: Tensor, w: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """z = x w + bias and act(z), both [E, M, N] in bf16, the second of the unrounded z.

    x [E or 1, M, K] and w [E, K, N], transposed or not, in bf16; bias [E, N] in float32; N a multiple of 16, K of 8;
    the activation is "mish" or "gelu".
    """
    x, w, bias = _lined(x), _packed(w), bias.contiguous()
    (members, inner, width), count = w.shape, x.shape[1]
    z, active = _pair(x, w)
    launch = _fitted(AHEAD, inner, width)
    grid = (triton.cdiv(count, launch["ROWS"]) * triton.cdiv(width, launch["COLUMNS"]), members)
    _ahead[grid](x, w, bias, z, active, count, *_members(x, w), KIND=kind, **_strides(x, w), **launch)
    return z, active


@ahead.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _pair(x, w)


def _pair(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    z = x.new_empty((w.shape[0], x.shape[1], w.shape[2]))
    return z, torch.empty_like(z)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    grad_ptr, w_ptr, z_ptr, dz_ptr, parts_ptr, count, x_member, w_member,
    KIND: tl.constexpr, SUMS: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    start, column = _corner(N, ROWS, COLUMNS)
    passed = _product(
        grad_ptr + member * x_member, w_ptr + member * w_member, start, column, count,
        K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    rows, columns = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (start + rows < count)[:, None] & (columns < N)[None, :]
    places = (member * count + start) * N + rows[:, None] * N + columns[None, :]
    z = tl.load(z_ptr + places, mask=inside, other=0.0).to(tl.float32)
    _, slope = activation(z, KIND)
    dz = passed * slope
    tl.store(dz_ptr + places, dz.to(tl.bfloat16), mask=inside)
    if SUMS:
        part = member * ((count + ROWS - 1) // ROWS) + start // ROWS
        tl.store(parts_ptr + part * N + columns, tl.sum(dz, 0), mask=columns < N)


@torch.library.custom_op("qpt::product_back", mutates_args=())
def back(grad: Tensor, w: Tensor, z: Tensor, kind: str, sums: bool = True) -> tuple[Tensor, Tensor]:
    """Where act(z) went into a product with w: by its result's gradient that of z, and sums over the rows of each tile.

    grad [E, M, K], w [E, N, K], transposed or not, and z [E, M, N] in bf16 -> [E, M, N] in bf16 and, of unrounded
    numbers, parts [E, P, N] in float32. Their sum over P is the gradient of the bias in z. Without `sums`, P is 0.
    """
    grad, w, z = _lined(grad), _packed(w.mT), z.contiguous()
    (members, inner, width), count = w.shape, z.shape[1]
    launch = _fitted(BACK, inner, width)
    dz, parts = _back_outputs(z, sums)
    grid = (triton.cdiv(count, launch["ROWS"]) * triton.cdiv(width, launch["COLUMNS"]), members)
    given = (grad, w, z, dz, parts, count, *_members(grad, w))
    _back[grid](*given, KIND=kind, SUMS=sums, **_strides(grad, w), **launch)
    return dz, parts


@back.register_fake
def _(grad: Tensor, w: Tensor, z: Tensor, kind: str, sums: bool = True) -> tuple[Tensor, Tensor]:
    return _back_outputs(z, sums)


def _back_outputs(z: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    members, count, width = z.shape
    tiles = triton.cdiv(count, BACK["ROWS"]) if sums else 0
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    return dz, z.new_empty((members, tiles, width), dtype=torch.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _value(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, last_ptr, z_ptr, out_ptr, count, x_member, w_member,
    KIND: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    start, column = _corner(N, ROWS, COLUMNS)
    z = _product(
        x_ptr + member * x_member, w_ptr + member * w_member, start, column, count,
        K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there, known = start + rows < count, columns < N
    z += tl.load(bias_ptr + member * N + columns, mask=known, other=0.0)[None, :]
    active, _ = activation(z, KIND)
    last = tl.load(last_ptr + member * N + columns, mask=known, other=0.0)[None, :]
    first = member * count + start
    tl.store(out_ptr + first + rows, tl.sum(active * last, 1), mask=there)
    places = first * N + rows[:, None] * N + columns[None, :]
    tl.store(z_ptr + places, z.to(tl.bfloat16), mask=there[:, None] & known[None, :])


@torch.library.custom_op("qpt::product_value", mutates_args=())
def value(x: Tensor, w: Tensor, bias: Tensor, last: Tensor, kind: str = "mish") -> tuple[Tensor, Tensor]:
    """z = x w + bias [E, M, N] as in `ahead`, and act(z) · last [E, M], of unrounded numbers, in float32.

    last [E, N] in float32; N up to 256.
    """
    x, w, bias, last = _lined(x), _packed(w), bias.contiguous(), last.contiguous()
    (members, inner, width), count = w.shape, x.shape[1]
    launch = _fitted({**VALUE, "COLUMNS": triton.next_power_of_2(width)}, inner, width)
    z, out = _value_outputs(x, w)
    grid = (triton.cdiv(count, launch["ROWS"]), members)
    given = (x, w, bias, last, z, out, count, *_members(x, w))
    _value[grid](*given, KIND=kind, **_strides(x, w), **launch)
    return z, out


@value.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, last: Tensor, kind: str = "mish") -> tuple[Tensor, Tensor]:
    return _value_outputs(x, w)


def _value_outputs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    members, count, width = w.shape[0], x.shape[1], w.shape[2]
    return x.new_empty((members, count, width)), x.new_empty((members, count), dtype=torch.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _value_back(  # type: ignore[no-untyped-def]
    z_ptr, last_ptr, grad_ptr, dz_ptr, parts_ptr, count,
    KIND: tl.constexpr, SUMS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks over many rows, so that its sums stay in registers and few of them are left to add."""
    program, programs, member = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places, known = rows[:, None] * N + columns[None, :], columns < N
    last = tl.load(last_ptr + member * N + columns, mask=known, other=0.0)[None, :]
    biases, lasts = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        first = member.to(tl.int64) * count + start
        there = start + rows < count
        inside = there[:, None] & known[None, :]
        z = tl.load(z_ptr + first * N + places, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + first + rows, mask=there, other=0.0)[:, None]
        active, slope = activation(z, KIND)
        dz = grad * (last * slope)
        if SUMS:
            biases += dz
            lasts += grad * active
        tl.store(dz_ptr + first * N + places, dz.to(tl.bfloat16), mask=inside)
    if SUMS:
        part = parts_ptr + (member * programs + program) * (2 * N) + columns
        tl.store(part, tl.sum(biases, 0), mask=known)
        tl.store(part + N, tl.sum(lasts, 0), mask=known)


@torch.library.custom_op("qpt::product_value_back", mutates_args=())
def value_back(z: Tensor, last: Tensor, grad: Tensor, kind: str = "mish", sums: bool = True) -> tuple[Tensor, Tensor]:
    """Of values act(z) · last: by their gradient [E, M] that of z [E, M, N], and parts [E, P, 2, N] in float32.

    The parts' sum over P is the gradient of the bias in z and that of last, each [E, N]. Without `sums`, P is 0.
    """
    z, last, grad = z.contiguous(), last.contiguous(), grad.contiguous()
    (members, count, width), (rows, columns, programs) = z.shape, _value_sizes(z)
    dz, parts = _value_back_outputs(z, sums)
    sizes = {"N": width, "COLUMNS": columns, "ROWS": rows, "STEPS": triton.cdiv(count, rows * programs)}
    given = (z, last, grad, dz, parts, count)
    _value_back[(programs, members)](*given, KIND=kind, SUMS=sums, **sizes, **VALUE_BACK)
    return dz, parts


@value_back.register_fake
def _(z: Tensor, last: Tensor, grad: Tensor, kind: str = "mish", sums: bool = True) -> tuple[Tensor, Tensor]:
    return _value_back_outputs(z, sums)


def _value_back_outputs(z: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    members, _, width = z.shape
    programs = _value_sizes(z)[2] if sums else 0
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    return dz, z.new_empty((members, programs, 2, width), dtype=torch.float32)


def _value_sizes(z: Tensor) -> tuple[int, int, int]:
    """Rows and columns of a tile, and programs for each member."""
    members, count, width = z.shape
    columns = triton.next_power_of_2(width)
    rows = TILE // columns
    return rows, columns, min(max(PROGRAMS // members, 1), triton.cdiv(count, rows))


def _lined(x: Tensor) -> Tensor:
    """Rows without gaps between their numbers."""
    return x if x.stride(2) == 1 else x.contiguous()


def _packed(w: Tensor) -> Tensor:
    """Matrices whose rows or whose columns have no gaps between their numbers."""
    return w if 1 in w.stride()[1:] else w.contiguous()


def _members(x: Tensor, w: Tensor) -> tuple[int, int]:
    """Numbers from one member to the next; none in an x that all share."""
    return x.stride(0) if x.shape[0] > 1 else 0, w.stride(0)


def _strides(x: Tensor, w: Tensor) -> dict[str, int]:
    return {"K": w.shape[1], "N": w.shape[2], "X_ROW": x.stride(1), "W_IN": w.stride(1), "W_OUT": w.stride(2)}


def _fitted(launch: dict[str, Any], inner: int, width: int) -> dict[str, Any]:
    """No tile is wider than the result, and few of its inner numbers lie beyond the last."""
    columns, step = min(launch["COLUMNS"], triton.next_power_of_2(width)), launch["INNER"]
    while step > 32 and inner % step:
        step //= 2
    return {**launch, "COLUMNS": columns, "INNER": step}
