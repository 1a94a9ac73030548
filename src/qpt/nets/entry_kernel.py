# ruff: noqa: ARG001  (an operator's fake has the arguments of the operator)
"""The Triton kernels behind `qpt.nets.entry`, as operators that autograd and torch.compile know.

A program takes some steps of the windows; of each it computes the four tokens, norms and drops, and writes them side by
side, as they are and normed once more. Backward it computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qpt.nets.residual_kernel import drop, kept, standard, through

ROWS, BACK_ROWS = 8, 4  # steps that a program takes at a time
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
    return_ptr, cost_ptr, seen_ptr, done_ptr, step_ptr, small_ptr, place_ptr, norm_ptr, seed_ptr, out_ptr, normed_ptr,
    count, eps, factor, limit,
    STEPS: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside, seed = rows < count, tl.load(seed_ptr)
    place = tl.load(place_ptr + tl.load(step_ptr + rows, mask=inside, other=0)[:, None] * D + d[None, :])
    gain, shift = tl.load(norm_ptr + d)[None, :], tl.load(norm_ptr + D + d)[None, :]
    next_gain, next_shift = tl.load(norm_ptr + 2 * D + d)[None, :], tl.load(norm_ptr + 3 * D + d)[None, :]
    for kind in tl.static_range(4):
        x, _value = _embedded(return_ptr, cost_ptr, seen_ptr, done_ptr, small_ptr, rows, inside, kind, D)
        normed, _scale = standard(x + place, eps, D)
        at = 4 * (rows % STEPS) + kind
        places, there = ((rows // STEPS) * LENGTH + at)[:, None] * D + d[None, :], (inside & (at < LENGTH))[:, None]
        token = tl.where(kept(places, seed, limit), (normed * gain + shift) * factor, 0.0).to(tl.bfloat16)
        tl.store(out_ptr + places, token, mask=there)
        normed, _scale = standard(token.to(tl.float32), eps, D)
        tl.store(normed_ptr + places, (normed * next_gain + next_shift).to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _enter_back(  # type: ignore[no-untyped-def]
    past_ptr, grad_ptr, return_ptr, cost_ptr, seen_ptr, done_ptr, step_ptr, small_ptr, place_ptr, norm_ptr, seed_ptr,
    dseen_ptr, ddone_ptr, dplaces_ptr, sums_ptr, count, eps, factor, limit,
    STEPS: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    program, d, seed = tl.program_id(0), tl.arange(0, D), tl.load(seed_ptr)
    gain, shift = tl.load(norm_ptr + d)[None, :], tl.load(norm_ptr + D + d)[None, :]
    next_gain = tl.load(norm_ptr + 2 * D + d)[None, :]
    gains, shifts = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    next_gains, next_shifts = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    return_slopes, returns = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    cost_slopes, costs = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, D), tl.float32)
    for turn in tl.range(0, TURNS):
        rows = (turn * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS)
        inside, wide = rows < count, rows[:, None] * D + d[None, :]
        shared = tl.load(step_ptr + rows, mask=inside, other=0)[:, None] * D + d[None, :]
        place = tl.load(place_ptr + shared)
        dplace = tl.zeros((ROWS, D), tl.float32)
        for kind in tl.static_range(4):
            at = 4 * (rows % STEPS) + kind
            places, there = ((rows // STEPS) * LENGTH + at)[:, None] * D + d[None, :], (inside & (at < LENGTH))[:, None]
            grad = tl.load(grad_ptr + places, mask=there, other=0.0).to(tl.float32)
            past = tl.load(past_ptr + places, mask=there, other=0.0).to(tl.float32)
            x, value = _embedded(return_ptr, cost_ptr, seen_ptr, done_ptr, small_ptr, rows, inside, kind, D)
            first, first_scale = standard(x + place, eps, D)
            stays = kept(places, seed, limit)
            token = tl.where(stays, (first * gain + shift) * factor, 0.0).to(tl.bfloat16).to(tl.float32)
            normed, scale = standard(token, eps, D)
            next_gains += grad * normed
            next_shifts += grad
            past = tl.where(stays, (past + through(normed, scale, grad, next_gain, D)) * factor, 0.0)
            gains += past * first
            shifts += past
            dx = through(first, first_scale, past, gain, D)
            dplace += dx
            if kind == 0:
                return_slopes += value * dx
                returns += dx
            elif kind == 1:
                cost_slopes += value * dx
                costs += dx
            else:
                tl.store((dseen_ptr if kind == 2 else ddone_ptr) + wide, dx.to(tl.bfloat16), mask=inside[:, None])
        tl.atomic_add(dplaces_ptr + shared, dplace, mask=inside[:, None], sem="relaxed")
    sums = sums_ptr + program * (8 * D) + d
    tl.store(sums, tl.sum(return_slopes, 0))
    tl.store(sums + D, tl.sum(returns, 0))
    tl.store(sums + 2 * D, tl.sum(cost_slopes, 0))
    tl.store(sums + 3 * D, tl.sum(costs, 0))
    tl.store(sums + 4 * D, tl.sum(gains, 0))
    tl.store(sums + 5 * D, tl.sum(shifts, 0))
    tl.store(sums + 6 * D, tl.sum(next_gains, 0))
    tl.store(sums + 7 * D, tl.sum(next_shifts, 0))


@torch.library.custom_op("qpt::enter", mutates_args=())
def enter(
    returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
    norms: Tensor, seed: Tensor, length: int, eps: float, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream [B, length, D] of steps [B, K], after norm and dropout, and that normed for the first block.

    Steps have return- and cost-to-go, and what was seen and done [B, K, D] in bf16. `small` [4, D]: weight and bias of
    the return's embedding, then of the cost's; `places` [H, D] of the steps; `norms` [4, D]: gain and shift of both.
    """
    given = [x.contiguous() for x in (returns, costs, seen, done, steps, small, places, norms)]
    out, normed = _streams(seen, length)
    count, sizes = steps.numel(), {"STEPS": steps.shape[1], "LENGTH": length, "D": seen.shape[-1], "ROWS": ROWS}
    _enter[(-(-count // ROWS),)](*given, seed, out, normed, count, eps, *drop(rate), **sizes, **LAUNCH)
    return out, normed


@enter.register_fake
def _(
    returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
    norms: Tensor, seed: Tensor, length: int, eps: float, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _streams(seen, length)


@torch.library.custom_op("qpt::enter_back", mutates_args=())
def enter_back(
    past: Tensor, grad: Tensor, returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor,
    small: Tensor, places: Tensor, norms: Tensor, seed: Tensor, eps: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what was seen and done and of the places [H, D], and parts [P, 8, D].

    The parts' sum is the gradient of `small` and `norms`.
    """
    given = [x.contiguous() for x in (past, grad, returns, costs, seen, done, steps, small, places, norms)]
    outputs, (programs, turns) = _outputs(seen, places), _share(seen)
    sizes = {"STEPS": steps.shape[1], "LENGTH": grad.shape[1], "D": seen.shape[-1], "ROWS": BACK_ROWS, "TURNS": turns}
    _enter_back[(programs,)](*given, seed, *outputs, steps.numel(), eps, *drop(rate), **sizes, **LAUNCH)
    return outputs


@enter_back.register_fake
def _(
    past: Tensor, grad: Tensor, returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor,
    small: Tensor, places: Tensor, norms: Tensor, seed: Tensor, eps: float, rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(seen, places)


def _streams(seen: Tensor, length: int) -> tuple[Tensor, Tensor]:
    shape = (len(seen), length, seen.shape[-1])
    return seen.new_empty(shape), seen.new_empty(shape)


def _outputs(seen: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dplaces = torch.zeros(places.shape, device=places.device)  # added to
    sums = seen.new_empty((_share(seen)[0], 8, seen.shape[-1]), dtype=torch.float32)
    return seen.new_empty(seen.shape), seen.new_empty(seen.shape), dplaces, sums


def _share(seen: Tensor) -> tuple[int, int]:
    """Programs, and tiles that each of them takes."""
    tiles = -(-seen.numel() // (seen.shape[-1] * BACK_ROWS))
    turns = -(-tiles // PROGRAMS)
    return -(-tiles // turns), turns


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _length, ctx.eps, ctx.rate = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, past: Tensor, grad: Tensor) -> tuple[Any, ...]:
    dseen, ddone, dplaces, parts = enter_back(past, grad, *ctx.saved_tensors, ctx.eps, ctx.rate)
    sums = parts.sum(0)
    return None, None, dseen, ddone, None, sums[:4], dplaces, sums[4:], None, None, None, None


enter.register_autograd(_back, setup_context=_keep)
