"""Attention over short windows: one Triton kernel a direction where it pays (CUDA, bf16), PyTorch's own elsewhere.

A window of K steps is 4K tokens, and heads are narrow: a whole (window, head) fits one tile. General kernels cut long
sequences into tiles of 128 queries and spend most of their time on padding; here a program reads its tile once,
keeps every intermediate in registers, and the backward pass recomputes the weights instead of storing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import kernels
from qpt.nets.pointwise import draw_seed

kernel = kernels.load("qpt.nets.attention_kernel")

LONGEST = 128  # tokens of a window that one tile holds


def attend(x: Tensor, layer: nn.Linear, heads: int, dropout: float = 0.0) -> Tensor:
    """Causal attention of all tokens, by the queries, keys and values that `layer` makes of them: [B, L, D] each."""
    if not _learns(x, x.shape[1], layer.in_features // heads):
        return self_attention(layer(x), heads, dropout)
    seed = draw_seed(x.device, dropout)
    out: Tensor = _Attend.apply(x, layer.weight, layer.bias, seed, heads, dropout)  # type: ignore[no-untyped-call]
    return out


def ask(x: Tensor, asking: Tensor, places: Tensor, layer: nn.Linear, heads: int, dropout: float = 0.0) -> Tensor:
    """The same for the tokens `asking` [B, M, D] alone, at `places` ([M] or [B, M]) of the windows."""
    width = layer.in_features
    if _learns(x, x.shape[1], width // heads):
        last, seed = places.to(torch.int32).expand(asking.shape[:2]), draw_seed(x.device, dropout)
        given = (x, asking, layer.weight, layer.bias, last, seed, heads, dropout)
        out: Tensor = _Ask.apply(*given)  # type: ignore[no-untyped-call]
        return out
    q = F.linear(asking, layer.weight[:width], layer.bias[:width])
    kv = F.linear(x, layer.weight[width:], layer.bias[width:])
    return query_attention(q, kv, places, heads, dropout)


def self_attention(qkv: Tensor, heads: int, dropout: float = 0.0) -> Tensor:
    """Causal attention of every token, from queries, keys and values side by side: [B, L, 3 D] -> [B, L, D]."""
    width = qkv.shape[-1] // 3
    if _fits(qkv, qkv.shape[1], width // heads):
        out: Tensor = kernel.self_attention(qkv, draw_seed(qkv.device, dropout), heads, dropout)
        return out
    q, k, v = torch.unflatten(qkv, -1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, L, d]
    return _merge(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True))


def query_attention(q: Tensor, kv: Tensor, places: Tensor, heads: int, dropout: float = 0.0) -> Tensor:
    """Attention of the tokens at `places` ([M] or [B, M]) to all up to their own: q [B, M, D], kv [B, L, 2 D]."""
    if _fits(q, kv.shape[1], q.shape[-1] // heads):
        last = places.to(torch.int32).expand(q.shape[:2])
        out: Tensor = kernel.query_attention(q, kv, last, draw_seed(q.device, dropout), heads, dropout)
        return out
    k, v = torch.unflatten(kv, -1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    split = torch.unflatten(q, -1, (heads, -1)).transpose(1, 2)
    visible = torch.arange(kv.shape[1], device=q.device) <= places[..., None]  # [M, L] or [B, M, L]
    visible = visible[:, None] if places.dim() == 2 else visible
    return _merge(F.scaled_dot_product_attention(split, k, v, attn_mask=visible, dropout_p=dropout))


def _merge(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)  # [B, H, L, d] -> [B, L, D]


def _fits(x: Tensor, length: int, head_width: int) -> bool:
    small = length <= LONGEST and head_width in (16, 32, 64)
    return kernel is not None and x.is_cuda and x.dtype is torch.bfloat16 and small


def _learns(x: Tensor, length: int, head_width: int) -> bool:
    """Whether the layer's gradients are taken with attention's: the bias's are sums that its kernel has at hand."""
    return torch.is_grad_enabled() and torch.compiler.is_compiling() and _fits(x, length, head_width)


class _Attend(torch.autograd.Function):
    """`attend` for x in bf16, weight and bias in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, heads: int, dropout: float) -> Tensor:
        narrow = weight.bfloat16()
        qkv = F.linear(x, narrow, bias.bfloat16())
        ctx.save_for_backward(x, narrow, qkv, seed)
        ctx.heads, ctx.dropout = heads, dropout
        out: Tensor = kernel.self_attention(qkv, seed, heads, dropout)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, qkv, seed = ctx.saved_tensors
        dqkv, parts = kernel.self_attention_backward(grad, qkv, seed, ctx.heads, ctx.dropout)
        dx, dweight = _product_back(x, weight, dqkv)
        return dx, dweight, _bias(parts), None, None, None


class _Ask(torch.autograd.Function):
    """`ask` for x and asking in bf16, weight and bias in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, asking: Tensor, weight: Tensor, bias: Tensor, last: Tensor, seed: Tensor, heads: int,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        narrow, width = weight.bfloat16(), x.shape[-1]
        q = F.linear(asking, narrow[:width], bias[:width].bfloat16())
        kv = F.linear(x, narrow[width:], bias[width:].bfloat16())
        ctx.save_for_backward(x, asking, narrow, q, kv, last, seed)
        ctx.heads, ctx.dropout = heads, dropout
        out: Tensor = kernel.query_attention(q, kv, last, seed, heads, dropout)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, asking, weight, q, kv, last, seed = ctx.saved_tensors
        dq, dkv, parts = kernel.query_attention_backward(grad, q, kv, last, seed, ctx.heads, ctx.dropout)
        width = x.shape[-1]
        (dx, dwide), (dasking, dnarrow) = (
            _product_back(x, weight[width:], dkv),
            _product_back(asking, weight[:width], dq),
        )
        return dx, dasking, torch.cat([dnarrow, dwide]), _bias(parts), None, None, None, None


def _product_back(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the weight in float32, given that of x weightᵀ."""
    rows = grad.flatten(0, 1)
    return grad @ weight, (rows.mT @ x.flatten(0, 1)).float()


def _bias(parts: Tensor) -> Tensor:
    """The gradient of queries', keys' and values' bias; what is the same for all keys changes no weight."""
    q, v = parts.sum(0)
    return torch.cat([q, torch.zeros_like(q), v])
