"""What `qpt bench` and `qpt reproduce` share: who does the work, on which data, with which settings, and its end."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
import tyro
from rich.console import Console

from qpt.algorithms.base import algorithm_classes
from qpt.algorithms.fields import choices, fitting
from qpt.data import DataSource
from qpt.errors import QptError
from qpt.experiments.bench import Bench, data_files, run_jobs
from qpt.experiments.executors import Executor, local_executor, ray_executor
from qpt.experiments.jobs import SET_BY_JOB, Job
from qpt.tasks import get_task
from qpt.training import TrainConfig

Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")]
Ints = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")]
Numbers = Annotated[tuple[float, ...], tyro.conf.arg(metavar="X [X ...]")]
Files = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK=FILE [TASK=FILE ...]")]
Settings = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE [FIELD=VALUE ...]")]


@dataclass(frozen=True)
class Machine:
    """Who does the work."""

    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    workers: int | None = None
    """Runs at the same time; by default one a core, or one where there is a GPU; 0 for this process alone."""
    executor: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: a Ray cluster."""
    address: str | None = None
    """Address of the Ray cluster; by default one is started on this machine."""
    cpus_per_job: float = 1.0
    """With Ray: CPUs of each run, which may be a fraction."""
    gpus_per_job: float = 0.0
    """With Ray: GPUs of each run, which may be a fraction."""

    def make_executor(self) -> Executor:
        if self.executor == "ray":
            return ray_executor(self.address, self.cpus_per_job, self.gpus_per_job)
        if self.workers is not None and self.workers < 0:
            raise QptError(f"--workers is a whole number of at least 0, not {self.workers}")
        return local_executor(self.workers if self.workers is not None else self._workers())

    def _workers(self) -> int:
        """Runs at the same time: on the CPU each takes one core, and a GPU is best given to one."""
        on_gpu = self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available())
        if on_gpu:
            return 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Worker = Annotated[Machine, tyro.conf.arg(name="")]


# -- before ------------------------------------------------------------------------------------------------------------


def check_simulators(tasks: Iterable[str]) -> None:
    """A task that cannot be evaluated is told before anything is trained."""
    for task in map(get_task, tasks):
        if not task.simulator_installed:
            raise QptError(f"{task.name} has no simulator here to be evaluated in; see qpt sims install --help")


def read_files(
    texts: Sequence[str], folder: Path | None, tasks: Sequence[str], source: DataSource = "dsrl"
) -> dict[str, str]:
    """Files by task, from --data, --data-dir and --data-source."""
    named: dict[str, str] = {}
    for text in texts:
        task, _, file = text.partition("=")
        if not file:
            raise QptError(f"--data {text} does not name the file of a task; write it as TASK=FILE")
        named[task] = file
    return data_files(tasks, named, folder, source)


def read_settings(texts: Sequence[str], algorithms: Sequence[str]) -> dict[str, Any]:
    """Values of --set by field, "method.field" for the fields of methods; a name or a type that does not fit is told.

    A field without a method before it goes to every method that has it.
    """
    hints = {a: get_type_hints(algorithm_classes(a)[1]) for a in algorithms}
    of_run = get_type_hints(TrainConfig)
    own = {f.name for f in fields(TrainConfig)} - SET_BY_JOB
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, written = text.partition("=")
        if not equals:
            raise QptError(f"--set {text} has no value; write it as field=value")
        method, _, field = name.rpartition(".")
        if field == "cost_limit":
            raise QptError(f"--set {text}: a cost limit is no setting; give it with --limits, where a command has them")
        if method and method not in hints:
            raise QptError(f"--set {text}: {method} is not among the methods of this run, {', '.join(hints)}")
        owners = [a for a in algorithms if method in ("", a) and field in hints[a]]
        if not owners and (method or field not in own):
            whose = f"{method} has" if method else "there is"
            raise QptError(f"--set {text}: {whose} no field {field!r}; see qpt train --help")
        for owner in owners or [""]:
            hint = hints[owner][field] if owner else of_run[field]
            found[f"{owner}.{field}" if owner else field] = _value(text, written, hint)
    return found


def _value(text: str, written: str, hint: Any) -> Any:
    try:
        value = tomllib.loads(f"x = {written}")["x"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False, "None": None}.get(written, written)  # a text need not be quoted
    for candidate in (value, written):
        with suppress(ValueError):
            return fitting(candidate, hint)  # 1 and 1.0 are one setting, and one run
    raise QptError(f"--set {text} does not fit the type of the field: it is {choices(hint)}")


# -- the work, and after it --------------------------------------------------------------------------------------------


def carry_out(jobs: Sequence[Job], root: Path, machine: Machine) -> Bench:
    """Run the jobs; Ctrl-C leaves what can be gone on with."""
    executor = machine.make_executor()
    print(f"{len({job.key for job in jobs})} runs in {root}", file=sys.stderr)
    try:
        return run_jobs(jobs, root, executor)
    except KeyboardInterrupt:
        print("run the same command again to go on", file=sys.stderr)
        raise


def tell(bench: Bench) -> int:
    """Say which workers died and which runs failed; returns the exit code."""
    for text in bench.incidents:
        print(f"note: {text}", file=sys.stderr)
    for key, text in bench.failures.items():
        print(f"failed: {key}: {text}", file=sys.stderr)
    count = len(bench.failures)
    if count:
        failed = f"{count} run{'s' * (count > 1)} failed"
        print(f"error: {failed}; mend the cause and run the same command again", file=sys.stderr)
    return 1 if count else 0


def console() -> Console:
    """Standard output, for tables."""
    return Console() if sys.stdout.isatty() else Console(width=150)  # a pipe has no width of its own
