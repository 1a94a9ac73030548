"""`qpt judge`: what would a policy earn and cost, told from logged episodes alone."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qpt import plotting
from qpt.cli.run import run
from qpt.data import load_dataset
from qpt.errors import QptError
from qpt.writing import check_file


def judge_command(
    checkpoint: Path,
    data: str,
    limits: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="X [X ...]")] = None,
    confidence: float = 0.95,
    members: int = 9,
    steps: int = 3000,
    seed: int = 0,
    device: str = "cpu",
    which: Literal["last", "best"] = "last",
    out: Path | None = None,
    picture: Path | None = None,
) -> int:
    """Estimate a policy's return and cost at each limit from held-out logs, without a simulator (fitted Q evaluation).

    Example: qpt judge --checkpoint runs/ball --data held_out.hdf5 --limits 10 20 40 --out judge.json

    Args:
        checkpoint: A run folder or a checkpoint folder.
        data: Logged episodes that the policy was not trained on: a file, or the name of a task.
        limits: Cost limits of an episode; by default 10 20 40, or the one that the policy was trained for.
        confidence: Of the intervals.
        members: Fits of the ensemble, each on a resample of the episodes.
        steps: Gradient steps of the networks whose features are used.
        seed: Fixes the resamples, the networks and the policy's noise.
        device: Where to compute: cpu or cuda.
        which: The last or the best checkpoint of a run folder.
        out: Write the judgement to this .json or .csv file.
        picture: Draw estimates, intervals and the profile of unlike actions.
    """
    check_files(out, picture)
    policy = importlib.import_module("qpt.policy").load_policy(checkpoint, which=which, device=device)
    if "OMP_NUM_THREADS" not in os.environ:  # small networks on the CPU gain nothing from more threads
        importlib.import_module("torch").set_num_threads(1)
    trained = policy.trained_limit if policy.limit_mode == "trained" else None
    wanted = limits or ((10.0, 20.0, 40.0) if trained is None else (trained,))
    ope = importlib.import_module("qpt.ope")
    logged = load_dataset(data)
    with bar("reading") as show:
        found = ope.judge(
            policy, logged, wanted, confidence=confidence, seed=seed, show=show,
            members=members, steps=steps, device=device,
        )  # fmt: skip
    console = Console() if sys.stdout.isatty() else Console(width=120)  # a pipe has no width of its own
    console.print(table(found))
    for part in found.limits:
        if part.warning:
            console.print(f"Warning, limit {part.cost_limit:g}: {part.warning}; the estimate may be far off.")
    fingerprint = read_fingerprint(policy.checkpoint)
    if fingerprint == logged.fingerprint:
        console.print("Warning: the policy was trained on these very episodes; judge it on others.")
    if out is not None:
        found.save(out)
    if picture is not None:
        plotting.save(draw(found), picture)
    for path in (out, picture):
        if path is not None:
            print(f"wrote {path}")
    return 0


def read_fingerprint(checkpoint: str) -> str | None:
    """Of the data that a checkpoint was trained on."""
    manifest = importlib.import_module("qpt.checkpoint").read_manifest(Path(checkpoint))
    value = manifest.get("data", {}).get("fingerprint")
    return None if value is None else str(value)


def table(found: Any) -> Table:
    """One line a limit."""
    grid = Table(
        title=f"{found.algorithm} · judged on {found.episodes} logged episodes, {found.confidence:.0%} intervals",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("limit", "return", "", "cost", "", "unlike actions"):
        grid.add_column(name, justify="right")
    grid.add_column("")
    for part in found.limits:
        grid.add_row(
            f"{part.cost_limit:g}",
            f"{part.expected_return:.1f}",
            "\\[{:.1f}, {:.1f}]".format(*part.return_interval),
            f"{part.expected_cost:.1f}",
            "\\[{:.1f}, {:.1f}]".format(*part.cost_interval),
            f"{part.outside:.0%}",
            part.verdict(),
            style={"safe": "bold", "unsafe": "dim"}.get(part.verdict(), ""),
        )
    return grid


def draw(found: Any) -> Any:
    """Estimates with intervals in the (cost, return) plane, and the share of unlike actions over an episode."""
    figure, first = plotting.new_figure(9.6, 4.4)
    first.remove()
    plane, profile = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    colours = (plotting.EPISODE, plotting.FRONTIER, "#228833", "#aa3377", "#222222")
    for number, part in enumerate(found.limits):
        colour = colours[number % len(colours)]
        x, y = part.expected_cost, part.expected_return
        reach = [[abs(x - e)] for e in part.cost_interval], [[abs(y - e)] for e in part.return_interval]
        label = f"limit {part.cost_limit:g}"
        plane.errorbar([x], [y], xerr=reach[0], yerr=reach[1], fmt="o", color=colour, capsize=3, label=label)
        plane.axvline(part.cost_limit, color=colour, linewidth=1, linestyle=(0, (4, 2)))
        middle = [(i + 0.5) / len(part.profile) for i in range(len(part.profile))]
        profile.plot(middle, [100 * p for p in part.profile], marker="o", color=colour)
    plane.set_xlabel("expected episode cost (dashed: the limits)")
    plane.set_ylabel("expected episode return")
    profile.set_xlabel("time in the episode, as a share of its length")
    profile.set_ylabel("actions unlike the logged ones, %")
    profile.set_ylim(0, 100)
    for axes in (plane, profile):
        axes.grid(color=plotting.GRID, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    title = f"{found.algorithm}, judged on {found.episodes} logged episodes ({found.confidence:.0%} intervals)"
    figure.suptitle(title, x=0.015, ha="left", fontsize=12, fontweight="bold", color=plotting.INK, parse_math=False)
    figure.legend(loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    return figure


@contextmanager
def bar(text: str) -> Iterator[Any]:
    """Progress on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        line = progress.add_task(text, total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(line, description=what, completed=done, total=total)

        yield show


def check_files(out: Path | None, picture: Path | None, endings: tuple[str, ...] = (".json", ".csv")) -> None:
    """What cannot be done is said before the long part."""
    if out is not None and out.suffix not in endings:
        raise QptError(f"results are saved as {' or '.join(endings)}, not as {out.name!r}; change the ending of --out")
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise QptError(f"a picture is saved as .png, .svg or .pdf, not as {picture.name!r}; change its ending")
    for path in filter(None, (out, picture)):
        check_file(path)


def main(args: Sequence[str]) -> int:
    return run(judge_command, args, "judge")
