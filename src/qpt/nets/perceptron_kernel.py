# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernel behind `qpt.nets.perceptron`, as an operator that torch.compile knows.

A program takes a tile of rows through the whole half block and runs over the hidden layer in chunks, which never
leave the chip.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.activation_kernel import tail

ROWS, CHUNK = 64, 64  # rows of a tile, hidden units of a chunk
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, shift_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, out_ptr, count, eps,
    D: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows, d = tl.arange(0, ROWS), tl.arange(0, D)
    places = program.to(tl.int64) * (ROWS * D) + rows[:, None] * D + d[None, :]
    inside = (program * ROWS + rows < count)[:, None]
    # Read twice, with different hints so that the compiler does not make it once and hold the tile all the while.
    x = tl.load(x_ptr + places, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    centred = x - (tl.sum(x, 1) / D)[:, None]
    h = centred / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)[:, None]
    h = h * tl.load(gain_ptr + d).to(tl.float32)[None, :] + tl.load(shift_ptr + d).to(tl.float32)[None, :]
    h = h.to(tl.bfloat16)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + units[:, None] * D + d[None, :])
        w2 = tl.load(w2_ptr + d[:, None] * HIDDEN + units[None, :])
        a = tl.dot(h, tl.trans(w1)) + tl.load(b1_ptr + units).to(tl.float32)[None, :]
        active = tl.maximum(a, 0.0) - tl.abs(a) * tail(a)
        out = tl.dot(active.to(tl.bfloat16), tl.trans(w2), out)
    out += tl.load(b2_ptr + d).to(tl.float32)[None, :]
    out += tl.load(x_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out_ptr + places, out.to(tl.bfloat16), mask=inside)


@torch.library.custom_op("qpt::perceptron", mutates_args=())
def perceptron(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float
) -> Tensor:
    """x + gelu(norm(x) w1ᵀ + b1) w2ᵀ + b2, without gradient: x [..., D], w1 [H, D], w2 [D, H] in bf16 -> [..., D]."""
    x, w1, w2 = x.contiguous(), w1.contiguous(), w2.contiguous()
    (hidden, width), out = w1.shape, torch.empty_like(x)
    count = x.numel() // width
    sizes = {"D": width, "HIDDEN": hidden, "ROWS": ROWS, "CHUNK": min(CHUNK, hidden)}
    _mix[(-(-count // ROWS),)](x, gain, shift, w1, b1, w2, b2, out, count, eps, **sizes, **LAUNCH)
    return out


@perceptron.register_fake
def _(x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
