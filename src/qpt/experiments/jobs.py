"""A job: one training run and its evaluations, in one folder that says what it is and how far it has come."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from qpt import checkpoint, logs
from qpt.algorithms.base import LimitMode, Spec, algorithm_classes, preset_config
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.policy import load_policy
from qpt.tasks import all_tasks, get_task
from qpt.training import TrainConfig, train
from qpt.writing import alone, check_folder, write_json

# What stands in the `checkpoint` column of the results: which checkpoint, on which episodes.
LAST = "last"  # the last checkpoint, on the report's episodes
ORACLE = "oracle"  # the best of all evaluations in training, on the very episodes it was chosen by (the paper's rule)
SELECTED = "selected"  # the same checkpoint on the report's episodes, which had no part in the choice
RULES = (LAST, ORACLE, SELECTED)
RULE_NAMES = {LAST: "last checkpoint", ORACLE: "oracle (the paper's rule)", SELECTED: "selected (fresh episodes)"}

# Settings of TrainConfig that say how a machine does the work, not what comes out: no part of a job's name.
MACHINE = {
    *("device", "workers", "threads", "precision", "fast", "compile", "checkpoint_every", "keep"),
    *("log_every", "progress", "tensorboard", "wandb"),
}
SET_BY_JOB = {
    *("task", "data", "data_source", "algorithm", "config", "seed", "out", "resume"),
    *("eval_every", "eval_episodes", "eval_limits", "eval_seed"),
}
JOB, DONE, EPISODES, EVENTS = "job.json", "done.json", "episodes.csv", "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train and how to evaluate it. Equal keys mean equal training runs."""

    task: str | None = None  # gives the data, the horizon and the simulator; without one nothing is evaluated
    data: str | None = None  # a file, or "collected:...", "embedded:..."; None: the task's published file
    algorithm: str
    preset: str = "default"
    seed: int = 0
    train_limit: float | None = None  # for methods that are trained for one limit; None for the others
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields of the method's config or the run's
    eval_limits: tuple[float, ...] = (10.0, 20.0, 40.0)
    episodes: int = 20  # at each limit
    eval_every: int = 0  # steps between the evaluations that choose a checkpoint; 0: the last one only
    label: str = ""  # the name of the variant in tables; by default the method's

    def __post_init__(self) -> None:
        if self.task is None and self.data is None:
            raise QptError("a job needs a task or a data file")
        limits = tuple(map(float, self.eval_limits))
        if self.train_limit is not None and limits != (self.train_limit,):
            raise QptError(f"a job trained for the limit {self.train_limit:g} is evaluated at that limit alone")
        object.__setattr__(self, "eval_limits", limits)
        plain = self.algorithm if self.preset == "default" else f"{self.algorithm} ({self.preset})"
        object.__setattr__(self, "label", self.label or plain)
        object.__setattr__(self, "overrides", dict(sorted(self.overrides.items())))

    @property
    def key(self) -> str:
        """The folder below the root: what it is, and a short hash of all that is not the default."""
        settings: dict[str, Any] = {k: v for k, v in self.overrides.items() if k not in MACHINE}
        source = _data_name(self.data, self.task)
        if self.task is not None and source:
            settings["data"] = source
        if self.eval_every:  # then the evaluations decide which checkpoint is best
            settings |= {"eval_every": self.eval_every, "episodes": self.episodes}
            if self.train_limit is None:  # else it stands in the key
                settings["limits"] = self.eval_limits
        text = json.dumps(settings, sort_keys=True, default=str)
        variant = self.preset + (f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if settings else "")
        limit = () if self.train_limit is None else (f"limit{self.train_limit:g}",)
        place = re.sub(r"[^\w.+-]", "-", self.task or source)
        return "/".join((place, self.algorithm, variant, *limit, f"seed{self.seed}"))

    @property
    def selection_seed(self) -> int:
        """Seed of the evaluations during training."""
        return 1_000 + self.seed

    @property
    def report_seed(self) -> int:
        """Seed of the evaluation that is reported: the same for all methods, and never used to choose."""
        return 1_000_000 + self.seed

    @property
    def steps(self) -> int:
        return int(method_config(self).steps)

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Job:
        return cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})


def grid(
    tasks: Sequence[str],
    algorithms: Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    limits: Sequence[float] | None = None,
    data: Mapping[str, str] | None = None,
    preset: str = "default",
    overrides: Mapping[str, Any] | None = None,
    episodes: int = 20,
    eval_every: int | None = 0,
    label: str = "",
) -> list[Job]:
    """Every combination: one job a limit where the method is trained for one, else one job for all limits.

    `limits=None` takes each task's own; `eval_every=None` is a tenth of the steps. `data` names files by task;
    `overrides` goes to every job, where a name may begin with a method's (`{"qpt.candidates": 10}`) to be meant for
    that method alone.
    """
    tasks, algorithms, seeds = (list(dict.fromkeys(x)) for x in (tasks, algorithms, seeds))  # type: ignore[assignment]
    own = {algorithm: _own_overrides(overrides or {}, algorithm) for algorithm in algorithms}
    modes = {algorithm: limit_mode(algorithm, preset, own[algorithm]) for algorithm in algorithms}
    jobs = []
    for seed in seeds:  # first one seed of everything: an early look at the whole table
        for task, algorithm in itertools.product(tasks, algorithms):
            wanted = tuple(dict.fromkeys(map(float, get_task(task).cost_limits if limits is None else limits)))
            job = Job(
                task=task,
                data=(data or {}).get(task),
                algorithm=algorithm,
                preset=preset,
                seed=seed,
                overrides=own[algorithm],
                eval_limits=wanted,
                episodes=episodes,
                label=label,
            )
            job = replace(job, eval_every=max(job.steps // 10, 1) if eval_every is None else eval_every)
            if modes[algorithm] == "trained":
                jobs += [replace(job, train_limit=limit, eval_limits=(limit,)) for limit in wanted]
            else:
                jobs.append(job)
    return jobs


def limit_mode(algorithm: str, preset: str = "default", overrides: Mapping[str, Any] | None = None) -> LimitMode:
    """Whether the method obeys a limit live, was trained for one, or ignores it.

    The config can decide it (cloning without a filter knows no limit), so one is made, on a stand-in for its data.
    """
    cls, _ = algorithm_classes(algorithm)
    config = method_config(Job(task="", algorithm=algorithm, preset=preset, overrides=overrides or {}))
    made: Any = cls(config, Spec(2, 2, 10, (0.0,) * 2, (1.0,) * 2, (0.0,), (0.0,), 0.0, 1.0, 1.0, 1.0, 1.0))
    mode: LimitMode = made.limit_mode
    return mode


# -- from a job to configs ---------------------------------------------------------------------------------------------


def method_config(job: Job) -> Any:
    """The method's own config: the preset, then the overrides, then the limit it is trained for."""
    config = preset_config(job.algorithm, job.preset, get_task(job.task) if job.task else None)
    own = {f.name for f in fields(config)}
    of_run = {f.name for f in fields(TrainConfig)} - SET_BY_JOB
    for name in job.overrides:
        if name not in own | of_run:
            raise QptError(f"{job.algorithm} has no setting {name!r}; see qpt train --algorithm {job.algorithm} --help")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in job.overrides.items() if k in own}
    if job.train_limit is not None:
        values["cost_limit"] = job.train_limit
    return replace(config, **values)


def train_config(job: Job, folder: Path, simulators: int = 0) -> TrainConfig:
    """The training run of a job in its folder, to be resumed where it has begun."""
    config = method_config(job)
    of_run = {k: v for k, v in job.overrides.items() if k not in {f.name for f in fields(config)}}
    settings: dict[str, Any] = {"workers": simulators, "progress": False, "keep": 1} | of_run
    return TrainConfig(
        task=job.task,
        data=Path(job.data) if job.data is not None else None,
        algorithm=job.algorithm,
        config=config,
        seed=job.seed,
        out=folder,
        resume=(folder / "run.json").exists(),
        eval_every=job.eval_every,
        eval_episodes=job.episodes,
        eval_limits=job.eval_limits,
        eval_seed=job.selection_seed,
        **settings,
    )


# -- doing it ----------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The job was asked to stop and has saved its state."""


def run_job(job: Job, root: Path, simulators: int = 0) -> Path:
    """Train (or go on training) and evaluate; returns the folder. What is done already is not done again.

    `simulators` is the number of simulator processes; 0 steps them in this process. Every attempt leaves its rows in
    events.jsonl: start (with the step it went on from), then trained, then done or failed.
    """
    folder = root / job.key
    check_folder(folder)
    with alone(folder / ".lock", f"working in {folder}"):
        if is_done(job, root):
            return folder
        began = time.time()
        _event(folder, "start", step=_trained_steps(folder))
        try:
            (folder / DONE).unlink(missing_ok=True)
            write_json(folder / JOB, job.to_json())
            _train(job, folder, simulators)
            _event(folder, "trained", step=_trained_steps(folder))
            if job.task is not None and get_task(job.task).has_simulator:
                evaluate_rules(job, folder, job.eval_limits, workers=simulators).save(folder / EPISODES)
            write_json(folder / DONE, _facts(job, folder) | {"seconds": round(time.time() - began, 1)})
            _event(folder, "done")
        except (Interrupted, KeyboardInterrupt):
            _event(folder, "interrupted", step=_trained_steps(folder))
            raise
        except Exception as error:
            _event(folder, "failed", error=str(error) if isinstance(error, QptError) else repr(error))
            raise
    return folder


def is_done(job: Job, root: Path) -> bool:
    """Whether the job's folder is finished, with the evaluations that the job asks for."""
    facts = read_json(root / job.key / DONE)
    wanted = {"key": job.key, "eval_limits": list(job.eval_limits), "episodes": job.episodes}
    return facts is not None and all(facts.get(k) == v for k, v in wanted.items())


def _train(job: Job, folder: Path, simulators: int) -> None:
    config = train_config(job, folder, simulators)
    if _trained_steps(folder) >= config.config.steps:  # only the evaluation is missing, which needs no data
        return
    if train(config).interrupted:
        raise Interrupted(job.key)


def evaluate_rules(
    job: Job,
    folder: Path,
    cost_limits: Sequence[float],
    settings: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> Episodes:
    """Episodes of a trained job by every rule; `settings` replace fields of the policy's config."""
    workers = job.overrides.get("workers", workers)
    device = str(job.overrides.get("device", "auto"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    def rows(rule: str, which: Literal["last", "best"], seed: int) -> Episodes:
        policy = load_policy(folder, which=which, device=device, **(settings or {}))
        found = evaluate(
            policy, str(job.task), episodes=job.episodes, cost_limits=cost_limits, seed=seed, workers=workers
        )
        return _named(found, rule)

    parts = [rows(LAST, "last", job.report_seed)]
    if job.eval_every:
        # Evaluation is exact: the rows that chose the checkpoint come out again.
        parts.append(rows(ORACLE, "best", job.selection_seed))
        steps = checkpoint_steps(job, folder)
        same = steps["best"] == steps["last"]
        parts.append(_named(parts[0], SELECTED) if same else rows(SELECTED, "best", job.report_seed))
    return Episodes.concatenate(parts)


def checkpoint_steps(job: Job, folder: Path) -> dict[str, int]:
    """The steps of the checkpoints that the rules speak of."""
    names: tuple[Literal["last", "best"], ...] = ("last", "best") if job.eval_every else ("last",)
    return {name: int(checkpoint.read_manifest(checkpoint.resolve(folder, name))["step"]) for name in names}


def _named(episodes: Episodes, rule: str) -> Episodes:
    return replace(episodes, checkpoint=np.full(len(episodes), rule))


def _trained_steps(folder: Path) -> int:
    found = checkpoint.checkpoints(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _facts(job: Job, folder: Path) -> dict[str, Any]:
    manifest = checkpoint.read_manifest(checkpoint.resolve(folder))
    return {
        "key": job.key,
        "eval_limits": job.eval_limits,
        "episodes": job.episodes,
        "step": manifest["step"],
        "data": manifest["data"],
        "versions": manifest["versions"],
        "host": socket.gethostname(),
        "time": time.time(),
    }


# -- little tools ------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none, or not a whole one."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def events(folder: Path) -> list[dict[str, Any]]:
    """What happened in a job's folder, oldest first."""
    return logs.rows(folder / EVENTS, "event")


def _event(folder: Path, name: str, **facts: Any) -> None:
    row = {"event": name, "time": round(time.time(), 3), "host": socket.gethostname(), "pid": os.getpid(), **facts}
    logs.append(folder / EVENTS, row)


def _data_name(data: str | None, task: str | None) -> str:
    """What the data are called on every machine; nothing where they are the task's own."""
    if data is None:
        return ""
    name = data if data.startswith(("embedded:", "minari:")) else Path(data).name
    known = all_tasks().get(task or "")
    return "" if known is not None and name == known.data_file else name


def _own_overrides(overrides: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The settings meant for a method: those without a name before them, and those with its own (which win)."""
    shared = {k: v for k, v in overrides.items() if "." not in k}
    return shared | {
        k.partition(".")[2]: v for k, v in overrides.items() if k.partition(".")[0] == algorithm and "." in k
    }
