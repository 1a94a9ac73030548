"""The perceptron's half of a block, by Triton kernels on CUDA in bf16, PyTorch's own elsewhere.

The hidden layer is four times as wide as the stream, so that its activations, written and read again around every
product, cost more time than the products. Where nothing is learned, one kernel keeps them on the chip: it reads x and
writes y. A backward pass needs them in memory; there the activation and its slope are part of the products before them.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
from torch import Tensor, nn

if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from qpt.nets import perceptron_kernel as kernel
    from qpt.nets import product_kernel as product
else:
    kernel = product = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)  # powers of two of which a tile's sums fit the registers


def mix(x: Tensor, norm: nn.LayerNorm, mlp: nn.Sequential) -> Tensor:
    """x + mlp(norm(x)), for an mlp of linear, GELU, linear, dropout."""
    if _fits(x, mlp):
        first, second = _linears(mlp)
        narrow = (first.weight.to(x.dtype), first.bias, second.weight.to(x.dtype), second.bias)
        out: Tensor = kernel.perceptron(x, norm.weight, norm.bias, *narrow, norm.eps)
        return out
    normed = norm(x)
    if not _learns(normed, mlp):
        mixed: Tensor = x + mlp(normed)
        return mixed
    first, second = _linears(mlp)
    y = _Perceptron.apply(normed, first.weight, first.bias, second.weight, second.bias)  # type: ignore[no-untyped-call]
    learned: Tensor = x + mlp[3](y)
    return learned


def _linears(mlp: nn.Sequential) -> tuple[nn.Linear, nn.Linear]:
    return cast(nn.Linear, mlp[0]), cast(nn.Linear, mlp[2])


def _fits(x: Tensor, mlp: nn.Sequential) -> bool:
    """Whether one kernel takes it all."""
    width, hidden = x.shape[-1], _linears(mlp)[0].out_features
    plain = not torch.is_grad_enabled() and not mlp.training
    narrow = kernel is not None and x.is_cuda and x.dtype is torch.bfloat16
    return plain and narrow and width in WIDTHS and hidden == 4 * width and x.numel() > 0


def _learns(x: Tensor, mlp: nn.Sequential) -> bool:
    """Whether weights are learned here, in a compiled step in bf16, and of widths that the products take."""
    if product is None or not (x.is_cuda and torch.compiler.is_compiling()):
        return False
    device, (first, second) = x.device.type, _linears(mlp)
    narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is x.dtype is torch.bfloat16
    wide = all(weight.dtype is torch.float32 for weight in (first.weight, second.weight))
    learned = torch.is_grad_enabled() and first.weight.requires_grad and wide
    whole = not any(width % 16 for width in (x.shape[-1], first.out_features, second.out_features))
    return narrow and learned and whole and x.numel() > 0


class _Perceptron(torch.autograd.Function):
    """gelu(x w1ᵀ + b1) w2ᵀ + b2: x [..., D] in bf16, w1 [H, D], w2 [D, H] and biases in float32 -> [..., D] in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        rows, w1, w2 = x.reshape(-1, x.shape[-1]), w1.bfloat16(), w2.bfloat16()
        a, g = product.ahead(rows[None], w1.mT[None], b1[None], "gelu")
        ctx.save_for_backward(rows, w1, w2, a, g)
        return torch.addmm(b2.bfloat16(), g[0], w2.mT).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, w1, w2, a, g = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        da, parts = product.back(dy[None], w2.mT[None], a, "gelu")
        dx = torch.mm(da[0], w1).view(*grad.shape[:-1], -1)
        dw1, dw2 = torch.mm(da[0].mT, rows), torch.mm(dy.mT, g[0])
        return dx, dw1.float(), parts.sum(1)[0], dw2.float(), dy.sum(0, dtype=torch.float32)
