"""Several runs that share a process take turns, and each computes what it would alone."""

from __future__ import annotations

from typing import Any

import torch


class Turn:
    """`with turn:` torch's default generators and current stream are this run's own.

    Made when the run is ready for its first step, it goes on from where the generators are then. On CUDA each run has a
    stream, so that steps of several overlap. Its generator is put in place by reference: a step captured within a turn
    goes on drawing from it when it is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._noise = torch.get_rng_state()
        self.stream: Any = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._default = torch.cuda.default_generators[index]
            self._cuda_noise = self._default.clone_state()
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._noise)
        if self.stream is not None:
            self._outside_cuda = self._default.graphsafe_get_state()
            self._default.graphsafe_set_state(self._cuda_noise)
            self._context = torch.cuda.stream(self.stream)
            self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *reason: Any) -> None:
        if self.stream is not None:
            self._context.__exit__(*reason)
            self._default.graphsafe_set_state(self._outside_cuda)
        self._noise = torch.get_rng_state()
        torch.set_rng_state(self._outside)
