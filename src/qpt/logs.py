"""What a running loop shows and keeps: JSONL and CSV rows, the progress bar, and the wish to stop."""

from __future__ import annotations

import csv
import json
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from qpt.errors import QptError
from qpt.writing import write_csv, write_whole

Row = dict[str, Any]


# -- files -------------------------------------------------------------------------------------------------------------


@contextmanager
def _appending(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise QptError(
            f"{path} cannot be written: {error.strerror or error}; make room, and add --resume to go on"
        ) from error


def append(path: Path, row: Row) -> None:
    """Add a line to a JSONL file."""
    with _appending(path) as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path, key: str = "step") -> list[Row]:
    """Rows of a JSONL file that have this key; a last line cut short by a kill is left out, another with a warning."""
    found: list[Row] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and key in row:
            found.append(row)
        elif number < len(lines):
            warnings.warn(f"line {number} of {path} is damaged and left out", stacklevel=2)
    return found


def rewrite(path: Path, kept: list[Row]) -> None:
    """A JSONL file of these rows alone."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def append_csv(path: Path, row: Row) -> None:
    """Add a row; where a method reports other metrics than before, the file is written anew with all columns."""
    columns: list[str] = []
    before: list[Row] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file), [])
        if set(row) <= set(columns):
            with _appending(path) as file:
                csv.DictWriter(file, columns).writerow(row)
            return
        with path.open(encoding="utf-8", newline="") as file:
            before = list(csv.DictReader(file))
    columns = list(dict.fromkeys([*columns, *row]))
    write_csv(path, columns, ([one.get(name, "") for name in columns] for one in [*before, row]))


def rewrite_csv(path: Path, kept: list[Row]) -> None:
    """A CSV file of these rows alone; none where there are none."""
    if not kept:
        path.unlink(missing_ok=True)
        return
    columns = list(dict.fromkeys(name for row in kept for name in row))
    write_csv(path, columns, ([row.get(name, "") for name in columns] for row in kept))


# -- the terminal ------------------------------------------------------------------------------------------------------


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or a termination signal asks the loop to save and stop; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(_number: int, _frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(enabled: bool, name: str, first: int, total: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A bar from step `first` to `total`; call what it yields with the step and the metrics to move it on."""
    if not enabled:
        yield lambda _step, _metrics: None
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    whole = Column(no_wrap=True)  # where a terminal is narrow, the bar alone gives way
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(table_column=whole),
    )
    task = bar.add_task(name, total=total, completed=first, rate="")
    screen, began = Live(bar), time.perf_counter()

    def show(step: int, metrics: dict[str, float]) -> None:
        rate = (step - first) / max(time.perf_counter() - began, 1e-9)
        shown = [k for k in metrics if "loss" in k or k.endswith("imitation")]
        losses = " ".join(f"{k.split('/')[-1]} {metrics[k]:.3g}" for k in shown)
        bar.update(task, completed=step, rate=f"{rate:.1f} steps/s")
        screen.update(Group(bar, losses))  # below the bar: their length is the method's

    try:
        with screen:
            yield show
    finally:
        if not screen.console.is_interactive:  # in a file the last line would be left open
            screen.console.print()
