"""Where tokens enter the transformer: one Triton kernel a direction in a step compiled for CUDA in bf16.

Four kinds of tokens are embedded, each in its own way, get the place of their step, are normed, interleaved, dropped,
and normed again by the first block. All of it is little work on much memory; a compiler makes several kernels of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qpt.nets import kernels
from qpt.nets.pointwise import draw_seed

kernel = kernels.load("qpt.nets.entry_kernel")

WIDTHS = (16, 32, 64, 128, 256)  # powers of two of which a tile fits the registers


def fits(seen: Tensor, done: Tensor) -> bool:
    """Whether `enter` takes these embeddings."""
    narrow = seen.dtype is torch.bfloat16 and done.dtype is torch.bfloat16
    there = kernel is not None and seen.is_cuda and torch.compiler.is_compiling()
    return there and narrow and seen.shape[-1] in WIDTHS and seen.numel() > 0


def enter(
    scalars: tuple[Tensor, Tensor],  # [B, K] each: return- and cost-to-go
    layers: tuple[nn.Linear, nn.Linear],  # their embeddings
    seen: Tensor,  # [B, K, D]
    done: Tensor,  # [B, K, D]
    steps: Tensor,  # [B, K]
    places: nn.Embedding,
    norms: tuple[nn.LayerNorm, nn.LayerNorm],  # of all tokens, and the first block's
    length: int,  # tokens of a window that are wanted
    rate: float,  # of dropout between the norms
) -> tuple[Tensor, Tensor]:
    """The stream, and that normed for the first block: [B, length, D]."""
    small = torch.stack([part for layer in layers for part in (layer.weight[:, 0], layer.bias)])
    gains = torch.stack([part for norm in norms for part in (norm.weight, norm.bias)])
    seed = draw_seed(seen.device, rate)
    both: tuple[Tensor, Tensor] = kernel.enter(
        *scalars, seen, done, steps, small, places.weight, gains, seed, length, norms[0].eps, rate
    )
    return both
