"""Critics that do not learn, in one kernel, against plain PyTorch in float64.

Without a GPU, Triton's interpreter runs the kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import frozen
from qpt.nets.mlp import StackedMLP, run_together

kernel = load("qpt.nets.critic_kernel")
ON_CUDA = DEVICE == "cuda"
TOLERANCE = 0.006 if ON_CUDA else 0.02  # the interpreter cuts numbers off where the GPU rounds them to bf16


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(DEVICE)


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


def stack(members: int, inputs: int, width: int, layers: int = 3, activation: str = "mish") -> StackedMLP:
    """Critics whose units reach both ends of mish, with weights that bf16 holds."""
    critics = StackedMLP(members, [inputs, *[width] * layers, 1], activation)
    generator = torch.Generator().manual_seed(width)
    for weight, bias in zip(critics.weights, critics.biases, strict=True):
        for t, scale in ((weight, 2 * weight.shape[1] ** -0.5), (bias, 0.5)):
            t.data = (torch.randn(t.shape, generator=generator) * scale).bfloat16().float()
    return critics.to(DEVICE)


def exact(x: Tensor, critics: StackedMLP, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Values [E, M] and the gradient of every member's rows [E, M, in], in float64."""
    wide = x.double().expand(critics.members, -1, -1).clone().requires_grad_()
    values = []
    for e in range(critics.members):
        h = wide[e]
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            h = h @ weight[e].detach().double() + bias[e].detach().double()
            h = F.mish(h) if i < 3 else h
        values.append(h[:, 0])
    right = torch.stack(values)
    return right.detach(), torch.autograd.grad(right, wide, grad.double())[0]


def layers_of(critics: StackedMLP) -> list[Tensor]:
    weights, biases = critics.layers(True)
    narrow = [*[w.bfloat16() for w in weights[:-1]], weights[-1]]
    return [t for layer in zip(narrow, biases, strict=True) for t in layer]


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("members", "rows", "inputs", "width"), [(4, 130, 80, 256), (2, 128, 16, 64), (3, 7, 24, 128), (1, 300, 128, 64)]
)
def test_the_kernels_equal_float64(members: int, rows: int, inputs: int, width: int, shared: bool) -> None:
    critics, x = stack(members, inputs, width), draw(1 if shared else members, rows, inputs).bfloat16()
    right, slope = exact(x, critics, torch.ones(members, rows, device=DEVICE))
    layers = layers_of(critics)
    values, slopes = kernel.slopes(x, layers)
    assert (values.dtype, slopes.dtype) == (torch.float32, torch.bfloat16)
    assert (values.shape, slopes.shape) == (right.shape, slope.shape)
    assert error(values, right) < TOLERANCE
    assert error(slopes, slope) < 1.5 * TOLERANCE
    alone = kernel.values(x, layers)
    assert alone.dtype is torch.float32
    assert error(alone, right) < TOLERANCE


@pytest.mark.usefixtures("products_of_bf16")
def test_far_from_zero_mish_is_0_or_the_number_itself() -> None:
    critics, x = stack(1, 16, 64), torch.zeros(1, 4, 16, device=DEVICE).bfloat16()
    x[0, :, 0] = torch.tensor([-1e4, -30.0, 30.0, 1e4])
    for weight, bias in zip(critics.weights, critics.biases, strict=True):  # a chain of units, one a layer
        weight.data.zero_()
        bias.data.zero_()
        weight.data[0, 0, 0] = 1.0
    values, slopes = kernel.slopes(x, layers_of(critics))
    expected = x[0, :, 0].float().clamp(min=0)
    torch.testing.assert_close(values[0], expected, rtol=TOLERANCE, atol=1e-4)
    torch.testing.assert_close(kernel.values(x, layers_of(critics))[0], expected, rtol=TOLERANCE, atol=1e-4)
    torch.testing.assert_close(slopes[0, :, 0].float(), (expected > 0).float(), rtol=TOLERANCE, atol=1e-4)
    assert not slopes[0, :, 1:].any()


@pytest.mark.usefixtures("products_of_bf16")
def test_shapes_are_known_without_running_them() -> None:
    for x in (draw(1, 40, 24).bfloat16(), draw(2, 40, 24).bfloat16()):
        given = (x, layers_of(stack(2, 24, 64)))
        torch.library.opcheck(kernel.values, given, test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(kernel.slopes, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_of_padded_rows_equals_float64(
    monkeypatch: pytest.MonkeyPatch, shared: bool, compiled: bool
) -> None:
    monkeypatch.setattr(frozen, "kernel", kernel)
    torch._dynamo.reset()
    critics = stack(2, 22, 64)

    def run(x: Tensor) -> Tensor:
        return frozen.values(F.pad(x, (0, 2)), *critics.layers(True))

    x, grad = draw(1 if shared else 2, 40, 22).bfloat16().float().requires_grad_(), draw(2, 40)
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
    assert (out.shape, out.dtype) == ((2, 40, 1), torch.float32)
    (dx,) = torch.autograd.grad(out, x, grad[..., None])
    right, each = exact(x.detach(), critics, grad)
    assert error(out[..., 0].detach(), right) < TOLERANCE
    assert error(dx, each.sum(0, keepdim=True) if shared else each) < 1.5 * TOLERANCE
    with torch.no_grad():
        assert error(run(x)[..., 0], right) < TOLERANCE


class OnCuda(Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_critics_use_it_only_where_they_do_not_learn_in_a_compiled_step_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(x: Tensor, layers: list[Tensor]) -> Any:
            calls.append(f"{name} {len(x)}")
            values = torch.zeros(len(layers[0]), x.shape[1], device=DEVICE)
            return values if name == "values" else (values, x.expand(len(values), -1, -1))

        return staticmethod(call)

    members = {"values": counted("values"), "slopes": counted("slopes")}
    monkeypatch.setattr(frozen, "kernel", type("Counted", (), members))
    x = draw(6, 11) if ON_CUDA else draw(6, 11).as_subclass(OnCuda)

    def runs(
        inputs: int = 11, width: int = 64, layers: int = 3, activation: str = "mish", narrow: bool = True, **how: Any
    ) -> list[str]:
        calls.clear()
        critics = stack(2, inputs, width, layers, activation)
        given = F.pad(x, (0, inputs - 11)).requires_grad_(how.pop("wanted", False))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
            assert critics(given, **how).shape == (2, 6, 1)
        return list(calls)

    assert runs(frozen=True) == []  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert runs(frozen=True) == runs(frozen=True, inputs=128) == ["values 1"]
    assert runs(frozen=True, wanted=True) == ["slopes 1"]
    assert runs() == runs(wanted=True) == []  # they learn
    with torch.no_grad():
        assert runs() == runs(width=256) == ["values 1"]
        assert runs(width=32) == runs(layers=2) == runs(activation="gelu") == runs(narrow=False) == []
        assert runs(inputs=129) == []
        calls.clear()
        with torch.autocast(DEVICE, torch.bfloat16):
            pair = [stack(2, 11, 64), stack(1, 11, 64)]
            assert run_together(pair, [x, x]).shape == (3, 6, 1)
            assert run_together(pair, [x, x + 1]).shape == (3, 6, 1)
        assert calls == ["values 1", "values 3"]  # rows that members share are not copied
    monkeypatch.setattr(frozen, "kernel", None)
    assert runs(frozen=True) == []
