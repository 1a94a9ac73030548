"""Adam over one buffer against PyTorch's own, one parameter at a time; on a CPU, where both run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qpt.algorithms import base, flat
from qpt.algorithms.flat import PIECE, FlatAdam, joined, lay_out

SHAPES = [(3, 5), (2,), (), (70, 90), (1, 1, 7), (4,)]  # odd sizes, a scalar, one of more than a piece
assert PIECE < 70 * 90


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def flat_adam(own: list[nn.Parameter]) -> FlatAdam:
    return FlatAdam(own, 0.01, weight_decay=0.1, betas=(0.9, 0.99))


def plain_adam(own: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(own, lr=torch.tensor(0.01), weight_decay=0.1, betas=(0.9, 0.99), fused=True)


def plain_step(optimizer: torch.optim.AdamW, own: list[nn.Parameter], step: int, clip: float | None) -> list[Tensor]:
    for parameter, gradient in zip(own, gradients(step), strict=True):
        parameter.grad = gradient
    norms = [nn.utils.clip_grad_norm_(group, clip) for group in (own[:2], own[2:])] if clip else []
    optimizer.step()
    return norms


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5, 1000.0])
def test_steps_equal_pytorchs(clip: float | None) -> None:
    flat, plain = parameters(), parameters()
    fast, slow = flat_adam(flat), plain_adam(plain)
    for step in range(5):
        fast.param_groups[0]["lr"].fill_(0.01 * (step + 1))
        slow.param_groups[0]["lr"].fill_(0.01 * (step + 1))
        assert_same(fast.descend(gradients(step), [2, 4], clip), plain_step(slow, plain, step, clip))
        assert_same(flat, plain)


def test_a_gradient_in_another_layout_reaches_its_own_places() -> None:
    flat, plain = parameters(), parameters()
    turned = [g.mT.contiguous().mT if g.dim() == 2 else g for g in gradients(0)]
    assert not turned[0].is_contiguous()
    flat_adam(flat).descend(turned, [6], None)
    plain_step(plain_adam(plain), plain, 0, None)
    assert_same(flat, plain)


def test_a_state_goes_from_one_to_the_other_and_back() -> None:
    flat, plain = parameters(), parameters()
    fast, slow = flat_adam(flat), plain_adam(plain)
    for step in range(3):
        plain_step(slow, plain, step, None)
    for parameter, value in zip(flat, plain, strict=True):
        parameter.data.copy_(value)
    fast.load_state_dict(copy.deepcopy(slow.state_dict()) | {"param_groups": fast.state_dict()["param_groups"]})
    for step in range(3, 5):
        fast.descend(gradients(step), [6], None)
        plain_step(slow, plain, step, None)
    assert_same(flat, plain)
    back = plain_adam(parameters())
    back.load_state_dict(copy.deepcopy(fast.state_dict()) | {"param_groups": back.state_dict()["param_groups"]})
    for mine, theirs in zip(back.state.values(), slow.state.values(), strict=True):
        assert set(mine) == set(theirs)
        assert all(torch.allclose(mine[key], theirs[key]) for key in theirs)


def test_a_state_without_steps_is_one_of_zeros() -> None:
    fast = flat_adam(parameters())
    fast.descend(gradients(0), [6], None)
    fresh = flat_adam(parameters())
    fresh.load_state_dict(copy.deepcopy(fast.state_dict()))
    assert all(state["step"] == 1 for state in fresh.state.values())
    empty = flat_adam(parameters())
    empty.load_state_dict(empty.state_dict() | {"state": {}})
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in empty.state.values())


def test_parameters_begin_at_whole_16_bytes_and_stay_leaves() -> None:
    own = [nn.Parameter(p.detach().float()) for p in parameters()]
    buffer = lay_out(own)
    assert all(p.is_leaf and p.requires_grad and p.storage_offset() % 4 == 0 for p in own)
    assert {p.untyped_storage().data_ptr() for p in own} == {buffer.untyped_storage().data_ptr()}
    assert_same([p.detach().double() for p in own], [p.float().double() for p in parameters()])


def test_neighbours_in_both_buffers_are_joined_and_no_others() -> None:
    one, other = parameters(), parameters()
    lay_out(one)
    assert len(list(joined(one, other))) == len(one)
    lay_out(other)
    assert len(list(joined(one, other))) == 1
    assert next(a.numel() for a, _ in joined([one[0], *one[2:]], [other[0], *other[2:]])) == 15
    with torch.no_grad():
        for parameter in other:
            parameter.fill_(2.0)
        right = [a + 0.25 * (b - a) for a, b in zip(one, other, strict=True)]
        for a, b in joined(one, other):
            a.lerp_(b, 0.25)
    assert_same(one, right)


def test_on_cuda_adam_is_flat_and_descends_as_on_a_cpu() -> None:
    class OnCuda(nn.Parameter):
        is_cuda = True  # type: ignore[assignment]

    own, plain = [OnCuda(p.detach()) for p in parameters()], parameters()
    fast, slow = base.adam(own, 0.01), base.adam(plain, 0.01)
    assert isinstance(fast, FlatAdam)
    assert isinstance(slow, torch.optim.AdamW)
    for _ in range(3):
        for optimizer, these in ((fast, own), (slow, plain)):
            loss = torch.stack([(p - 1).square().sum() for p in these]).sum()
            base.descend(optimizer, loss, [list(these)], 0.5)
    assert_same([p.detach().as_subclass(Tensor) for p in own], plain)


def test_our_kernels_take_float32_on_cuda_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    there = torch.zeros(4).as_subclass(OnCuda)
    monkeypatch.setattr(flat, "kernel", object())
    assert flat._fits(there)
    assert not flat._fits(there.double())
    assert not flat._fits(torch.zeros(4))
    monkeypatch.setattr(flat, "kernel", None)
    assert not flat._fits(there)
