"""The way back through bias and mish in one kernel, and the layers that use it, against plain PyTorch in float64.

Without a GPU, Triton's interpreter runs the kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import DEVICE, load
from qpt.nets import mlp
from qpt.nets.mlp import StackedMLP

kernel = load("qpt.nets.mish_kernel")
ON_CUDA = DEVICE == "cuda"
TOLERANCE = 0.005 if ON_CUDA else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(DEVICE)


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize(("members", "rows", "width"), [(2, 64, 32), (3, 77, 80), (1, 301, 256), (2, 3, 1024)])
def test_the_kernel_equals_float64(monkeypatch: pytest.MonkeyPatch, members: int, rows: int, width: int) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 4)  # so few that each takes several tiles
    z, grad = draw(members, rows, width, scale=3.0).bfloat16(), draw(rows, width).bfloat16().repeat(members, 1, 1)
    bias = draw(members, width)
    x = (z.double() + bias.double()[:, None]).requires_grad_()
    (slope,) = torch.autograd.grad(F.mish(x), x, grad.double())
    dz, parts = kernel.back(z, bias, grad)
    assert (dz.dtype, parts.dtype) == (torch.bfloat16, torch.float32)
    assert dz.shape == z.shape
    assert error(dz, slope) < TOLERANCE
    assert error(parts.sum(1), slope.sum(1)) < 1e-4  # of numbers that were not rounded


@pytest.mark.parametrize(("members", "rows", "width"), [(2, 64, 32), (3, 77, 80), (1, 301, 256)])
def test_the_head_equals_float64(monkeypatch: pytest.MonkeyPatch, members: int, rows: int, width: int) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 4)
    z, bias, weight = draw(members, rows, width).bfloat16(), draw(members, width), draw(members, width, scale=2.0)
    grad = draw(members, rows)
    wide = [t.double().requires_grad_() for t in (z, bias, weight)]
    values = (F.mish(wide[0] + wide[1][:, None]) * wide[2][:, None]).sum(-1)
    right = torch.autograd.grad(values, wide, grad.double())
    dz, parts = kernel.head_back(z, bias, weight, grad)
    assert error(dz, right[0]) < TOLERANCE
    assert error(parts.sum(1)[:, 0], right[1]) < 1e-4
    assert error(parts.sum(1)[:, 1], right[2]) < 1e-4


def test_far_from_zero_the_slopes_are_0_and_1() -> None:
    z = torch.tensor([-1e4, -90.0, 90.0, 1e4], device=DEVICE).bfloat16().repeat(1, 5, 4)
    dz, parts = kernel.back(z, torch.zeros(1, 16, device=DEVICE), torch.ones_like(z))
    for got, expected in ((dz, (z > 0).float()), (parts.sum(1), 5.0 * (z[:, 0] > 0))):
        torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE, atol=1e-6)


def test_shapes_are_known_without_running_them() -> None:
    z, bias = draw(2, 77, 48).bfloat16(), draw(2, 48)
    torch.library.opcheck(kernel.back, (z, bias, z), test_utils=("test_schema", "test_faketensor"))
    given = (z, bias, bias, draw(2, 77))
    torch.library.opcheck(kernel.head_back, given, test_utils=("test_schema", "test_faketensor"))


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = mlp._MishLayer.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [77, 512])
def test_a_layer_and_its_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, rows: int, compiled: bool) -> None:
    monkeypatch.setattr(mlp, "kernel", kernel)
    x, weight, bias = draw(2, rows, 24), draw(2, 24, 48, scale=0.2), draw(2, 1, 48)
    x, weight = x.bfloat16(), weight.bfloat16().float()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = (torch.compile(layer, backend="aot_eager") if compiled else layer)(*leaves)
    grad = draw(*out.shape).bfloat16()
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out))]
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]

    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    members = [F.mish(wide[0][e] @ wide[1][e] + wide[2][e]) for e in range(2)]
    right = torch.stack(members)
    for got, expected in zip(found, [right.detach(), *torch.autograd.grad(right, wide, grad.double())], strict=True):
        assert got.shape == expected.shape
        assert error(got, expected) < TOLERANCE


def head(x: Tensor, weight: Tensor, bias: Tensor, last: Tensor, shift: Tensor) -> Tensor:
    out: Tensor = mlp._MishHead.apply(x, weight, bias, last, shift)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("compiled", [True, False])
def test_a_head_and_its_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(mlp, "kernel", kernel)
    x, weight, bias = draw(2, 77, 24).bfloat16(), draw(2, 24, 48, scale=0.2).bfloat16().float(), draw(2, 1, 48)
    last, shift = draw(2, 48, 1), draw(2, 1, 1)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, last, shift)]
    out = (torch.compile(head, backend="aot_eager") if compiled else head)(*leaves)
    grad = draw(*out.shape)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    wide = [t.double().requires_grad_() for t in (x, weight, bias, last, shift)]
    right = F.mish(wide[0] @ wide[1] + wide[2]) @ wide[3] + wide[4]
    for got, expected in zip(found, [right.detach(), *torch.autograd.grad(right, wide, grad.double())], strict=True):
        assert got.shape == expected.shape
        assert error(got, expected) < TOLERANCE


@pytest.mark.parametrize("rows", [512, 1024, 520])
def test_a_product_by_pieces_is_the_whole_one(rows: int) -> None:
    x, dz = draw(3, rows, 16).double(), draw(3, rows, 32).double()
    torch.testing.assert_close(mlp._outer(x, dz).double(), x.mT @ dz, rtol=1e-5, atol=1e-5)
    shared = x[:1].expand(3, -1, -1)  # as the first layer has it
    torch.testing.assert_close(mlp._outer(shared, dz).double(), shared.mT @ dz, rtol=1e-5, atol=1e-5)


class OnCuda(Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_critics_use_it_only_where_they_learn_in_a_compiled_step_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted:
        @staticmethod
        def apply(x: Tensor, weight: Tensor, bias: Tensor, *last: Tensor) -> Tensor:
            calls.append(weight.shape[-1])
            y = torch.bmm(x, weight.to(x.dtype)) + bias
            return y.float() @ last[0] + last[1] if last else y

    monkeypatch.setattr(mlp, "kernel", kernel)
    monkeypatch.setattr(mlp, "_MishLayer", Counted)
    monkeypatch.setattr(mlp, "_MishHead", Counted)
    x = draw(6, 11) if ON_CUDA else draw(6, 11).as_subclass(OnCuda)

    def runs(narrow: bool = True, activation: str = "mish", width: int = 32, **how: Any) -> list[int]:
        calls.clear()
        critics = StackedMLP(2, [11, width, 48, 1], activation).to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
            assert critics(x, **how).shape == (2, 6, 1)
        return list(calls)

    assert runs() == []  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert runs() == [32, 48]  # hidden layers, the second with the value behind it
    assert runs(width=40) == [48]
    assert runs(narrow=False) == runs(activation="gelu") == runs(frozen=True) == []
    with torch.no_grad():
        assert runs() == []
    monkeypatch.setattr(mlp, "kernel", None)
    assert runs() == []
