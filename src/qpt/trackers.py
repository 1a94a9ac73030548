"""Optional trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from qpt.errors import QptError, require
from qpt.writing import write_whole

ID = "wandb.id"  # a file in the run folder: the W&B run that a resumed run goes on in


def check_trackers(tensorboard: bool, wandb: str | None) -> None:
    """A package that is missing is named before anything is written."""
    if tensorboard:
        require("tensorboard", "trackers")
        require("torch.utils.tensorboard", "trackers")
    if wandb:
        require("wandb", "trackers")


@contextmanager
def open_trackers(
    folder: Path, tensorboard: bool, wandb: str | None, step: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A function that logs a row of metrics to every tracker that was asked for; the run has come to `step`."""
    writer = run = None
    with ExitStack() as opened:
        if tensorboard:
            # Later rows are those that a killed run wrote after its last checkpoint; they come again. (W&B keeps the
            # first row of a step, which is the same.)
            board = require("torch.utils.tensorboard", "trackers")
            writer = board.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
            opened.enter_context(closing(writer))
        if wandb:
            run = _wandb_run(folder, wandb)
            opened.callback(run.finish)

        def track(step: int, metrics: dict[str, float]) -> None:
            if writer:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)
            if run:
                run.log(metrics, step=step)

        yield track


def _wandb_run(folder: Path, project: str) -> Any:
    """A run of this project: the one that the folder knows, or a new one."""
    wandb, file = require("wandb", "trackers"), folder / ID
    known = file.read_text(encoding="utf-8").strip() if file.exists() else None
    try:
        run = wandb.init(project=project, dir=str(folder), name=folder.name, id=known, resume="allow")
    except wandb.Error as error:
        raise QptError(
            f"Weights & Biases cannot log this run ({error}); run wandb login and add --resume, or leave out --wandb"
        ) from error
    write_whole(file, f"{run.id}\n")
    return run
