"""The Triton kernels behind `qpt.nets.frozen`, as operators that torch.compile knows.

A program takes a tile of one member's rows through the whole network; hidden layers never leave the chip. Layers go in
pairs: what a chunk of the units of one is worth goes at once into the sums of the next, so that no more than one layer
is whole at a time, and a loop over chunks has its weights on their way while it computes.

A value is one number for each row, so its gradient is a row of slopes times a number: the slopes are found where the
values are, and nothing has to be computed again on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of a tile, units of a chunk (wider ones of the slopes would not fit the registers), and stages: chunks of weights
# that are on their way, and the one in use. Larger tiles are no faster, and need shared memory that few GPUs have.
TILES: dict[str, Any] = {"ROWS": 64, "CHUNK": 32, "STAGES": 3, "num_warps": 4}

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _parts(x):  # type: ignore[no-untyped-def]
    """e^x and 2 / (n + 2) as in `qpt.nets.pointwise`. Two neighbours share a root: it takes longer than products."""
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
    shape: tl.constexpr = x.shape
    a, b = tl.split(tl.reshape(e * (e + 2) + 2, (shape[0], shape[1] // 2, 2)))
    root = tl.rsqrt(a * b)
    both = 2 * (root * root)
    return e, tl.reshape(tl.join(both * b, both * a), shape)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mish(x):  # type: ignore[no-untyped-def]
    """n / (n + 2) is 1 - 2 / (n + 2) to what bf16 can tell of a sum."""
    _e, r = _parts(x)
    return x * (1 - r)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mish_and_slope(x):  # type: ignore[no-untyped-def]
    e, r = _parts(x)
    return x * (1 - r), (1 - r) + x * r * ((e * e + e) * r)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(x_ptr, member, count, stride, IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which rows a program takes, the rows, where their numbers lie, and which of these there are."""
    rows, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K)
    places = rows.to(tl.int64)[:, None] * IN + k[None, :]
    inside = (rows < count)[:, None] & (k < IN)[None, :]
    x = tl.load(x_ptr + member.to(tl.int64) * stride + places, mask=inside, other=0.0)
    return rows, x, places, inside


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _first(w1_ptr, b1_ptr, x, units, IN: tl.constexpr, K: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some units of the first layer before their activation, and their weights."""
    k = tl.arange(0, K)[:, None]
    w1 = tl.load(w1_ptr + k * H + units[None, :], mask=k < IN, other=0.0)
    return tl.dot(x, w1) + tl.load(b1_ptr + units)[None, :], w1


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _second(  # type: ignore[no-untyped-def]
    w1_ptr, b1_ptr, w2_ptr, b2_ptr, x,
    IN: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second layer before its activation."""
    every = tl.arange(0, H)
    z2 = tl.zeros((ROWS, H), tl.float32)
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):
        units = start + tl.arange(0, CHUNK)
        z1, _w1 = _first(w1_ptr, b1_ptr, x, units, IN, K, H)
        w2 = tl.load(w2_ptr + units[:, None] * H + every[None, :])
        z2 = tl.dot(_mish(z1).to(tl.bfloat16), w2, z2)
    return z2 + tl.load(b2_ptr + every)[None, :]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _values(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, w4_ptr, b4_ptr, value_ptr, count, stride,
    IN: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    every = tl.arange(0, H)
    rows, x, _places, _inside = _rows(x_ptr, member, count, stride, IN, K, ROWS)
    w1_ptr, w2_ptr, w3_ptr = w1_ptr + member * IN * H, w2_ptr + member * H * H, w3_ptr + member * H * H
    b1_ptr, b2_ptr = b1_ptr + member * H, b2_ptr + member * H
    h2 = _mish(_second(w1_ptr, b1_ptr, w2_ptr, b2_ptr, x, IN, K, H, ROWS, CHUNK, STAGES)).to(tl.bfloat16)
    sums = tl.zeros((ROWS, CHUNK), tl.float32)
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):
        units = start + tl.arange(0, CHUNK)
        w3 = tl.load(w3_ptr + every[:, None] * H + units[None, :])
        z3 = tl.dot(h2, w3) + tl.load(b3_ptr + member * H + units)[None, :]
        sums += _mish(z3) * tl.load(w4_ptr + member * H + units)[None, :]
    value = tl.sum(sums, 1) + tl.load(b4_ptr + member)
    tl.store(value_ptr + member * count + rows, value, mask=rows < count)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slopes(  # type: ignore[no-untyped-def]
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, w4_ptr, b4_ptr, value_ptr, slope_ptr, kept_ptr,
    count, stride,
    IN: tl.constexpr, K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    every = tl.arange(0, H)
    rows, x, places, inside = _rows(x_ptr, member, count, stride, IN, K, ROWS)
    w1_ptr, w2_ptr, w3_ptr = w1_ptr + member * IN * H, w2_ptr + member * H * H, w3_ptr + member * H * H
    b1_ptr, b2_ptr = b1_ptr + member * H, b2_ptr + member * H
    h2, s2 = _mish_and_slope(_second(w1_ptr, b1_ptr, w2_ptr, b2_ptr, x, IN, K, H, ROWS, CHUNK, STAGES))
    h2 = h2.to(tl.bfloat16)
    # The registers are full until the way back comes here: aside, into the cache.
    tile = member.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    kept = kept_ptr + tile * (ROWS * H) + tl.arange(0, ROWS)[:, None] * H + every[None, :]
    tl.store(kept, s2.to(tl.bfloat16))
    value, d2 = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, H), tl.float32)
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):  # there and back through the third layer
        units = start + tl.arange(0, CHUNK)
        w3 = tl.load(w3_ptr + every[:, None] * H + units[None, :])
        z3 = tl.dot(h2, w3) + tl.load(b3_ptr + member * H + units)[None, :]
        w4 = tl.load(w4_ptr + member * H + units)[None, :]
        h3, s3 = _mish_and_slope(z3)
        value += tl.sum(h3 * w4, 1)
        d2 = tl.dot((s3 * w4).to(tl.bfloat16), tl.trans(w3), d2)
    tl.store(value_ptr + member * count + rows, value + tl.load(b4_ptr + member), mask=rows < count)
    tl.debug_barrier()  # what a thread reads, another may have put aside
    d2 = (d2 * tl.load(kept)).to(tl.bfloat16)
    dx = tl.zeros((ROWS, K), tl.float32)
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):  # a layer this narrow costs less again than kept
        units = start + tl.arange(0, CHUNK)
        z1, w1 = _first(w1_ptr, b1_ptr, x, units, IN, K, H)
        w2 = tl.load(w2_ptr + units[:, None] * H + every[None, :])
        _h1, s1 = _mish_and_slope(z1)
        d1 = tl.dot(d2, tl.trans(w2)) * s1
        dx = tl.dot(d1.to(tl.bfloat16), tl.trans(w1), dx)
    tl.store(slope_ptr + member.to(tl.int64) * count * IN + places, dx.to(tl.bfloat16), mask=inside)


# (The schemas are written out because torch 2.6 does not know list[Tensor].)


@torch.library.custom_op("qpt::critic_values", mutates_args=(), schema="(Tensor x, Tensor[] layers) -> Tensor")
def values(x: Tensor, layers: list[Tensor]) -> Tensor:
    """Values [E, M] in float32 of rows [E or 1, M, in], 1 where the members share them.

    `layers`: weight [E, in, out] and bias [E, 1, out] of four layers, the last with one unit, hidden ones with mish and
    64, 128 or 256 units. x and hidden weights in bf16, all else in float32; `in` up to 128.
    """
    x, layers = x.contiguous(), [t.contiguous() for t in layers]
    out, (grid, sizes, stride) = _empty(x, layers), _launch(x, layers)
    _values[grid](x, *layers, out, x.shape[1], stride, **sizes, **TILES)
    return out


@values.register_fake
def _(x: Tensor, layers: list[Tensor]) -> Tensor:
    return _empty(x, layers)


@torch.library.custom_op(
    "qpt::critic_slopes", mutates_args=(), schema="(Tensor x, Tensor[] layers) -> (Tensor, Tensor)"
)
def slopes(x: Tensor, layers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`values`, and how each changes with its row: [E, M, in] in bf16."""
    x, layers = x.contiguous(), [t.contiguous() for t in layers]
    out, (grid, sizes, stride) = (_empty(x, layers), _empty(x, layers, x.shape[-1])), _launch(x, layers)
    kept = x.new_empty((*grid, TILES["ROWS"], sizes["H"]))
    _slopes[grid](x, *layers, *out, kept, x.shape[1], stride, **sizes, **TILES)
    return out


@slopes.register_fake
def _(x: Tensor, layers: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _empty(x, layers), _empty(x, layers, x.shape[-1])


def _empty(x: Tensor, layers: list[Tensor], *columns: int) -> Tensor:
    dtype = torch.bfloat16 if columns else torch.float32
    return x.new_empty((len(layers[0]), x.shape[1], *columns), dtype=dtype)


def _launch(x: Tensor, layers: list[Tensor]) -> tuple[tuple[int, int], dict[str, int], int]:
    """The grid (tiles, members), the sizes of the layers, and how far the rows of two members are apart."""
    (shared, count, inputs), (members, _, hidden) = x.shape, layers[0].shape
    sizes = {"IN": inputs, "K": max(triton.next_power_of_2(inputs), 16), "H": hidden}
    return (triton.cdiv(count, TILES["ROWS"]), members), sizes, 0 if shared == 1 else count * inputs
