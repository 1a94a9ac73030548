"""`qpt data augment`: show what relabelling does to a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qpt import plotting
from qpt.cli.data import warn
from qpt.data import Trajectories, load_dataset
from qpt.data import augment as room
from qpt.data.checks import noticed
from qpt.errors import QptError
from qpt.tasks import Augmentation, Task, all_tasks, get_task


def augment(
    source: tyro.conf.Positional[str],
    rule: Literal["paper", "osrl"] = "paper",
    out: Path | None = None,
    task: str | None = None,
    fraction: float = 0.2,
    max_reward: float | None = None,
    degree: int | None = None,
    max_reward_decrease: float | None = None,
    min_reward: float = 1.0,
    beta: float = 1.0,
    seed: int = 0,
    arrows: int = 60,
    cost_key: str | None = None,
    action_bound: float = 1.0,
) -> None:
    """Show which episodes are relabelled with which targets, as a table and a picture; no data are written.

    Example: qpt data augment embedded:ballcircle --task BallCircle --rule paper --out augmentation.png

    Args:
        source: a file, the name of a task, minari:ID, or embedded:ballcircle.
        rule: the paper's Algorithm 2, or OSRL's nearest-point rule.
        out: write the picture here: every episode by cost and return, arrows from base episodes to their new pairs.
        task: whose published constants to use (found by the source's name by default; without any, the data decide).
        fraction: relabelled episodes for each episode.
        max_reward: where the return targets end.
        degree: degree of OSRL's fitted frontier.
        max_reward_decrease: how much worse an episode may be that stands in for a shared one (osrl).
        min_reward: how far return targets stay above the fitted frontier (osrl).
        beta: softens distances (osrl).
        seed: of the random targets.
        arrows: how many arrows to draw at most.
        cost_key: the name of the costs in the source, if it is not "costs" (Minari: "cost" in infos).
        action_bound: the largest magnitude that an action may have.
    """
    if arrows < 0:
        raise QptError(f"the number of arrows must be 0 or more, not {arrows}")
    trajectories = load_dataset(source, cost_key=cost_key, action_bound=action_bound)
    warn(source, noticed(trajectories.info))
    row = get_task(task) if task is not None else task_of(source)
    relabelled = room.augment(
        trajectories,
        rule=rule,
        fraction=fraction,
        max_reward=max_reward,
        degree=degree,
        max_reward_decrease=max_reward_decrease,
        min_reward=min_reward,
        beta=beta,
        seed=seed,
        task=row,
    )
    flags = {"--max-reward": max_reward, "--degree": degree, "--max-reward-decrease": max_reward_decrease}
    given = [flag for flag, value in flags.items() if value is not None]
    _show(trajectories, relabelled, source, row, given)
    if out is not None:
        title = f"{Path(source).name}: {len(relabelled):,} relabelled episodes, {rule} rule"
        print(f"picture: {plotting.save(room.figure(trajectories, relabelled, title, arrows), out)}")


def task_of(source: str) -> Task | None:
    """The task whose name or data file the source is."""
    tasks = all_tasks()
    return tasks.get(source) or next((t for t in tasks.values() if t.data_file == Path(source).name), None)


def _show(
    trajectories: Trajectories, relabelled: room.Relabelled, source: str, task: Task | None, given: list[str]
) -> None:
    table = Table(title=Text(source), title_justify="left", title_style="bold", header_style="bold")
    for column in ("", "min", "mean", "max"):
        table.add_column(column, justify="right" if column else "left")
    rows: dict[str, npt.NDArray[Any]] = {
        "cost of the data": trajectories.episode_costs,
        "return of the data": trajectories.returns,
        "cost target": relabelled.target_cost,
        "return target": relabelled.target_return,
        "shift of the cost-to-go": relabelled.cost_shift,
        "shift of the return-to-go": relabelled.return_shift,
    }
    for name, values in rows.items():
        numbers = (values.min(), values.mean(), values.max()) if len(values) else ()
        table.add_row(name, *(f"{number:,.1f}" for number in numbers))
    console = Console()
    console.print(table)
    published = task is not None and task.augmentation != Augmentation()
    constants = f"constants of {task.name}" if task is not None and published else "constants chosen from the data"
    fit = "" if relabelled.fit is None else f"; the fitted frontier has degree {relabelled.fit.degree()}"
    console.print(
        Text(
            f"{len(relabelled):,} relabelled episodes, made from {len(np.unique(relabelled.base)):,} "
            f"of the {len(trajectories):,} there are; "
            f"return targets up to {relabelled.max_reward:,.1f}{fit}; "
            + constants
            + (f", but for {' and '.join(given)}" if given else "")
        )
    )
    for note in relabelled.notes:
        console.print(Text(f"note: {note}", style="yellow"))
