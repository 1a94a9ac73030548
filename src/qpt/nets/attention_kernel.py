# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernels behind `qpt.nets.attention`, as operators that autograd and torch.compile know.

With heads this narrow, time goes into what is done to every weight, not into products. What rows have in common (the
softmax's divisor, the scale, dropout's factor) is therefore applied to queries, gradients or results, which are
narrower than the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kept(seed, program, rows, columns, limit):  # type: ignore[no-untyped-def]
    """Which attention weights stay: a hash of (seed, program, place), several times cheaper than Philox.

    Two neighbours share a hash: one looks at all of it, the other at its second half, which is as random.
    """
    x = (seed + program * 16384 + rows * 128)[:, None].to(tl.uint32) + (columns // 2)[None, :].to(tl.uint32)
    x = x * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 15)
    return tl.where((columns % 2 == 0)[None, :], x, x << 16).to(tl.int32, bitcast=True) >= limit


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weights(q, k, last, keys, scale):  # type: ignore[no-untyped-def]
    """Softmax over the keys that each query sees: [rows, columns] in float32, and by what rows are to be divided."""
    scores = tl.where(keys[None, :] <= last[:, None], tl.dot(q, tl.trans(k)), -1e30)
    weights = tl.exp2(scores * (scale * LOG2_E) - (tl.max(scores, 1) * (scale * LOG2_E))[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile(pointer, row, rows, d, count):  # type: ignore[no-untyped-def]
    return tl.load(pointer + rows[:, None] * row + d[None, :], mask=rows[:, None] < count, other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaled(x, factor):  # type: ignore[no-untyped-def]
    """Rows times a factor each."""
    return (x.to(tl.float32) * factor[:, None]).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _put(pointer, row, rows, d, count, values):  # type: ignore[no-untyped-def]
    tl.store(pointer + rows[:, None] * row + d[None, :], values.to(tl.bfloat16), mask=rows[:, None] < count)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, last_ptr, seed_ptr, out_ptr, last_batch, last_row, q_batch, q_row, kv_batch, kv_row,
    scale, rate, limit,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch, head = (program // HEADS).to(tl.int64), program % HEADS
    rows, columns, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS), head * D + tl.arange(0, D)
    source = kv_ptr + batch * kv_batch
    q, k = _tile(q_ptr + batch * q_batch, q_row, rows, d, QUERIES), _tile(source, kv_row, columns, d, KEYS)
    v = _tile(source + HEADS * D, kv_row, columns, d, KEYS)
    last = tl.load(last_ptr + batch * last_batch + rows * last_row, mask=rows < QUERIES, other=0)
    weights, total = _weights(q, k, last, columns, scale)
    if DROPOUT:
        weights = tl.where(_kept(tl.load(seed_ptr), program, rows, columns, limit), weights, 0.0)
    out = tl.dot(weights.to(v.dtype), v) / (total * (1 - rate))[:, None]
    _put(out_ptr + batch * (QUERIES * HEADS * D), HEADS * D, rows, d, QUERIES, out)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, last_ptr, seed_ptr, grad_ptr, dq_ptr, dkv_ptr, sums_ptr, last_batch, last_row, q_batch, q_row,
    kv_batch, kv_row, dq_batch, dq_row, dkv_batch, dkv_row, scale, rate, limit,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch, head = (program // HEADS).to(tl.int64), program % HEADS
    rows, columns, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS), head * D + tl.arange(0, D)
    source = kv_ptr + batch * kv_batch
    q, k = _tile(q_ptr + batch * q_batch, q_row, rows, d, QUERIES), _tile(source, kv_row, columns, d, KEYS)
    v = _tile(source + HEADS * D, kv_row, columns, d, KEYS)
    grad = _tile(grad_ptr + batch * (QUERIES * HEADS * D), HEADS * D, rows, d, QUERIES)
    last = tl.load(last_ptr + batch * last_batch + rows * last_row, mask=rows < QUERIES, other=0)
    weights, total = _weights(q, k, last, columns, scale)
    dropped, passed = weights, tl.dot(grad, tl.trans(v))  # gradient of the (dropped) weights
    if DROPOUT:
        kept = _kept(tl.load(seed_ptr), program, rows, columns, limit)
        dropped, passed = tl.where(kept, weights, 0.0), tl.where(kept, passed, 0.0)
    factor = 1 / (total * (1 - rate))  # of every row; the rate is 0 without dropout
    dv = tl.dot(tl.trans(dropped.to(v.dtype)), _scaled(grad, factor))
    scores = (weights * (passed - (tl.sum(weights * passed, 1) / total)[:, None])).to(v.dtype)
    dq = tl.dot(scores, k) * (factor * scale)[:, None]
    dk = tl.dot(tl.trans(scores), _scaled(q, factor * scale))
    _put(dq_ptr + batch * dq_batch, dq_row, rows, d, QUERIES, dq)
    target = dkv_ptr + batch * dkv_batch
    _put(target, dkv_row, columns, d, KEYS, dk)
    _put(target + HEADS * D, dkv_row, columns, d, KEYS, dv)
    sums = sums_ptr + batch * (2 * HEADS * D) + d
    tl.store(sums, tl.sum(dq, 0))
    tl.store(sums + HEADS * D, tl.sum(dv, 0))


# A causal window is a triangle: cut into a first tile of A tokens and a rest of C, the empty square is never touched.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _two(q, k1, k2, rows, second, scale):  # type: ignore[no-untyped-def]
    """Softmax of the later rows over both tiles of keys, and by what rows are to be divided."""
    s1 = tl.dot(q, tl.trans(k1))
    s2 = tl.where(second[None, :] <= rows[:, None], tl.dot(q, tl.trans(k2)), -1e30)
    narrow = scale * LOG2_E
    top = (tl.maximum(tl.max(s1, 1), tl.max(s2, 1)) * narrow)[:, None]
    s1, s2 = tl.exp2(s1 * narrow - top), tl.exp2(s2 * narrow - top)
    return s1, s2, tl.sum(s1, 1) + tl.sum(s2, 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_all(  # type: ignore[no-untyped-def]
    qkv_ptr, seed_ptr, out_ptr, batch_stride, row, scale, rate, limit,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, A: tl.constexpr, C: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch, head = (program // HEADS).to(tl.int64), program % HEADS
    W: tl.constexpr = HEADS * D
    d, first = head * D + tl.arange(0, D), tl.arange(0, A)
    source, target = qkv_ptr + batch * batch_stride, out_ptr + batch * (LENGTH * W)
    q1, k1 = _tile(source, row, first, d, LENGTH), _tile(source + W, row, first, d, LENGTH)
    v1 = _tile(source + 2 * W, row, first, d, LENGTH)
    weights, total = _weights(q1, k1, first, first, scale)
    if DROPOUT:
        seed = tl.load(seed_ptr)
        weights = tl.where(_kept(seed, program, first, first, limit), weights, 0.0)
    _put(target, W, first, d, LENGTH, tl.dot(weights.to(v1.dtype), v1) / (total * (1 - rate))[:, None])
    if C > 0:
        second = A + tl.arange(0, C)
        q2, k2 = _tile(source, row, second, d, LENGTH), _tile(source + W, row, second, d, LENGTH)
        v2 = _tile(source + 2 * W, row, second, d, LENGTH)
        w1, w2, total = _two(q2, k1, k2, second, second, scale)
        if DROPOUT:
            w1 = tl.where(_kept(seed, program, second, first, limit), w1, 0.0)
            w2 = tl.where(_kept(seed, program, second, second, limit), w2, 0.0)
        out = tl.dot(w1.to(v1.dtype), v1) + tl.dot(w2.to(v1.dtype), v2)
        _put(target, W, second, d, LENGTH, out / (total * (1 - rate))[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_all(  # type: ignore[no-untyped-def]
    qkv_ptr, seed_ptr, grad_ptr, out_ptr, sums_ptr, batch_stride, row, scale, rate, limit,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, A: tl.constexpr, C: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch, head = (program // HEADS).to(tl.int64), program % HEADS
    W: tl.constexpr = HEADS * D
    d, first = head * D + tl.arange(0, D), tl.arange(0, A)
    source, target = qkv_ptr + batch * batch_stride, out_ptr + batch * (LENGTH * 3 * W)
    incoming = grad_ptr + batch * (LENGTH * W)
    q1, k1 = _tile(source, row, first, d, LENGTH), _tile(source + W, row, first, d, LENGTH)
    v1, g1 = _tile(source + 2 * W, row, first, d, LENGTH), _tile(incoming, W, first, d, LENGTH)
    weights, total = _weights(q1, k1, first, first, scale)
    dropped, passed = weights, tl.dot(g1, tl.trans(v1))  # gradient of the (dropped) weights
    if DROPOUT:
        seed = tl.load(seed_ptr)
        kept = _kept(seed, program, first, first, limit)
        dropped, passed = tl.where(kept, weights, 0.0), tl.where(kept, passed, 0.0)
    factor = 1 / (total * (1 - rate))  # of every row; the rate is 0 without dropout
    dv1 = tl.dot(tl.trans(dropped.to(v1.dtype)), _scaled(g1, factor))
    scores = (weights * (passed - (tl.sum(weights * passed, 1) / total)[:, None])).to(v1.dtype)
    dq = tl.dot(scores, k1) * (factor * scale)[:, None]
    _put(target, 3 * W, first, d, LENGTH, dq)
    sum_q, sum_v = tl.sum(dq, 0), tl.zeros((D,), tl.float32)
    dk1 = tl.dot(tl.trans(scores), _scaled(q1, factor * scale))
    if C > 0:
        second = A + tl.arange(0, C)
        q2, k2 = _tile(source, row, second, d, LENGTH), _tile(source + W, row, second, d, LENGTH)
        v2, g2 = _tile(source + 2 * W, row, second, d, LENGTH), _tile(incoming, W, second, d, LENGTH)
        w1, w2, total = _two(q2, k1, k2, second, second, scale)
        d1, d2, p1, p2 = w1, w2, tl.dot(g2, tl.trans(v1)), tl.dot(g2, tl.trans(v2))
        if DROPOUT:
            kept1, kept2 = _kept(seed, program, second, first, limit), _kept(seed, program, second, second, limit)
            d1, p1 = tl.where(kept1, w1, 0.0), tl.where(kept1, p1, 0.0)
            d2, p2 = tl.where(kept2, w2, 0.0), tl.where(kept2, p2, 0.0)
        factor = 1 / (total * (1 - rate))
        arrived, asked = _scaled(g2, factor), _scaled(q2, factor * scale)
        dv1 += tl.dot(tl.trans(d1.to(v1.dtype)), arrived)
        dv2 = tl.dot(tl.trans(d2.to(v1.dtype)), arrived)
        mean = ((tl.sum(w1 * p1, 1) + tl.sum(w2 * p2, 1)) / total)[:, None]
        s1, s2 = (w1 * (p1 - mean)).to(v1.dtype), (w2 * (p2 - mean)).to(v1.dtype)
        dq = (tl.dot(s1, k1) + tl.dot(s2, k2)) * (factor * scale)[:, None]
        _put(target, 3 * W, second, d, LENGTH, dq)
        sum_q += tl.sum(dq, 0)
        dk1 += tl.dot(tl.trans(s1), asked)
        _put(target + W, 3 * W, second, d, LENGTH, tl.dot(tl.trans(s2), asked))
        _put(target + 2 * W, 3 * W, second, d, LENGTH, dv2)
        sum_v += tl.sum(dv2, 0)
    _put(target + W, 3 * W, first, d, LENGTH, dk1)
    _put(target + 2 * W, 3 * W, first, d, LENGTH, dv1)
    sums = sums_ptr + batch * (2 * W) + d
    tl.store(sums, sum_q)
    tl.store(sums + W, sum_v + tl.sum(dv1, 0))


def _drop(rate: float) -> tuple[float, int]:
    """A rate, and the 32-bit number (with its sign) that as large a share of all lies below."""
    return rate, int(rate * 2**32) - 2**31


def _cut(length: int) -> tuple[int, int]:
    """Sizes of the two tiles, powers of two from 16 on; the second may be 0."""
    first = max(16, 1 << (length.bit_length() - 1))
    rest = length - first
    if rest <= 0:
        return first, 0
    second = max(16, triton.next_power_of_2(rest))
    return (2 * first, 0) if second == first else (first, second)


def _all_sizes(qkv: Tensor, heads: int, dropout: float) -> dict[str, Any]:
    first, second = _cut(qkv.shape[1])
    width = qkv.shape[-1] // (3 * heads)
    warps = 1 if first <= 32 else 4
    tiles = {"A": first, "C": second, "num_warps": warps}
    return {"LENGTH": qkv.shape[1], "HEADS": heads, "D": width, "DROPOUT": dropout > 0, **tiles}


def _sizes(q: Tensor, kv: Tensor, heads: int, dropout: float) -> dict[str, Any]:
    queries, keys = q.shape[1], kv.shape[1]
    rows, columns = (max(16, triton.next_power_of_2(count)) for count in (queries, keys))
    return {
        "QUERIES": queries,
        "KEYS": keys,
        "HEADS": heads,
        "D": q.shape[-1] // heads,
        "ROWS": rows,
        "COLUMNS": columns,
        "DROPOUT": dropout > 0,
        "num_warps": 1 if rows * columns <= 1024 else 4,
    }


def _run(q: Tensor, kv: Tensor, last: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
    """q [B, M, D], kv [B, L, 2 D]; a query sees the keys up to its `last` [B, M] -> [B, M, D]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = _sizes(q, kv, heads, dropout)
    strides = [x.stride(i) for x in (last, q, kv) for i in (0, 1)]
    _forward[(q.shape[0] * heads,)](q, kv, last, seed, out, *strides, sizes["D"] ** -0.5, *_drop(dropout), **sizes)
    return out


def _run_back(
    grad: Tensor, q: Tensor, kv: Tensor, dq: Tensor, dkv: Tensor, sums: Tensor, last: Tensor, seed: Tensor, heads: int,
    rate: float,
) -> None:  # fmt: skip
    """Fills dq, dkv and sums."""
    sizes = _sizes(q, kv, heads, rate)
    strides = [x.stride(i) for x in (last, q, kv, dq, dkv) for i in (0, 1)]
    _backward[(q.shape[0] * heads,)](
        q, kv, last, seed, grad.contiguous(), dq, dkv, sums, *strides, sizes["D"] ** -0.5, *_drop(rate), **sizes
    )


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _sums(x: Tensor, width: int) -> Tensor:
    return torch.empty((len(x), 2, width), dtype=torch.float32, device=x.device)


# -- every token: queries, keys and values in one tensor, and so their gradients ---------------------------------------


@torch.library.custom_op("qpt::self_attention", mutates_args=())
def self_attention(qkv: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
    """[B, L, 3 D] -> [B, L, D]."""
    qkv = qkv.contiguous()
    out = qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))
    sizes = _all_sizes(qkv, heads, dropout)
    grid = (qkv.shape[0] * heads,)
    _forward_all[grid](qkv, seed, out, qkv.stride(0), qkv.stride(1), sizes["D"] ** -0.5, *_drop(dropout), **sizes)
    return out


@self_attention.register_fake
def _(qkv: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


@torch.library.custom_op("qpt::self_attention_backward", mutates_args=())
def self_attention_backward(
    grad: Tensor, qkv: Tensor, seed: Tensor, heads: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and its sum over every window's queries and values [B, 2, D]; over keys it is 0."""
    qkv = qkv.contiguous()
    out, sums, sizes = _empty(qkv), _sums(qkv, grad.shape[-1]), _all_sizes(qkv, heads, dropout)
    places = (qkv, seed, grad.contiguous(), out, sums, qkv.stride(0), qkv.stride(1))
    if sizes["num_warps"] == 1 and sizes["D"] == 16:  # fits without spilling, and two more programs a processor
        sizes["maxnreg"] = 144
    _backward_all[(qkv.shape[0] * heads,)](*places, sizes["D"] ** -0.5, *_drop(dropout), **sizes)
    return out, sums


@self_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, seed: Tensor, heads: int, dropout: float) -> tuple[Tensor, Tensor]:
    return _empty(qkv), _sums(qkv, grad.shape[-1])


def _keep_self(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, seed, ctx.heads, ctx.dropout = inputs
    ctx.save_for_backward(qkv, seed)


def _back_self(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    qkv, seed = ctx.saved_tensors
    return self_attention_backward(grad, qkv, seed, ctx.heads, ctx.dropout)[0], None, None, None


self_attention.register_autograd(_back_self, setup_context=_keep_self)


# -- some tokens -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("qpt::query_attention", mutates_args=())
def query_attention(q: Tensor, kv: Tensor, last: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
    """q [B, M, D], kv [B, L, 2 D], last [B, M] int32 -> [B, M, D]."""
    return _run(q, kv, last, seed, heads, dropout)


@query_attention.register_fake
def _(q: Tensor, kv: Tensor, last: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
    return _empty(q)


@torch.library.custom_op("qpt::query_attention_backward", mutates_args=())
def query_attention_backward(
    grad: Tensor, q: Tensor, kv: Tensor, last: Tensor, seed: Tensor, heads: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q and kv, and their sums over every window's queries and values [B, 2, D]."""
    dq, dkv, sums = _empty(q), _empty(kv), _sums(q, q.shape[-1])
    _run_back(grad, q, kv, dq, dkv, sums, last, seed, heads, dropout)
    return dq, dkv, sums


@query_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, last: Tensor, seed: Tensor, heads: int, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(kv), _sums(q, q.shape[-1])


def _keep_query(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, kv, last, seed, ctx.heads, ctx.dropout = inputs
    ctx.save_for_backward(q, kv, last, seed)


def _back_query(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dq, dkv, _ = query_attention_backward(grad, *ctx.saved_tensors, ctx.heads, ctx.dropout)
    return dq, dkv, None, None, None, None


query_attention.register_autograd(_back_query, setup_context=_keep_query)
