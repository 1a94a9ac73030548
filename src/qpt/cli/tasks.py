"""`qpt tasks`: the registry as a table, with what is installed and whose data is at hand."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qpt.cli.run import run
from qpt.data.download import find_cached, find_collected
from qpt.errors import QptError
from qpt.tasks import SIMULATORS, Task, all_tasks


def tasks(
    suite: Literal["bullet", "safety-gymnasium", "metadrive", "custom"] | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """List the tasks: sizes, horizon, range of returns, whose data is in the cache, which simulators are installed.

    "return" is DSRL's range, between which returns are normalised; "cost" the largest cost of an episode and "episodes"
    their number in the published file; "data": that file is in the cache; "sim": the simulator is installed.

    Example: qpt tasks --suite bullet

    Args:
        suite: only this suite; custom are those of your own (QPT_TASKS names a TOML file of them).
        as_json: print JSON instead of a table.
    """
    rows = [_row(task) for task in all_tasks().values() if suite in (None, task.suite)]
    if not rows:
        raise QptError("there are no tasks of your own; docs/tasks.md shows how to register one")
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows)


def main(args: list[str]) -> int:
    """Entry point of `qpt tasks`."""
    return run(tasks, args, "tasks")


def _row(task: Task) -> dict[str, Any]:
    cached, collected = find_cached(task), find_collected(task)
    return {
        "name": task.name,
        "suite": task.suite,
        "observation_dim": task.observation_dim,
        "action_dim": task.action_dim,
        "horizon": task.horizon,
        "reward_min": task.reward_min,
        "reward_max": task.reward_max,
        "cost_max": task.cost_max,
        "trajectories": task.trajectories,
        "data_file": task.data_file,
        "cached": None if cached is None else str(cached),
        "collected": None if collected is None else str(collected),
        "simulator_installed": task.simulator_installed,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    wide = Console()
    console = wide if wide.is_terminal else Console(width=200)  # in a pipe nothing is cut off
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in ("task", "obs", "act", "horizon", "return", "cost", "episodes", "data", "sim"):
        words = column in ("task", "data", "sim")
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    suite = None
    for row in rows:
        if row["suite"] != suite:
            suite = row["suite"]
            table.add_row(Text(suite, style="bold"))
        low, high = row["reward_min"], row["reward_max"]
        table.add_row(
            Text("  " + row["name"]),
            *(_number(row[key]) for key in ("observation_dim", "action_dim", "horizon")),
            "-" if low is None or high is None else f"{low:.0f}–{high:.0f}",
            *(_number(row[key]) for key in ("cost_max", "trajectories")),
            _data(row),
            _yes(row["simulator_installed"]),
        )
    console.print(table)
    cached, ready = sum(row["cached"] is not None for row in rows), sum(row["simulator_installed"] for row in rows)
    console.print(
        f"\n{len(rows)} task{'s' * (len(rows) > 1)}: published data at hand for {cached}, collected data for "
        f"{sum(row['collected'] is not None for row in rows)},\nsimulator installed for {ready}"
    )
    published = [row for row in rows if row["suite"] in SIMULATORS]  # a task of one's own may well have neither
    if any(row["cached"] is None for row in published):
        console.print("`qpt data download TASK` fetches data, `qpt collect record TASK` makes some", style="dim")
    if not all(row["simulator_installed"] for row in published):
        console.print("`qpt sims install` installs the simulators", style="dim")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _data(row: dict[str, Any]) -> Text:
    """Whose data of the task are at hand."""
    kinds = [name for name, key in (("dsrl", "cached"), ("coll.", "collected")) if row[key] is not None]
    return Text(kinds[0] if len(kinds) == 1 else "both", style="green") if kinds else Text("no", style="dim")


def _yes(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("no", style="dim")
