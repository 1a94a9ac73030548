"""The Triton kernels behind `qpt.algorithms.flat`: a step of AdamW over one buffer, each group clipped on its own.

The buffer is cut into blocks, none of which reaches from one group into the next. One kernel writes the sum of squares
of every block of the gradient; in the other every program adds those of its group up (a few hundred numbers, in the
same order everywhere) and updates its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers that a program updates
LAUNCH: dict[str, Any] = {"num_warps": 4}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _places(row_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the numbers of a block lie, and which of them belong to it; blocks begin and end at whole 16 bytes."""
    start, end = tl.multiple_of(tl.load(row_ptr), 4), tl.multiple_of(tl.load(row_ptr + 1), 4)
    places = start + tl.arange(0, BLOCK)
    return places, places < end


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _missing(log_beta, count):  # type: ignore[no-untyped-def]
    """1 - beta^count, what a mean that began at zero lacks; of a beta near 1 float32 would leave few digits."""
    return (1.0 - tl.exp2(count.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_squares(gradient_ptr, table_ptr, sums_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    places, inside = _places(table_ptr + 5 * program, BLOCK)
    gradient = tl.load(gradient_ptr + places, mask=inside, other=0.0)
    tl.store(sums_ptr + program, tl.sum(gradient * gradient, 0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    value_ptr, mean_ptr, square_ptr, gradient_ptr, table_ptr, sums_ptr, norms_ptr, count_ptr, lr_ptr,
    beta1, beta2, log_beta1, log_beta2, weight_decay, eps, clip,
    CLIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_ptr = table_ptr + 5 * program
    places, inside = _places(row_ptr, BLOCK)
    gradient = tl.load(gradient_ptr + places, mask=inside, other=0.0)
    value = tl.load(value_ptr + places, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + places, mask=inside, other=0.0)
    square = tl.load(square_ptr + places, mask=inside, other=0.0)
    count, lr = tl.load(count_ptr), tl.load(lr_ptr)
    if CLIPS:
        first, behind = tl.load(row_ptr + 2), tl.load(row_ptr + 3)
        block = tl.arange(0, BLOCKS)
        sums = tl.load(sums_ptr + block, mask=(block >= first) & (block < behind), other=0.0)
        norm = tl.sqrt_rn(tl.sum(sums, 0))
        tl.store(norms_ptr + tl.load(row_ptr + 4), norm, mask=program == first)
        share = tl.div_rn(1.0, norm + 1e-6) * clip
        gradient *= tl.where(share > 1.0, 1.0, share)  # a NaN stays one
    # From here on in the order, and with the rounding, of PyTorch's fused kernel.
    value -= lr * weight_decay * value
    mean = tl.fma(beta1, mean, tl.fma(-beta1, gradient, gradient))
    squared = gradient * gradient
    square = tl.fma(beta2, square, tl.fma(-beta2, squared, squared))
    root = tl.div_rn(tl.sqrt_rn(square), tl.sqrt_rn(_missing(log_beta2, count)))
    value -= tl.div_rn(tl.div_rn(lr, _missing(log_beta1, count)) * mean, root + eps)
    tl.store(value_ptr + places, value, mask=inside)
    tl.store(mean_ptr + places, mean, mask=inside)
    tl.store(square_ptr + places, square, mask=inside)


def table(bounds: Sequence[int], device: torch.device) -> Tensor:
    """The blocks of groups that lie between these bounds (multiples of 4), in int32.

    Of each: start, end; of its group: the first block, the one behind the last, the place. They are copied from the
    host, which a captured step must not do: make them before.
    """
    rows: list[list[int]] = []
    for group, (start, end) in enumerate(pairwise(bounds)):
        starts = range(start, max(end, start + 1), BLOCK)  # an empty group has a norm, too
        first = len(rows)
        rows += [[at, min(at + BLOCK, end), first, first + len(starts), group] for at in starts]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def adamw(
    buffers: Sequence[Tensor],
    gradient: Tensor,
    blocks: Tensor,
    groups: int,
    *,
    count: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    clip: float | None,
) -> list[Tensor]:
    """One step of values, means and squares (float32, one buffer each) in place; `count` includes it already.

    Returns the norms of the groups before clipping, none without a clip.
    """
    sums, norms = gradient.new_empty(len(blocks)), gradient.new_empty(groups)
    if clip:
        _sum_squares[(len(blocks),)](gradient, blocks, sums, BLOCK=BLOCK, **LAUNCH)
    logs = torch.tensor(betas, dtype=torch.float32).log2().tolist()  # of the betas that the kernel sees, in float32
    settings = map(float, (*betas, *logs, weight_decay, eps, clip or 0.0))  # (an integer 1 would be compiled in)
    sizes = {"CLIPS": bool(clip), "BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(len(blocks))}
    _update[(len(blocks),)](*buffers, gradient, blocks, sums, norms, count, lr, *settings, **sizes, **LAUNCH)
    return list(norms) if clip else []
