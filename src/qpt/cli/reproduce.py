"""`qpt reproduce`: the paper's experiments, each beside the numbers that it printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from qpt import plotting
from qpt.cli.grid import (
    Files,
    Ints,
    Machine,
    Names,
    Numbers,
    Settings,
    Worker,
    carry_out,
    check_simulators,
    console,
    read_files,
    read_settings,
    tell,
)
from qpt.cli.run import Command, run_group
from qpt.data import DataSource, augment, load_dataset
from qpt.errors import QptError
from qpt.experiments import beside, figures, paper, reproduce, theory
from qpt.experiments.bench import Bench
from qpt.experiments.jobs import RULE_NAMES
from qpt.experiments.results import Results
from qpt.tasks import get_task
from qpt.writing import check_folder, write_csv


@dataclass(frozen=True)
class Setup:
    """What the experiments have in common."""

    out: Path
    """The folder of tables and pictures."""
    scale: reproduce.ScaleName = "paper"
    """smoke: does it run at all; small: 2,000 steps, 2 seeds; comparison: 30,000 steps; paper: its protocol."""
    tasks: Names = ()
    """Tasks by name; by default the paper's."""
    data: Files = ()
    """Data of single tasks, as in BallCircle=embedded:ballcircle."""
    data_source: DataSource = "dsrl"
    """Data of all other tasks: the published files, or what `qpt collect record` made."""
    data_dir: Path | None = None
    """A folder with the tasks' data files; what is not there is looked for in the cache."""
    runs: Path | None = None
    """The folder of the runs; by default OUT/runs. Experiments that share it share the runs they have in common."""
    preset: str = "paper"
    """What each method's settings start from: paper or default."""
    steps: int | None = None
    """Training steps, in place of the scale's."""
    seeds: int | None = None
    """Number of training seeds, in place of the scale's."""
    episodes: int | None = None
    """Episodes of each evaluation, in place of the scale's."""
    settings: Settings = ()
    """Settings of the methods and of the runs, as in batch_size=256 qpt.eta_cost=0.01."""
    machine: Worker = field(default_factory=Machine)

    @property
    def run_folder(self) -> Path:
        return self.runs or self.out / "runs"

    @property
    def simulators(self) -> int | None:
        """Simulator processes for questions to trained policies; one a core unless all is to stay in this process."""
        return 0 if self.machine.workers == 0 else None


Common = Annotated[Setup, tyro.conf.arg(name="")]


# -- the commands ------------------------------------------------------------------------------------------------------


def main_table(setup: Common, algorithms: Names = tuple(paper.METHODS)) -> int:
    """Table 1: all methods on all tasks at a cost limit of 10, beside the printed cells.

    Example: qpt reproduce main-table --scale small --tasks BallCircle CarRun --data-dir data --out results/main

    Args:
        algorithms: Methods by name; by default the nine of the paper.
    """
    tasks = setup.tasks or tuple(paper.main_table_tasks())
    jobs = reproduce.main_table_jobs(_plan(setup, tasks, algorithms), algorithms)
    bench = carry_out(jobs, setup.run_folder, setup.machine)
    return _finish(setup, "main-table", "Main table", bench, bench.results, reproduce.main_table, figures.main_table)


def components(setup: Common, experiments: Ints = ()) -> int:
    """The component ablation: augmentation, both critics' terms and candidates, each on or off.

    Example: qpt reproduce components --scale small --tasks HopperVelocity --data-dir data --out results/components

    Args:
        experiments: Numbers of the paper's experiments, 1 to 8; by default all.
    """
    jobs = reproduce.component_jobs(_plan(setup, setup.tasks or paper.COMPONENT_TASKS, ("qpt",)), experiments)
    bench = carry_out(jobs, setup.run_folder, setup.machine)
    return _finish(setup, "components", "Components", bench, bench.results, reproduce.components, figures.components)


def candidates(setup: Common, counts: Ints = paper.CANDIDATES) -> int:
    """The number of candidates at inference: one trained policy a seed, asked with each number.

    Example: qpt reproduce candidates --scale small --data-dir data --out results/candidates

    Args:
        counts: Numbers of candidates.
    """
    if not counts or min(counts) < 1:
        raise QptError("numbers of candidates are whole numbers of at least 1")
    counts = tuple(dict.fromkeys(counts))  # what is named twice counts once
    jobs = _plan(setup, setup.tasks or paper.CANDIDATE_TASKS, ("qpt",)).jobs("qpt")
    bench = carry_out(jobs, setup.run_folder, setup.machine)
    found = bench.results and reproduce.candidates(setup.run_folder, jobs, counts, setup.simulators)
    notes = ("The oracle's checkpoint was chosen with the number of candidates that the policy was trained with.",)
    words = ("candidates", "Number of candidates")
    return _finish(setup, *words, bench, found, reproduce.candidate_rows, figures.candidates, notes)


def hyperparameters(
    setup: Common,
    etas: Numbers = (0.01, 0.1, 1.0, 2.0),
    fixed_eta_reward: float = 0.1,
    fixed_eta_cost: float = 0.01,
) -> int:
    """The weights η1 and η2 of the critics' terms: reward and cost over training steps, for each value.

    The paper shows this as a figure without numbers and prints neither the values nor the fixed ones.

    Example: qpt reproduce hyperparameters --scale small --tasks HopperVelocity --data-dir data --out results/eta

    Args:
        etas: Values of the weight that is varied.
        fixed_eta_reward: η1 while η2 is varied.
        fixed_eta_cost: η2 while η1 is varied.
    """
    plan = _plan(setup, setup.tasks or paper.HYPERPARAMETER_TASKS, ("qpt",))
    jobs, sweeps = reproduce.hyperparameter_jobs(plan, etas, fixed_eta_reward, fixed_eta_cost)
    bench = carry_out(jobs, setup.run_folder, setup.machine)
    curves = reproduce.curves(setup.run_folder, jobs)

    def picture(_: Sequence[beside.Row]) -> Any:
        return figures.hyperparameters(curves, sweeps)

    if curves:
        header = ("task", "label", "step", "reward", "reward_std", "cost", "cost_std")
        points = (
            (c.task, c.label, *point)
            for c in curves
            for point in zip(c.steps, c.reward, c.reward_std, c.cost, c.cost_std, strict=True)
        )
        write_csv(setup.out / "curves.csv", header, points)
    words = ("hyperparameters", "Hyper-parameters")
    return _finish(setup, *words, bench, bench.results, reproduce.hyperparameter_rows, picture)


def zero_shot(setup: Common, limits: Numbers = paper.ZERO_SHOT_LIMITS, algorithms: Names = ("qpt", "cdt")) -> int:
    """Zero-shot adaptation: policies trained once, asked to keep limits from 10 to 60.

    The paper's figure has five tasks, of which the text names CarButton1 and PointButton1.

    Example: qpt reproduce zero-shot --scale small --tasks BallRun PointCircle1 --data-dir data --out results/zero-shot

    Args:
        limits: Cost limits to ask for.
        algorithms: Methods with a live limit.
    """
    if not limits or not all(math.isfinite(limit) and limit >= 0 for limit in limits):
        raise QptError(f"--limits are finite numbers of at least 0, and at least one; these are {list(limits)}")
    limits, algorithms = tuple(dict.fromkeys(limits)), tuple(dict.fromkeys(algorithms))
    plan = _plan(setup, setup.tasks or paper.ZERO_SHOT_TASKS, algorithms)
    jobs = reproduce.zero_shot_jobs(plan, algorithms)
    fixed = sorted({job.algorithm for job in jobs if job.train_limit is not None})
    if fixed:
        raise QptError(f"{fixed[0]} is trained for one limit and cannot be asked for another; choose qpt, cdt or caps")
    bench = carry_out(jobs, setup.run_folder, setup.machine)
    found = bench.results and reproduce.zero_shot(setup.run_folder, jobs, limits, setup.simulators)
    notes = ("Printed: Table 1 at the limit 10; elsewhere, for CDT and CAPS, the supplement of the CAPS paper.",)
    words = ("zero-shot", "Zero-shot adaptation")
    return _finish(setup, *words, bench, found, reproduce.zero_shot_rows, figures.zero_shot, notes)


def augmentation_figure(
    out: Path,
    task: str = "BallCircle",
    data: str | None = None,
    rule: Literal["paper", "osrl"] = "paper",
    fraction: float = 0.2,
    seed: int = 0,
) -> int:
    """The (cost, return) plane of a data set before and after relabelling.

    Example: qpt reproduce augmentation-figure --data embedded:ballcircle --out results/augmentation

    Args:
        out: The folder of the picture and the table of relabelled pairs.
        task: The task, whose published constants are used.
        data: A data file, or embedded:ballcircle; by default the task's own.
        rule: The paper's Algorithm 2, or OSRL's nearest-point rule.
        fraction: Relabelled episodes for each logged one.
        seed: Of the random targets.
    """
    episodes, facts = load_dataset(data or task), get_task(task)
    relabelled = augment.augment(episodes, rule=rule, fraction=fraction, seed=seed, task=facts)
    title = f"{facts.name}: relabelling by the {rule} rule"
    if episodes.is_surrogate:
        title += " (surrogate data)"
    plotting.save(figures.augmentation(episodes, relabelled, title), out / "augmentation.png")
    base = relabelled.base
    header = ("base_episode", "base_cost", "base_return", "target_cost", "target_return")
    columns = (base, episodes.episode_costs[base], episodes.returns[base], relabelled.target_cost)
    write_csv(out / "augmentation.csv", header, zip(*columns, relabelled.target_return, strict=True))
    counts = f"{len(relabelled):,} relabelled episodes from {len(set(base.tolist())):,} of {len(episodes):,}"
    print(f"{counts}\nwrote {out / 'augmentation.png'} and augmentation.csv")
    return 0


def theory_command(out: Path, problems: int = 300) -> int:
    """The theorem's setting made concrete: exact gaps beside the bounds, and where a step of it fails.

    Example: qpt reproduce theory --out results/theory

    Args:
        out: The folder of pictures and tables.
        problems: Random problems of each kind.
    """
    if problems < 1:
        raise QptError(f"at least one random problem is needed, not {problems}")
    check_folder(out)
    result = theory.run(out, problems)
    page = console()
    table = Table("where the theorem or its proof fails", "H", "ε", "σ^r", "σ^c", "claimed ≤", "true", box=SIMPLE_HEAD)
    for row in result.counter_examples:
        numbers = [f"{float(row[name]):.3g}" for name in ("epsilon", "sigma_reward", "sigma_cost", "claimed", "true")]
        table.add_row(str(row["name"]), str(row["H"]), *numbers)
    page.print(table)
    table = Table("the road", "value", "H", box=SIMPLE_HEAD)
    for name in ("gap of π_DT", "gap of π̂", "bound", "cost gap of π_DT", "cost gap of π̂", "cost bound"):
        table.add_column(name, justify="right")
    for row in result.sweeps:
        keys = [f"{s}_{k}" for s in theory.SIGNALS for k in ("gap_dt", "gap_penalised", "bound")]
        table.add_row(str(row["sweep"]), f"{row['x']:.3g}", str(row["H"]), *(f"{float(row[k]):.3g}" for k in keys))
    page.print(table)
    for kind, bound in (("as printed", "bound"), ("with what the proof needs", "bound_repaired")):
        part = [row for row in result.scatter if row["sweep"] == kind]
        counts = [len(theory.violations(part, signal, bound)) for signal in theory.SIGNALS]
        print(f"random problems, assumptions {kind}: above the bound {counts[0]} (reward), {counts[1]} (cost)", end="")
        print(f" of {len(part)}")
    print(f"wrote bounds.png, random.png and three tables to {out}")
    return 0


COMMANDS: dict[str, Command | str] = {
    "main-table": main_table,
    "components": components,
    "candidates": candidates,
    "hyperparameters": hyperparameters,
    "zero-shot": zero_shot,
    "augmentation-figure": augmentation_figure,
    "theory": theory_command,
}


def main(args: Sequence[str]) -> int:
    return run_group(COMMANDS, args, "reproduce")


# -- what they share ---------------------------------------------------------------------------------------------------


def _plan(setup: Setup, tasks: Sequence[str], algorithms: Sequence[str]) -> reproduce.Plan:
    tasks = tuple(dict.fromkeys(tasks))
    check_simulators(tasks)
    changes: dict[str, Any] = {"steps": setup.steps, "seeds": setup.seeds, "episodes": setup.episodes}
    given = {name: value for name, value in changes.items() if value is not None}
    if min(given.values(), default=1) < 1:
        raise QptError("--steps, --seeds and --episodes are whole numbers of at least 1")
    return reproduce.Plan(
        tasks,
        replace(reproduce.SCALES[setup.scale], **given),
        read_files(setup.data, setup.data_dir, tasks, setup.data_source),
        setup.preset,
        read_settings(setup.settings, algorithms) | {"device": setup.machine.device},
    )


def _finish(
    setup: Setup,
    name: str,
    title: str,
    bench: Bench,
    results: Results,
    make_rows: Callable[[Results], list[beside.Row]],
    picture: Callable[[Sequence[beside.Row]], Any],
    notes: Sequence[str] = (),
) -> int:
    """Write the tables, the picture and the episodes behind them, print the paper's rule, and tell what failed."""
    if len(results):
        rows, notes = make_rows(results), (*_about(setup, bench), *notes)
        shown = [row for row in rows if row.rule == rows[0].rule]  # the paper's rule, where there is one
        written = beside.write_tables(setup.out, name, title, rows, notes)
        written.append(plotting.save(picture(shown), setup.out / f"{name}.png"))
        written.append(results.save(setup.out / f"{name}-episodes.csv"))  # for `qpt report`
        page = console()
        page.print(_table(shown))
        for note in (*notes, f"wrote {', '.join(str(path) for path in written)}"):
            page.print(note, highlight=False, markup=False)
    return tell(bench) or (0 if len(results) else 1)


def _about(setup: Setup, bench: Bench) -> list[str]:
    steps = sorted({job.steps for job in bench.results.jobs.values()})
    texts = [f"Scale {setup.scale}, preset {setup.preset}: {', '.join(f'{s:,}' for s in steps)} training steps."]
    return [*texts, *bench.results.notes]


def _table(rows: Sequence[beside.Row]) -> Table:
    title = f"checkpoint: {RULE_NAMES[rows[0].rule]}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in beside.HEAD:
        table.add_column(name, justify="left" if name in ("task", "variant", "verdict") else "right")
    for row in rows:
        style = "bold blue" if row.best else "bold" if row.safe else "dim"
        table.add_row(*map(escape, beside.cells(row)), style=style)
    return table
