"""Dropout and activations in a form that a compiled step runs at the speed of memory; elsewhere they are PyTorch's own.

Where a step is compiled for CUDA, the pointwise work around matrix products is fused, and what is left of its time is
arithmetic: Philox costs 60 operations a random number, a hash 9; mish by its definition needs a logarithm and a
hyperbolic tangent, its closed form one exponential and one inverse root; the normal distribution in GELU needs a
function of many branches, or, to what bf16 can tell, one exponential.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOG2_E = math.log2(math.e)
DENSITY = 1 / math.sqrt(2 * math.pi)  # of the standard normal at 0


def mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + e^x))."""
    result: Tensor
    if torch.compiler.is_compiling() and x.is_cuda:
        result = _FusedMish.apply(x)  # type: ignore[no-untyped-call]
    elif torch.compiler.is_compiling() or x.is_cuda or not x.requires_grad:
        result = F.mish(x)
    else:
        result = _Mish.apply(x)  # type: ignore[no-untyped-call]
    return result


class _FusedMish(torch.autograd.Function):
    """x n / (n + 2) with n = e^x (e^x + 2). An inverse root is one instruction, a quotient many.

    (The forward pass must not end in a `.to` that changes nothing: compiled by torch 2.11, it had no gradient.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = fused_mish(x)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The slope n r + 4 x e (e + 1) r² with r = 1 / (n + 2)."""
        (x,) = ctx.saved_tensors
        e, n, r = _parts(x)
        slope: Tensor = r * (n + 4 * x * (e * (e + 1) * r))
        return grad * slope


def fused_mish(x: Tensor) -> Tensor:
    """In the form that a compiler makes one kernel of; without the gradient of `_FusedMish`."""
    _, n, r = _parts(x)
    return x * (n * r)


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^x, n and 1 / (n + 2); beyond 20, n / (n + 2) is 1 in any precision here."""
    e = torch.exp2(x.clamp(max=20.0) * LOG2_E)
    n = e * (e + 2)
    root = torch.rsqrt(n + 2)
    return e, n, root * root


class GELU(nn.Module):
    """x Φ(x)."""

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda and torch.compiler.is_compiling() and x.dtype is torch.bfloat16):
            return F.gelu(x)
        result: Tensor = _FusedGelu.apply(x)  # type: ignore[no-untyped-call]
        return result


def _tail(u: Tensor) -> Tensor:
    """The share of a standard normal beyond u >= 0, to 2e-6: its logarithm is nearly a parabola."""
    rest = -0.4595262408256531 + u * (-0.052220940589904785 + u * (0.007229659240692854 - u * 0.0004925123648718))
    return torch.exp2(-1.0000032186508179 + u * (-1.1510181427001953 + u * rest))


class _FusedGelu(torch.autograd.Function):
    """Of bf16, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.float()
        u = wide.abs()
        y = (wide.clamp(min=0) - u * _tail(u)).bfloat16()
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        tail = _tail(wide.abs())
        below = torch.where(wide < 0, tail, 1 - tail)
        slope = below + DENSITY * wide * torch.exp2(-0.5 * LOG2_E * wide * wide)
        passed: Tensor = grad.float() * slope
        return passed.bfloat16()


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
        return torch.where(keeps(x.shape, draw_seed(x.device, self.rate), self.rate), x / (1 - self.rate), 0.0)


def draw_seed(device: torch.device, rate: float) -> Tensor:
    """Drawn on the device, so that every replay of a captured step has a mask of its own; not drawn for a rate of 0."""
    if rate == 0.0:
        return torch.zeros(1, dtype=torch.int32, device=device)
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device)


def keeps(shape: torch.Size, seed: Tensor, rate: float) -> Tensor:
    """Which entries dropout leaves: a hash of the seed and their place."""
    places = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device)
    return (uniform_bits(places ^ seed) >= rate * 2**24).view(shape)


def uniform_bits(x: Tensor) -> Tensor:
    """24 random bits for every 32-bit number (Murmur3's finaliser; products wrap, shifts are made logical)."""
    x = x * -1640531535  # 0x9E3779B1
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    x = x ^ ((x >> 16) & 0xFFFF)
    return (x >> 8) & 0xFFFFFF
