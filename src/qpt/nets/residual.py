"""What a half block adds to the stream, and the norm behind it: backward one Triton kernel in a step compiled for CUDA.

Forward, a compiler makes one kernel of bias, dropout, sum and norm. Backward it makes several, around one for the norm:
the sum of both gradients of the stream, dropout's mask, and sums over all rows for gain, shift and bias. The kernel
reads what it needs once and leaves one sum a program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import kernels
from qpt.nets.pointwise import draw_seed, keeps

kernel = kernels.load("qpt.nets.residual_kernel")


def add(x: Tensor, branch: Tensor, bias: Tensor, rate: float, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + dropout(branch + bias), and that normed: x and branch [..., D] in bf16, as are the results.

    For the streams that `qpt.nets.perceptron` takes with gradients.
    """
    seed = draw_seed(x.device, rate)
    both: tuple[Tensor, Tensor] = _Add.apply(x, branch, bias, norm.weight, norm.bias, norm.eps, seed, rate)  # type: ignore[no-untyped-call]
    return both


class _Add(torch.autograd.Function):
    """In float32 between bf16."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float, seed: Tensor,
        rate: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        more = (branch.float() + bias) * (1 / (1 - rate))
        total = (x.float() + torch.where(keeps(x.shape, seed, rate), more, 0.0)).bfloat16()
        ctx.save_for_backward(total, gain, seed)
        ctx.eps, ctx.rate = eps, rate
        return total, F.layer_norm(total.float(), x.shape[-1:], gain, shift, eps).bfloat16()

    @staticmethod
    def backward(ctx: Any, past: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, gain, seed = ctx.saved_tensors
        dx, dropped, parts = kernel.add_norm_back(past, grad, total, gain, ctx.eps, seed, ctx.rate)
        gains, shifts, biases = parts.sum(0)
        return dx, dropped, biases, gains, shifts, None, None, None
