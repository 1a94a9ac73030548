"""The half block in one kernel against plain PyTorch in float64; without a GPU, Triton's interpreter runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import perceptron
from qpt.nets.transformer import Block

kernel = load("qpt.nets.perceptron_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(("count", "width"), [(128, 16), (150, 32), (7, 128)])
def test_the_kernel_equals_float64(count: int, width: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale + mean).bfloat16().to(DEVICE)

    hidden = 4 * width
    x, gain, shift = draw(count, width, mean=0.5), draw(width, mean=1.0), draw(width)
    w1, b1 = draw(hidden, width, scale=2 * width**-0.5), draw(hidden)
    w2, b2 = draw(width, hidden, scale=0.1), draw(width)
    got = kernel.perceptron(x, gain.float(), shift.float(), w1, b1.float(), w2, b2.float(), 1e-5)
    normed = F.layer_norm(x.double(), (width,), gain.double(), shift.double())
    inner = F.gelu(F.linear(normed, w1.double(), b1.double()))
    right = x.double() + F.linear(inner, w2.double(), b2.double())
    assert got.dtype is torch.bfloat16
    assert ((got.double() - right).norm() / right.norm()).item() < TOLERANCE


def test_a_block_uses_it_only_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(16, 2, 0.3, 0.0).to(DEVICE)
    x = torch.randn(6, 8, 16, device=DEVICE).bfloat16()
    if DEVICE == "cpu":

        class OnCuda(Tensor):
            is_cuda = True  # type: ignore[assignment]

        x = x.as_subclass(OnCuda)
    calls: list[int] = []

    def counted(x: Tensor, *_rest: Any) -> Tensor:
        calls.append(x.shape[0])
        return x

    monkeypatch.setattr(perceptron, "kernel", type("Counted", (), {"perceptron": staticmethod(counted)}))

    def runs() -> int:
        calls.clear()
        with torch.autocast(DEVICE, torch.bfloat16):
            perceptron.mix(x, block.norm2, block.mlp)
        return len(calls)

    assert runs() == 0
    with torch.no_grad():
        assert runs() == 0  # its dropout is on
        block.eval()
        assert runs() == 1
        block.mlp[0] = nn.Linear(16, 32, device=DEVICE)
        block.mlp[2] = nn.Linear(32, 16, device=DEVICE)
        assert runs() == 0  # not the shape it was written for
