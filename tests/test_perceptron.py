"""The half block in one kernel against plain PyTorch in float64; without a GPU, Triton's interpreter runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import perceptron, pointwise
from qpt.nets.transformer import Block

kernel = load("qpt.nets.perceptron_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


def drawn(count: int, width: int) -> list[Tensor]:
    """x, gain, shift, w1, b1, w2, b2: the matrices in bf16, and the rest as wide as parameters are."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale + mean).bfloat16().to(DEVICE)

    hidden = 4 * width
    x, gain, shift = draw(count, width, mean=0.5), draw(width, mean=1.0).float(), draw(width).float()
    w1, b1 = draw(hidden, width, scale=2 * width**-0.5), draw(hidden).float()
    return [x, gain, shift, w1, b1, draw(width, hidden, scale=0.1), draw(width).float()]


def seeded(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=DEVICE)


def plain(mask: Tensor | float, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The half block, with dropout's factors, and what is in between: normed, before and after the activation."""
    x, gain, shift, w1, b1, w2, b2 = inputs
    normed = F.layer_norm(x, x.shape[-1:], gain, shift)
    a = F.linear(normed, w1, b1)
    return x + mask * F.linear(F.gelu(a), w2, b2), normed, a, F.gelu(a)


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(("count", "width"), [(128, 16), (150, 32), (7, 128)])
def test_the_kernel_equals_float64(count: int, width: int) -> None:
    inputs = drawn(count, width)
    got = kernel.perceptron(*inputs, 1e-5)
    assert got.dtype is torch.bfloat16
    assert error(got, plain(1.0, [each.double() for each in inputs])[0]) < TOLERANCE


def mask_of(seed: Tensor, rate: float, count: int, width: int) -> Tensor:
    """What the kernel multiplies by: all that it adds here is dropout of ones."""
    x, one = torch.zeros(count, width, device=DEVICE).bfloat16(), torch.ones(width, device=DEVICE)
    w1, b1 = torch.zeros(4 * width, width, device=DEVICE).bfloat16(), torch.zeros(4 * width, device=DEVICE)
    out: Tensor = kernel.perceptron_train(x, one, one, w1, b1, w1.mT.contiguous(), one, seed, 1e-5, rate)[0]
    return out


@pytest.mark.usefixtures("products_of_bf16")
def test_kernel_and_torch_keep_the_same_entries() -> None:
    for number in (0, 7, 2**31 - 2):  # the last one wraps
        mask, seed = mask_of(seeded(number), 0.3, 150, 16), seeded(number)
        assert torch.equal(mask != 0, pointwise.kept(mask, seed, 0.3))
        assert mask.unique().tolist() == pytest.approx([0, 1 / 0.7], rel=0.01)


@pytest.mark.usefixtures("products_of_bf16")
def test_the_right_share_is_kept_and_seeds_differ() -> None:
    masks = torch.stack([mask_of(seeded(seed), 0.2, 200, 16) != 0 for seed in (3, 12345, 987654321)]).double()
    assert masks.mean().item() == pytest.approx(0.8, abs=0.021)  # five standard errors
    assert torch.corrcoef(masks.flatten(1)).fill_diagonal_(0).abs().max().item() < 0.09
    assert mask_of(seeded(3), 0.0, 200, 16).unique().tolist() == [1]


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("count", "width"), [(128, 16), (150, 32), (8, 128)])
def test_training_and_its_gradients_equal_float64(count: int, width: int, rate: float, compiled: bool) -> None:
    inputs, seed = drawn(count, width), seeded(2**31 - 2)
    inputs[0] = inputs[0].unflatten(0, (2, -1))
    mask = pointwise.kept(inputs[0], seed, rate).double() / (1 - rate)

    def fast(*leaves: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = kernel.perceptron_train(*leaves, seed, 1e-5, rate)
        return results

    fast = torch.compile(fast, backend="aot_eager") if compiled else fast
    leaves = [each.clone().requires_grad_() for each in inputs]
    wide = [each.double().requires_grad_() for each in inputs]
    got, right = fast(*leaves), plain(mask, wide)
    assert [each.requires_grad for each in got] == [True, False, False, False]
    for one, other in zip(got, right, strict=True):
        assert one.dtype is torch.bfloat16
        assert error(one, other) < TOLERANCE
    grad = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    got[0].backward(grad)
    right[0].backward(grad.double())
    for leaf, expected in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert expected.grad is not None
        assert leaf.grad.dtype is leaf.dtype
        assert error(leaf.grad, expected.grad) < TOLERANCE


def test_a_block_uses_it_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(16, 2, 0.3, 0.0).to(DEVICE)
    x = torch.randn(6, 8, 16, device=DEVICE).bfloat16()
    if DEVICE == "cpu":

        class OnCuda(Tensor):
            is_cuda = True  # type: ignore[assignment]

        x = x.as_subclass(OnCuda)
    calls: list[Any] = []

    class Counted:
        @staticmethod
        def perceptron(x: Tensor, *_rest: Any) -> Tensor:
            calls.append("plain")
            return x

        @staticmethod
        def perceptron_train(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            calls.append(rest[-1])  # the rate
            return x, x, x, x

    monkeypatch.setattr(perceptron, "kernel", Counted)

    def runs() -> list[Any]:
        calls.clear()
        with torch.autocast(DEVICE, torch.bfloat16):
            perceptron.mix(x, block.norm2, block.mlp)
        return calls.copy()

    assert runs() == []  # a backward pass that is not compiled has PyTorch's own
    with torch.no_grad():
        assert runs() == []  # its dropout is on
        block.eval()
        assert runs() == ["plain"]
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert runs() == [0.0]
        block.train()
        assert runs() == [0.3]
        with torch.no_grad():
            assert runs() == []
        compiling.setattr(perceptron, "kernel", None)
        assert runs() == []
    block.eval()
    block.mlp[0] = nn.Linear(16, 32, device=DEVICE)
    block.mlp[2] = nn.Linear(32, 16, device=DEVICE)
    with torch.no_grad():
        assert runs() == []  # not the shape it was written for
