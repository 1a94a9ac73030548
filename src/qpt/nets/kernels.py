"""Where Triton kernels can run."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


def load(module: str) -> Any:
    """The module of kernels with this name, where there is a GPU and Triton; else None."""
    there = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    return importlib.import_module(module) if there else None
