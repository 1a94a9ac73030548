# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""Matrix products that end in an activation, or in its slope, as Triton kernels in operators that torch.compile knows.

A product alone is faster in cuBLAS, but then its result is written, read again for bias and activation, and backward
read again for the slope and once more for the bias's gradient. Here all of that happens to a tile while it is still in
registers. Operands are bf16, sums float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.activation_kernel import activation

# Rows, columns and inner numbers of a tile, and stages: tiles of operands on their way. Where a program HOLDS its
# columns of the weight on the chip it walks over many rows, and there are as many programs as run at once: PROGRAMS a
# processor for weights of 129 to 256 rows, twice that for shorter ones. Otherwise every tile has its program.
AHEAD: dict[str, Any] = {
    "ROWS": 64, "COLUMNS": 128, "INNER": 64, "STAGES": 3, "HOLDS": True, "PROGRAMS": 1, "num_warps": 8,
}  # fmt: skip
BACK: dict[str, Any] = {
    "ROWS": 64, "COLUMNS": 128, "INNER": 64, "STAGES": 2, "HOLDS": True, "PROGRAMS": 1, "num_warps": 8, "maxnreg": 128,
}  # fmt: skip
VALUE: dict[str, Any] = {  # its columns are whole rows
    "ROWS": 64, "INNER": 32, "STAGES": 2, "HOLDS": True, "PROGRAMS": 1, "num_warps": 8,
}  # fmt: skip
LONGEST = 256  # rows of a weight that can be held
VALUE_BACK: dict[str, Any] = {"STAGES": 3, "num_warps": 4}
TILE = 2048  # entries of a tile of `value_back`: whole rows
PROGRAMS = 528  # of `value_back`, over all members: four for each of an H200's 132 processors, all there at once


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weight(  # type: ignore[no-untyped-def]
    w_ptr, columns,
    K: tl.constexpr, N: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr, INNER: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """The columns of a weight where they are held, else its address."""
    if HOLDS:
        inner = tl.arange(0, INNER)[:, None]
        return tl.load(w_ptr + inner * W_IN + columns * W_OUT, mask=(inner < K) & (columns < N), other=0.0)
    else:
        return w_ptr


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    x_ptr, weight, columns, there,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """Rows from x_ptr on, where they are `there`, times the columns of the weight: zero beyond either's last."""
    rows, inner = tl.arange(0, ROWS)[:, None], tl.arange(0, INNER)
    if HOLDS:
        x = tl.load(x_ptr + rows * X_ROW + inner[None, :], mask=there & (inner < K)[None, :], other=0.0)
        return tl.dot(x, weight)
    else:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, K, INNER, num_stages=STAGES):
            x_here, w_here = there, columns < N
            if K % INNER:
                x_here, w_here = x_here & (first + inner < K)[None, :], w_here & (first + inner < K)[:, None]
            x = tl.load(x_ptr + rows * X_ROW + (first + inner)[None, :], mask=x_here, other=0.0)
            w = tl.load(weight + (first + inner)[:, None] * W_IN + columns * W_OUT, mask=w_here, other=0.0)
            total = tl.dot(x, w, total)
        return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(N: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of a program and of all that share its columns, its member, and its columns.

    Programs of the same rows are neighbours, and find them in the cache.
    """
    across: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    here, all_here = tl.program_id(0), tl.num_programs(0)
    columns = here % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return here // across, all_here // across, tl.program_id(1).to(tl.int64), columns


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ahead(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, z_ptr, active_ptr, count, x_member, w_member,
    KIND: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    HOLDS: tl.constexpr,
):  # fmt: skip
    program, programs, member, columns = _place(N, COLUMNS)
    rows = tl.arange(0, ROWS)[:, None]
    weight = _weight(w_ptr + member * w_member, columns, K, N, W_IN, W_OUT, INNER, HOLDS)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        there = start + rows < count
        z = _product(
            x_ptr + member * x_member + start.to(tl.int64) * X_ROW, weight, columns, there,
            K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER, STAGES, HOLDS,
        )  # fmt: skip
        z += tl.load(bias_ptr + member * N + columns, mask=columns < N, other=0.0)  # here, so that no register holds it
        active, _ = activation(z, KIND)
        places = (member * count + start) * N + rows * N + columns
        tl.store(z_ptr + places, z.to(tl.bfloat16), mask=there & (columns < N))
        tl.store(active_ptr + places, active.to(tl.bfloat16), mask=there & (columns < N))


@torch.library.custom_op("qpt::product_ahead", mutates_args=())
def ahead(x: Tensor, w: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """z = x w + bias and act(z), both [E, M, N] in bf16, the second of the unrounded z.

    x [E or 1, M, K] and w [E, K, N], transposed or not, in bf16; bias [E, N] in float32; N a multiple of 16, K of 8;
    the activation is "mish" or "gelu".
    """
    x, w, bias = _lined(x), _packed(w), bias.contiguous()
    z, active = _pair(x, w)
    grid, sizes = _launch(AHEAD, x, w)
    _ahead[grid](x, w, bias, z, active, x.shape[1], *_members(x, w), KIND=kind, **sizes)
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
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    HOLDS: tl.constexpr,
):  # fmt: skip
    program, programs, member, columns = _place(N, COLUMNS)
    rows = tl.arange(0, ROWS)[:, None]
    weight = _weight(w_ptr + member * w_member, columns, K, N, W_IN, W_OUT, INNER, HOLDS)
    sums = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        there = start + rows < count
        places = (member * count + start) * N + rows * N + columns
        z = tl.load(z_ptr + places, mask=there & (columns < N), other=0.0)  # on its way while the product is computed
        passed = _product(
            grad_ptr + member * x_member + start.to(tl.int64) * X_ROW, weight, columns, there,
            K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER, STAGES, HOLDS,
        )  # fmt: skip
        _, slope = activation(z.to(tl.float32), KIND)
        dz = passed * slope
        if SUMS:
            # In pairs, rows 8 apart: both are in one thread, and half the sums take half the registers.
            sums += tl.sum(tl.reshape(dz, (ROWS // 16, 2, 8, COLUMNS)), 1)
        tl.store(dz_ptr + places, dz.to(tl.bfloat16), mask=there & (columns < N))
    if SUMS:
        tl.store(
            parts_ptr + (member * programs + program) * N + columns,
            tl.sum(tl.sum(sums, 1), 0)[None, :],
            mask=columns < N,
        )


@torch.library.custom_op("qpt::product_back", mutates_args=())
def back(grad: Tensor, w: Tensor, z: Tensor, kind: str, sums: bool = True) -> tuple[Tensor, Tensor]:
    """Where act(z) went into a product with w: by its result's gradient that of z, and sums over rows.

    grad [E, M, K], w [E, N, K], transposed or not, and z [E, M, N] in bf16 -> [E, M, N] in bf16 and, of unrounded
    numbers, parts [E, P, N] in float32. Their sum over P is the gradient of the bias in z. Without `sums`, P is 0.
    """
    grad, w, z = _lined(grad), _packed(w.mT), z.contiguous()
    dz, parts = _back_outputs(grad, w, z, sums)
    grid, sizes = _launch(BACK, grad, w)
    _back[grid](grad, w, z, dz, parts, z.shape[1], *_members(grad, w), KIND=kind, SUMS=sums, **sizes)
    return dz, parts


@back.register_fake
def _(grad: Tensor, w: Tensor, z: Tensor, kind: str, sums: bool = True) -> tuple[Tensor, Tensor]:
    return _back_outputs(grad, w.mT, z, sums)


def _back_outputs(grad: Tensor, w: Tensor, z: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    programs = _spread(BACK, grad, w)[2] if sums else 0
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    return dz, z.new_empty((z.shape[0], programs, z.shape[2]), dtype=torch.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _value(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, last_ptr, z_ptr, out_ptr, count, x_member, w_member,
    KIND: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    HOLDS: tl.constexpr,
):  # fmt: skip
    program, programs, member, columns = _place(N, COLUMNS)
    rows = tl.arange(0, ROWS)[:, None]
    weight = _weight(w_ptr + member * w_member, columns, K, N, W_IN, W_OUT, INNER, HOLDS)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        there = start + rows < count
        z = _product(
            x_ptr + member * x_member + start.to(tl.int64) * X_ROW, weight, columns, there,
            K, N, X_ROW, W_IN, W_OUT, ROWS, COLUMNS, INNER, STAGES, HOLDS,
        )  # fmt: skip
        z += tl.load(bias_ptr + member * N + columns, mask=columns < N, other=0.0)
        active, _ = activation(z, KIND)
        last = tl.load(last_ptr + member * N + columns, mask=columns < N, other=0.0)
        first = member * count + start
        tl.store(out_ptr + first + rows, tl.sum(active * last, 1)[:, None], mask=there)
        tl.store(z_ptr + first * N + rows * N + columns, z.to(tl.bfloat16), mask=there & (columns < N))


@torch.library.custom_op("qpt::product_value", mutates_args=())
def value(x: Tensor, w: Tensor, bias: Tensor, last: Tensor, kind: str = "mish") -> tuple[Tensor, Tensor]:
    """z = x w + bias [E, M, N] as in `ahead`, and act(z) · last [E, M], of unrounded numbers, in float32.

    last [E, N] in float32; N up to 256.
    """
    x, w, bias, last = _lined(x), _packed(w), bias.contiguous(), last.contiguous()
    z, out = _value_outputs(x, w)
    grid, sizes = _launch({**VALUE, "COLUMNS": triton.next_power_of_2(w.shape[2])}, x, w)
    _value[grid](x, w, bias, last, z, out, x.shape[1], *_members(x, w), KIND=kind, **sizes)
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


@functools.cache
def _device() -> tuple[int, bool]:
    """Processors, and whether each has the memory to hold weights: 227 KiB, as on an H100, H200 or B200."""
    if not torch.cuda.is_available():
        return 132, True
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.multi_processor_count, found.major in (9, 10)


def _spread(launch: dict[str, Any], x: Tensor, w: Tensor) -> tuple[bool, int, int]:
    """Whether programs hold their columns of w, how wide their tiles are, and how many share columns of a member."""
    (members, inner, width), tiles, (processors, large) = w.shape, triton.cdiv(x.shape[1], launch["ROWS"]), _device()
    columns = min(launch["COLUMNS"], triton.next_power_of_2(width))
    if not (launch["HOLDS"] and inner <= LONGEST and large):
        return False, columns, tiles
    at_once = processors * launch["PROGRAMS"] * (2 if 2 * inner <= LONGEST else 1)
    return True, columns, min(max(at_once // (members * triton.cdiv(width, columns)), 1), tiles)


def _launch(launch: dict[str, Any], x: Tensor, w: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and what a kernel is compiled for."""
    (members, inner, width), (holds, columns, programs) = w.shape, _spread(launch, x, w)
    step = max(triton.next_power_of_2(inner), 16) if holds else launch["INNER"]
    while not holds and step > 32 and inner % step:  # few of the inner numbers lie beyond the last
        step //= 2
    steps = triton.cdiv(triton.cdiv(x.shape[1], launch["ROWS"]), programs)
    strides = {"X_ROW": x.stride(1), "W_IN": w.stride(1), "W_OUT": w.stride(2)}
    sizes = {"K": inner, "N": width, "COLUMNS": columns, "INNER": step, "STEPS": steps, "HOLDS": holds}
    given = {name: number for name, number in launch.items() if name != "PROGRAMS"}
    return (programs * triton.cdiv(width, columns), members), {**given, **sizes, **strides}
