"""A block's perceptron, by Triton kernels on CUDA in bf16, PyTorch's own elsewhere.

The hidden layer is four times as wide as the stream, so that its activations, written and read again around every
product, cost more time than the products. Where nothing is learned, one kernel keeps them on the chip, with all else
behind attention. A backward pass needs them in memory; there GELU and its slope are part of the products before them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from qpt.nets import kernels

kernel = kernels.load("qpt.nets.perceptron_kernel")

WIDTHS = (16, 32, 64, 128)  # powers of two of which a tile's sums fit the registers


def fits(x: Tensor, mlp: nn.Sequential) -> bool:
    """Whether `rest` (without gradients, and where no dropout is on) or `branch` (with them) takes this stream.

    With gradients only in a compiled step: what surrounds the products of the backward pass is fused there alone.
    """
    pays = torch.compiler.is_compiling() if torch.is_grad_enabled() else not mlp.training
    narrow = kernel is not None and x.is_cuda and x.dtype is torch.bfloat16
    fourfold = cast(nn.Linear, mlp[0]).out_features == 4 * x.shape[-1]
    return pays and narrow and fourfold and x.shape[-1] in WIDTHS and x.numel() > 0


def rest(
    x: Tensor, attended: Tensor, project: nn.Linear, norm: nn.LayerNorm, mlp: nn.Sequential, following: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    """y = z + mlp(norm(z)) of z = x + project(attended), and y normed by what follows; without gradients.

    The mlp is of linear, GELU, linear, dropout; attended [..., D] in bf16.
    """
    first, second = cast(nn.Linear, mlp[0]), cast(nn.Linear, mlp[2])
    wide = torch.stack([part for one in (norm, following) for part in (one.weight, one.bias)])
    layers = [part for layer in (first, second) for part in (layer.weight.to(x.dtype), layer.bias)]
    given = (project.weight.to(x.dtype), project.bias, wide, *layers)
    both: tuple[Tensor, Tensor] = kernel.rest(x, attended, *given, norm.eps)
    return both


def branch(normed: Tensor, mlp: nn.Sequential) -> Tensor:
    """What `mlp` makes of a normed stream, before the bias of its last layer and dropout."""
    first, second = cast(nn.Linear, mlp[0]), cast(nn.Linear, mlp[2])
    out: Tensor = _Perceptron.apply(normed, first.weight, first.bias, second.weight)  # type: ignore[no-untyped-call]
    return out


class _Perceptron(torch.autograd.Function):
    """gelu(x w1ᵀ + b1) w2ᵀ: x [..., D] in bf16, w1 [H, D], b1 [H] and w2 [D, H] in float32 -> [..., D] in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        rows, w1, w2 = x.reshape(-1, x.shape[-1]), w1.bfloat16(), w2.bfloat16()
        a, active = kernel.ahead(rows, w1, b1)
        ctx.save_for_backward(rows, w1, w2, a, active)
        return torch.mm(active, w2.mT).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, w1, w2, a, active = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        da, parts = kernel.back(dy, w2, a)
        dx = torch.mm(da, w1).view(grad.shape)
        dw1, dw2 = torch.mm(da.mT, rows), torch.mm(dy.mT, active)
        return dx, dw1.float(), parts.sum(0), dw2.float()
