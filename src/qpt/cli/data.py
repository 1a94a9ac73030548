"""`qpt data`: look at data sets, convert, split, check, download and augment them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qpt import plotting
from qpt.cli.run import Command, run_group
from qpt.data import Trajectories, find, load_dataset, write
from qpt.data.checks import NOTICED, noticed
from qpt.data.files import check_ending, write_all
from qpt.data.paths import expanded
from qpt.data.validation import examine
from qpt.errors import QptError
from qpt.tasks import all_tasks

Source = tyro.conf.Positional[str]


def info(
    source: Source,
    limits: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="X [X ...]")] = None,
    out: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    cost_key: str | None = None,
    action_bound: float = 1.0,
) -> None:
    """Show what a data set holds: episodes, returns, costs, what each cost limit allows; and draw it.

    Example: qpt data info embedded:ballcircle --limits 10 20 40 --out ballcircle.png

    Args:
        source: a file (HDF5, npz, Minari folder), the name of a task, minari:ID, or embedded:ballcircle.
        limits: cost limits to look at (the task's own by default).
        out: write the picture here: every episode by cost and return, the reward frontier, the limits.
        as_json: print the numbers as JSON instead of a table.
        cost_key: the name of the costs in the file, if it is not "costs" (Minari: "cost" in infos).
        action_bound: the largest magnitude that an action may have.
    """
    trajectories = load_dataset(source, cost_key=cost_key, action_bound=action_bound)
    chosen = _limits(limits, source)
    facts = trajectories.statistics(chosen)
    notes = {k: trajectories.info[k] for k in ("note", *NOTICED) if k in trajectories.info}
    if out is not None:
        name = Path(source).name
        title = f"{name}: {len(trajectories):,} episodes, {trajectories.steps:,} steps"
        plotting.save(plotting.cost_return_plane(trajectories, chosen, title), out)
    if as_json:
        print(json.dumps({"source": source, **facts, **notes, **({"picture": str(out)} if out else {})}, indent=2))
        return
    _show(trajectories, source, facts)
    if out is not None:
        print(f"picture: {out}")


def convert(
    source: Source,
    target: tyro.conf.Positional[Path],
    compact: bool = False,
    cost_key: str | None = None,
    action_bound: float = 1.0,
) -> None:
    """Read any data set and write it in DSRL's layout (HDF5), or as npz if the name ends so.

    Example: qpt data convert minari:mujoco/safe-hopper-v0 hopper.hdf5 --compact

    Args:
        source: a file (HDF5, npz, Minari folder), the name of a task, minari:ID, or embedded:ballcircle.
        target: the file to write; one that exists is replaced as a whole or not at all.
        compact: store one final observation an episode instead of next_observations (half the size; DSRL's own loader
            does not read it).
        cost_key: the name of the costs in the source, if it is not "costs" (Minari: "cost" in infos).
        action_bound: the largest magnitude that an action may have.
    """
    trajectories = load_dataset(source, cost_key=cost_key, action_bound=action_bound)
    path = write(trajectories, target, compact=compact)
    warn(source, noticed(trajectories.info))
    size = path.stat().st_size / 1e6
    print(f"{target}: {len(trajectories):,} episodes, {trajectories.steps:,} steps, {size:.1f} MB")


def split(
    source: Source,
    target: tyro.conf.Positional[Path],
    rest: tyro.conf.Positional[Path],
    share: float = 0.1,
    seed: int = 0,
    compact: bool = False,
    cost_key: str | None = None,
    action_bound: float = 1.0,
) -> None:
    """Put a random share of the episodes into another file, to judge by what was not learned from.

    Example: qpt data split ball.hdf5 train.hdf5 rest.hdf5 --share 0.1

    Args:
        source: a file (HDF5, npz, Minari folder), the name of a task, minari:ID, or embedded:ballcircle.
        target: the file for most of the episodes.
        rest: the file for the share.
        share: the share of the episodes that goes into the rest.
        seed: which episodes they are.
        compact: store one final observation an episode instead of next_observations.
        cost_key: the name of the costs in the source, if it is not "costs" (Minari: "cost" in infos).
        action_bound: the largest magnitude that an action may have.
    """
    target, rest = expanded(target), expanded(rest)
    if target.resolve() == rest.resolve():
        raise QptError("both parts would be written to the same file; name two")
    if find(source).resolve() in (target.resolve(), rest.resolve()):
        raise QptError(f"{source} would be replaced by a part of itself; name two other files")
    if seed < 0:
        raise QptError(f"a seed is a number of at least 0, not {seed}")
    for path in (target, rest):
        check_ending(path)
    trajectories = load_dataset(source, cost_key=cost_key, action_bound=action_bound)
    warn(source, noticed(trajectories.info))
    held, kept = trajectories.split(share, seed)
    write_all([(kept, target), (held, rest)], compact)
    for path, part in ((target, kept), (rest, held)):
        print(f"{path}: {len(part):,} episodes, {part.steps:,} steps")


def validate(
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")],
    cost_key: str | None = None,
    action_bound: float = 1.0,
    timeout: float | None = None,
) -> int:
    """Check files, each in a process of its own; one line each, exit code 1 if any is bad.

    Example: qpt data validate my.hdf5 other.hdf5

    Args:
        files: the files to check, or names of tasks whose data are in the cache.
        cost_key: the name of the costs in the files, if it is not "costs".
        action_bound: the largest magnitude that an action may have.
        timeout: seconds to allow for each file (a minute, and more for large files, by default).
    """
    if not files:
        print("error: no file is given; name at least one: qpt data validate FILE...", file=sys.stderr)
        return 2
    bad = 0
    for file in files:
        try:
            defect, found = examine(find(file), cost_key=cost_key, action_bound=action_bound, timeout=timeout)
        except QptError as error:
            defect, found = f"{file}: {error}", []
        bad += defect is not None
        print(f"{file}: good" if defect is None else f"bad: {defect}", flush=True)
        warn(file, found)
    return int(bad > 0)


def main(args: list[str]) -> int:
    """Entry point of `qpt data`."""
    commands: dict[str, Command | str] = {
        "info": info,
        "convert": convert,
        "split": split,
        "validate": validate,
        "download": "qpt.cli.data_download:download",
        "augment": "qpt.cli.data_augment:augment",
    }
    return run_group(commands, args, "data")


# -- how it looks ------------------------------------------------------------------------------------------------------


def warn(source: str, found: list[str]) -> None:
    """Tell what reading noticed, where what is printed is read by programs too."""
    for text in found:
        print(f"warning: {source}: {text}", file=sys.stderr)


def _limits(limits: tuple[float, ...] | None, source: str) -> tuple[float, ...]:
    if limits is None:
        task = all_tasks().get(source)
        return task.cost_limits if task else (10.0, 20.0, 40.0)
    if any(not 0 <= limit < float("inf") for limit in limits):
        raise QptError("a cost limit is a number from 0 up")
    return tuple(sorted(set(limits)))


def _show(trajectories: Trajectories, source: str, facts: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=Text(source), title_justify="left", title_style="bold", show_header=True, header_style="bold")
    table.add_column("")
    for column in ("min", "mean", "max"):
        table.add_column(column, justify="right")
    for name in ("return", "cost", "length"):
        table.add_row(f"episode {name}", *(f"{facts[name][column]:,.1f}" for column in ("min", "mean", "max")))
    print_ = console.print
    print_(table)
    print_(
        Text(
            f"{facts['episodes']:,} episodes, {facts['steps']:,} steps; observations of {facts['observation_dim']} "
            f"numbers, actions of {facts['action_dim']}; {facts['ended_by_terminal']:.0%} of the episodes end by a "
            "terminal, the others by a timeout"
        )
    )
    if facts["limits"]:
        within = Table(header_style="bold")
        for column in ("cost limit", "episodes within", "best safe return"):
            within.add_column(column, justify="right")
        for row in facts["limits"]:
            best = row["best_safe_return"]
            within.add_row(
                f"{row['cost_limit']:g}", f"{row['share_within']:.1%}", "none" if best is None else f"{best:,.1f}"
            )
        print_(within)
    for text in noticed(trajectories.info):
        print_(Text(text, style="yellow"))
    note = trajectories.info.get("note")
    if trajectories.is_surrogate:
        print_(Panel(Text(str(note or "not the published data")), title="surrogate data", style="yellow", expand=False))
    elif note:
        print_(Text(f"note: {note}"))
