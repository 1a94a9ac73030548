"""`qpt export`: a policy as one ONNX graph, with a side file and a model card."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from qpt.cli.run import run


def export_command(
    checkpoint: Path,
    out: Path,
    which: Literal["last", "best"] = "last",
    candidates: int | None = None,
    episodes: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Write a policy as one ONNX graph that needs no PyTorch, after a check that it decides as PyTorch does.

    Example: qpt export --checkpoint runs/ball --out policy.onnx

    Beside policy.onnx come policy.json, which a program that runs the graph reads, and policy.md, the model card.

    Args:
        checkpoint: A run folder or a checkpoint folder.
        out: The graph, a file that ends in .onnx.
        which: The last checkpoint of a run, or the best of its evaluations.
        candidates: Candidates of a decision; by default as in training. Fewer are faster.
        episodes: A table that `qpt evaluate --out` wrote, for the model card; by default those of the run folder.
        overwrite: Replace an earlier export.
    """
    room: Any = importlib.import_module("qpt.export")
    settings = {} if candidates is None else {"candidates": candidates}
    table = None if episodes is None else importlib.import_module("qpt.episodes").Episodes.load(episodes)
    done = room.export_policy(checkpoint, out, which=which, episodes=table, overwrite=overwrite, **settings)
    print(done.parity)
    for file in (done.graph, done.side, done.card):
        print(f"wrote {file}")
    return 0


def main(args: Sequence[str]) -> int:
    return run(export_command, args, "export")
