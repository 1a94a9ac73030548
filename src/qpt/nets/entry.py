"""Where tokens enter the transformer: one Triton kernel a direction in a step compiled for CUDA in bf16.

Four kinds of tokens are embedded, each in its own way, get the place of their step, and are normed and interleaved. All
of it is little work on much memory; a compiler makes several kernels of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qpt.nets import kernels

kernel = kernels.load("qpt.nets.entry_kernel")

WIDTHS = (16, 32, 64, 128, 256)  # powers of two of which a tile fits the registers


def fits(seen: Tensor, done: Tensor) -> bool:
    """Whether `enter` takes these embeddings."""
    narrow = seen.dtype is torch.bfloat16 and done.dtype is torch.bfloat16
    there = kernel is not None and seen.is_cuda and torch.compiler.is_compiling()
    return there and narrow and seen.shape[-1] in WIDTHS and seen.numel() > 0


def enter(
    scalars: tuple[Tensor, Tensor],  # [...] each: return- and cost-to-go
    layers: tuple[nn.Linear, nn.Linear],  # their embeddings
    seen: Tensor,  # [..., D]
    done: Tensor,  # [..., D]
    steps: Tensor,  # [...]
    places: nn.Embedding,
    norm: nn.LayerNorm,
) -> Tensor:
    """Normed tokens: [..., 4, D]."""
    small = torch.stack([part for layer in layers for part in (layer.weight[:, 0], layer.bias)])
    norms = (norm.weight, norm.bias, norm.eps)
    tokens: Tensor = kernel.enter(*scalars, seen, done, steps, small, places.weight, *norms)
    return tokens
