"""Layer norm whose backward pass is one Triton kernel in a step that is compiled for CUDA, PyTorch's own elsewhere.

The gradients of gain and shift are sums over all rows. A compiler makes many small sums of them, and adds those up in
kernels that cost as much again; here a program goes over many rows and leaves one sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import kernels

kernel = kernels.load("qpt.nets.norm_kernel")

WIDTHS = (16, 32, 64, 128, 256)  # powers of two of which a tile fits the registers


class Norm(nn.LayerNorm):
    """Over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        if not _fits(x):
            return super().forward(x)
        result: Tensor = _Norm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return result


def _fits(x: Tensor) -> bool:
    learned = torch.is_grad_enabled() and torch.compiler.is_compiling()
    narrow = kernel is not None and x.is_cuda and x.dtype is torch.bfloat16
    return learned and narrow and x.shape[-1] in WIDTHS and x.numel() > 0


class _Norm(torch.autograd.Function):
    """Of bf16, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        return F.layer_norm(x.float(), x.shape[-1:], gain, shift, eps).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        dx, parts = kernel.norm_back(grad, x, gain, ctx.eps)
        gains, shifts = parts.sum(0)
        return dx, gains, shifts, None
