"""The paper's experiments as lists of jobs, and what is made of their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qpt import logs
from qpt.algorithms.base import algorithm_classes
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.experiments import paper
from qpt.experiments.beside import Row, averages, compare
from qpt.experiments.jobs import Job, checkpoint_steps, evaluate_rules, grid, is_done, method_config
from qpt.experiments.results import Results
from qpt.experiments.scores import spread
from qpt.tasks import get_task

ScaleName = Literal["smoke", "small", "comparison", "paper"]


@dataclass(frozen=True)
class Scale:
    """How much of the paper's protocol a machine is asked for."""

    steps: int | None  # None: the paper's of each task, for every method
    seeds: int = paper.SEEDS
    episodes: int = paper.EPISODES
    evaluations: int = 10  # during training, evenly spaced; the selection rule chooses among them
    overrides: Mapping[str, Any] = field(default_factory=dict)  # for methods that have such a field


SCALES: dict[ScaleName, Scale] = {
    "smoke": Scale(
        20,
        seeds=1,
        episodes=2,
        evaluations=2,
        overrides={
            **{"batch_size": 16, "width": 16, "critic_width": 16, "vae_width": 16, "layers": 1, "heads": 2},
            **{"context": 3, "candidates": 4, "samples": 3, "stage_min": 2},
        },
    ),
    "small": Scale(2_000, seeds=2, episodes=5, evaluations=4, overrides={"batch_size": 64}),
    "comparison": Scale(30_000, overrides={"batch_size": 256}),
    "paper": Scale(None, evaluations=40),
}


@dataclass(frozen=True)
class Plan:
    """What all experiments need to know: the protocol at a scale, for tasks and their data."""

    tasks: tuple[str, ...]
    scale: Scale
    data: Mapping[str, str] = field(default_factory=dict)  # by task; else from the cache
    preset: str = "paper"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of jobs; "qpt.eta_cost" for one method alone

    def jobs(self, algorithm: str, label: str = "", overrides: Mapping[str, Any] | None = None) -> list[Job]:
        """The jobs of one method or variant, at the paper's limit."""
        fitting = {f.name for f in fields(algorithm_classes(algorithm)[1])}
        chosen = {f"{algorithm}.{k}": v for k, v in self.scale.overrides.items() if k in fitting}
        chosen |= self.overrides
        chosen |= {f"{algorithm}.{k}": v for k, v in (overrides or {}).items()}
        made = []
        # By steps, asked for and of the preset: finding out what a limit means to a method takes a while.
        pattern: dict[tuple[int, int], list[Job]] = {}
        for task in self.tasks:
            usual = get_task(task).paper_steps
            steps = self.scale.steps or usual
            if (steps, usual) not in pattern:
                some = grid(
                    [task],
                    [algorithm],
                    limits=(paper.COST_LIMIT,),
                    preset=self.preset,
                    overrides={"steps": steps} | chosen,
                    episodes=self.scale.episodes,
                    eval_every=max(steps // self.scale.evaluations, 1),
                    label=label or paper.METHODS.get(algorithm, algorithm),
                )
                pattern[steps, usual] = [_without_defaults(job) for job in some]
            for seed in range(self.scale.seeds):
                made += [replace(job, task=task, data=self.data.get(task), seed=seed) for job in pattern[steps, usual]]
        return made


def _without_defaults(job: Job) -> Job:
    """Leave out settings that change nothing, so that experiments share the runs they have in common."""
    plain = method_config(replace(job, overrides={}, label=job.label))
    kept = {k: v for k, v in job.overrides.items() if not hasattr(plain, k) or getattr(plain, k) != v}
    return replace(job, overrides=kept)


def by_seed(jobs: Sequence[Job]) -> list[Job]:
    """One seed of everything first: an early look at the whole table."""
    return sorted(jobs, key=lambda job: job.seed)


# -- the experiments ---------------------------------------------------------------------------------------------------


def main_table_jobs(plan: Plan, algorithms: Sequence[str] = tuple(paper.METHODS)) -> list[Job]:
    """Table 1: every method on every task."""
    return by_seed([job for algorithm in algorithms for job in plan.jobs(algorithm)])


def main_table(results: Results) -> list[Row]:
    """Table 1 with the averages of the suites, over the tasks that were run."""
    rows = compare(results, lambda task, variant, _: paper.main_table().get((task, variant)))
    known = {job.task for job in results.jobs.values() if job.task is not None}
    suites = {name: paper.SUITES.get(get_task(name).suite, "custom") for name in known}
    return rows + averages(rows, suites)


def component_jobs(plan: Plan, experiments: Sequence[int] = ()) -> list[Job]:
    """The ablation of augmentation, both critics' terms and candidates."""
    wanted = [c for c in paper.components() if not experiments or c.number in experiments]
    if len(wanted) < len(set(experiments)):
        raise QptError(f"the component experiments are numbered 1 to 8, not {list(experiments)}")
    return by_seed([job for c in wanted for job in plan.jobs("qpt", c.label, c.overrides)])


def components(results: Results) -> list[Row]:
    printed = {c.label: c.scores for c in paper.components()}
    return compare(results, lambda task, variant, _: printed[variant].get(task))


def candidates(runs: Path, jobs: Sequence[Job], counts: Sequence[int], simulators: int | None = None) -> Results:
    """The trained policies of `jobs` with other numbers of candidates; nothing is trained."""
    return _joined(
        (
            replace(job, label=f"m = {count}"),
            reevaluate(job, runs, job.eval_limits, {"candidates": count}, simulators),
        )
        for count in counts
        for job in jobs
        if is_done(job, runs)
    )


def candidate_rows(results: Results) -> list[Row]:
    def printed(task: str, variant: str, _: float) -> paper.Score | None:
        return paper.candidates().get(int(variant.removeprefix("m = "))) if task in paper.CANDIDATE_TASKS else None

    return compare(results, printed)


def zero_shot_jobs(plan: Plan, algorithms: Sequence[str] = ("qpt", "cdt")) -> list[Job]:
    """The policies of the main table; they are asked for other limits afterwards."""
    return main_table_jobs(plan, algorithms)


def zero_shot(runs: Path, jobs: Sequence[Job], limits: Sequence[float], simulators: int | None = None) -> Results:
    """The trained policies of `jobs` at other limits; nothing is trained."""
    return _joined((job, reevaluate(job, runs, limits, {}, simulators)) for job in jobs if is_done(job, runs))


def zero_shot_rows(results: Results) -> list[Row]:
    """Beside Table 1 at its limit; elsewhere beside the CAPS paper's supplement, for CDT: the figure has no numbers."""

    def printed(task: str, variant: str, limit: float) -> paper.Score | None:
        if limit == paper.COST_LIMIT:
            return paper.main_table().get((task, variant))
        return paper.other_limits().get((task, variant, limit))

    return compare(results, printed)


def hyperparameter_jobs(
    plan: Plan, etas: Sequence[float], fixed_reward: float, fixed_cost: float
) -> tuple[list[Job], dict[str, dict[str, float]]]:
    """η1 varied with η2 fixed, then the other way round; also which η stands behind each label, by sweep."""
    jobs: list[Job] = []
    sweeps: dict[str, dict[str, float]] = {}
    for name, fixed in (("η1", ("η2", fixed_cost)), ("η2", ("η1", fixed_reward))):
        sweep = sweeps.setdefault(f"{name}, with {fixed[0]} = {fixed[1]:g}", {})
        for eta in etas:
            first, second = (eta, fixed[1]) if name == "η1" else (fixed[1], eta)
            label = f"η1 = {first:g}, η2 = {second:g}"
            if label not in {job.label for job in jobs}:
                jobs += plan.jobs("qpt", label, {"eta_reward": float(first), "eta_cost": float(second)})
            sweep[label] = eta
    return by_seed(jobs), sweeps


def hyperparameter_rows(results: Results) -> list[Row]:
    return compare(results, lambda *_: None)  # a figure in the paper, without numbers


@dataclass(frozen=True)
class Curve:
    """Normalised reward and cost over training steps, as mean and spread over seeds."""

    task: str
    label: str
    steps: list[int]
    reward: list[float]
    reward_std: list[float]
    cost: list[float]
    cost_std: list[float]


def curves(runs: Path, jobs: Sequence[Job]) -> list[Curve]:
    """The evaluations during training, from the folders of finished jobs."""
    found: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for job in jobs:
        for row in logs.rows(runs / job.key / "evaluations.jsonl") if is_done(job, runs) else []:
            part = row["limits"][0]
            scores = (float(part["normalized_return"]), float(part["normalized_cost"]))
            found.setdefault((str(job.task), job.label), {}).setdefault(int(row["step"]), []).append(scores)
    made = []
    for (task, label), by_step in found.items():
        steps = sorted(by_step)
        columns = []
        for values in ([[score[i] for score in by_step[step]] for step in steps] for i in (0, 1)):
            columns += [[float(np.mean(v)) for v in values], [spread(v) for v in values]]
        made.append(Curve(task, label, steps, *columns))
    return made


# -- other questions to trained policies -------------------------------------------------------------------------------


def reevaluate(
    job: Job, runs: Path, limits: Sequence[float], settings: Mapping[str, Any], simulators: int | None = None
) -> Episodes:
    """Episodes of a finished job's checkpoints at other limits or with other settings, by each rule as in the job.

    They are kept in the job's folder and made once.
    """
    folder = runs / job.key
    steps = checkpoint_steps(job, folder)
    asked = {"limits": list(map(float, limits)), "settings": dict(settings), "episodes": job.episodes, "steps": steps}
    text = json.dumps(asked, sort_keys=True)
    path = folder / "asked" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.csv"
    if not path.is_file():
        evaluate_rules(job, folder, limits, settings, simulators).save(path)
    return Episodes.load(path)


def _joined(parts: Iterable[tuple[Job, Episodes]]) -> Results:
    found = [(job.key, job, episodes) for job, episodes in parts]
    if not found:
        raise QptError("no run is finished; see above why they failed")
    return Results.of(found)
