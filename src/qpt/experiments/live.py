"""What a bench looks like while it runs: one live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from qpt.experiments.executors import Report
from qpt.experiments.jobs import Job

ROWS = 24  # of the table at most: the running jobs and those that ended last
STYLES = {"running": "bold", "done": "green", "failed": "red", "waiting": "dim"}


class Board:
    """The state of every job, as reported, with its progress, as its files tell."""

    def __init__(self, jobs: Sequence[Job], root: Path, skipped: int) -> None:
        self.jobs, self.root, self.skipped = {job.key: job for job in jobs}, root, skipped
        self.state = dict.fromkeys(self.jobs, "waiting")
        self.failures: dict[str, str] = {}
        self.incidents: list[str] = []  # deaths of workers
        self.changed = dict.fromkeys(self.jobs, 0.0)
        self._steps: dict[str, int] = {}

    def note(self, job: Job, state: str, text: str) -> None:
        self.state[job.key] = "waiting" if state == "again" else state
        self.changed[job.key] = time.monotonic()
        if state == "failed":
            self.failures[job.key] = text
        if state == "again":
            self.incidents.append(f"{job.key}: {text}")

    def table(self) -> Table:
        """The running jobs, the last that ended and the next that wait."""
        rank = {"running": 0, "failed": 1, "done": 1, "waiting": 2}
        order = sorted(self.jobs, key=lambda key: (rank[self.state[key]], -self.changed[key]))[:ROWS]
        grid = Table(box=SIMPLE_HEAD, pad_edge=False, title=self._title())
        grid.add_column("job", overflow="fold")
        grid.add_column("state")
        for name in ("step", "steps/s", "return", "cost", "left"):
            grid.add_column(name, justify="right", no_wrap=True)
        for key in [k for k in self.jobs if k in order]:
            grid.add_row(key, self.state[key], *self._progress(key), style=STYLES[self.state[key]])
        return grid

    def _title(self) -> str:
        counts = {name: list(self.state.values()).count(name) for name in ("running", "waiting", "done", "failed")}
        said = [f"{count} {name}" for name, count in counts.items() if count]
        return " · ".join([*said, *([f"{self.skipped} done before"] if self.skipped else [])])

    def _progress(self, key: str) -> tuple[str, ...]:
        """Step, speed, the last evaluation at its first limit, and the time that is left."""
        folder, state = self.root / key, self.state[key]
        if state == "waiting":
            return ("",) * 5
        steps = self._steps.setdefault(key, self.jobs[key].steps)
        row, looked = _last_row(folder / "metrics.jsonl"), _last_row(folder / "evaluations.jsonl")
        step, rate = int(row.get("step", 0)), float(row.get("steps_per_second", 0.0))
        left = _duration((steps - step) / rate) if state == "running" and rate and step < steps else ""
        first: dict[str, Any] = (looked.get("limits") or [{}])[0]
        scores = (f"{first['return']:.1f}", f"{first['cost']:.1f} / {first['cost_limit']:g}") if first else ("", "")
        return f"{step} / {steps}", f"{rate:.1f}" if rate else "", *scores, left

    def line(self, job: Job, state: str, text: str) -> str:
        """What happened, for a log."""
        ended = sum(s in ("done", "failed") for s in self.state.values())
        words = {"running": "began", "again": "again:", "done": "done", "failed": "FAILED:"}[state]
        step, _, reward, cost, _ = self._progress(job.key) if state == "done" else ("",) * 5
        scores = f"return {reward}, cost {cost}" if reward else text
        return f"[{ended}/{len(self.jobs)}] {job.key} {words} {scores}".rstrip() + (f", {step} steps" if step else "")


@contextmanager
def board(jobs: Sequence[Job], root: Path, skipped: int = 0, show: str = "auto") -> Iterator[tuple[Board, Report]]:
    """A board and the callback that moves it; `show` is table, lines, none, or auto: by whether this is a terminal."""
    state = Board(jobs, root, skipped)
    console = Console(file=sys.stderr)
    if show == "table" or (show == "auto" and console.is_terminal):
        with Live(get_renderable=state.table, console=console, refresh_per_second=1, transient=True):
            yield state, state.note
        return

    def report(job: Job, what: str, text: str) -> None:
        state.note(job, what, text)
        if show != "none":
            print(state.line(job, what, text), file=sys.stderr, flush=True)

    yield state, report


def _last_row(path: Path) -> dict[str, Any]:
    """The last whole row of a JSONL file, without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 16_384, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # being written
            continue
        return row if isinstance(row, dict) else {}
    return {}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
