"""Behaviour policies: the small networks that record data sets, in one safetensors file a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
WEIGHTS = ("w1", "b1", "w2", "b2", "w3", "b3")  # stored in half precision
EXACT = ("mean", "inverse_std", "std")  # of the observations, and of the actions' noise


@dataclass
class Actor:
    """Two hidden layers of tanh: mean actions [n, A] of raw observations [n, S]."""

    p: dict[str, Any]
    mean: Float32s  # [S] of the observations
    inverse_std: Float32s  # [S]
    std: Float32s  # [A] of the noise that it learned with

    def __call__(self, observations: Float32s) -> Float32s:
        x = np.minimum(np.maximum((observations - self.mean) * self.inverse_std, -10), 10)
        p = self.p
        result: Float32s = np.tanh(np.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]
        return result

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As it is stored."""
        weights = {name: np.asarray(self.p[name], np.float16) for name in WEIGHTS}
        return {**weights, **{name: np.asarray(getattr(self, name), np.float32) for name in EXACT}}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Actor:
        return cls({name: arrays[name].astype(np.float32) for name in WEIGHTS}, *(arrays[name] for name in EXACT))
