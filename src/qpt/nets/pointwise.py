"""Dropout and activations in a form that a compiled step runs at the speed of memory; elsewhere they are PyTorch's own.

Where a step is compiled for CUDA, the pointwise work around matrix products is fused, and what is left of its time is
arithmetic: Philox costs 60 operations a random number, a hash 9; mish by its definition needs a logarithm and a
hyperbolic tangent, its closed form one exponential.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2)."""
    if torch.compiler.is_compiling() and x.is_cuda:
        e = torch.exp(x.clamp(max=20.0))  # beyond, n / (n + 2) is 1 in any precision here
        n = e * (e + 2)
        return x * (n / (n + 2))
    if torch.compiler.is_compiling() or x.is_cuda or not x.requires_grad:
        return F.mish(x)
    result: Tensor = _Mish.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Mish(torch.autograd.Function):
    """By the sigmoid s and r = 1 - s: tanh(log(1 + e^x)) = s (1 + r) / (1 + r²); torch's CPU kernel is slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        r = 1 - s
        t = torch.addcmul(s, s, r).div_(r.mul_(r).add_(1))
        ctx.save_for_backward(x, s, t)
        return x * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, s, t = ctx.saved_tensors
        d = (t * t).sub_(1).mul_(s).mul_(x)  # mish' = t + x s (1 - t²)
        return torch.sub(t, d, out=d).mul_(grad)


class Dropout(nn.Module):
    """Zero a share of the entries and scale the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        if not (x.is_cuda and torch.compiler.is_compiling()):
            return F.dropout(x, self.rate)
        seed = torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=x.device)
        kept = uniform_bits(torch.arange(x.numel(), dtype=torch.int32, device=x.device) ^ seed) >= self.rate * 2**24
        return torch.where(kept.view(x.shape), x / (1 - self.rate), 0.0)


def uniform_bits(x: Tensor) -> Tensor:
    """24 random bits for every 32-bit number (Murmur3's finaliser; products wrap, shifts are made logical)."""
    x = x * -1640531535  # 0x9E3779B1
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    x = x ^ ((x >> 16) & 0xFFFF)
    return (x >> 8) & 0xFFFFFF
