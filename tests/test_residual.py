"""What half blocks add to the stream, and the norm behind, against float64; without a GPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load
from qpt.nets import pointwise, residual

kernel = load("qpt.nets.residual_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(got: Tensor, right: Tensor) -> bool:
    return ((got.double() - right).norm() / right.norm()).item() < TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("shape", "programs"), [((3, 50, 16), 528), ((7, 128), 528), ((200, 32), 3)])
def test_sum_norm_and_gradients_equal_float64(
    shape: tuple[int, ...], programs: int, rate: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # few: each goes over several tiles
    monkeypatch.setattr(residual, "kernel", kernel)
    norm, seed = nn.LayerNorm(shape[-1]).to(DEVICE), torch.tensor([12345], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(residual, "draw_seed", lambda *_: seed)
    with torch.no_grad():
        norm.weight += draw(shape[-1], seed=1)
        norm.bias += draw(shape[-1], seed=2)
    leaves = [draw(*shape, seed=3).bfloat16(), draw(*shape, seed=4).bfloat16(), draw(shape[-1], seed=5)]
    leaves = [leaf.requires_grad_() for leaf in leaves] + [norm.weight, norm.bias]

    def run(x: Tensor, branch: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return residual.add(x, branch, bias, rate, norm)

    torch._dynamo.reset()
    found = (torch.compile(run, backend="aot_eager") if compiled else run)(*leaves[:3])
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    kept = pointwise.keeps(leaves[0].shape, seed, rate)
    assert kept.all() if rate == 0 else 0.6 < kept.double().mean() < 0.8
    total = wide[0] + torch.where(kept, (wide[1] + wide[2]) / (1 - rate), 0.0)
    right = total, F.layer_norm(total, shape[-1:], wide[3], wide[4])
    grads = [draw(*shape, seed=6).bfloat16(), draw(*shape, seed=7).bfloat16()]
    for got, wanted in zip(found, right, strict=True):
        assert got.dtype is torch.bfloat16
        assert close(got, wanted)
    got_all = torch.autograd.grad(found, leaves, grads)
    right_all = torch.autograd.grad(right, wide, [grad.double() for grad in grads])
    for leaf, got, wanted in zip(leaves, got_all, right_all, strict=True):
        assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)
        assert close(got, wanted)
