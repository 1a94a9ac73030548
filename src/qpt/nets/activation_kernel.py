"""Activations inside Triton kernels: value and slope in the closed forms of `qpt.nets.pointwise`."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
DENSITY = tl.constexpr(0.3989422804014327)  # of the standard normal at 0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tail(x):  # type: ignore[no-untyped-def]
    """The share of a standard normal beyond |x|."""
    u = tl.abs(x)
    rest = -0.4595262408256531 + u * (-0.052220940589904785 + u * (0.007229659240692854 - u * 0.0004925123648718))
    return tl.exp2(-1.0000032186508179 + u * (-1.1510181427001953 + u * rest))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mish(x):  # type: ignore[no-untyped-def]
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
    n = e * (e + 2)
    root = tl.rsqrt(n + 2)
    r = root * root
    return x * (n * r), r * (n + 4 * x * (e * (e + 1) * r))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gelu(x):  # type: ignore[no-untyped-def]
    beyond = tail(x)
    below = tl.where(x < 0, beyond, 1 - beyond)
    return tl.maximum(x, 0.0) - tl.abs(x) * beyond, below + x * DENSITY * tl.exp2(x * x * (-0.5 * LOG2_E))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def activation(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value and slope; what a kernel does not use is not computed."""
    if KIND == "mish":
        value, slope = _mish(x)
    else:
        value, slope = _gelu(x)
    return value, slope
