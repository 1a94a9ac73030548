"""`qpt collect`: make a data set of DSRL's kind in a simulator."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qpt.cli.run import run
from qpt.collect.collection import Collected, check_cap, collect, own_task, record_policy, remove
from qpt.collect.filter import coverage
from qpt.collect.schedules import Plan, plans
from qpt.data import write
from qpt.episodes import command as typed
from qpt.errors import QptError
from qpt.tasks import Task, dsrl_tasks, get_task


def collect_command(
    out: Path,
    task: str | None = None,
    env: str | None = None,
    trajectories: int | None = None,
    seed: int = 0,
    runs: int | None = None,
    steps: int | None = None,
    workers: int | None = None,
    horizon: int | None = None,
    cost_cap: float | None = None,
    schedule: Path | None = None,
    policy: str | None = None,
    limits: Annotated[tuple[float, ...], tyro.conf.arg(metavar="[X [X ...]]")] = (),
    compact: bool = False,
    picture: bool = True,
    keep_episodes: bool = False,
    overwrite: bool = False,
) -> int:
    """Make a data set: train policies under changing cost limits, record their episodes, and choose evenly from them.

    Run the same command again to go on after an interruption. One seed gives one file.

    Example: qpt collect --task CarCircle --trajectories 1450 --out car.hdf5

    Args:
        out: The file to write (.hdf5 or .npz); what is recorded on the way lies beside it in OUT.parts.
        task: A task by its name; `qpt tasks` lists them.
        env: Instead of a task: module:factory of an environment of your own that reports a cost.
        trajectories: How many trajectories to choose; by default as many as the published data have, or 1000.
        seed: Seed of everything.
        runs: Independent runs; by default those of the task's schedule.
        steps: Simulator steps of each run; by default those of the schedule.
        workers: Processes, one a run at a time; by default one a core, 0 for none.
        horizon: Cut episodes off after this many steps (for --env).
        cost_cap: Leave out episodes that cost more; by default the largest cost in the published data.
        schedule: A TOML file with schedules of your own.
        policy: Record this policy instead of training any: the folder of a checkpoint, or module:function.
        limits: Cost limits for a --policy that takes any; by default the task's own.
        compact: Store final observations instead of next observations: half the size.
        picture: Draw the (cost, return) plane beside the file.
        keep_episodes: Keep OUT.parts with all recorded episodes when done.
        overwrite: Replace a file that exists, and its picture.
    """
    began = time.monotonic()
    if (task is None) == (env is None):
        raise QptError("give either --task (`qpt tasks` lists them) or --env module:factory")
    if out.suffix.lower() not in (".hdf5", ".h5", ".npz"):
        raise QptError(f"a data set is written as .hdf5 or .npz, not as {out.name!r}; change the ending of --out")
    if out.exists() and not overwrite:
        raise QptError(f"{out} exists; give another --out, or --overwrite to replace it")
    drawing = out.with_suffix(".png")
    if picture and drawing.exists() and not overwrite:
        raise QptError(f"{drawing} exists; give another --out, --no-picture, or --overwrite to replace it")
    if limits and policy is None:
        raise QptError("--limits are those of --policy; leave them out, or name a policy to record")
    if policy is not None and any(given is not None for given in (runs, steps, schedule)):
        raise QptError("--policy trains nothing; leave out --runs, --steps and --schedule")
    if task is not None and horizon is not None:
        raise QptError(f"the horizon of {task} is part of the task; --horizon is for --env")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder, as with `python -m`
    facts = get_task(task) if task is not None else own_task(str(env), horizon, cost_cap)
    folder = out.with_name(out.name + ".parts")
    program, *words = typed()
    command = shlex.join(["qpt", "collect", *words[1:]]) if Path(program).name == "qpt" else ""
    console = Console(stderr=True)
    chosen: dict[str, Any]
    common: dict[str, Any] = {"trajectories": trajectories, "seed": seed, "workers": workers, "command": command}
    try:
        if policy is not None:
            with console.status("recording ...") as bar:
                result = record_policy(
                    policy, facts, folder, cost_limits=limits, cost_cap=cost_cap, **common,
                    report=lambda done, total: bar.update(f"recorded {done} of {total} episodes"),
                )  # fmt: skip
        else:
            todo = plans(facts.name, check_cap(facts, cost_cap), seed=seed, runs=runs, steps=steps, file=schedule)
            chosen = {"cost_cap": cost_cap, "runs": runs, "steps": steps, "schedule": schedule}
            with Progress(facts, check_cap(facts, cost_cap), todo, console) as progress:
                result = collect(facts, folder, report=progress.hear, **chosen, **common)
            print(progress.shares())
    except KeyboardInterrupt:
        print(f"what was recorded lies in {folder}; run the same command again to go on", file=sys.stderr)
        raise
    write(result.trajectories, out, compact=compact)
    if picture:
        draw(result, facts, drawing)
    if not keep_episodes:
        remove(folder)
    print(_summary(result, facts, out, time.monotonic() - began))
    return 0


def _summary(result: Collected, task: Task, out: Path, seconds: float) -> str:
    data, known = result.trajectories, ""
    if task.reward_min is not None and task.reward_max is not None:
        known = f" ({_whose(task)}: {task.reward_min:.1f} to {task.reward_max:.1f})"
    lines = [
        f"wrote {out}: {len(data)} trajectories, {data.steps} steps, chosen from {result.recorded} episodes "
        f"({result.steps} simulator steps, {seconds / 60:.1f} minutes)",
        f"  return {data.returns.min():.1f} to {data.returns.max():.1f}{known}, "
        f"mean cost {data.episode_costs.mean():.1f}",
    ]
    for limit in task.cost_limits:
        best = data.best_safe_episode(limit)
        share = (data.episode_costs <= limit).mean()
        told = "none" if best is None else f"{data.returns[best]:.1f}"
        lines.append(f"  cost ≤ {limit:g}: {share:.0%} of the trajectories, best return {told}")
    return "\n".join(lines)


def _whose(task: Task) -> str:
    """Where the range of returns comes from."""
    return "DSRL" if task.name in dsrl_tasks() else "the task"


def draw(result: Collected, task: Task, drawing: Path) -> None:
    """The (cost, return) plane beside the file, with the published data's extremes."""
    from qpt import plotting

    data, whose = result.trajectories, f"{_whose(task)}'s"
    try:
        figure = plotting.cost_return_plane(data, task.cost_limits, f"{task.name}: {len(data)} trajectories")
        axes = figure.axes[0]
        style: dict[str, Any] = {"color": plotting.INK, "linewidth": 1, "linestyle": ":", "zorder": 1}
        for value, name in ((task.reward_max, "largest"), (task.reward_min, "smallest")):
            if value is not None:
                axes.axhline(value, **style)
                axes.annotate(
                    f"{whose} {name} return, {value:.0f}", (0.0, value), xycoords=("axes fraction", "data"),
                    xytext=(4, 3), textcoords="offset points", ha="left", fontsize=8, color=plotting.INK,
                )  # fmt: skip
        if task.cost_max is not None:
            axes.axvline(task.cost_max, **style)
            axes.set_xlim(right=max(axes.get_xlim()[1], task.cost_max * 1.04))
        plotting.save(figure, drawing)
    except QptError as error:  # the data matter more than their picture
        print(f"no picture: {error}", file=sys.stderr)


# -- progress ----------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """What is known of one run."""

    steps: int = 0
    begun_at: int = 0  # steps when we began, on a run that goes on
    last: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class Progress(ExitStack):
    """A table of the runs that lives on a terminal; elsewhere, a line now and then."""

    def __init__(self, task: Task, cap: float, todo: list[Plan], console: Console) -> None:
        super().__init__()
        self.task, self.cap, self.todo, self.console = task, cap, todo, console
        self.rows = [_Row() for _ in todo]
        self.episodes: list[tuple[float, float, int]] = []
        self.began = self.told = time.monotonic()
        self.live = None
        if console.is_terminal:
            self.live = self.enter_context(Live(console=console, get_renderable=self.table, transient=True))

    def hear(self, number: int, message: dict[str, Any]) -> None:
        row = self.rows[number]
        if "incident" in message:
            self.console.print(Text(message["incident"]), soft_wrap=True)
            return
        if "return" in message:
            row.last = message
            self.episodes += map(tuple, message["episodes"])
        elif row.steps == 0:  # its first word: what it had recorded before
            row.begun_at = message["steps"]
            self.episodes += map(tuple, message["episodes"])
        row.steps, row.times = message["steps"], message["times"]
        if self.live is None and time.monotonic() - self.told > 15:
            self.told = time.monotonic()
            self.console.print(Text(self.line()), soft_wrap=True)

    def rate(self) -> float:
        return sum(r.steps - r.begun_at for r in self.rows) / max(time.monotonic() - self.began, 1e-9)

    def covered(self) -> float:
        if not self.episodes:
            return 0.0
        returns, costs, _ = np.array(self.episodes, np.float64).T
        low = float(returns.min()) if self.task.reward_min is None else self.task.reward_min
        high = float(returns.max()) if self.task.reward_max is None else self.task.reward_max
        return coverage(returns, costs, self.cap, low, high)

    def line(self) -> str:
        total = sum(plan.steps for plan in self.todo)
        done = sum(min(row.steps, plan.steps) for row, plan in zip(self.rows, self.todo, strict=True))
        left = (total - done) / max(self.rate(), 1e-9)
        ahead = f"{left / 60:.1f} min left" if done else "starting"
        return (
            f"{self.task.name}: {done:,} of {total:,} steps, {self.rate():,.0f} steps/s, {len(self.episodes)} episodes "
            f"within the cap, {self.covered():.0%} of the grid, {ahead}"
        )

    def table(self) -> Group:
        grid = Table(box=SIMPLE_HEAD)
        for name in ("run", "steps", "return", "cost", "limit", "multiplier", "steps/s"):
            grid.add_column(name, justify="right")
        for plan, row in zip(self.todo, self.rows, strict=True):
            told = row.last
            values = (
                (f"{told['return']:.1f}", f"{told['cost']:.1f}", f"{told['limit']:.1f}", f"{told['multiplier']:.2f}")
                if told else ("–",) * 4
            )  # fmt: skip
            speed = f"{row.steps / row.times['wall']:,.0f}" if row.times.get("wall") else "–"
            grid.add_row(str(plan.number), f"{min(row.steps / plan.steps, 1):.0%}", *values, speed)
        return Group(grid, Text(self.line()))

    def shares(self) -> str:
        """Where the processors' time went."""
        sums = {k: sum(row.times.get(k, 0.0) for row in self.rows) for k in ("simulator", "policy", "learner")}
        total = sum(sums.values()) or 1.0
        parts = ", ".join(f"{name} {value / total:.0%}" for name, value in sums.items())
        return f"{sum(r.steps for r in self.rows) / total:,.0f} steps a second of processor time: {parts}"


def main(args: Sequence[str]) -> int:
    return run(collect_command, args, "collect")
