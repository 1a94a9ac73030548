"""The attention kernels against attention written out in float64, with the very weights that a mask drops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import attention

kernel = load("qpt.nets.attention_kernel")
pytestmark = pytest.mark.usefixtures("products_of_bf16")
BATCH, HEADS, WIDTH = 3, 2, 16
TOLERANCE = 0.01 if DEVICE == "cuda" else 0.02  # the interpreter cuts numbers off where the GPU rounds them to bf16


def kept(seed: int, queries: int, keys: int, rate: float) -> Tensor:
    """The kernel's hash, in 64 bits: which weights stay, [B, H, queries, keys]."""
    program = np.arange(BATCH * HEADS, dtype=np.uint64).reshape(BATCH, HEADS, 1, 1) * 16384
    columns = np.arange(keys, dtype=np.uint64)
    places = np.arange(queries, dtype=np.uint64)[:, None] * 128 + columns // 2
    x = (program + places + seed) % 2**32
    x = x * 0x9E3779B1 % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    x ^= x >> 15
    signed = np.where(columns % 2 == 0, x, (x << 16) % 2**32).astype(np.uint32).view(np.int32)
    return torch.from_numpy(signed >= rate * 2**32 - 2**31).to(DEVICE)


def slow(q: Tensor, k: Tensor, v: Tensor, last: Tensor, mask: Tensor, rate: float) -> Tensor:
    """[B, M, H * d] and [B, L, H * d] -> [B, M, H * d]; a query sees the keys up to its `last` [B, M]."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.arange(k.shape[2], device=q.device) > last[:, None, :, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(-1) * mask / (1 - rate)
    return (weights @ v).transpose(1, 2).flatten(2)


def compare(fast: Callable[..., Tensor], right: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Results and the gradients of all inputs."""
    found = []
    for function, kind in ((fast, torch.bfloat16), (right, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
        out.backward(grad)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for got, expected in zip(*found, strict=True):
        assert ((got.double() - expected).norm() / expected.norm()).item() < TOLERANCE


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(DEVICE)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("length", [12, 16, 40, 64, 80, 128])
def test_attention_of_all_tokens_equals_float64(length: int, rate: float) -> None:
    seed = torch.tensor([2**31 - 2], dtype=torch.int32, device=DEVICE)  # wraps
    mask = kept(2**31 - 2, length, length, rate) if rate else torch.ones(1, device=DEVICE)
    places = torch.arange(length, device=DEVICE).expand(BATCH, -1)

    def right(qkv: Tensor) -> Tensor:
        return slow(*qkv.chunk(3, -1), places, mask, rate)

    compare(lambda qkv: kernel.self_attention(qkv, seed, HEADS, rate), right, [draw(BATCH, length, 3 * HEADS * WIDTH)])


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("length", [12, 40, 128])
def test_attention_of_some_tokens_equals_float64(length: int, rate: float) -> None:
    places = torch.arange(2, length, 4, device=DEVICE)
    seed, queries = torch.tensor([7], dtype=torch.int32, device=DEVICE), len(places)
    last = places.to(torch.int32).expand(BATCH, -1)
    mask = kept(7, queries, length, rate) if rate else torch.ones(1, device=DEVICE)

    def right(q: Tensor, kv: Tensor) -> Tensor:
        return slow(q, *kv.chunk(2, -1), last, mask, rate)

    compare(
        lambda q, kv: kernel.query_attention(q, kv, last, seed, HEADS, rate),
        right,
        [draw(BATCH, queries, HEADS * WIDTH), draw(BATCH, length, 2 * HEADS * WIDTH)],
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_a_layer_and_its_attention_learn_as_in_float64(
    some: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, width = 39, HEADS * WIDTH
    places = torch.arange(2, length, 4, device=DEVICE) if some else torch.arange(length, device=DEVICE)
    layer, seed = nn.Linear(width, 3 * width).to(DEVICE), torch.tensor([7], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(attention, "kernel", kernel)
    monkeypatch.setattr(attention, "draw_seed", lambda *_: seed)
    monkeypatch.setattr(attention, "_learns", lambda *_: True)
    x, asking = draw(BATCH, length, width).requires_grad_(), draw(BATCH, len(places), width).requires_grad_()

    def run(x: Tensor, asking: Tensor) -> Tensor:
        if some:
            return attention.ask(x, asking, places, layer, HEADS, 0.3)
        return attention.attend(x, layer, HEADS, 0.3)

    torch._dynamo.reset()
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(x, asking)
    leaves = [x, layer.weight, layer.bias, *([asking] if some else [])]
    grad = draw(*out.shape)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q = torch.nn.functional.linear(wide[3] if some else wide[0], wide[1][:width], wide[2][:width])
    k, v = torch.nn.functional.linear(wide[0], wide[1][width:], wide[2][width:]).chunk(2, -1)
    mask = kept(7, len(places), length, 0.3)
    right = slow(q, k, v, places.expand(BATCH, -1), mask, 0.3)
    wanted = [right.detach(), *torch.autograd.grad(right, wide, grad.double())]
    for got, expected in zip(found, wanted, strict=True):
        assert got.shape == expected.shape
        assert ((got.double() - expected).norm() / expected.norm()).item() < TOLERANCE
    assert not found[3][width : 2 * width].any()  # of the keys' bias
    assert [t.dtype for t in found[:4]] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_the_right_share_is_dropped_and_neighbours_do_not_matter() -> None:
    masks = torch.stack([kept(seed, 40, 40, 0.2) for seed in (3, 12345, 987654321)]).double()
    assert masks.mean().item() == pytest.approx(0.8, abs=0.011)  # five standard errors
    flat = masks.cpu().numpy().reshape(3, -1)
    pairs = [
        (flat[0], flat[1]),
        (flat[0][:-1], flat[0][1:]),
        (flat[0][::2], flat[0][1::2]),  # the two that share a hash
        (flat[1][:-40], flat[1][40:]),
        (flat[2][:1600], flat[2][1600:3200]),
    ]
    assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.125 for one, other in pairs)


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device with Triton")
def test_dropped_attention_is_right_on_average() -> None:
    qkv = torch.randn(3, 40, 3 * 64, device="cuda", dtype=torch.bfloat16)
    expected = attention.self_attention(qkv, 4).float()
    mean = torch.stack([attention.self_attention(qkv, 4, 0.2).float() for _ in range(400)]).mean(0)
    assert ((mean - expected).norm() / expected.norm()).item() < 0.05
