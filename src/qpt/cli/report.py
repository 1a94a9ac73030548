"""`qpt report`: one page that shows runs and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from qpt.cli.run import run
from qpt.errors import QptError


def report_command(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH [PATH ...]")],
    out: Path = Path("report.html"),
    tables: Path | None = None,
    title: str = "",
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[TASK=]SOURCE [...]")] = (),
) -> int:
    """Write one HTML page about runs: tables, curves, the data's plane, histograms, configuration. It needs no network.

    A PATH is a run folder of `qpt train`, a folder with runs below it such as a root of `qpt bench`, or a table of
    `qpt evaluate --out`. NAME=PATH gives the method a name of its own.

    Example: qpt report runs/ball runs/cdt.csv --out report.html --tables tables

    Args:
        paths: Run folders, folders with runs, tables of episodes (.csv or .parquet).
        out: The page.
        tables: Also write the headline tables as Markdown, CSV and LaTeX into this folder.
        title: Headline of the page.
        data: Logged episodes to show the policies among; by default those the runs were trained on.
    """
    from qpt.report import write_report

    for path in write_report(paths, out, title=title, table_folder=tables, data=sources(data)):
        print(f"wrote {path}")
    return 0


def sources(texts: Sequence[str]) -> dict[str, str]:
    """Sources by task; one without a task is for every task."""
    found: dict[str, str] = {}
    for text in texts:
        task, equals, source = text.partition("=")
        key, value = (task, source) if equals else ("", text)
        if key in found:
            raise QptError(f"--data names {key or 'the data of every task'} twice; write TASK=SOURCE for each task")
        found[key] = value
    return found


def main(args: Sequence[str]) -> int:
    command: Any = report_command
    return run(command, args, "report")
