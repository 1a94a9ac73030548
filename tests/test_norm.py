"""Layer norm's backward kernel against PyTorch in float64; without a GPU, Triton's interpreter runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load
from qpt.nets import norm

kernel = load("qpt.nets.norm_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


def draw(*shape: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) + mean).bfloat16().to(DEVICE)


def gradients(x: Tensor, gain: Tensor, shift: Tensor, grad: Tensor) -> list[Tensor]:
    wide = [t.detach().double().requires_grad_() for t in (x, gain, shift)]
    normed = F.layer_norm(wide[0], x.shape[-1:], wide[1], wide[2])
    return list(torch.autograd.grad(normed, wide, grad.double()))


def close(got: Tensor, right: Tensor) -> bool:
    return ((got.double() - right).norm() / right.norm()).item() < TOLERANCE


@pytest.mark.parametrize(("shape", "programs"), [((3, 50, 16), 528), ((7, 128), 528), ((200, 32), 3)])
def test_the_kernel_equals_float64(shape: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # few: each goes over several tiles
    x, grad = draw(*shape, mean=0.5), draw(*shape, seed=1)
    gain, shift = draw(shape[-1], mean=1.0, seed=3).float(), draw(shape[-1], seed=4).float()
    dx, parts = kernel.norm_back(grad, x, gain, 1e-5)
    right = gradients(x, gain, shift, grad)
    assert dx.dtype is torch.bfloat16
    assert len(parts) <= programs
    assert close(dx, right[0])
    assert close(parts.sum(0)[0], right[1])
    assert close(parts.sum(0)[1], right[2])


def test_the_layer_uses_it_only_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "kernel", kernel)
    layer, plain = norm.Norm(16).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    x, grad = draw(6, 5, 16), draw(6, 5, 16, seed=1)
    assert torch.equal(layer(x.float()), plain(x.float()))
    assert not norm._fits(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert norm._fits(x) == (DEVICE == "cuda")
    monkeypatch.setattr(norm, "_fits", lambda _x: True)
    x.requires_grad_()
    got = layer(x)
    assert got.dtype is torch.bfloat16
    for mine, right in zip(
        torch.autograd.grad(got, [x, layer.weight, layer.bias], grad),
        gradients(x, layer.weight, layer.bias, grad),
        strict=True,
    ):
        assert close(mine, right)
