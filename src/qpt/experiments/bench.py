"""Run a list of jobs to its end: skip what is done, resume what has begun, and put the results together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qpt.data import COLLECTED, DataSource, find, load_dataset, of_task
from qpt.data.download import find_cached
from qpt.errors import QptError
from qpt.experiments.executors import Executor, local_executor
from qpt.experiments.jobs import DONE, Job, is_done, method_config, read_json
from qpt.experiments.live import board
from qpt.experiments.results import Results, collect_results
from qpt.tasks import Task, get_task
from qpt.writing import check_folder


@dataclass(frozen=True, eq=False)
class Bench:
    """What came of a list of jobs."""

    results: Results  # of the jobs that are finished
    failures: Mapping[str, str]  # why, by the job's key
    incidents: tuple[str, ...]  # workers that died and were replaced
    skipped: int  # jobs that were done before


def run_jobs(jobs: Sequence[Job], root: str | Path, executor: Executor | None = None, *, show: str = "auto") -> Bench:
    """Carry out all jobs below `root` and return their results; a job that fails does not stop the others.

    `executor` is `local_executor(workers)` (one worker by default) or `ray_executor(...)`. `show`: "table" or "lines"
    on stderr, "none", or "auto" for what fits. Jobs with the same key are run once.
    """
    root = Path(root)
    unique: dict[str, Job] = {}
    for job in jobs:
        method_config(job)  # a wrong setting is told now and not in an hour
        first = unique.setdefault(job.key, job)
        if (first.eval_limits, first.episodes) != (job.eval_limits, job.episodes):
            raise QptError(
                f"{job.key} is asked for with two kinds of evaluation; give all its limits and episodes once"
            )
        if (one := _file(first.data)) != (other := _file(job.data)):
            raise QptError(
                f"the data {one} and {other} are called alike, and one of them would not be run ({job.key}); "
                "rename one file, or run it below another root"
            )
    todo = [job for job in unique.values() if not is_done(job, root)]
    check_data(todo)
    _check_same_data([job for job in unique.values() if job not in todo], root)
    check_folder(root)
    with board(todo, root, len(unique) - len(todo), show) as (state, report):
        if todo:
            (executor or local_executor())(todo, root, report)
    return Bench(collect_results(root, jobs), state.failures, tuple(state.incidents), len(unique) - len(todo))


def _file(data: str | None) -> str:
    if data is None:
        return "of the cache"
    return str(Path(data).resolve()) if Path(data).exists() else data


def _check_same_data(done: Sequence[Job], root: Path) -> None:
    """A run that is finished must have been trained on the very file that is named now, not on one called alike."""
    prints: dict[str, str] = {}
    for data in {job.data for job in done if job.data is not None}:
        if not (data.startswith(COLLECTED) or Path(data).is_file()):
            continue
        with suppress(QptError):  # what is done needs no data
            prints[data] = load_dataset(data, action_bound=None).fingerprint
    for job in done:
        facts = (read_json(root / job.key / DONE) or {}).get("data") or {}
        if job.data in prints and facts.get("fingerprint") not in (None, prints[job.data]):
            raise QptError(
                f"the finished run {root / job.key} was trained on other data than {job.data}; choose another --out, "
                "or delete that folder"
            )


def data_files(
    tasks: Sequence[str], named: Mapping[str, str], folder: Path | None, source: DataSource = "dsrl"
) -> dict[str, str]:
    """The data of each task: as named, else what was collected if that is asked for, else from the folder, else
    (nothing here) from the cache.

    In the folder a file may hold another number of episodes than the published one: "...-v0-80-900.hdf5" will do.
    """
    unknown = sorted(set(named) - set(tasks))
    if unknown:
        raise QptError(f"--data names {unknown[0]!r}, which is not among the tasks; add it to --tasks or leave it out")
    if source == "collected":
        if folder is not None:
            raise QptError("--data-dir is a folder of published files; leave it or --data-source collected out")
        return {name: named.get(name) or of_task(name, source) for name in tasks}
    found = dict(named)
    for task in (get_task(name) for name in tasks if name not in named):
        if folder is not None and task.data_file is not None:
            path = _in_folder(task, folder)
            if path is not None:
                found[task.name] = str(path)
            elif find_cached(task) is None:
                found[task.name] = str(folder / Path(task.data_file).name)  # so that it is named when it is missed
    return found


def _in_folder(task: Task, folder: Path) -> Path | None:
    name = Path(str(task.data_file)).name
    if (folder / name).is_file():
        return folder / name
    stem = re.sub(r"-\d+-\d+(?=\.\w+$)", "", name).rsplit(".", 1)[0]
    like = sorted(folder.glob(f"{stem}-*.hdf5"))
    if len(like) > 1:
        raise QptError(f"{folder} has several data files of {task.name}; choose one with --data {task.name}=FILE")
    return like[0] if like else None


def check_data(jobs: Sequence[Job]) -> None:
    """One sentence for all data that are missing, before anything is run."""
    missing = []
    for task, data in dict.fromkeys((job.task, job.data) for job in jobs):
        try:
            find(data if data is not None else str(task))
        except QptError:
            if task is None or get_task(task).data_file is None or str(data).startswith(COLLECTED):
                raise
            missing.append((task, data))
    if missing:
        names, (task, data) = " ".join(task for task, _ in missing), missing[0]
        where = f" (looked for {', '.join(str(d) for _, d in missing if d is not None)})" if data is not None else ""
        raise QptError(
            f"the data of {names.replace(' ', ', ')} are missing{where}; run `qpt data download {names}`, or make data "
            f"of the same kind with `qpt collect record {names}` and use --data-source collected; files elsewhere are "
            "named with --data TASK=FILE, or their folder with --data-dir"
        )
