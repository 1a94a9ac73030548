"""The half block's kernels against plain PyTorch in float64; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import perceptron, residual
from qpt.nets.transformer import Block

kernel = load("qpt.nets.perceptron_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(("count", "width"), [(128, 16), (150, 32), (7, 128)])
def test_all_behind_attention_equals_float64(count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perceptron, "kernel", kernel)
    torch.manual_seed(count)
    block, following = Block(width, 1, 0.3, 0.0).to(DEVICE).eval(), nn.LayerNorm(width).to(DEVICE)
    with torch.no_grad():
        for parameter in (*block.parameters(), *following.parameters()):
            scale = 2 * width**-0.5 if parameter.dim() == 2 else 0.5
            parameter.copy_((scale * torch.randn_like(parameter) + (parameter.mean() > 0.5)).bfloat16())
        x, attended = (torch.randn(2, count, width, device=DEVICE).bfloat16() for _ in range(2))
        found = perceptron.rest(x, attended, block.project, block.norm2, block.mlp, following)
        right = block.double()._rest(x.double(), attended.double(), following.double())
    for got, expected in zip(found, right, strict=True):
        assert got.dtype is torch.bfloat16
        assert got.shape == x.shape
        assert ((got.double() - expected).norm() / expected.norm()).item() < TOLERANCE


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(DEVICE)


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("programs", [264, 4])  # few: each goes over several tiles
@pytest.mark.parametrize(("count", "width"), [(128, 16), (150, 32), (7, 128), (300, 64)])
def test_products_with_gelu_equal_float64(
    count: int, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    x, b1 = draw(count, width).bfloat16(), draw(4 * width)
    w1, w2 = draw(4 * width, width, scale=2 * width**-0.5).bfloat16(), draw(width, 4 * width, scale=0.1).bfloat16()
    a, active = kernel.ahead(x, w1, b1)
    right = F.linear(x.double(), w1.double(), b1.double())
    assert a.dtype is active.dtype is torch.bfloat16
    assert error(a, right) < TOLERANCE
    assert error(active, F.gelu(right)) < TOLERANCE
    grad, wide = draw(count, width, scale=2.0).bfloat16(), a.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(F.gelu(wide), w2.double()), wide, grad.double())
    da, parts = kernel.back(grad, w2, a)
    assert (da.dtype, parts.dtype) == (torch.bfloat16, torch.float32)
    assert error(da, expected) < TOLERANCE
    assert error(parts.sum(0), expected.sum(0)) < 1e-4  # of numbers that were not rounded
    for op, given in ((kernel.ahead, (x, w1, b1)), (kernel.back, (grad, w2, a))):
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("products_of_bf16")
def test_far_from_zero_the_slopes_are_0_and_1() -> None:
    a = torch.tensor([-1e4, -90.0, 90.0, 1e4], device=DEVICE).bfloat16().repeat(5, 16)
    w2 = torch.zeros(16, 64, device=DEVICE).bfloat16()
    w2[0] = 1.0
    grad = torch.zeros(5, 16, device=DEVICE).bfloat16()
    grad[:, 0] = 1.0
    da, parts = kernel.back(grad, w2, a)
    torch.testing.assert_close(da.float(), (a > 0).float(), rtol=TOLERANCE, atol=1e-6)
    torch.testing.assert_close(parts.sum(0), 5.0 * (a[0] > 0), rtol=TOLERANCE, atol=1e-6)


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("compiled", [True, False])
def test_what_learns_and_its_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(perceptron, "kernel", kernel)

    def run(*given: Tensor) -> Tensor:
        out: Tensor = perceptron._Perceptron.apply(*given)  # type: ignore[no-untyped-call]
        return out

    torch._dynamo.reset()
    x, w1, w2 = draw(3, 43, 32).bfloat16(), draw(128, 32, scale=0.3), draw(32, 128, scale=0.1)
    leaves = [t.clone().requires_grad_() for t in (x, w1, draw(128), w2)]
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(*leaves)
    grad = draw(3, 43, 32).bfloat16()
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 3]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = F.linear(F.gelu(F.linear(*wide[:3])), wide[3])
    for got, wanted in zip(found, [right.detach(), *torch.autograd.grad(right, wide, grad.double())], strict=True):
        assert got.shape == wanted.shape
        assert error(got, wanted) < TOLERANCE


def test_a_block_uses_each_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    block, following = Block(16, 2, 0.3, 0.0).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    x = torch.randn(6, 8, 16, device=DEVICE).bfloat16()
    if DEVICE == "cpu":

        class OnCuda(Tensor):
            is_cuda = True  # type: ignore[assignment]

        x = x.as_subclass(OnCuda)
    calls: list[str] = []

    def counted(name: str, results: int = 2) -> Any:
        def call(x: Tensor, *_rest: Any) -> Any:
            calls.append(name)
            return x if results == 1 else (x, x)

        return call

    monkeypatch.setattr(perceptron, "kernel", object())
    monkeypatch.setattr(perceptron, "rest", counted("whole"))
    monkeypatch.setattr(perceptron, "branch", counted("learned", 1))
    monkeypatch.setattr(residual, "add", counted("added"))

    def runs(x: Tensor = x) -> list[str]:
        calls.clear()
        with torch.autocast(DEVICE, torch.bfloat16):
            for result in block._rest(x, x, following):
                assert result.shape == x.shape
        return list(calls)

    assert runs() == []  # with gradients, and not compiled
    with torch.no_grad():
        assert runs() == []  # its dropout is on
        block.eval()
        assert runs() == ["whole"]
    block.train()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert runs() == ["added", "learned", "added"]
        assert runs(x.float()) == []
    block.eval()
    block.mlp[0] = nn.Linear(16, 32, device=DEVICE)
    block.mlp[2] = nn.Linear(32, 16, device=DEVICE)
    with torch.no_grad():
        assert runs() == []  # not the shape it was written for
