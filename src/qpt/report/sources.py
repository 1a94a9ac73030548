"""What a report is made of: run folders, roots of benchmarks and tables of episodes, read into results and runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import logs
from qpt.episodes import Episodes, origins, settings_of
from qpt.errors import QptError, require
from qpt.experiments.jobs import LAST, ORACLE, RULES, SELECTED
from qpt.report.places import Place, method_names, named, newest, tables_of, walk
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
    fallback: Floats  # share of decisions; NaN where the policy has none
    whole: bool  # each value is an episode
    step: int = -1  # of the checkpoint; -1 where that is not said
    numbers: Sequence[tuple[int, int]] = ()  # evaluation seed and number of each episode
    changed: bool = False  # run with other settings than it was trained with


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


# -- from paths to everything ------------------------------------------------------------------------------------------


def collect(paths: Sequence[str | Path], data: Mapping[str, str] | None = None) -> Collected:
    """Read run folders, roots with runs below them, and tables of `qpt evaluate --out`.

    A path may be written NAME=PATH to give the method a name of its own. `data` names the logged episodes of tasks
    (task: source), where they are not those the runs name or cannot be found there; the key "" stands for every task.
    """
    if not paths:
        raise QptError("a report needs at least one run folder, results folder or table of episodes")
    places: list[Place] = []
    tables: list[tuple[Path, str]] = []
    for text in paths:
        path, label = named(text)
        if path.is_file():
            tables.append((path, label))
        elif path.is_dir():
            places += walk(path, label)
        else:
            raise QptError(f"there is no file or folder {path}; name a run, a results folder or a table of episodes")
    places = list({place.folder.resolve(): place for place in reversed(places)}.values())[::-1]  # each once
    places, given = newest(places), len(places)
    own = {table.resolve() for place in places for table in tables_of(place.folder)}
    tables = [(path, label) for path, label in dict(tables).items() if path.resolve() not in own]
    jobs = {str(place.done["key"]) for place in places if place.done.get("key")}
    results: list[Result] = []
    runs: list[Run] = []
    provenance: list[tuple[str, Mapping[str, Any]]] = []
    for place, method in zip(places, method_names(places), strict=True):
        run = _read_run(place, method)
        runs.append(run)
        results += _from_training(run)
        for table in tables_of(place.folder):
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
    if older := given - len(places):
        whose = "1 run is" if older == 1 else f"{older} runs are"
        notes.append(f"{whose} left out: a newer copy is given too. NAME=PATH would keep copies apart.")
    collected = Collected(_without_doubles(_of_last_steps(results, notes)), runs, provenance)
    collected.notes.extend(notes)
    _add_planes(collected, data or {})
    return collected


# -- one run, one table ------------------------------------------------------------------------------------------------


def _read_run(place: Place, method: str) -> Run:
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
    names, settings = (episodes.task, episodes.algorithm, selections, episodes.cost_limit, steps), _settings(episodes)
    for key, rows in _places(list(zip(*(column.tolist() for column in names), strict=True))).items():
        part = episodes.select(rows)
        yield Result(
            task=str(key[0]),
            method=" · ".join([method or str(key[1]), *settings]),
            run=run,
            selection=str(key[2]),
            cost_limit=float(key[3]),
            returns=part.returns,
            costs=part.costs,
            normalized_returns=part.normalized_return,
            fallback=part.fallback_share,
            whole=True,
            step=int(key[4]),
            numbers=list(zip(part.seed.tolist(), part.episode.tolist(), strict=True)),
            changed=bool(settings),
        )


def _settings(episodes: Episodes) -> list[str]:
    """What was changed for these episodes: other settings are another policy. Of several kinds, all are named."""
    changed = [settings_of(origin) for origin in origins(episodes.provenance)]
    kinds = list(dict.fromkeys(" · ".join(f"{k}={v}" for k, v in sorted(each.items())) for each in changed))
    return [" or ".join(kind or "as trained" for kind in kinds)] if any(kinds) else []


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
                fallback=np.array([np.nan]),
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
    """Episodes of one policy from several tables are put together, each once; they stand in for means of training."""
    kept: dict[tuple[Any, ...], list[Result]] = {}
    evaluated = {(r.task, r.run) for r in results if r.whole and not r.changed}
    for r in results:
        if r.whole or (r.task, r.run) not in evaluated:
            kept.setdefault((r.task, r.method, r.run, r.selection, r.cost_limit), []).append(r)
    return [_joined(parts) for parts in kept.values()]


def _joined(parts: Sequence[Result]) -> Result:
    numbers = [number for r in parts for number in r.numbers]
    rows = [places[0] for places in _places(numbers).values()] or [0]  # means of training have no numbers
    names = ("returns", "costs", "normalized_returns", "fallback")
    columns: dict[str, Any] = {name: np.concatenate([getattr(r, name) for r in parts])[rows] for name in names}
    return replace(parts[0], **columns, numbers=[numbers[row] for row in rows] if numbers else ())


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
