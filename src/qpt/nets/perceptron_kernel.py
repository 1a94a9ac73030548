# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernel behind `qpt.nets.perceptron`, as operators that autograd and torch.compile know.

A program takes a tile of rows through the whole half block and runs over the hidden layer in chunks. They never leave
the chip, except that a forward pass in training writes what the backward pass needs of them. The backward pass is
plain torch, which a compiled step fuses between its products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.hash_kernel import hashed
from qpt.nets.pointwise import kept, limit, narrow_gelu, narrow_gelu_back

ROWS, CHUNK = 64, 64  # rows of a tile, hidden units of a chunk
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
SAVING = LAUNCH | {"num_stages": 2}  # what it writes takes shared memory, which has to last for two tiles


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tail(x):  # type: ignore[no-untyped-def]
    """The share of a standard normal beyond |x|, as in `qpt.nets.pointwise`."""
    u = tl.abs(x)
    rest = -0.4595262408256531 + u * (-0.052220940589904785 + u * (0.007229659240692854 - u * 0.0004925123648718))
    return tl.exp2(-1.0000032186508179 + u * (-1.1510181427001953 + u * rest))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    x_ptr, gain_ptr, shift_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, seed_ptr, out_ptr, a_ptr, count, eps, scale, limit,
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
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(0, HIDDEN, CHUNK):
        units = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + units[:, None] * D + d[None, :])
        w2 = tl.load(w2_ptr + d[:, None] * HIDDEN + units[None, :])
        a = tl.dot(h, tl.trans(w1)) + tl.load(b1_ptr + units).to(tl.float32)[None, :]
        if SAVE:
            target = a_ptr + program.to(tl.int64) * (ROWS * HIDDEN) + rows[:, None] * HIDDEN + units[None, :]
            tl.store(target, a.to(tl.bfloat16), mask=inside)
        active = tl.maximum(a, 0.0) - tl.abs(a) * _tail(a)
        out = tl.dot(active.to(tl.bfloat16), tl.trans(w2), out)
    out += tl.load(b2_ptr + d).to(tl.float32)[None, :]
    if DROPOUT:
        first = (tl.load(seed_ptr) + program * (ROWS * D)).to(tl.uint32)
        numbers = (first + (rows * D).to(tl.uint32))[:, None] + d[None, :].to(tl.uint32)
        out = tl.where(hashed(numbers) >= limit, out * scale, 0.0)
    out += tl.load(x_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out_ptr + places, out.to(tl.bfloat16), mask=inside)


def _run(
    x: Tensor, w1: Tensor, w2: Tensor, small: tuple[Tensor, ...], seed: Tensor | None, a: Tensor | None, eps: float,
    rate: float,
) -> Tensor:  # fmt: skip
    """Fills `a`, where it is given."""
    gain, shift, b1, b2 = small
    x, w1, w2 = x.contiguous(), w1.contiguous(), w2.contiguous()
    (hidden, width), out = w1.shape, torch.empty_like(x)
    count = x.numel() // width
    sizes = {"D": width, "HIDDEN": hidden, "ROWS": ROWS, "CHUNK": min(CHUNK, hidden)}
    flags = {"DROPOUT": rate > 0, "SAVE": a is not None}
    _mix[(-(-count // ROWS),)](
        x, gain, shift, w1, b1, w2, b2, seed, out, a, count, eps, 1 / (1 - rate), limit(rate),
        **sizes, **flags, **(LAUNCH if a is None else SAVING),
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
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + dropout(gelu(a) w2ᵀ + b2) [..., D], and a = norm(x) w1ᵀ + b1 [..., H] for the backward pass alone."""
    a = x.new_empty((*x.shape[:-1], w1.shape[0]))
    return _run(x, w1, w2, (gain, shift, b1, b2), seed, a, eps, rate), a


@perceptron_train.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, seed: Tensor, eps: float,
    rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty((*x.shape[:-1], w1.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, shift, w1, b1, w2, b2, seed, ctx.eps, ctx.rate = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, gain, shift, w1, b1, w2, b2, seed, output[1])


def _back(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Products of bf16, all else in float32; the norm is computed again, which costs less than to read it."""
    x, gain, shift, w1, b1, w2, b2, seed, a = ctx.saved_tensors
    dz = torch.where(kept(grad, seed, ctx.rate), grad * (1 / (1 - ctx.rate)), 0.0) if ctx.rate else grad
    dz, a, wide = dz.reshape(-1, dz.shape[-1]), a.reshape(-1, a.shape[-1]), x.float().reshape(-1, x.shape[-1])
    da = narrow_gelu_back(a, dz @ w2)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + ctx.eps)
    unit = centred * scale
    normed = (unit * gain + shift).to(x.dtype)
    dnormed = (da @ w1).float()
    dunit = dnormed * gain
    along = (dunit * unit).mean(-1, keepdim=True)
    dx = scale * (dunit - dunit.mean(-1, keepdim=True) - unit * along) + grad.reshape(wide.shape)
    small = (dnormed * unit, dnormed, da, dz)
    dgain, dshift, db1, db2 = (
        each.sum(0, dtype=torch.float32).to(kind.dtype) for each, kind in zip(small, (gain, shift, b1, b2), strict=True)
    )
    dx = dx.to(x.dtype).view(x.shape)
    return dx, dgain, dshift, da.mT @ normed, db1, dz.mT @ narrow_gelu(a), db2, None, None, None


perceptron_train.register_autograd(_back, setup_context=_keep)
