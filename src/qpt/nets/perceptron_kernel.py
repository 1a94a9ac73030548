# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernels behind `qpt.nets.perceptron`, as operators that torch.compile knows.

Where nothing is learned, a program takes a tile of rows through all of a block behind its attention, and runs over the
hidden layer in chunks, which never leave the chip. Where something is, the hidden layer is needed in memory: there GELU
and its slope happen to a tile of the product before them while it is in registers. Those programs hold their columns of
the weight on the chip and walk over many rows, so that few sums of the bias's gradient are left to be added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.residual_kernel import standard

ROWS, CHUNK = 64, 64  # rows of a tile, hidden units of a chunk
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
# Of the products in training: rows and columns of a tile, programs at once, and stages: tiles that are on their way.
TILE_ROWS, TILE_COLUMNS, PROGRAMS = 64, 128, 264  # two for every processor of an H100 or H200
AHEAD: dict[str, Any] = {"STAGES": 3, "num_warps": 8}
BACK: dict[str, Any] = {"STAGES": 2, "num_warps": 8, "maxnreg": 128}

LOG2_E = tl.constexpr(1.4426950408889634)
DENSITY = tl.constexpr(0.3989422804014327)  # of the standard normal at 0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tail(x):  # type: ignore[no-untyped-def]
    """The share of a standard normal beyond |x|, as in `qpt.nets.pointwise`."""
    u = tl.abs(x)
    rest = -0.4595262408256531 + u * (-0.052220940589904785 + u * (0.007229659240692854 - u * 0.0004925123648718))
    return tl.exp2(-1.0000032186508179 + u * (-1.1510181427001953 + u * rest))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gelu(x):  # type: ignore[no-untyped-def]
    return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rest(  # type: ignore[no-untyped-def]
    x_ptr, attended_ptr, project_ptr, bias_ptr, norm_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, out_ptr, normed_ptr,
    count, eps, D: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows, d = tl.arange(0, ROWS), tl.arange(0, D)
    places = program.to(tl.int64) * (ROWS * D) + rows[:, None] * D + d[None, :]
    inside = (program * ROWS + rows < count)[:, None]
    attended = tl.load(attended_ptr + places, mask=inside, other=0.0)
    project = tl.load(project_ptr + d[:, None] * D + d[None, :])
    x = tl.dot(attended, tl.trans(project)) + tl.load(bias_ptr + d)[None, :]
    x += tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, x.to(tl.bfloat16), mask=inside)  # and read again below: registers are dear until then
    normed, _scale = standard(x, eps, D)
    h = (normed * tl.load(norm_ptr + d)[None, :] + tl.load(norm_ptr + D + d)[None, :]).to(tl.bfloat16)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + units[:, None] * D + d[None, :])
        w2 = tl.load(w2_ptr + d[:, None] * HIDDEN + units[None, :])
        a = tl.dot(h, tl.trans(w1)) + tl.load(b1_ptr + units).to(tl.float32)[None, :]
        active = _gelu(a)
        out = tl.dot(active.to(tl.bfloat16), tl.trans(w2), out)
    out += tl.load(b2_ptr + d).to(tl.float32)[None, :]
    tl.debug_barrier()  # what a thread reads, another may have written
    out += tl.load(out_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, out.to(tl.bfloat16), mask=inside)
    normed, _scale = standard(out, eps, D)
    normed = normed * tl.load(norm_ptr + 2 * D + d)[None, :] + tl.load(norm_ptr + 3 * D + d)[None, :]
    tl.store(normed_ptr + places, normed.to(tl.bfloat16), mask=inside)


@torch.library.custom_op("qpt::rest", mutates_args=())
def rest(
    x: Tensor, attended: Tensor, project: Tensor, bias: Tensor, norms: Tensor, w1: Tensor, b1: Tensor, w2: Tensor,
    b2: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y = z + gelu(norm(z) w1ᵀ + b1) w2ᵀ + b2 of z = x + attended projectᵀ + bias, and y normed; without gradient.

    x, attended [..., D], project [D, D], w1 [H, D] and w2 [D, H] in bf16; `norms` [4, D]: gain and shift of both.
    """
    x, attended = x.contiguous(), attended.contiguous()
    (hidden, width), out, normed = w1.shape, torch.empty_like(x), torch.empty_like(x)
    count = x.numel() // width
    sizes = {"D": width, "HIDDEN": hidden, "ROWS": ROWS, "CHUNK": min(CHUNK, hidden)}
    weights = [t.contiguous() for t in (project, bias, norms, w1, b1, w2, b2)]
    _rest[(-(-count // ROWS),)](x, attended, *weights, out, normed, count, eps, **sizes, **LAUNCH)
    return out, normed


@rest.register_fake
def _(
    x: Tensor, attended: Tensor, project: Tensor, bias: Tensor, norms: Tensor, w1: Tensor, b1: Tensor, w2: Tensor,
    b2: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out)


# -- where something is learned ----------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ahead(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, a_ptr, active_ptr, count,
    D: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = HIDDEN // COLUMNS  # programs of the same rows are neighbours, and find them in the cache
    program, programs = tl.program_id(0) // across, tl.num_programs(0) // across
    rows, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(w_ptr + columns * D + d[:, None])
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        there, first = start + rows < count, start.to(tl.int64)
        x = tl.load(x_ptr + first * D + rows * D + d[None, :], mask=there, other=0.0)
        a = tl.dot(x, weight)
        a += tl.load(bias_ptr + columns)  # here, so that no register holds it
        places = first * HIDDEN + rows * HIDDEN + columns
        tl.store(a_ptr + places, a.to(tl.bfloat16), mask=there)
        tl.store(active_ptr + places, _gelu(a).to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _back(  # type: ignore[no-untyped-def]
    grad_ptr, w_ptr, a_ptr, da_ptr, parts_ptr, count,
    D: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = HIDDEN // COLUMNS
    program, programs = tl.program_id(0) // across, tl.num_programs(0) // across
    rows, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(w_ptr + d[:, None] * HIDDEN + columns)
    sums = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = (step * programs + program) * ROWS
        there, first = start + rows < count, start.to(tl.int64)
        places = first * HIDDEN + rows * HIDDEN + columns
        a = tl.load(a_ptr + places, mask=there, other=0.0)  # on its way while the product is computed
        grad = tl.load(grad_ptr + first * D + rows * D + d[None, :], mask=there, other=0.0)
        passed = tl.dot(grad, weight)
        x = a.to(tl.float32)
        beyond = _tail(x)
        da = passed * (tl.where(x < 0, beyond, 1 - beyond) + x * DENSITY * tl.exp2(x * x * (-0.5 * LOG2_E)))
        # In pairs, rows 8 apart: both are in one thread, and half the sums take half the registers.
        sums += tl.sum(tl.reshape(da, (ROWS // 16, 2, 8, COLUMNS)), 1)
        tl.store(da_ptr + places, da.to(tl.bfloat16), mask=there)
    tl.store(parts_ptr + program * HIDDEN + columns, tl.sum(tl.sum(sums, 1), 0)[None, :])


@torch.library.custom_op("qpt::perceptron_ahead", mutates_args=())
def ahead(x: Tensor, w1: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
    """a = x w1ᵀ + b1 and gelu(a), both [M, H] in bf16: x [M, D] and w1 [H, D] in bf16, b1 in float32."""
    x, w1 = x.contiguous(), w1.contiguous()
    a, active = _wide(x, w1.shape[0]), _wide(x, w1.shape[0])
    grid, sizes = _walk(x, w1.shape[0])
    _ahead[grid](x, w1, b1, a, active, len(x), **sizes, **AHEAD)
    return a, active


@ahead.register_fake
def _(x: Tensor, w1: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
    return _wide(x, w1.shape[0]), _wide(x, w1.shape[0])


@torch.library.custom_op("qpt::perceptron_back", mutates_args=())
def back(grad: Tensor, w2: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """By the gradient [M, D] of gelu(a) w2ᵀ that of a [M, H], and parts [P, H], whose sum over P is that of b1.

    grad, w2 [D, H] and a in bf16; the parts are of unrounded numbers.
    """
    grad, w2, a = grad.contiguous(), w2.contiguous(), a.contiguous()
    grid, sizes = _walk(grad, a.shape[1])
    da, parts = torch.empty_like(a), _parts(grad, a)
    _back[grid](grad, w2, a, da, parts, len(grad), **sizes, **BACK)
    return da, parts


@back.register_fake
def _(grad: Tensor, w2: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a, memory_format=torch.contiguous_format), _parts(grad, a)


def _wide(x: Tensor, hidden: int) -> Tensor:
    return x.new_empty((len(x), hidden))


def _parts(grad: Tensor, a: Tensor) -> Tensor:
    (programs,), sizes = _walk(grad, a.shape[1])
    return a.new_empty((programs * sizes["COLUMNS"] // a.shape[1], a.shape[1]), dtype=torch.float32)


def _walk(x: Tensor, hidden: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the sizes of a tile and of a program's way."""
    columns = min(TILE_COLUMNS, hidden)
    across, tiles = hidden // columns, -(-len(x) // TILE_ROWS)
    programs = min(max(PROGRAMS // across, 1), tiles)
    sizes = {"D": x.shape[1], "HIDDEN": hidden, "ROWS": TILE_ROWS, "COLUMNS": columns, "STEPS": -(-tiles // programs)}
    return (programs * across,), sizes
