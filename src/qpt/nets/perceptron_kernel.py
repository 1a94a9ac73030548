# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernel behind `qpt.nets.perceptron`, as operators that autograd and torch.compile know.

A program takes a tile of rows through the whole half block and runs over the hidden layer in chunks. They never leave
the chip, except that a forward pass in training writes what the backward pass needs of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.activation_kernel import back, tail
from qpt.nets.hash_kernel import hashed
from qpt.nets.norm_kernel import norm_back
from qpt.nets.pointwise import kept, limit

ROWS, CHUNK = 64, 64  # rows of a tile, hidden units of a chunk
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
SAVING = LAUNCH | {"num_stages": 2}  # what it writes takes shared memory, which has to last for two tiles


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, shift_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, seed_ptr, out_ptr, h_ptr, a_ptr, active_ptr,
    count, eps, scale, limit,
    D: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    DROPOUT: tl.constexpr, SAVE: tl.constexpr,
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
    if SAVE:
        tl.store(h_ptr + places, h, mask=inside)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + units[:, None] * D + d[None, :])
        w2 = tl.load(w2_ptr + d[:, None] * HIDDEN + units[None, :])
        a = tl.dot(h, tl.trans(w1)) + tl.load(b1_ptr + units).to(tl.float32)[None, :]
        active = (tl.maximum(a, 0.0) - tl.abs(a) * tail(a)).to(tl.bfloat16)
        if SAVE:
            targets = program.to(tl.int64) * (ROWS * HIDDEN) + rows[:, None] * HIDDEN + units[None, :]
            tl.store(a_ptr + targets, a.to(tl.bfloat16), mask=inside)
            tl.store(active_ptr + targets, active, mask=inside)
        out = tl.dot(active, tl.trans(w2), out)
    out += tl.load(b2_ptr + d).to(tl.float32)[None, :]
    if DROPOUT:
        first = (tl.load(seed_ptr) + program * (ROWS * D)).to(tl.uint32)
        numbers = (first + (rows * D).to(tl.uint32))[:, None] + d[None, :].to(tl.uint32)
        out = tl.where(hashed(numbers) >= limit, out * scale, 0.0)
    out += tl.load(x_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out_ptr + places, out.to(tl.bfloat16), mask=inside)


def _run(
    x: Tensor, w1: Tensor, w2: Tensor, small: tuple[Tensor, ...], seed: Tensor | None, saved: tuple[Tensor, ...] | None,
    eps: float, rate: float,
) -> Tensor:  # fmt: skip
    """Fills what is to be saved, where it is given."""
    gain, shift, b1, b2 = small
    x, w1, w2 = x.contiguous(), w1.contiguous(), w2.contiguous()
    (hidden, width), out = w1.shape, torch.empty_like(x)
    count = x.numel() // width
    sizes = {"D": width, "HIDDEN": hidden, "ROWS": ROWS, "CHUNK": min(CHUNK, hidden)}
    flags = {"DROPOUT": rate > 0, "SAVE": saved is not None}
    _mix[(-(-count // ROWS),)](
        x, gain, shift, w1, b1, w2, b2, seed, out, *(saved or (None, None, None)),
        count, eps, 1 / (1 - rate), limit(rate), **sizes, **flags, **(SAVING if saved else LAUNCH),
    )  # fmt: skip
    return out


# -- where nothing is learned ------------------------------------------------------------------------------------------


@torch.library.custom_op("qpt::perceptron", mutates_args=())
def perceptron(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float
) -> Tensor:
    """x + gelu(norm(x) w1ᵀ + b1) w2ᵀ + b2, without gradient: x [..., D], w1 [H, D], w2 [D, H] in bf16 -> [..., D]."""
    return _run(x, w1, w2, (gain, shift, b1, b2), None, None, eps, 0.0)


@perceptron.register_fake
def _(x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- where something is: with dropout and a gradient -------------------------------------------------------------------


@torch.library.custom_op("qpt::perceptron_train", mutates_args=())
def perceptron_train(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, seed: Tensor, eps: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x + dropout(gelu(a) w2ᵀ + b2), and for the backward pass alone norm(x), a = norm(x) w1ᵀ + b1, and gelu(a)."""
    saved = _to_save(x, w1)
    return _run(x, w1, w2, (gain, shift, b1, b2), seed, saved, eps, rate), *saved


@perceptron_train.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, seed: Tensor, eps: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_to_save(x, w1)


def _to_save(x: Tensor, w1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = (*x.shape[:-1], w1.shape[0])
    return x.new_empty(x.shape), x.new_empty(wide), x.new_empty(wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gain, _, w1, _, w2, _, seed, ctx.eps, ctx.rate = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, gain, w1, w2, seed, *output[1:])


def _back(ctx: Any, grad: Tensor, *_unused: Any) -> tuple[Any, ...]:
    """Products by cuBLAS, the rest by kernels of which each reads and writes everything once."""
    x, gain, w1, w2, seed, normed, a, active = ctx.saved_tensors
    dz = torch.where(kept(grad, seed, ctx.rate), grad * (1 / (1 - ctx.rate)), 0.0) if ctx.rate else grad
    dz, normed, a, active = (_rows(each) for each in (dz, normed, a, active))
    nothing = a.new_zeros(1, a.shape[1], dtype=torch.float32)  # b1 is in a already
    da, _again, db1 = back(a[None], nothing, (dz @ w2)[None], "gelu", again=False)
    dx, parts = norm_back((da[0] @ w1).view(x.shape), x, gain, grad, ctx.eps)
    dw1, dw2, db2 = da[0].mT @ normed, dz.mT @ active, dz.sum(0, dtype=torch.float32)
    return dx, *parts.sum(0), dw1, db1[0], dw2, db2, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


perceptron_train.register_autograd(_back, setup_context=_keep)
