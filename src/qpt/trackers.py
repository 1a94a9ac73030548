"""Optional trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qpt.errors import require


@contextmanager
def open_trackers(
    folder: Path, tensorboard: bool, wandb: str | None
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A function that logs a row of metrics to every tracker that was asked for."""
    writer = run = None
    if tensorboard:
        require("tensorboard", "trackers")
        writer = require("torch.utils.tensorboard", "trackers").SummaryWriter(str(folder / "tensorboard"))
    if wandb:
        run = require("wandb", "trackers").init(project=wandb, dir=str(folder), name=folder.name, resume="allow")

    def track(step: int, metrics: dict[str, float]) -> None:
        if writer:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
        if run:
            run.log(metrics, step=step)

    try:
        yield track
    finally:
        if writer:
            writer.close()
        if run:
            run.finish()
