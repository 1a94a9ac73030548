"""Work of a training step that nothing waits for yet: on CUDA on a stream of its own, so that the two overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Beside:
    """A captured step keeps both branches. Gradients of what was computed here flow on the same stream."""

    def __init__(self) -> None:
        self._stream: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Beside:
        return Beside()  # a stream cannot be copied, nor should a copy share it

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        """Begins when all that was asked for before is done; what is asked for after it need not wait."""
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """From here on its results may be used."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
