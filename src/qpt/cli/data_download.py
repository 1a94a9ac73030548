"""`qpt data download`: fetch data files into the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from qpt.data import download as room
from qpt.errors import QptError
from qpt.tasks import Task, all_tasks, get_task


def download(
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TASK ...")] = (),
    /,
    *,
    url: str | None = None,
    all_: Annotated[bool, tyro.conf.arg(name="all")] = False,
    verify: bool = False,
) -> int:
    """Download the data files of tasks; files that are at hand are not fetched again.

    A cut download goes on where it stopped. Files go to QPT_DATA_DIR, or ~/.cache/qpt/datasets.

    Example: qpt data download BallCircle CarRun

    Args:
        tasks: names of tasks, as `qpt tasks` lists them.
        url: a mirror to try first: a folder's address, or a file's (QPT_DATA_URL does the same).
        all_: every task that has an address.
        verify: compare each file with the sha256 recorded when it came.
    """
    chosen = [task for task in all_tasks().values() if task.data_urls] if all_ else [get_task(name) for name in tasks]
    if not chosen:
        raise QptError("name at least one task, or give --all; `qpt tasks` lists them")
    for given, where in ((url, "--url"), (os.environ.get("QPT_DATA_URL"), "QPT_DATA_URL")):
        if given and len(chosen) > 1 and room.is_file_url(given):
            raise QptError(
                f"the address given with {where} names one file; give the address of its folder for several tasks"
            )
    failed = 0
    for task in chosen:
        try:
            path = _with_bar(task, url)
            note = ""
            if verify:
                note = "  (sha256 agrees)" if room.verify(path) else "  (sha256 recorded now)"
            print(f"{task.name}: {path}{note}", flush=True)
        except QptError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    return int(failed > 0)


def _with_bar(task: Task, url: str | None) -> Path:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        row = bar.add_task(task.name, total=None, visible=False)

        def show(message: str, done: int, total: int | None) -> None:
            bar.update(row, description=f"{task.name}: {message}", completed=done, total=total, visible=True)

        return room.download(task, urls=[url] if url else None, progress=show)
