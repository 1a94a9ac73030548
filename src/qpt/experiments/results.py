"""The results of many jobs as one table, and its summary with honest intervals."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import stats
from qpt.episodes import Episodes
from qpt.errors import QptError, require
from qpt.experiments.jobs import DONE, EPISODES, JOB, RULES, Job, is_done, read_json

Strings = npt.NDArray[np.str_]
Ints = npt.NDArray[np.int64]
COLUMN = {"returns": "return", "costs": "cost", "lengths": "length"}  # named in files as Episodes names them


@dataclass(frozen=True, eq=False)
class Results:
    """One row an episode. `episodes.checkpoint` holds the rule: last, oracle or selected (see qpt.experiments.jobs)."""

    episodes: Episodes
    job: Strings  # the key of the row's job
    label: Strings  # the variant's name
    train_seed: Ints
    jobs: Mapping[str, Job]  # by key
    notes: tuple[str, ...] = ()  # what a reader must know before comparing

    def __len__(self) -> int:
        return len(self.episodes)

    def select(self, mask: npt.ArrayLike) -> Results:
        """The rows of a mask or of indices."""
        index = np.flatnonzero(mask) if np.asarray(mask).dtype == bool else np.asarray(mask, np.int64)
        parts = self.job[index], self.label[index], self.train_seed[index]
        return Results(self.episodes.select(index), *parts, self.jobs, self.notes)

    def columns(self) -> dict[str, list[Any]]:
        """The table by column: those of `Episodes`, then the run's."""
        names = [f.name for f in fields(Episodes) if f.name not in ("provenance", "trajectories")]
        table = {COLUMN.get(name, name): getattr(self.episodes, name).tolist() for name in names}
        run = {name: getattr(self, name).tolist() for name in ("job", "label", "train_seed")}
        return table | run | {"preset": [self.jobs[key].preset for key in run["job"]]}

    def save(self, path: str | Path) -> Path:
        """Write the table as .csv or .parquet; `Episodes.load` reads it too."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        table = self.columns()
        if path.suffix == ".parquet":
            arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
            parquet.write_table(arrow.table(table), temporary)
        elif path.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(table)
                writer.writerows(zip(*table.values(), strict=True))
        else:
            raise QptError(f"a table is saved as .csv or .parquet, not as {path.name!r}; change the ending")
        temporary.replace(path)
        return path


def collect_results(root: str | Path, jobs: Sequence[Job] | None = None) -> Results:
    """The episodes of all finished folders below `root`, or of the given jobs (under the labels these have)."""
    root = Path(root)
    runs = _finished(root) if jobs is None else [(j.key, root / j.key, j) for j in jobs if is_done(j, root)]
    parts: list[tuple[str, Job, Episodes]] = []
    sources: dict[str, set[tuple[str, bool]]] = {}  # fingerprint, and whether the data are a surrogate
    for key, folder, job in runs:
        if not (folder / EPISODES).exists():  # a task without a simulator
            continue
        parts.append((key, job, Episodes.load(folder / EPISODES)))
        facts = (read_json(folder / DONE) or {}).get("data", {})
        sources.setdefault(str(job.task), set()).add((str(facts.get("fingerprint")), bool(facts.get("surrogate"))))
    mixed = [f"The runs of {task} were trained on different data." for task, found in sources.items() if len(found) > 1]
    stand_ins = ", ".join(task for task, found in sources.items() if any(surrogate for _, surrogate in found))
    notes = (*mixed, *([f"Trained on surrogate data, not on the published ones: {stand_ins}."] if stand_ins else ()))

    def column(values: list[Any], kind: Any) -> Any:
        return np.repeat(np.array(values, kind), [len(e) for _, _, e in parts])

    return Results(
        Episodes.concatenate([e for _, _, e in parts]) if parts else _no_episodes(),
        column([key for key, _, _ in parts], np.str_),
        column([job.label for _, job, _ in parts], np.str_),
        column([job.seed for _, job, _ in parts], np.int64),
        {key: job for key, job, _ in parts},
        notes,
    )


def _finished(root: Path) -> list[tuple[str, Path, Job]]:
    """The finished folders with the keys they were given; of a run that was copied to two places, the newer one."""
    newest: dict[str, tuple[float, Path, Job]] = {}
    for path in sorted(root.rglob(DONE)):
        facts, row = read_json(path), read_json(path.with_name(JOB))
        if facts is None or row is None or "key" not in facts:
            continue
        entry = (float(facts.get("time", 0.0)), path.parent, Job.from_json(row))
        if facts["key"] not in newest or entry[0] > newest[facts["key"]][0]:
            newest[facts["key"]] = entry
    return [(key, folder, job) for key, (_, folder, job) in newest.items()]


def _no_episodes() -> Episodes:
    kinds: dict[str, Any] = {"Strings": np.str_, "Ints": np.int64, "Floats": np.float64}
    columns: dict[str, Any] = {f.name: np.empty(0, kinds[f.type]) for f in fields(Episodes) if f.type in kinds}
    return Episodes(**columns)


# -- the summary -------------------------------------------------------------------------------------------------------


def summarize(results: Results, confidence: float = 0.95) -> list[dict[str, Any]]:
    """One line for each task, variant, limit and rule.

    Means are means of the training seeds' means, and their intervals come from drawing seeds, then episodes within
    each. `within_limit` counts episodes, with Wilson's interval. `verdict` is safe (or unsafe) only when the whole
    interval of the mean cost lies within (or above) the limit.
    """
    e = results.episodes
    keys = list(zip(e.task.tolist(), results.label.tolist(), e.cost_limit.tolist(), e.checkpoint.tolist(), strict=True))
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    # tasks and variants in the order they came in
    tasks, variants = ({key: i for i, key in enumerate(dict.fromkeys(k[:n] for k in keys))} for n in (1, 2))
    rules = {rule: i for i, rule in enumerate(RULES)}
    order = sorted(rows, key=lambda k: (tasks[k[:1]], variants[k[:2]], k[2], rules.get(k[3], len(RULES))))
    return [_line(results.select(rows[key]), key, confidence) for key in order]


def _line(part: Results, key: tuple[Any, ...], confidence: float) -> dict[str, Any]:
    e, limit = part.episodes, float(key[2])
    line: dict[str, Any] = dict(zip(("task", "label", "cost_limit", "rule"), key, strict=True))
    line |= {"algorithm": str(e.algorithm[0]), "seeds": len(np.unique(part.train_seed)), "episodes": len(e)}
    scores = {
        "return": e.returns,
        "cost": e.costs,
        "normalized_return": e.normalized_return,
        "normalized_cost": e.normalized_cost,
    }
    for name, values in scores.items():
        means = [values[part.train_seed == seed].mean() for seed in np.unique(part.train_seed)]
        line[name] = float(np.mean(means))
        line[f"{name}_interval"] = stats.bootstrap_mean_interval(values, confidence, groups=part.train_seed)
    within = int((e.costs <= limit).sum())
    line["within_limit"] = within / len(e)
    line["within_limit_interval"] = stats.wilson_interval(within, len(e), confidence)
    line["cost_cvar"] = stats.cvar(e.costs, 0.1)
    line["fallback_share"] = math.nan if np.isnan(e.fallback_share).all() else float(np.nanmean(e.fallback_share))
    low, high = line["cost_interval"]
    line["verdict"] = "safe" if high <= limit else "unsafe" if low > limit else "unclear"
    return line
