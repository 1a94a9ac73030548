"""Tokens' entry as kernels against plain PyTorch in float64; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load
from qpt.nets import entry

kernel = load("qpt.nets.entry_kernel")
TOLERANCE = 0.005 if DEVICE == "cuda" else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16
HORIZON = 9


def given(batch: int, length: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    return {
        "returns": draw(batch, length),
        "costs": draw(batch, length),
        "seen": draw(batch, length, width).bfloat16(),
        "done": draw(batch, length, width).bfloat16(),
        "steps": torch.randint(HORIZON, (batch, length), generator=generator).to(DEVICE),
        "small": draw(4, width),
        "places": draw(HORIZON, width),
        "gain": draw(width) + 1,
        "shift": draw(width),
    }


def slow(returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
         gain: Tensor, shift: Tensor) -> Tensor:  # fmt: skip
    rows = []
    for b in range(len(steps)):
        for k in range(steps.shape[1]):
            first, second = returns[b, k] * small[0] + small[1], costs[b, k] * small[2] + small[3]
            kinds = torch.stack([first, second, seen[b, k], done[b, k]]) + places[steps[b, k]]
            rows.append(F.layer_norm(kinds, gain.shape, gain, shift))
    return torch.stack(rows).view(*steps.shape, 4, -1)


def close(got: Tensor, right: Tensor) -> bool:
    return ((got.double() - right).norm() / right.norm()).item() < TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("batch", "length", "width", "programs"), [(3, 5, 16, 528), (9, 7, 32, 2), (2, 1, 128, 528)])
def test_tokens_and_gradients_equal_float64(
    batch: int, length: int, width: int, programs: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # few: each goes over several tiles
    tensors = given(batch, length, width)
    learned = ("seen", "done", "small", "places", "gain", "shift")

    def run(**tensors: Tensor) -> Any:
        return kernel.enter(*tensors.values(), 1e-5)

    leaves = {k: v.clone().requires_grad_(k in learned) for k, v in tensors.items()}
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(**leaves)
    assert out.dtype is torch.bfloat16
    wide = {k: v if k == "steps" else v.double().requires_grad_(k in learned) for k, v in tensors.items()}
    right = slow(**wide)
    assert close(out, right)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(DEVICE)
    found = torch.autograd.grad(out, [leaves[k] for k in learned], grad)
    for got, expected in zip(found, torch.autograd.grad(right, [wide[k] for k in learned], grad.double()), strict=True):
        assert got.shape == expected.shape
        assert close(got, expected)


def test_layers_are_handed_over_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "kernel", kernel)
    tensors = given(2, 3, 16)
    layers = nn.Linear(1, 16).to(DEVICE), nn.Linear(1, 16).to(DEVICE)
    places, norm = nn.Embedding(HORIZON, 16).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    scalars = tensors["returns"], tensors["costs"]
    with torch.no_grad():
        got = entry.enter(scalars, layers, tensors["seen"], tensors["done"], tensors["steps"], places, norm)
        kinds = [layer(x[..., None]) for layer, x in zip(layers, scalars, strict=True)]
        kinds += [tensors["seen"].float(), tensors["done"].float()]
        assert close(got, norm(torch.stack(kinds, -2) + places(tensors["steps"])[..., None, :]).double())
    assert not entry.fits(tensors["seen"], tensors["done"])  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert entry.fits(tensors["seen"], tensors["done"]) == (DEVICE == "cuda")
