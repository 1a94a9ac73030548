"""The perceptron's half of a block where nothing is learned: one Triton kernel (CUDA, bf16), PyTorch's own elsewhere.

The hidden layer is four times as wide as the stream, so that its activations, written and read again around every
product, cost more time than the products. The kernel keeps them on the chip: it reads x and writes y. (A backward pass
needs them in memory, and would gain nothing.)
"""

from __future__ import annotations

import importlib.util
from typing import cast

import torch
from torch import Tensor, nn

if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from qpt.nets import perceptron_kernel as kernel
else:
    kernel = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)  # powers of two of which a tile's sums fit the registers


def mix(x: Tensor, norm: nn.LayerNorm, mlp: nn.Sequential) -> Tensor:
    """x + mlp(norm(x)), for an mlp of linear, GELU, linear, dropout."""
    if not _fits(x, mlp):
        mixed: Tensor = x + mlp(norm(x))
        return mixed
    first, second = cast(nn.Linear, mlp[0]), cast(nn.Linear, mlp[2])
    narrow = (first.weight.to(x.dtype), first.bias, second.weight.to(x.dtype), second.bias)
    out: Tensor = kernel.perceptron(x, norm.weight, norm.bias, *narrow, norm.eps)
    return out


def _fits(x: Tensor, mlp: nn.Sequential) -> bool:
    width, hidden = x.shape[-1], cast(nn.Linear, mlp[0]).out_features
    plain = not torch.is_grad_enabled() and not mlp.training
    narrow = kernel is not None and x.is_cuda and x.dtype is torch.bfloat16
    return plain and narrow and width in WIDTHS and hidden == 4 * width and x.numel() > 0
