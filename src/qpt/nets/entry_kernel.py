# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernels behind `qpt.nets.entry`, as operators that autograd and torch.compile know.

A program takes some steps of the windows; of each it computes the four tokens, norms them, and writes them side by
side. Backward it computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.norm_kernel import rows_back, standard

ROWS = 8  # steps that a program takes at a time
PROGRAMS = 528  # of the way back, at most: four for every processor of an H100 or H200
LAUNCH: dict[str, Any] = {"num_warps": 4}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _embedded(  # type: ignore[no-untyped-def]
    return_ptr, cost_ptr, seen_ptr, done_ptr, small_ptr, rows, inside, KIND: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Tokens of a kind before they get their places, and the numbers that they stand for, if it is a kind of those."""
    d = tl.arange(0, D)
    if KIND < 2:
        value = tl.load((return_ptr if KIND == 0 else cost_ptr) + rows, mask=inside, other=0.0)[:, None]
        small = small_ptr + 2 * KIND * D + d
        x = value * tl.load(small)[None, :] + tl.load(small + D)[None, :]
    else:
        places = (seen_ptr if KIND == 2 else done_ptr) + rows[:, None] * D + d[None, :]
        x = tl.load(places, mask=inside[:, None], other=0.0).to(tl.float32)
        value = x
    return x, value


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _enter(  # type: ignore[no-untyped-def]
    return_ptr, cost_ptr, seen_ptr, done_ptr, step_ptr, small_ptr, place_ptr, gain_ptr, shift_ptr, out_ptr, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside = rows < count
    place = tl.load(place_ptr + tl.load(step_ptr + rows, mask=inside, other=0)[:, None] * D + d[None, :])
    gain, shift = tl.load(gain_ptr + d)[None, :], tl.load(shift_ptr + d)[None, :]
    target = out_ptr + rows.to(tl.int64)[:, None] * (4 * D) + d[None, :]
    for kind in tl.static_range(4):
        x, _value = _embedded(return_ptr, cost_ptr, seen_ptr, done_ptr, small_ptr, rows, inside, kind, D)
        normed, _scale = standard(x + place, eps, D)
        tl.store(target + kind * D, (normed * gain + shift).to(tl.bfloat16), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _enter_back(  # type: ignore[no-untyped-def]
    grad_ptr, return_ptr, cost_ptr, seen_ptr, done_ptr, step_ptr, small_ptr, place_ptr, gain_ptr,
    dseen_ptr, ddone_ptr, dplace_ptr, sums_ptr, count, eps,
    D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    program, d = tl.program_id(0), tl.arange(0, D)
    gain = tl.load(gain_ptr + d)[None, :]
    gains, shifts = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    return_slopes, returns = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    cost_slopes, costs = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    for turn in tl.range(0, TURNS):
        rows = (turn * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS)
        inside = rows < count
        there, wide = inside[:, None], rows[:, None] * D + d[None, :]
        place = tl.load(place_ptr + tl.load(step_ptr + rows, mask=inside, other=0)[:, None] * D + d[None, :])
        source = grad_ptr + rows.to(tl.int64)[:, None] * (4 * D) + d[None, :]
        dplace = tl.zeros((ROWS, D), tl.float32)
        for kind in tl.static_range(4):
            grad = tl.load(source + kind * D, mask=there, other=0.0).to(tl.float32)
            x, value = _embedded(return_ptr, cost_ptr, seen_ptr, done_ptr, small_ptr, rows, inside, kind, D)
            dx, more = rows_back(x + place, grad, gain, eps, D)
            gains += more
            shifts += grad
            dplace += dx
            if kind == 0:
                return_slopes += value * dx
                returns += dx
            elif kind == 1:
                cost_slopes += value * dx
                costs += dx
            else:
                tl.store((dseen_ptr if kind == 2 else ddone_ptr) + wide, dx.to(tl.bfloat16), mask=there)
        tl.store(dplace_ptr + wide, dplace, mask=there)
    sums = sums_ptr + program * (6 * D) + d
    tl.store(sums, tl.sum(return_slopes, 0))
    tl.store(sums + D, tl.sum(returns, 0))
    tl.store(sums + 2 * D, tl.sum(cost_slopes, 0))
    tl.store(sums + 3 * D, tl.sum(costs, 0))
    tl.store(sums + 4 * D, tl.sum(gains, 0))
    tl.store(sums + 5 * D, tl.sum(shifts, 0))


@torch.library.custom_op("qpt::enter", mutates_args=())
def enter(
    returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
    gain: Tensor, shift: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """Normed tokens [..., 4, D] of steps [...]: their return- and cost-to-go, what was seen and done [..., D] in bf16.

    `small` [4, D]: weight and bias of the return's embedding, then of the cost's; `places` [H, D] of the steps.
    """
    given = [x.contiguous() for x in (returns, costs, seen, done, steps, small, places)]
    out = seen.new_empty((*seen.shape[:-1], 4, seen.shape[-1]))
    count = steps.numel()
    _enter[(-(-count // ROWS),)](*given, gain, shift, out, count, eps, D=seen.shape[-1], ROWS=ROWS, **LAUNCH)
    return out


@enter.register_fake
def _(
    returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
    gain: Tensor, shift: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    return seen.new_empty((*seen.shape[:-1], 4, seen.shape[-1]))


@torch.library.custom_op("qpt::enter_back", mutates_args=())
def enter_back(
    grad: Tensor, returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor,
    places: Tensor, gain: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what was seen and done and of every step's place [N, D], and parts [P, 6, D].

    The parts' sum is the gradient of `small`, gain and shift.
    """
    given = [x.contiguous() for x in (grad, returns, costs, seen, done, steps, small, places)]
    outputs, (programs, turns) = _outputs(seen), _share(seen)
    sizes = {"D": seen.shape[-1], "ROWS": ROWS, "TURNS": turns}
    _enter_back[(programs,)](*given, gain, *outputs, steps.numel(), eps, **sizes, **LAUNCH)
    return outputs


@enter_back.register_fake
def _(
    grad: Tensor, returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor,
    places: Tensor, gain: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(seen)


def _outputs(seen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = seen.shape[-1]
    dplace = seen.new_empty((seen.numel() // width, width), dtype=torch.float32)
    sums = seen.new_empty((_share(seen)[0], 6, width), dtype=torch.float32)
    return seen.new_empty(seen.shape), seen.new_empty(seen.shape), dplace, sums


def _share(seen: Tensor) -> tuple[int, int]:
    """Programs, and tiles that each of them takes."""
    tiles = -(-seen.numel() // (seen.shape[-1] * ROWS))
    turns = -(-tiles // PROGRAMS)
    return -(-tiles // turns), turns


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _shift, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    steps, places = ctx.saved_tensors[4], ctx.saved_tensors[6]
    dseen, ddone, dplace, parts = enter_back(grad, *ctx.saved_tensors, ctx.eps)
    sums = parts.sum(0)
    dplaces = torch.zeros_like(places).index_add(0, steps.reshape(-1), dplace)
    return None, None, dseen, ddone, None, sums[:4], dplaces, sums[4], sums[5], None


enter.register_autograd(_back, setup_context=_keep)
