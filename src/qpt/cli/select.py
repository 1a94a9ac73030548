"""`qpt select`: which checkpoint to deploy at a limit, told from logged episodes alone."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qpt.cli.judge import bar, check_files, read_fingerprint
from qpt.cli.run import run
from qpt.data import load_dataset
from qpt.errors import QptError
from qpt.writing import write_json

NONE_QUALIFIES = 3  # exit code; 1 and 2 are errors, as everywhere


def select_command(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    limit: float,
    data: str,
    members: int = 9,
    steps: int = 3000,
    seed: int = 0,
    device: str = "cpu",
    out: Path | None = None,
    oracle: Path | None = None,
) -> int:
    """Rank all checkpoints of runs by expected return among those whose upper bound on cost meets the limit.

    Example: qpt select runs/ball runs/cdt --limit 10 --data held_out.hdf5 --out selection.json

    Exits with 0 when a checkpoint qualifies and with 3 when none does; then the one with the lowest bound is first.

    Args:
        runs: Run folders (all their checkpoints are judged) or checkpoint folders.
        limit: The cost limit of an episode.
        data: Logged episodes that the policies were not trained on: a file, or the name of a task.
        members: Fits of the ensemble, each on a resample of the episodes.
        steps: Gradient steps of the networks whose features are used.
        seed: Fixes the resamples, the networks and the policies' noise.
        device: Where to compute: cpu or cuda.
        out: Write the ranking to this .json file.
        oracle: A table of `qpt evaluate --out` with every candidate; reports what the choice costs against the best.
    """
    if not runs:
        raise QptError("name at least one run folder or checkpoint")
    if not (math.isfinite(limit) and limit >= 0):
        raise QptError(f"a cost limit is a number of at least 0, not {limit:g}")
    check_files(out, None, (".json",))
    ope = importlib.import_module("qpt.ope")
    selection_room = importlib.import_module("qpt.ope.select")
    if "OMP_NUM_THREADS" not in os.environ:  # small networks on the CPU gain nothing from more threads
        importlib.import_module("torch").set_num_threads(1)
    options = ope.candidates(runs)  # before the long part, should one not be found
    episodes = None if oracle is None else importlib.import_module("qpt.episodes").Episodes.load(oracle)
    if episodes is not None:
        simulated = {os.path.realpath(str(name)) for name in set(episodes.checkpoint.tolist())}
        for option in options:
            if os.path.realpath(option.checkpoint) not in simulated:
                raise QptError(f"{oracle} holds no episodes of {option.checkpoint}; evaluate every candidate")
    logged = load_dataset(data)
    with bar("reading") as show:
        found = ope.select(runs, logged, limit, seed=seed, device=device, show=show, members=members, steps=steps)
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width of its own
    console.print(table(found))
    if any(read_fingerprint(option.checkpoint) == logged.fingerprint for option in options):
        console.print("Warning: some of these were trained on these very episodes; judge them on others.")
    best = found.chosen.candidate.checkpoint
    if found.qualified:
        print(f"Chosen: {best}")  # not by rich, which takes a [name] in a path for a style
    else:
        print(f"None qualifies: no upper bound on cost meets the limit {limit:g}; the lowest is that of {best}")
    content = found.to_json()
    if out is not None:  # before the comparison, should that fail
        write_json(out, content)
    if episodes is not None:
        report = ope.oracle_report(found, selection_room.realised_values(episodes, found))
        content["oracle"] = vars(report)
        print(sentence(report))
    if out is not None:
        write_json(out, content)
        print(f"wrote {out}")
    return 0 if found.qualified else NONE_QUALIFIES


def sentence(report: Any) -> str:
    return (
        f"In the simulator the choice returns {report.chosen_return:.1f} at cost {report.chosen_cost:.1f}; "
        f"the best choice, {report.oracle}, returns {report.oracle_return:.1f} at cost {report.oracle_cost:.1f}: "
        f"a regret of {report.regret:.1f}. The last checkpoints return {report.last_return:.1f} at cost "
        f"{report.last_cost:.1f} on average (regret {report.last_regret:.1f}); {report.last_safe:.0%} keep the limit."
    )


def table(found: Any) -> Table:
    """One line a candidate, best first."""
    grid = Table(title=f"Candidates for a cost limit of {found.cost_limit:g}", box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("checkpoint", overflow="fold")
    for name in ("method", "given limit", "return", "cost", "upper bound", "unlike actions", ""):
        grid.add_column(name, justify="left" if name in ("method", "") else "right")
    for ranked in found.ranking:
        part = ranked.judgement.limits[0]
        grid.add_row(
            Text(ranked.candidate.checkpoint),
            ranked.candidate.algorithm,
            f"{ranked.given_limit:g}",
            f"{part.expected_return:.1f}",
            f"{part.expected_cost:.1f}",
            f"{ranked.cost_bound:.1f}",
            f"{part.outside:.0%}",
            "qualifies" if ranked.qualifies else "",
            style="bold" if ranked is found.ranking[0] and found.qualified else "",
        )
    return grid


def main(args: Sequence[str]) -> int:
    return run(select_command, args, "select")
