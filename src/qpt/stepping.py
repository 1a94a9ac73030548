"""How a training step is run: plainly, or on CUDA compiled and captured as a graph, so that the host only says "go"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qpt.algorithms.base import Algorithm
from qpt.data.sampling import Sampler


class Stepper:
    """Calls `algorithm.update(sampler.sample())`; on CUDA the same as one captured graph, after a few plain steps.

    The captured step computes what the plain one does: every draw comes from generators that the graph knows, every
    scalar that changes (learning rate, step count) lives on the device. Where capture is not possible, one warning is
    given and steps stay plain.
    """

    def __init__(
        self, algorithm: Algorithm, sampler: Sampler, *, fast: bool, compile: bool, stream: Any = None
    ) -> None:
        """`stream`: of a run among others, for its steps and its graph alone."""
        self.algorithm, self.sampler = algorithm, sampler
        self._stream: Any = stream or (torch.cuda.Stream() if fast else None)  # type: ignore[no-untyped-call]
        self._capture, self._warm, self._warned = fast, 3, False
        self._graph: Any = None
        self._phase: int | None = None
        self._metrics: dict[str, Tensor] = {}
        if compile:
            for name in algorithm.compilable:
                setattr(algorithm, name, self._compiled(algorithm, name))
            for name in getattr(sampler, "compilable", ()) if fast else ():  # on a CPU it is 1 % of a step
                setattr(sampler, name, self._compiled(sampler, name))

    def _compiled(self, owner: Any, name: str) -> Callable[..., Any]:
        """The compiled form of a method, or the method itself if it proves impossible to compile."""
        plain = getattr(owner, name)
        # On CUDA many small kernels are joined: casts of weights, sums of gradients.
        compiled: Any = torch.compile(plain, options={"combo_kernels": True} if self._capture else None)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # whatever stops the compiler, the plain method still works
                if not self._warned:
                    reason = str(error).strip().splitlines()[0]
                    warnings.warn(f"the step cannot be compiled ({reason}); it runs as it is", stacklevel=2)
                self._warned = True
                setattr(owner, name, plain)
                return plain(*args, **kwargs)

        return call

    def step(self) -> dict[str, Tensor]:
        phase = getattr(self.algorithm, "phase", None)
        if phase != self._phase:  # a method of several stages: from here on its step is another one
            self._phase, self._graph, self._warm = phase, None, 3
        if self._graph is not None:
            self._graph.replay()
            if hasattr(self.algorithm, "host_step"):  # a replay runs no Python, so the host's own count is moved here
                self.algorithm.host_step += 1
            return self._metrics
        if not self._capture or self._warm > 0:
            self._warm -= 1
            return self._plain()
        return self._record()

    def _plain(self) -> dict[str, Tensor]:
        if not self._capture:
            return self.algorithm.update(self.sampler.sample())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            metrics = self.algorithm.update(self.sampler.sample())
        torch.cuda.current_stream().wait_stream(self._stream)
        return metrics

    def _record(self) -> dict[str, Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.sampler.generator)
        before, host_step = self.sampler.generator.get_state(), getattr(self.algorithm, "host_step", None)
        try:
            with torch.cuda.graph(graph, stream=self._stream):  # a work space of its own: graphs may run side by side
                self._metrics = self.algorithm.update(self.sampler.sample())
        except Exception as error:  # whatever stops a capture, the plain step still works
            warnings.warn(
                f"the training step cannot be captured as a CUDA graph ({error}); steps run one kernel at a time",
                stacklevel=2,
            )
            self._capture = False
            if host_step is not None:
                self.algorithm.host_step = host_step  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            self.sampler.generator = torch.Generator(before.device if before.is_cuda else "cuda")
            self.sampler.generator.set_state(before)
            return self._plain()
        self._graph = graph
        graph.replay()
        return self._metrics
