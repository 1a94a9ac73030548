"""What a report is made of: run folders, roots of benchmarks and tables of episodes, read into results and runs."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import logs
from qpt.episodes import Episodes
from qpt.errors import QptError, require
from qpt.experiments.jobs import DONE, JOB, LAST, ORACLE, RULES, SELECTED
from qpt.report.planes import Plane, read_plane
from qpt.training import best_evaluation

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
CALIBRATION = ("cost_limit", "predicted_cost", "realised_cost")


@dataclass(frozen=True, eq=False)
class Result:
    """One policy at one cost limit: its episodes, or the mean of an evaluation during training as a single value."""

    task: str
    method: str
    run: str  # what was trained once; the unit of an interval over seeds
    selection: str  # which checkpoint, on which episodes: a rule of qpt.experiments.jobs
    cost_limit: float
    returns: Floats
    costs: Floats
    normalized_returns: Floats
    fallback: float  # share of decisions; NaN where the policy has none
    whole: bool  # each value is an episode
    step: int = -1  # of the checkpoint; -1 where that is not said


@dataclass(frozen=True, eq=False)
class Run:
    """A training run: its configuration and its logs."""

    name: str
    task: str
    method: str
    seed: int | None
    facts: Mapping[str, Any]
    metrics: Sequence[Row]
    evaluations: Sequence[Row]
    calibration: Mapping[str, list[float]] | None = None


@dataclass(frozen=True, eq=False)
class Collected:
    """Everything a report shows."""

    results: list[Result]
    runs: list[Run]
    provenance: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)  # of the tables
    planes: dict[str, Plane] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be shown, and why

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys([r.task for r in self.results] + [r.task for r in self.runs]))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys([r.method for r in self.results] + [r.method for r in self.runs]))


@dataclass(frozen=True)
class _Place:
    """The folder of a run, and the method's name where the caller gave one."""

    folder: Path
    label: str = ""

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        return _json(self.folder / "run.json")

    @cached_property
    def name(self) -> str:
        """The method as the caller, the benchmark's job or the run calls it."""
        job = self.folder / JOB
        own = str(_json(job).get("label") or "") if job.is_file() else ""
        return self.label or own or str(self.facts.get("algorithm") or "unknown")

    @cached_property
    def done(self) -> Mapping[str, Any]:
        """What a job of a benchmark says when it is finished."""
        path = self.folder / DONE
        return _json(path) if path.is_file() else {}

    @property
    def key(self) -> str:
        return str(self.done.get("key") or self.folder)

    @property
    def time(self) -> float:
        return float(self.done.get("time") or 0.0)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What sets runs of one method apart: its settings and its data."""
        config, data = (self.facts.get(name) or {} for name in ("config", "data"))
        source = Path(str(data.get("source") or "")).name  # the folder is another on every machine
        return {k: v for k, v in config.items() if k != "cost_limit"} | {"data": source}


# -- from paths to everything ------------------------------------------------------------------------------------------


def collect(paths: Sequence[str | Path], data: Mapping[str, str] | None = None) -> Collected:
    """Read run folders, roots with runs below them, and tables of `qpt evaluate --out`.

    A path may be written NAME=PATH to give the method a name of its own. `data` names the logged episodes of tasks
    (task: source), where they are not those the runs name or cannot be found there; the key "" stands for every task.
    """
    if not paths:
        raise QptError("a report needs at least one run folder, results folder or table of episodes")
    places: list[_Place] = []
    tables: list[tuple[Path, str]] = []
    for text in paths:
        path, label = _named(text)
        if path.is_file():
            tables.append((path, label))
        elif path.is_dir():
            places += _walk(path, label)
        else:
            raise QptError(f"there is no file or folder {path}; name a run, a results folder or a table of episodes")
    places = list({place.folder.resolve(): place for place in reversed(places)}.values())[::-1]  # each once
    own = {table.resolve() for place in places for table in _tables(place.folder)}
    tables = [(path, label) for path, label in dict(tables).items() if path.resolve() not in own]
    jobs = {str(place.done["key"]) for place in places if place.done.get("key")}
    results: list[Result] = []
    runs: list[Run] = []
    provenance: list[tuple[str, Mapping[str, Any]]] = []
    for place, method in zip(places, _method_names(places), strict=True):
        run = _read_run(place, method)
        runs.append(run)
        results += _from_training(run)
        for table in _tables(place.folder):
            episodes = Episodes.load(table)
            results += _from_table(episodes, run=run.name, method=method)
            provenance.append((str(table), episodes.provenance))
    known = {place.folder.resolve(): (run.name, run.method) for place, run in zip(places, runs, strict=True)}
    for table, label in tables:
        episodes = Episodes.load(table)
        provenance.append((str(table), episodes.provenance))
        owners = [
            (job or known.get(_run_of(checkpoint), (_run_name(checkpoint, table), "")))
            for checkpoint, job in zip(episodes.checkpoint.tolist(), _jobs(table, len(episodes)), strict=True)
        ]
        for owner, rows in _places(owners).items():
            if owner[0] in jobs:  # a benchmark's table beside its runs: these episodes are here already
                continue
            results += _from_table(episodes.select(rows), run=owner[0], method=label or owner[1])
    if not results and not any(run.metrics for run in runs):
        raise QptError(f"there are no results yet in {', '.join(map(str, paths))}; train or evaluate first")
    notes: list[str] = []
    collected = Collected(_without_doubles(_of_last_steps(results, notes)), runs, provenance)
    collected.notes.extend(notes)
    _add_planes(collected, data or {})
    return collected


def _named(text: str | Path) -> tuple[Path, str]:
    label, equals, rest = str(text).partition("=")
    if equals and not Path(text).exists():
        return Path(rest), label
    return Path(text), ""


def _walk(root: Path, label: str) -> list[_Place]:
    """The runs at or below a folder, by task and method; of one that was copied to two places, the newer."""
    places: list[_Place] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop(0)
        if (folder / "run.json").is_file():
            places.append(_Place(folder, label))
        else:
            waiting[:0] = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    newest = {place.key: place for place in sorted(places, key=lambda place: place.time)}
    places = [place for place in places if newest[place.key] is place]
    places.sort(key=lambda place: (*(str(place.facts.get(k)) for k in ("task", "algorithm")), place.name))
    if not places:
        raise QptError(f"there is no run in {root}; name a folder of `qpt train` or `qpt bench`, or tables of episodes")
    return places


def _tables(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(p for p in folder.glob("episodes*") if p.suffix in (".csv", ".parquet")))


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QptError(f"{path} cannot be read ({error}); leave this run out, or train it again") from error
    if not isinstance(found, dict):
        raise QptError(f"{path} does not describe a run; leave it out, or train it again")
    return found


# -- names of methods --------------------------------------------------------------------------------------------------


def _method_names(places: Sequence[_Place]) -> list[str]:
    """The method of each run, with the settings by which runs of one name on one task differ."""
    names = []
    for place in places:
        alike = [p.config for p in places if p.name == place.name and p.facts.get("task") == place.facts.get("task")]
        keys = [k for k, v in place.config.items() if any(other.get(k) != v for other in alike)]
        if place.label or not keys:
            names.append(place.name)
        elif len(keys) <= 3:
            names.append(" · ".join([place.name, *(f"{k}={place.config[k]}" for k in keys)]))
        else:  # too much to say: the folder's name says it better
            names.append(f"{place.name} · {place.folder.name}")
    return names


# -- one run, one table ------------------------------------------------------------------------------------------------


def _read_run(place: _Place, method: str) -> Run:
    folder, facts = place.folder, place.facts
    seed = facts.get("seed")
    return Run(
        name=str(folder),
        task=str(facts.get("task") or "no task"),
        method=method,
        seed=seed if isinstance(seed, int) else None,
        facts=facts,
        metrics=logs.rows(folder / "metrics.jsonl"),
        evaluations=logs.rows(folder / "evaluations.jsonl"),
        calibration=_calibration(folder / "calibration.csv"),
    )


def _calibration(path: Path) -> Mapping[str, list[float]] | None:
    """What `qpt calibrate --out RUN/calibration.csv` left."""
    if not path.is_file():
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {name: [float(row[name]) for row in rows] for name in CALIBRATION}
    except (KeyError, ValueError, TypeError) as error:
        raise QptError(
            f"{path} is no table of a calibration; write it again with `qpt calibrate --out {path}`"
        ) from error


def _from_table(episodes: Episodes, *, run: str, method: str) -> Iterable[Result]:
    selections = np.array([_selection(text) for text in episodes.checkpoint.tolist()])
    steps = np.array([_step(text) for text in episodes.checkpoint.tolist()])
    names = (episodes.task, episodes.algorithm, selections, episodes.cost_limit, steps)
    for key, rows in _places(list(zip(*(column.tolist() for column in names), strict=True))).items():
        part = episodes.select(rows)
        yield Result(
            task=str(key[0]),
            method=method or str(key[1]),
            run=run,
            selection=str(key[2]),
            cost_limit=float(key[3]),
            returns=part.returns,
            costs=part.costs,
            normalized_returns=part.normalized_return,
            fallback=float(part.fallback_share.mean()),
            whole=True,
            step=int(key[4]),
        )


def _places(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Where each key stands; in one pass, for tables of large benches."""
    found: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


def _jobs(table: Path, rows: int) -> list[tuple[str, str] | None]:
    """Run and method of each row in a table of a benchmark, which says them in columns of its own."""
    names = ("job", "label")
    if table.suffix == ".parquet":
        columns = require("pyarrow.parquet", "parquet").read_table(table).to_pydict()
    else:
        with table.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        columns = {name: [row[name] for row in found] for name in names if found and name in found[0]}
    if not all(name in columns for name in names):
        return [None] * rows
    return [(str(job), str(label)) for job, label in zip(columns["job"], columns["label"], strict=True)]


def _from_training(run: Run) -> Iterable[Result]:
    """Where nothing but the evaluations of training is known: means of the last one, and of the best by its rule."""
    rows = [dict(row) for row in run.evaluations]
    for selection, row in ((LAST, rows[-1] if rows else None), (ORACLE, best_evaluation(rows))):
        for part in row["limits"] if row else []:
            yield Result(
                task=run.task,
                method=run.method,
                run=run.name,
                selection=selection,
                cost_limit=float(part["cost_limit"]),
                returns=np.array([part["return"]], float),
                costs=np.array([part["cost"]], float),
                normalized_returns=np.array([part.get("normalized_return", np.nan)], float),
                fallback=float("nan"),
                whole=False,
            )


def _selection(checkpoint: str) -> str:
    """Which checkpoint a row is of: a benchmark says so; of a path the name tells."""
    if checkpoint in RULES:
        return checkpoint
    return SELECTED if Path(checkpoint).name.startswith("best-") else LAST


def _step(checkpoint: str) -> int:
    """The step in a checkpoint's name; -1 where it says none."""
    found = re.fullmatch(r"(?:step|best)-(\d+)", Path(checkpoint).name)
    return int(found[1]) if found else -1


def _of_last_steps(results: Sequence[Result], notes: list[str]) -> list[Result]:
    """Of each run and rule the episodes of the latest checkpoint alone; others are policies of their own."""
    latest: dict[tuple[str, str, str], int] = {}
    for r in results:
        place = (r.task, r.run, r.selection)
        latest[place] = max(latest.get(place, -1), r.step)
    earlier = [r for r in results if 0 <= r.step < latest[r.task, r.run, r.selection]]
    notes += [
        f"The episodes of step {step:,} of {run} are left out: a later checkpoint was evaluated too."
        for run, step in sorted({(r.run, r.step) for r in earlier})
    ]
    return [r for r in results if r not in earlier]


def _run_of(checkpoint: str) -> Path:
    path = Path(checkpoint)
    return (path.parent.parent if path.parent.name == "checkpoints" else path).resolve()


def _run_name(checkpoint: str, table: Path) -> str:
    return str(_run_of(checkpoint)) if checkpoint and checkpoint not in RULES else str(table)


def _without_doubles(results: Sequence[Result]) -> list[Result]:
    """Episodes of one policy from several tables are put together; they stand in for the means of training."""
    kept: dict[tuple[Any, ...], list[Result]] = {}
    evaluated = {(r.task, r.run) for r in results if r.whole}
    for r in results:
        if r.whole or (r.task, r.run) not in evaluated:
            kept.setdefault((r.task, r.method, r.run, r.selection, r.cost_limit), []).append(r)
    return [
        replace(
            parts[0],
            returns=np.concatenate([r.returns for r in parts]),
            costs=np.concatenate([r.costs for r in parts]),
            normalized_returns=np.concatenate([r.normalized_returns for r in parts]),
            fallback=float(np.mean([r.fallback for r in parts])),
        )
        for parts in kept.values()
    ]


# -- the logged episodes -----------------------------------------------------------------------------------------------


def _add_planes(collected: Collected, given: Mapping[str, str]) -> None:
    unknown = sorted(set(given) - set(collected.tasks) - {""})
    if unknown:
        raise QptError(f"the report has no task {unknown[0]!r}; it has {', '.join(collected.tasks)}")
    for task in collected.tasks:
        trained = {str((r.facts.get("data") or {}).get("source") or "") for r in collected.runs if r.task == task}
        chosen = given.get(task) or given.get("")
        for source in [chosen] if chosen else sorted(trained - {""}):
            try:
                collected.planes[task] = read_plane(source)
                break
            except QptError as error:
                if chosen:
                    raise
                collected.notes.append(f"The logged episodes of {task} are not shown: {error}.")
