"""Every way to run a step computes what eager fp32 does, within a stated tolerance; where a way fails, one warning."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import tiny_data
from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.stepping import Stepper


def benchmark() -> ModuleType:
    """benchmarks/training.py, which holds the check so that it also runs where there is no pytest."""
    path = Path(__file__).parents[1] / "benchmarks" / "training.py"
    sys.path.append(str(path.parent))  # as when it is run as a script
    spec = importlib.util.spec_from_file_location("benchmark_training", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRAINING = benchmark()
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def assert_within(way: str, precision: str, device: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be (captured|compiled).*")
        found = TRAINING.deviations(way, precision == "bf16", torch.device(device))
    for step, got, allowed in zip(TRAINING.CHECKED, found, TRAINING.TOLERANCE[precision], strict=True):
        assert got[0] <= allowed[0], f"loss after {step} steps"
        assert got[1] <= allowed[1], f"weights after {step} steps"
    if precision == "bf16":
        assert found[0][1] > 0  # it was another way


def test_bf16_stays_near_fp32() -> None:
    assert_within("eager", "bf16", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_losses_stay_near_eager_ones(precision: str) -> None:
    assert_within("compiled", precision, "cpu")


@on_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["eager", "captured", "compiled and captured"])
def test_cuda_stays_near_eager(way: str, precision: str) -> None:
    assert_within(way, precision, "cuda")


def test_the_check_notices_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is off by a thousandth in the second run is found."""
    runs = {"n": 0}
    loss = QPT.policy_loss

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        runs["n"] += 1
        original(self, *args, **kwargs)
        if runs["n"] == 2:
            self.method.policy_loss = lambda *given: (lambda x, m: (x * 1.001, m))(*loss(self.method, *given))

    original = TRAINING.Training.__init__
    monkeypatch.setattr(TRAINING.Training, "__init__", made)
    found = TRAINING.deviations("eager", False, torch.device("cpu"), steps=(1, 2))
    assert found[0][0] > TRAINING.TOLERANCE["fp32"][0][0]


# -- falling back ------------------------------------------------------------------------------------------------------


def small_run(**how: Any) -> tuple[QPT, Stepper]:
    config = QPTConfig(batch_size=4, width=8, layers=1, heads=2, context=3, critic_width=8, dropout=0.2)
    data = tiny_data()
    torch.manual_seed(0)
    method = QPT(config, Spec.from_data(data))
    return method, Stepper(method, method.make_sampler(data, torch.device("cpu"), 0), **how)


def after(steps: int, method: QPT, stepper: Stepper) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        stepper.step()
    return {k: v.clone() for k, v in method.state_dict().items()}


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    return after(6, *small_run(fast=False, compile=False))


def assert_same_with_one_warning(method: QPT, stepper: Stepper, wanted: dict[str, torch.Tensor], text: str) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = after(6, method, stepper)
    assert [str(w.message).count(text) for w in given if issubclass(w.category, UserWarning)] == [1]
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_a_step_that_cannot_be_captured_runs_plainly(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, torch.Tensor]
) -> None:
    """A device that refuses capture, made up: everything of torch.cuda that a step uses."""
    stream = SimpleNamespace(wait_stream=lambda _: None)

    @contextmanager
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(register_generator_state=lambda _: None))
    monkeypatch.setattr(torch.cuda, "graph", refused)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: generator())
    method, stepper = small_run(fast=True, compile=False)
    assert_same_with_one_warning(method, stepper, wanted, "cannot be captured as a CUDA graph (operation not permitted")


def test_losses_that_cannot_be_compiled_run_plainly(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, torch.Tensor]
) -> None:
    def broken(_: Any, **__: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no working C++ compiler\nlong explanation")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    method, stepper = small_run(fast=False, compile=True)
    assert len(method.compilable) > 1  # and yet one warning
    assert_same_with_one_warning(method, stepper, wanted, "cannot be compiled (no working C++ compiler)")
