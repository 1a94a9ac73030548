"""Attention over short windows: one Triton kernel a direction where it pays (CUDA, bf16), PyTorch's own elsewhere.

A window of K steps is 4K tokens, and heads are narrow: a whole (window, head) fits one tile. General kernels cut long
sequences into tiles of 128 queries and spend most of their time on padding; here a program reads its tile once,
keeps every intermediate in registers, and the backward pass recomputes the weights instead of storing them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qpt.nets import kernels
from qpt.nets.pointwise import draw_seed

kernel = kernels.load("qpt.nets.attention_kernel")

LONGEST = 128  # tokens of a window that one tile holds


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
