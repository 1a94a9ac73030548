"""Training in a process that is killed at a chosen call."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from helpers import tiny_data
from qpt import checkpoint
from qpt.training import TrainConfig, train, train_seeds

PLACES = {
    "model": (checkpoint, "_save"),
    "training": (checkpoint, "_digest"),
    "manifest": (checkpoint, "_sync"),
    "rename": (Path, "rename"),
}


def _train_and_die(place: str, call: int, config: TrainConfig) -> None:
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)
    (train_seeds if config.seeds else train)(config, tiny_data())


def killed_while_training(place: str, call: int, config: TrainConfig) -> None:
    """Train on the tiny data until the given call of the function at `place`; a run that ends otherwise is an error."""
    # A new process, not a fork: a forked one cannot train once its parent did so on a GPU (autograd has threads there).
    process = multiprocessing.get_context("spawn").Process(target=_train_and_die, args=(place, call, config))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
