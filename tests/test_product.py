"""Products that end in an activation, and what is made of them, against plain PyTorch in float64.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import DEVICE, load, products_of_bf16  # noqa: F401
from qpt.nets import mlp, perceptron
from qpt.nets.mlp import StackedMLP
from qpt.nets.transformer import Block

kernel = load("qpt.nets.product_kernel")
pytestmark = pytest.mark.usefixtures("products_of_bf16")
ON_CUDA = DEVICE == "cuda"
TOLERANCE = 0.005 if ON_CUDA else 0.015  # the interpreter cuts numbers off where the GPU rounds them to bf16
ACTIVATIONS = {"mish": F.mish, "gelu": F.gelu}
SHAPES = [(2, 64, 32, 48), (3, 131, 80, 256), (1, 77, 128, 512), (2, 3, 24, 144), (1, 9, 272, 16)]
NAMES = ("members", "rows", "inner", "width")


@pytest.fixture(params=[True, False])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weight held by few programs, so that each takes several tiles, and with a program for every tile."""
    for launch in (kernel.AHEAD, kernel.BACK, kernel.VALUE):
        monkeypatch.setitem(launch, "HOLDS", request.param)
    monkeypatch.setattr(kernel, "_device", lambda: (4, True))


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(DEVICE)


def narrow(*shape: int, scale: float = 1.0) -> Tensor:
    return draw(*shape, scale=scale).bfloat16()


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


def passed(kind: str, z: Tensor, grad: Tensor) -> Tensor:
    """By the gradient of act(z) that of z, in float64."""
    wide = z.double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[kind](wide), wide, grad)
    return slope


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["mish", "gelu"])
@pytest.mark.parametrize(NAMES, SHAPES)
def test_a_product_and_its_activation_equal_float64(
    members: int, rows: int, inner: int, width: int, kind: str, turned: bool
) -> None:
    bias, scale = draw(members, width), 2 * inner**-0.5
    w = narrow(members, width, inner, scale=scale).mT if turned else narrow(members, inner, width, scale=scale)
    for x in (narrow(members, rows, inner), narrow(1, rows, inner)):  # each member's own, and shared
        z, active = kernel.ahead(x, w, bias, kind)
        right = x.double() @ w.double() + bias.double()[:, None]
        assert z.dtype is active.dtype is torch.bfloat16
        assert z.shape == active.shape == right.shape
        assert error(z, right) < TOLERANCE
        assert error(active, ACTIVATIONS[kind](right)) < TOLERANCE


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("kind", ["mish", "gelu"])
@pytest.mark.parametrize(NAMES, SHAPES)
def test_the_way_back_equals_float64(members: int, rows: int, inner: int, width: int, kind: str, sums: bool) -> None:
    grad, z = narrow(members, rows, inner), narrow(members, rows, width, scale=2.0)
    for w in (narrow(members, width, inner), narrow(members, inner, width).mT):
        right = passed(kind, z, grad.double() @ w.double().mT)
        dz, parts = kernel.back(grad, w, z, kind, sums)
        assert (dz.dtype, parts.dtype) == (torch.bfloat16, torch.float32)
        assert error(dz, right) < TOLERANCE
        assert error(parts.sum(1), right.sum(1)) < 1e-4 if sums else parts.shape == (members, 0, width)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(NAMES, [(2, 64, 32, 48), (3, 131, 80, 256), (2, 3, 24, 144)])
def test_values_and_their_way_back_equal_float64(
    monkeypatch: pytest.MonkeyPatch, members: int, rows: int, inner: int, width: int
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 4)  # so few that each takes several tiles
    w, bias, last = narrow(members, inner, width, scale=2 * inner**-0.5), draw(members, width), draw(members, width)
    for x in (narrow(members, rows, inner), narrow(1, rows, inner)):
        z, out = kernel.value(x, w, bias, last)
        right = x.double() @ w.double() + bias.double()[:, None]
        assert (z.dtype, out.dtype) == (torch.bfloat16, torch.float32)
        assert error(z, right) < TOLERANCE
        assert error(out, (F.mish(right) * last.double()[:, None]).sum(-1)) < 1e-4
    grad = draw(members, rows)
    wide = [t.double().requires_grad_() for t in (z, last)]
    slopes = torch.autograd.grad((F.mish(wide[0]) * wide[1][:, None]).sum(-1), wide, grad.double())
    for sums in (True, False):
        dz, parts = kernel.value_back(z, last, grad, "mish", sums)
        assert error(dz, slopes[0]) < TOLERANCE
        if not sums:
            assert parts.shape == (members, 0, 2, width)
            continue
        assert error(parts.sum(1)[:, 0], slopes[0].sum(1)) < 1e-4
        assert error(parts.sum(1)[:, 1], slopes[1]) < 1e-4


@pytest.mark.parametrize("kind", ["mish", "gelu"])
def test_far_from_zero_the_slopes_are_0_and_1(kind: str) -> None:
    far = torch.tensor([-1e4, -90.0, 90.0, 1e4], device=DEVICE).repeat(4)[None]
    x, one = torch.zeros(1, 5, 16, device=DEVICE).bfloat16(), torch.eye(16, device=DEVICE).bfloat16()[None]
    z, active = kernel.ahead(x, one, far, kind)
    dz, parts = kernel.back(torch.ones_like(x), one, z, kind)
    right = far[:, None].expand(1, 5, 16)
    expected = (right, right.clamp(min=0), (right > 0).float(), 5.0 * (far > 0))
    for got, wanted in zip((z, active, dz, parts.sum(1)), expected, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=TOLERANCE, atol=1e-6)


def test_shapes_are_known_without_running_them() -> None:
    x, w, bias, z = narrow(1, 77, 80), narrow(2, 80, 48), draw(2, 48), narrow(2, 77, 48)
    for op, given in [
        (kernel.ahead, (x, w, bias, "gelu")),
        (kernel.back, (narrow(2, 77, 80), w.mT, z, "mish", True)),
        (kernel.back, (narrow(2, 77, 80), w.mT, z, "mish", False)),
        (kernel.value, (x, w, bias, bias)),
        (kernel.value_back, (z, bias, draw(2, 77))),
        (kernel.value_back, (z, bias, draw(2, 77), "mish", False)),
    ]:
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))


def maybe_compiled(call: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager") if compiled else call


def values(x: Tensor, *layers: Tensor) -> Tensor:
    out: Tensor = mlp._Values.apply(x, layers[0].requires_grad, *layers)  # type: ignore[no-untyped-call]
    return out


def plain(x: Tensor, *layers: Tensor) -> Tensor:
    half = len(layers) // 2
    for i, (weight, bias) in enumerate(zip(layers[:half], layers[half:], strict=True)):
        x = x @ weight + bias
        x = F.mish(x) if i < half - 1 else x
    return x


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("sizes", "rows", "own"), [((24, 48, 32, 16, 1), 77, 1), ((16, 32, 1), 512, 2)])
def test_a_stack_and_its_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], rows: int, own: int, learned: bool, compiled: bool
) -> None:
    monkeypatch.setattr(mlp, "kernel", kernel)
    weights = [draw(2, a, b, scale=1.5 * a**-0.5) for a, b in itertools.pairwise(sizes)]
    biases = [draw(2, 1, b) for b in sizes[1:]]
    x = draw(own, rows, sizes[0])  # for every member its own, or one that they share
    leaves = [x.clone().requires_grad_(), *(t.clone().requires_grad_(learned) for t in (*weights, *biases))]
    out = maybe_compiled(values, compiled)(*leaves)
    grad, asked = draw(*out.shape), [t for t in leaves if t.requires_grad]
    found = [out.detach(), *torch.autograd.grad(out, asked, grad)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = plain(*wide)
    expected = [right.detach(), *torch.autograd.grad(right, wide[: len(asked)], grad.double())]
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape
        assert got.dtype is torch.float32
        assert error(got, wanted) < 2 * TOLERANCE  # of several layers


def test_what_is_given_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "kernel", kernel)
    layers = [draw(2, 16, 32), draw(2, 32, 1), draw(2, 1, 32), draw(2, 1, 1)]
    leaves = [t.requires_grad_() for t in layers]
    out = maybe_compiled(values, True)(draw(1, 64, 16), *leaves)
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_perceptron_and_its_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(perceptron, "product", kernel)

    def run(*given: Tensor) -> Tensor:
        out: Tensor = perceptron._Perceptron.apply(*given)  # type: ignore[no-untyped-call]
        return out

    x, w1, w2 = narrow(3, 43, 32), draw(128, 32, scale=0.3), draw(32, 128, scale=0.1)
    leaves = [t.clone().requires_grad_() for t in (x, w1, draw(128), w2, draw(32))]
    out = maybe_compiled(run, compiled)(*leaves)
    grad = narrow(3, 43, 32)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 4]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = F.linear(F.gelu(F.linear(*wide[:3])), *wide[3:])
    for got, wanted in zip(found, [right.detach(), *torch.autograd.grad(right, wide, grad.double())], strict=True):
        assert got.shape == wanted.shape
        assert error(got, wanted) < TOLERANCE


@pytest.mark.parametrize("rows", [512, 1024, 520])
def test_a_product_by_pieces_is_the_whole_one(rows: int) -> None:
    x, dz = draw(3, rows, 16).double(), draw(3, rows, 32).double()
    torch.testing.assert_close(mlp._outer(x, dz).double(), x.mT @ dz, rtol=1e-5, atol=1e-5)
    shared = x[:1].expand(3, -1, -1)  # as the first layer has it
    torch.testing.assert_close(mlp._outer(shared, dz).double(), shared.mT @ dz, rtol=1e-5, atol=1e-5)


class OnCuda(Tensor):
    is_cuda = True  # type: ignore[assignment]


def as_on_cuda(x: Tensor) -> Tensor:
    return x if ON_CUDA else x.as_subclass(OnCuda)


def test_critics_use_them_only_with_gradients_in_a_compiled_step_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    class Counted:
        @staticmethod
        def apply(x: Tensor, learned: bool, *layers: Tensor) -> Tensor:
            calls.append(learned)
            return plain(x, *layers)

    monkeypatch.setattr(mlp, "kernel", kernel)
    monkeypatch.setattr(mlp, "_Values", Counted)
    given = as_on_cuda(draw(6, 11))

    def runs(
        narrow: bool = True, activation: str = "mish", sizes: Sequence[int] = (32, 48), outputs: int = 1, **how: Any
    ) -> list[bool]:
        calls.clear()
        critics = StackedMLP(2, [11, *sizes, outputs], activation).to(DEVICE)
        x = how.pop("x", given)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
            assert critics(x, **how).shape == (2, 6, outputs)
        return list(calls)

    assert runs() == []  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert runs() == runs(sizes=(512, 256)) == [True]
    assert runs(frozen=True, x=as_on_cuda(draw(6, 11)).requires_grad_()) == [False]
    assert runs(frozen=True) == []  # no gradient at all
    assert runs(sizes=(40, 48)) == runs(sizes=(32, 272)) == runs(sizes=()) == runs(outputs=2) == []
    assert runs(narrow=False) == runs(activation="gelu") == []
    with torch.no_grad():
        assert runs() == []
    monkeypatch.setattr(mlp, "kernel", None)
    assert runs() == []


def test_a_block_uses_them_only_where_it_learns_in_a_compiled_step_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted:
        @staticmethod
        def apply(x: Tensor, *layers: Tensor) -> Tensor:
            calls.append(len(layers))
            return x

    monkeypatch.setattr(perceptron, "product", kernel)
    monkeypatch.setattr(perceptron, "_Perceptron", Counted)
    x = as_on_cuda(narrow(6, 8, 16))

    def runs(x: Tensor = x, narrow: bool = True, **how: Any) -> int:
        calls.clear()
        block = Block(x.shape[-1], 2, 0.3, 0.0).to(DEVICE).requires_grad_(how.get("learned", True))
        block.norm2 = nn.Identity()  # type: ignore[assignment]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
            assert perceptron.mix(x, block.norm2, block.mlp).shape == x.shape
        return len(calls)

    assert runs() == 0  # not compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert runs() == 1
    assert runs(learned=False) == runs(x.float()) == runs(x[..., :8]) == 0
    with torch.no_grad():
        assert runs() == 0
    monkeypatch.setattr(perceptron, "product", None)
    assert runs() == 0
