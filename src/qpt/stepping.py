"""How a training step is run: plainly, or on CUDA compiled and captured as a graph, so that the host only says "go"."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from qpt.algorithms.base import Algorithm
from qpt.data.sampling import Sampler


class Stepper:
    """Calls `algorithm.update(sampler.sample())`; on CUDA the same as one captured graph, after a few plain steps.

    The captured step computes what the plain one does: every draw comes from generators that the graph knows, every scalar that
    changes (learning rate, step count) lives on the device. Where capture is not possible, one warning is given and steps stay plain.
    """

    def __init__(self, algorithm: Algorithm, sampler: Sampler, *, fast: bool, compile: bool) -> None:
        self.algorithm, self.sampler = algorithm, sampler
        self._capture, self._warm, self._graph = fast, 3, None
        self._metrics: dict[str, Tensor] = {}
        if compile:
            for name in algorithm.compilable:
                setattr(algorithm, name, torch.compile(getattr(algorithm, name)))

    def step(self) -> dict[str, Tensor]:
        if self._graph is not None:
            self._graph.replay()
            return self._metrics
        if not self._capture or self._warm > 0:
            self._warm -= 1
            return self._plain()
        return self._record()

    def _plain(self) -> dict[str, Tensor]:
        if not self._capture:
            return self.algorithm.update(self.sampler.sample())
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            metrics = self.algorithm.update(self.sampler.sample())
        torch.cuda.current_stream().wait_stream(stream)
        return metrics

    def _record(self) -> dict[str, Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.sampler.generator)
        before = self.sampler.generator.get_state()
        try:
            with torch.cuda.graph(graph):
                self._metrics = self.algorithm.update(self.sampler.sample())
        except Exception as error:  # whatever stops a capture, the plain step still works
            warnings.warn(
                f"the training step cannot be captured as a CUDA graph ({error}); steps run one kernel at a time",
                stacklevel=2,
            )
            self._capture = False
            torch.cuda.synchronize()
            self.sampler.generator = torch.Generator(before.device if before.is_cuda else "cuda")
            self.sampler.generator.set_state(before)
            return self._plain()
        self._graph: Any = graph
        graph.replay()
        return self._metrics
