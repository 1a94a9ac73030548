"""The results of many jobs as one table, and its summary with honest intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.experiments.jobs import DONE, EPISODES, JOB, RULES, Job, is_done, read_json
from qpt.experiments.scores import score
from qpt.tasks import all_tasks

Strings = npt.NDArray[np.str_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Results:
    """One row an episode. `episodes.checkpoint` holds the rule: last, oracle or selected (see qpt.experiments.jobs)."""

    episodes: Episodes
    job: Strings  # the key of the row's job
    label: Strings  # the variant's name
    train_seed: Ints
    jobs: Mapping[str, Job]  # by key
    notes: tuple[str, ...] = ()  # what a reader must know before comparing

    @classmethod
    def of(cls, parts: Sequence[tuple[str, Job, Episodes]], notes: tuple[str, ...] = ()) -> Results:
        """The episodes of jobs, each with its key."""

        def column(values: list[Any], kind: Any) -> Any:
            return np.repeat(np.array(values, kind), [len(e) for _, _, e in parts])

        return cls(
            Episodes.concatenate([e for _, _, e in parts]) if parts else _no_episodes(),
            column([key for key, _, _ in parts], np.str_),
            column([job.label for _, job, _ in parts], np.str_),
            column([job.seed for _, job, _ in parts], np.int64),
            {key: job for key, job, _ in parts},
            notes,
        )

    def __len__(self) -> int:
        return len(self.episodes)

    def select(self, mask: npt.ArrayLike) -> Results:
        """The rows of a mask or of indices."""
        index = np.flatnonzero(mask) if np.asarray(mask).dtype == bool else np.asarray(mask, np.int64)
        parts = self.job[index], self.label[index], self.train_seed[index]
        return Results(self.episodes.select(index), *parts, self.jobs, self.notes)

    def columns(self) -> dict[str, list[Any]]:
        """The table by column: those of `Episodes`, then the run's."""
        return self.episodes.columns() | self._of_runs()

    def save(self, path: str | Path) -> Path:
        """Write the table as .csv or .parquet; `Episodes.load` reads it too."""
        return self.episodes.save(path, self._of_runs())

    def _of_runs(self) -> dict[str, list[Any]]:
        columns = {name: getattr(self, name).tolist() for name in ("job", "label", "train_seed")}
        return columns | {"preset": [self.jobs[key].preset for key in columns["job"]]}


def collect_results(root: str | Path, jobs: Sequence[Job] | None = None) -> Results:
    """The episodes of all finished folders below `root`, or of the given jobs (under the labels these have)."""
    root = Path(root)
    notes: list[str] = []
    if jobs is None:
        runs = _apart(_finished(root, notes))
    else:
        once = {(job.key, job.label): job for job in jobs}
        runs = [(job.key, root / job.key, job) for job in once.values() if is_done(job, root)]
    parts: list[tuple[str, Job, Episodes]] = []
    sources: dict[str, set[str]] = {}  # fingerprints of the data
    kinds: dict[str, set[str]] = {}  # and what they are, by the tasks that have them
    for key, folder, job in runs:
        if not (folder / EPISODES).exists():  # a task without a simulator
            continue
        parts.append((key, job, Episodes.load(folder / EPISODES)))
        facts = (read_json(folder / DONE) or {}).get("data", {})
        sources.setdefault(str(job.task), set()).add(str(facts.get("fingerprint")))
        kinds.setdefault(_kind(facts, job.task), set()).add(str(job.task))
    notes += [
        f"The runs of {task} were trained on different data." for task, found in sources.items() if len(found) > 1
    ]
    notes += [f"Trained on {kind}: {', '.join(sorted(found))}." for kind, found in sorted(kinds.items()) if kind]
    return Results.of(parts, tuple(notes))


def _kind(facts: Mapping[str, Any], task: str | None) -> str:
    """Whose data a run was trained on, if that is known."""
    known = all_tasks().get(task or "")
    if facts.get("surrogate"):
        return "surrogate data, not on the published ones"
    published = known is not None and Path(str(facts.get("source"))).name == known.data_file
    return "the published data" if published else ""


def _finished(root: Path, notes: list[str]) -> list[tuple[str, Path, Job]]:
    """The finished folders with their keys, by task and method; of a run that was copied to two places, the newer."""
    newest: dict[str, tuple[float, Path, Job]] = {}
    for path in sorted(root.rglob(DONE)):
        facts, row = read_json(path), read_json(path.with_name(JOB))
        try:
            key, time = str((facts or {})["key"]), float((facts or {}).get("time", 0.0))
            job = Job.from_json(row or {})
        except (KeyError, TypeError, ValueError, QptError):  # cut short while it was copied, or none of ours
            notes.append(f"{path.parent} is left out: its {JOB} or {DONE} is not whole.")
            continue
        if key not in newest or time > newest[key][0]:
            newest[key] = (time, path.parent, job)
    found = [(key, folder, job) for key, (_, folder, job) in newest.items()]
    return sorted(found, key=lambda run: (str(run[2].task), run[2].algorithm, run[2].label, run[0]))


def _apart(runs: Sequence[tuple[str, Path, Job]]) -> list[tuple[str, Path, Job]]:
    """Runs of one task and label but of different settings are different methods: their folder's name tells which."""

    def variant(key: str) -> str:  # task / method / preset-hash [/ limit] / seed
        return key.split("/")[2] if key.count("/") > 2 else key

    found: dict[tuple[str | None, str], set[str]] = {}
    for key, _, job in runs:
        found.setdefault((job.task, job.label), set()).add(variant(key))
    return [
        (key, folder, replace(job, label=f"{job.label} · {variant(key)}"))
        if len(found[job.task, job.label]) > 1
        else (key, folder, job)
        for key, folder, job in runs
    ]


def _no_episodes() -> Episodes:
    kinds: dict[str, Any] = {"Strings": np.str_, "Ints": np.int64, "Floats": np.float64}
    columns: dict[str, Any] = {f.name: np.empty(0, kinds[f.type]) for f in fields(Episodes) if f.type in kinds}
    return Episodes(**columns)


# -- the summary -------------------------------------------------------------------------------------------------------


def summarize(results: Results, confidence: float = 0.95) -> list[dict[str, Any]]:
    """One line for each task, variant, limit and rule, with the numbers of `qpt.experiments.scores`."""
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
    e, seeds = part.episodes, part.train_seed
    line: dict[str, Any] = dict(zip(("task", "label", "cost_limit", "rule"), key, strict=True))
    line |= {"algorithm": str(e.algorithm[0]), "seeds": len(np.unique(seeds)), "episodes": len(e)}
    line |= score(e.returns, e.costs, e.normalized_return, seeds, float(key[2]), confidence)
    line["fallback_share"] = math.nan if np.isnan(e.fallback_share).all() else float(np.nanmean(e.fallback_share))
    return line
