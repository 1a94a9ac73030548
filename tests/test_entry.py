"""Tokens' entry as kernels against plain PyTorch in float64; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load
from qpt.nets import entry
from qpt.nets.pointwise import keeps

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
        "norms": draw(4, width) + torch.tensor([1.0, 0.0, 1.0, 0.0], device=DEVICE)[:, None],
        "seed": torch.tensor([77], dtype=torch.int32, device=DEVICE),
    }


def slow(returns: Tensor, costs: Tensor, seen: Tensor, done: Tensor, steps: Tensor, small: Tensor, places: Tensor,
         norms: Tensor, seed: Tensor, length: int, rate: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = []
    for b in range(len(steps)):
        for k in range(steps.shape[1]):
            first, second = returns[b, k] * small[0] + small[1], costs[b, k] * small[2] + small[3]
            kinds = torch.stack([first, second, seen[b, k], done[b, k]]) + places[steps[b, k]]
            rows.append(F.layer_norm(kinds, norms[0].shape, norms[0], norms[1]))
    tokens = torch.cat(rows).view(len(steps), 4 * steps.shape[1], -1)[:, :length]
    tokens = torch.where(keeps(tokens.shape, seed, rate), tokens / (1 - rate), 0.0)
    return tokens, F.layer_norm(tokens, norms[2].shape, norms[2], norms[3])


def close(got: Tensor, right: Tensor) -> bool:
    return ((got.double() - right).norm() <= TOLERANCE * right.norm()).item()  # (both may be 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("left_out", "rate"), [(0, 0.0), (1, 0.2)])
@pytest.mark.parametrize(("batch", "length", "width", "programs"), [(3, 5, 16, 528), (9, 7, 32, 2), (2, 1, 128, 528)])
def test_tokens_and_gradients_equal_float64(
    batch: int,
    length: int,
    width: int,
    programs: int,
    left_out: int,
    rate: float,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # few: each goes over several tiles
    tensors, tokens = given(batch, length, width), 4 * length - left_out
    learned = ("seen", "done", "small", "places", "norms")

    def run(**tensors: Tensor) -> Any:
        return kernel.enter(*tensors.values(), tokens, 1e-5, rate)

    torch._dynamo.reset()
    leaves = {k: v.clone().requires_grad_(k in learned) for k, v in tensors.items()}
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(**leaves)
    wide = {k: v if v.dtype in (torch.int32, torch.int64) else v.double() for k, v in tensors.items()}
    wide = {k: v.requires_grad_(k in learned) for k, v in wide.items()}
    right = slow(**wide, length=tokens, rate=rate)
    grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5 + i)) for i, x in enumerate(out)]
    grads = [grad.bfloat16().to(DEVICE) for grad in grads]
    for got, expected in zip(out, right, strict=True):
        assert got.dtype is torch.bfloat16
        assert got.shape == (batch, tokens, width)
        assert close(got, expected)
    found = torch.autograd.grad(out, [leaves[k] for k in learned], grads)
    wanted = torch.autograd.grad(right, [wide[k] for k in learned], [grad.double() for grad in grads])
    for name, got, expected in zip(learned, found, wanted, strict=True):
        assert got.shape == expected.shape
        assert close(got, expected), name


def test_layers_are_handed_over_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "kernel", kernel)
    tensors = given(2, 3, 16)
    layers = nn.Linear(1, 16).to(DEVICE), nn.Linear(1, 16).to(DEVICE)
    places = nn.Embedding(HORIZON, 16).to(DEVICE)
    norms = nn.LayerNorm(16).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    scalars = tensors["returns"], tensors["costs"]
    with torch.no_grad():
        norms[1].weight += tensors["small"][0]
        norms[0].bias += tensors["small"][1]
        inputs = (scalars, layers, tensors["seen"], tensors["done"], tensors["steps"], places, norms)
        stream, normed = entry.enter(*inputs, 11, 0.0)
        kinds = [layer(x[..., None]) for layer, x in zip(layers, scalars, strict=True)]
        kinds += [tensors["seen"].float(), tensors["done"].float()]
        right = norms[0](torch.stack(kinds, -2) + places(tensors["steps"])[..., None, :]).flatten(1, 2)[:, :11]
        assert close(stream, right.double())
        assert close(normed, norms[1](right).double())
    assert not entry.fits(tensors["seen"], tensors["done"])  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert entry.fits(tensors["seen"], tensors["done"]) == (DEVICE == "cuda")
