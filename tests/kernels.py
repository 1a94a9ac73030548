"""Triton kernels in tests: on a GPU as they are, without one by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

ON_CUDA = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_CUDA else "cpu"


def load(name: str) -> Any:
    """The module of a kernel; skips the tests where Triton is missing."""
    if not ON_CUDA:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton was imported for a GPU", allow_module_level=True)
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are declared, so before they are imported
        pytest.importorskip("triton.runtime.interpreter")
    return pytest.importorskip(name)


@pytest.fixture
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bf16 as if they were integers: widen them first."""
    if ON_CUDA:
        return
    from triton.runtime import interpreter

    dot, bf16 = interpreter.InterpreterBuilder.create_dot, interpreter.tl.bfloat16

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != bf16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, interpreter.tl.float32)

    def wide_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)
