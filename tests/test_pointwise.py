"""The forms of dropout, mish and GELU that are used where a step is compiled, against plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qpt.nets import pointwise


def test_mish_and_its_gradient_equal_their_definition() -> None:
    values = torch.linspace(-30, 30, 601, dtype=torch.float64)
    x = values.clone().requires_grad_()
    y = pointwise.mish(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    for at, got, slope in zip(values.tolist(), y.tolist(), gradient.tolist(), strict=True):
        t = math.tanh(math.log1p(math.exp(at)))
        assert got == pytest.approx(at * t, abs=1e-12)
        assert slope == pytest.approx(t + at * (1 - t * t) / (1 + math.exp(-at)), abs=1e-12)


class OnCuda(Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fused", "plain", "dtype", "error"),
    [
        (pointwise.mish, F.mish, torch.float64, 1e-12),
        (pointwise.mish, F.mish, torch.float32, 2e-6),
        (pointwise.GELU(), F.gelu, torch.float64, 0.0),  # rounded only where bf16 rounds more
        (pointwise.GELU(), F.gelu, torch.bfloat16, 0.05),
    ],
)
def test_compiled_forms_and_their_slopes_equal_the_definitions(
    monkeypatch: pytest.MonkeyPatch,
    fused: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    error: float,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.cat([torch.linspace(-40, 40, 801), torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4])]).to(dtype)
    found = []
    for function, values in ((fused, x.as_subclass(OnCuda)), (plain, x.double())):
        leaf = values.clone().requires_grad_()
        y = function(leaf)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
        found.append([t.detach().as_subclass(Tensor).double() for t in (y, slope)])
    for got, right in zip(*found, strict=True):
        assert torch.allclose(got, right, rtol=error / 5, atol=error)


def test_the_share_of_the_normal_in_gelu_is_right_to_a_millionth() -> None:
    u = torch.linspace(0, 40, 4001, dtype=torch.float64)
    assert (pointwise._tail(u) - torch.special.ndtr(-u)).abs().max().item() < 2e-6
    assert pointwise._tail(u.float())[-1] == 0


@pytest.mark.parametrize(
    ("form", "plain", "dtype", "error"),
    [
        (pointwise._FusedMish, F.mish, torch.float32, 1e-5),
        (pointwise._FusedMish, F.mish, torch.bfloat16, 0.05),
        (pointwise._FusedGelu, F.gelu, torch.bfloat16, 0.05),
    ],
)
def test_compiled_forms_keep_their_gradient(
    form: Any, plain: Callable[[Tensor], Tensor], dtype: torch.dtype, error: float
) -> None:
    x = torch.linspace(-5, 5, 64, dtype=dtype).requires_grad_()
    y = torch.compile(lambda x: form.apply(x), backend="aot_eager")(x)
    assert torch.allclose(y, plain(x), atol=error)
    slopes = [torch.autograd.grad(z.sum(), x)[0] for z in (y, plain(x))]
    assert slopes[0].dtype is dtype
    assert torch.allclose(*slopes, atol=error)


def test_hashed_bits_are_murmurs_and_uniform() -> None:
    x = torch.arange(-5000, 95_000, dtype=torch.int32)
    got = pointwise.uniform_bits(x).numpy()
    y = x.numpy().astype(np.uint32).astype(np.uint64)
    y = y * 0x9E3779B1 % 2**32
    y = (y ^ (y >> 16)) * 0x85EBCA6B % 2**32
    y = (y ^ (y >> 13)) * 0xC2B2AE35 % 2**32
    assert np.array_equal(got, (y ^ (y >> 16)) >> 8)
    shares = np.histogram(got, 20, (0, 2**24))[0] / len(got)
    assert np.abs(shares - 0.05).max() < 0.004  # five standard errors
    for lag in (1, 2, 128):  # neighbours, also in another row, say nothing of each other
        assert abs(np.corrcoef(got[:-lag], got[lag:])[0, 1]) < 0.016


def test_dropout_keeps_the_mean_and_does_nothing_in_evaluation() -> None:
    layer, x = pointwise.Dropout(0.3), torch.ones(200, 500)
    torch.manual_seed(0)
    dropped = layer(x)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert layer.eval()(x) is x
