"""The perceptron's half of a block: one Triton kernel where it pays (CUDA, bf16), PyTorch's own elsewhere.

The hidden layer is four times as wide as the stream, so that its activations, written and read again around every
product, cost more time than the products. The kernel keeps them on the chip: it reads x and writes y. In training it
also writes them, while it computes the next ones, because the backward pass needs them; only where the step is
compiled, for what surrounds that pass's products is fused there alone.
"""

from __future__ import annotations

import importlib.util
from typing import cast

import torch
from torch import Tensor, nn

from qpt.nets.pointwise import Dropout, draw_seed

if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from qpt.nets import perceptron_kernel as kernel
else:
    kernel = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)  # powers of two of which a tile's sums fit the registers


def mix(x: Tensor, norm: nn.LayerNorm, mlp: nn.Sequential) -> Tensor:
    """x + mlp(norm(x)), for an mlp of linear, GELU, linear, dropout."""
    learning = torch.is_grad_enabled()
    dropout = cast(Dropout, mlp[3]).rate if mlp.training else 0.0
    pays = torch.compiler.is_compiling() if learning else dropout == 0.0
    if not (pays and _fits(x, mlp)):
        mixed: Tensor = x + mlp(norm(x))
        return mixed
    first, second = cast(nn.Linear, mlp[0]), cast(nn.Linear, mlp[2])
    given = (x, norm.weight, norm.bias, first.weight.to(x.dtype), first.bias, second.weight.to(x.dtype), second.bias)
    out: Tensor
    if learning:
        out = kernel.perceptron_train(*given, draw_seed(x, dropout), norm.eps, dropout)[0]
    else:
        out = kernel.perceptron(*given, norm.eps)
    return out


def _fits(x: Tensor, mlp: nn.Sequential) -> bool:
    width, hidden = x.shape[-1], cast(nn.Linear, mlp[0]).out_features
    narrow = kernel is not None and x.is_cuda and x.dtype is torch.bfloat16
    return narrow and width in WIDTHS and hidden == 4 * width and x.numel() > 0
