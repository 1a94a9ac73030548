"""Values of stacked critics that do not learn here, by one Triton kernel in a compiled step on CUDA in bf16.

Only their input may want a gradient. Then nothing of the hidden layers has to be in memory for a backward pass, and
writing and reading them took most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qpt.nets import kernels

kernel = kernels.load("qpt.nets.critic_kernel")

WIDTHS = (64, 128, 256)  # of the hidden layers
INPUTS = 128  # at most: more would not fit the registers on the way back


def fits(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether these layers, of mish, are of the kernel's shape, and none of them learns."""
    if kernel is None or not (x.is_cuda and torch.compiler.is_compiling()):
        return False
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, *biases))
    widths = [w.shape[-1] for w in weights]
    shaped = len(widths) == 4 and widths[0] in WIDTHS and widths == [*widths[:1] * 3, 1] and x.shape[-1] <= INPUTS
    known = weights[0].dtype is torch.float32 and x.numel() > 0
    return narrow and not learned and shaped and known


def values(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """[E or 1, M, in] -> [E, M, 1] in float32; rows may be longer than the first weight, by what they were padded."""
    first = F.pad(weights[0], (0, 0, 0, x.shape[-1] - weights[0].shape[1]))
    matrices = [w.bfloat16() for w in (first, *weights[1:-1])]
    layers = [t for layer in zip((*matrices, weights[-1]), biases, strict=True) for t in layer]
    out: Tensor
    if torch.is_grad_enabled() and x.requires_grad:
        out = _Frozen.apply(x.bfloat16(), *layers)  # type: ignore[no-untyped-call]
    else:
        out = kernel.values(x.bfloat16(), layers)
    return out[..., None]


class _Frozen(torch.autograd.Function):
    """Values [E, M] of rows [E or 1, M, in] in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: Tensor) -> Tensor:
        out: Tensor
        out, slopes = kernel.slopes(x, list(layers))
        ctx.save_for_backward(slopes)
        ctx.shared = len(x) == 1
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        dx = grad[..., None] * slopes
        if ctx.shared:
            dx = dx.sum(0, keepdim=True)
        return dx.bfloat16(), *[None] * 8
