"""The random bits of dropout in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def hashed(x):  # type: ignore[no-untyped-def]
    """32 random bits (with a sign) for every uint32, bit for bit as in `qpt.nets.pointwise`."""
    x = x * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x.to(tl.int32, bitcast=True)
