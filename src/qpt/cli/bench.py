"""`qpt bench`: train and evaluate a grid of tasks, methods, limits and seeds."""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from qpt.algorithms.base import algorithm_classes
from qpt.cli.run import run
from qpt.cli.tasks import simulator_installed
from qpt.cli.train import _fits
from qpt.data.download import find_cached
from qpt.errors import QptError, require
from qpt.experiments.bench import Bench, run_jobs
from qpt.experiments.executors import local_executor, ray_executor
from qpt.experiments.jobs import LAST, SET_BY_JOB, grid
from qpt.experiments.results import Results, collect_results, summarize
from qpt.tasks import Task, get_task
from qpt.training import TrainConfig

Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")]


def bench_command(
    out: Path,
    tasks: Names = (),
    algorithms: Names = ("qpt", "cdt", "bc-safe"),
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")] = (0, 1, 2),
    limits: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="X [X ...]")] = None,
    episodes: int = 20,
    steps: int | None = None,
    eval_every: int | None = None,
    preset: str = "default",
    data_dir: Path | None = None,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK=FILE [TASK=FILE ...]")] = (),
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE [FIELD=VALUE ...]")] = (),
    device: str = "auto",
    workers: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
    cpus_per_job: float = 1.0,
    gpus_per_job: float = 0.0,
    table: Path | None = None,
) -> int:
    """Train and evaluate a grid of runs, each in a folder of its own, and compare the methods with 95 % intervals.

    Run the same command again to go on after an interruption: finished runs are skipped, begun ones are resumed.
    Results of several machines are put together by copying their folders into one. Without --tasks, the runs that lie
    in OUT are summarised.

    Example: qpt bench --tasks BallCircle CarRun --algorithms qpt cdt bc-safe --seeds 0 1 2 --limits 10 20 --out results

    Args:
        out: The folder of all runs.
        tasks: Tasks by name; `qpt tasks` lists them.
        algorithms: Methods by name; those that are trained for one limit get one run a limit.
        seeds: Training seeds.
        limits: Cost limits; by default each task's own.
        episodes: Episodes of each evaluation, at each limit.
        steps: Training steps; by default those of each method's preset.
        eval_every: Steps between the evaluations that choose a checkpoint; by default a tenth of the steps, 0 for none.
        preset: What each method's settings start from: default or paper.
        data_dir: A folder with the tasks' data files; what is not there is looked for in the cache.
        data: Data of single tasks, as in BallCircle=embedded:ballcircle.
        settings: Settings of the methods and of the runs, as in batch_size=256 qpt.candidates=10.
        device: cpu, cuda, or auto: cuda where there is one.
        workers: Runs at the same time; by default one a core, or one where there is a GPU; 0 for this process alone.
        executor: local: processes of this machine; ray: a Ray cluster.
        address: Address of the Ray cluster; by default one is started on this machine.
        cpus_per_job: With Ray: CPUs of each run, which may be a fraction.
        gpus_per_job: With Ray: GPUs of each run, which may be a fraction.
        table: Where the table of all episodes goes (.csv or .parquet); by default OUT/table.csv.
    """
    table = table or out / "table.csv"
    if table.suffix not in (".csv", ".parquet"):
        raise QptError(f"a table is saved as .csv or .parquet, not as {table.name!r}; change the ending of --table")
    if table.suffix == ".parquet":
        require("pyarrow.parquet", "parquet")
    if not tasks:
        results = collect_results(out)
        if not len(results):
            raise QptError(f"there are no finished runs in {out}; name the --tasks to run")
        return _finish(Bench(results, {}, (), 0), out, table)
    facts = [get_task(name) for name in tasks]
    for task in facts:
        if not task.has_simulator or not (task.env_factory or simulator_installed(task)):
            raise QptError(f"{task.name} has no simulator here to be evaluated in; see qpt sims install --help")
    overrides = _settings(settings, algorithms) | {"device": device} | ({} if steps is None else {"steps": steps})
    jobs = grid(
        tasks,
        algorithms,
        seeds=seeds,
        limits=limits,
        data=_files(data, data_dir, facts),
        preset=preset,
        overrides=overrides,
        episodes=episodes,
        eval_every=eval_every,
    )
    if executor == "ray":
        chosen = ray_executor(address, cpus_per_job, gpus_per_job)
    else:
        chosen = local_executor(workers if workers is not None else _workers(device))
    print(f"{len(jobs)} runs in {out}", file=sys.stderr)
    try:
        bench = run_jobs(jobs, out, chosen)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return _finish(bench, out, table)


def _finish(bench: Bench, out: Path, table: Path) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a pipe has no width of its own
    if len(bench.results):
        collect_results(out).save(table)  # of everything that lies there
        lines = summarize(bench.results)
        (out / "summary.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
        console.print(summary_table(lines))
        for note in (*_explanations(bench.results), *bench.results.notes):
            console.print(note, highlight=False)
        console.print(f"wrote {table} and {out / 'summary.json'}", highlight=False)
    for text in bench.incidents:
        print(f"note: {text}", file=sys.stderr)
    for key, text in bench.failures.items():
        print(f"failed: {key}: {text}", file=sys.stderr)
    if bench.failures:
        print(f"error: {len(bench.failures)} runs failed; mend them and run the same command again", file=sys.stderr)
    return 1 if bench.failures else 0


def summary_table(lines: Sequence[dict[str, Any]]) -> Table:
    """One line for each task, method, limit and rule; the rules of one method stand together."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "method", "limit", "rule", "seeds", "normalized return", "normalized cost", "P(cost ≤ limit)"):
        grid.add_column(name, justify="left" if name in ("task", "method", "rule") else "right", overflow="fold")
    grid.add_column("")
    before: tuple[Any, ...] = ()
    for line in lines:
        group = (line["task"], line["label"], f"{line['cost_limit']:g}")
        if before and group[:2] != before[:2]:
            grid.add_section()
        grid.add_row(
            *(("", "", "") if group == before else group),
            line["rule"],
            str(line["seeds"]),
            _with_interval(line, "normalized_return"),
            _with_interval(line, "normalized_cost"),
            _with_interval(line, "within_limit"),
            line["verdict"],
            style={"safe": "bold", "unsafe": "dim"}.get(line["verdict"], ""),
        )
        before = group
    return grid


def _explanations(results: Results) -> list[str]:
    seeds = len(set(results.train_seed.tolist()))
    texts = ["last: the last checkpoint."]
    if (results.episodes.checkpoint != LAST).any():
        texts = [
            "last: the last checkpoint. oracle: the best evaluation during training, as it was seen (the paper's "
            "rule; flattering).",
            "selected: the oracle's checkpoint on other episodes, which had no part in the choice.",
        ]
    if seeds < 3:
        texts.append(f"Intervals from {seeds} training seed{'s' * (seeds > 1)} say little about the next seed.")
    return texts


def _with_interval(line: dict[str, Any], key: str) -> str:
    mean, low, high = (f"{value:z.2f}" for value in (line[key], *line[f"{key}_interval"]))  # z: no -0.0
    return "–" if math.isnan(line[key]) else f"{mean} \\[{low}, {high}]"


# -- reading the flags -------------------------------------------------------------------------------------------------


def _files(named: Sequence[str], folder: Path | None, tasks: Sequence[Task]) -> dict[str, str]:
    """The data of each task: as named, else from the folder, else (nothing here) from the cache."""
    files: dict[str, str] = {}
    for text in named:
        task, equals, file = text.partition("=")
        if not equals or task not in {t.name for t in tasks}:
            raise QptError(f"--data {text} does not name the file of one of the tasks; write it as TASK=FILE")
        files[task] = file
    for facts in tasks:
        if folder is not None and facts.name not in files and facts.data_file is not None:
            file = str(folder / Path(facts.data_file).name)
            if Path(file).is_file() or find_cached(facts) is None:
                files[facts.name] = file
    return files


def _settings(texts: Sequence[str], algorithms: Sequence[str]) -> dict[str, Any]:
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
        if method and method not in hints:
            raise QptError(f"--set {text}: {method} is not among the methods of this run, {', '.join(hints)}")
        owners = [a for a in algorithms if method in ("", a) and field in hints[a]]
        if not owners and (method or field not in own):
            raise QptError(
                f"--set {text}: {method or 'none of the methods'} has no field {field!r}; see qpt train --help"
            )
        for owner in owners or [""]:
            hint = hints[owner][field] if owner else of_run[field]
            found[f"{owner}.{field}" if owner else field] = _value(text, written, hint)
    return found


def _value(text: str, written: str, hint: Any) -> Any:
    try:
        value = tomllib.loads(f"x = {written}")["x"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False}.get(written, written)  # a text need not be quoted
    for candidate in (value, written):
        if _fits(candidate, hint):
            return tuple(candidate) if isinstance(candidate, list) else candidate
    raise QptError(f"--set {text} does not fit the type of the field; see qpt train --help")


def _workers(device: str) -> int:
    """Runs at the same time: on the CPU each takes one core, and a GPU is best given to one."""
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(args: Sequence[str]) -> int:
    return run(bench_command, args, "bench")
