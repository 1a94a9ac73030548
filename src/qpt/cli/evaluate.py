"""`qpt evaluate`: run a policy in a simulator at one or more cost limits."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qpt import plotting, stats
from qpt.behaviour import PREFIX, load_behaviour
from qpt.cli.run import run
from qpt.data import Trajectories, load_dataset, write
from qpt.envs import make_env
from qpt.envs.vector import dimensions
from qpt.errors import QptError, require
from qpt.evaluation import (
    CallablePolicy,
    ConstantPolicy,
    EpisodePolicy,
    Episodes,
    RandomPolicy,
    episode_seeds,
    evaluate,
)
from qpt.tasks import Task, get_task
from qpt.writing import check_file, check_folder, write_whole

FRAMES = 250  # of a picture at most: longer episodes leave some out
# Colours and shapes of the limits in a picture, apart from those of the data's plane.
MARKS = (("#228833", "o"), ("#aa3377", "s"), ("#222222", "^"), ("#998811", "D"), ("#117788", "v"))


def evaluate_command(
    task: str | None = None,
    checkpoint: Path | None = None,
    policy: str | None = None,
    which: Literal["last", "best"] = "last",
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE [FIELD=VALUE ...]")] = (),
    limits: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="X [X ...]")] = None,
    episodes: int = 20,
    seed: int = 0,
    workers: int | None = None,
    slots: int | None = None,
    out: Path | None = None,
    record: Path | None = None,
    picture: Path | None = None,
    data: str | None = None,
    render: int = 0,
    render_dir: Path = Path("renders"),
    step_timeout: float = 120.0,
) -> int:
    """Run a policy in its task's simulator and print one line for each cost limit, with 95 % intervals.

    Example: qpt evaluate --checkpoint runs/ball --task BallCircle --limits 10 20 40 --out episodes.csv
    Example: qpt evaluate --checkpoint runs/ball --set candidates=16 rtg_noise=0.2 test_offset=3 --limits 10

    Args:
        task: The task; by default the one the checkpoint was trained for.
        checkpoint: A run folder or a checkpoint folder.
        policy: Instead of a checkpoint: random, zero, constant:0.5,-1, behaviour:TASK/N (one that datasets are recorded
            with), or module:function of observations [n, S].
        which: The last checkpoint of a run, or the best of its evaluations.
        settings: How the checkpoint's policy decides, in place of what it was trained with: fields of its method.
        limits: Cost limits of an episode; by default the task's own.
        episodes: Episodes at each limit.
        seed: Seed of the evaluation; the same seed gives the same rows.
        workers: Simulator processes; by default one a core, 0 for none.
        slots: Episodes that run at the same time.
        out: Write the table of episodes to this .csv or .parquet file.
        record: Write the episodes themselves to this DSRL file (.hdf5).
        picture: Draw the episodes among those of the data, by cost and return.
        data: Data of the picture; by default those the policy was trained on.
        render: Draw this many episodes at each limit as GIF pictures.
        render_dir: Where the pictures go.
        step_timeout: Seconds after which a simulator step counts as hung.
    """
    if (checkpoint is None) == (policy is None):
        raise QptError("give either --checkpoint or --policy (random, zero, constant:X,X or module:function)")
    if settings and checkpoint is None:
        raise QptError("--set changes how a checkpoint's policy decides; give one with --checkpoint")
    if which != "last" and checkpoint is None:
        raise QptError("--which chooses among the checkpoints of a run; give one with --checkpoint")
    _check_files(out, record, picture, render_dir if render else None)
    chosen: Any = None
    changed: dict[str, Any] = {}
    if checkpoint is not None:
        load_policy = importlib.import_module("qpt.policy").load_policy
        checkpoint = importlib.import_module("qpt.checkpoint").resolve(checkpoint, which)
        chosen = load_policy(checkpoint)
        if settings:  # their types depend on the method, which the checkpoint tells
            changed = _changed(settings, chosen.algorithm)
            chosen = load_policy(checkpoint, **changed)
        if "OMP_NUM_THREADS" not in os.environ:  # small networks on the CPU gain nothing from more threads
            importlib.import_module("torch").set_num_threads(1)
        task = task or chosen.spec.task
    if task is None:
        raise QptError("give the task to evaluate in with --task; `qpt tasks` lists them")
    facts = get_task(task)
    chosen = chosen if chosen is not None else named_policy(str(policy), facts)
    own = getattr(chosen, "trained_limit", None) if chosen.limit_mode == "trained" else None
    wanted = limits if limits is not None else facts.cost_limits if own is None else (float(own),)
    logged = None if picture is None else _logged(data, checkpoint)  # before the long part, should it not be found
    results = evaluate(
        chosen,
        facts,
        episodes=episodes,
        cost_limits=wanted,
        seed=seed,
        workers=workers,
        slots=slots,
        progress=sys.stderr.isatty(),
        record=record is not None,
        step_timeout=step_timeout,
    )
    results = replace(results, provenance={**results.provenance, "settings": changed})
    console = Console() if sys.stdout.isatty() else Console(width=120)  # a pipe has no width of its own
    console.print(table(results, console.width))  # before anything is written: a full disk must not cost the numbers
    if checkpoint is not None:
        print(f"Checkpoint: {checkpoint}")  # not by rich, which takes a [name] in a path for a style
    home = getattr(chosen, "task", None)
    if home and home != facts.name:
        print(f"The policy was trained for {home}, not for {facts.name}.")
    if results.provenance.get("surrogate_data"):
        console.print("The policy was trained on surrogate data, not on the published data of its task.")
    if own is not None:
        console.print(f"The policy was trained for the limit {own:g} and takes no other.")
    if out is not None:
        results.save(out)
    if record is not None and results.trajectories is not None:
        write(results.trajectories, record)
    if picture is not None and logged is not None:
        plotting.save(plane(results, logged), picture)
    for path in (out, record, picture):
        if path is not None:
            print(f"wrote {path}")
    for index, limit in enumerate(wanted):
        for number in range(min(render, episodes)):
            file = render_dir / f"{facts.name}-limit{limit:g}-episode{number}.gif"
            draw(chosen, facts, limit, episode_seeds(seed, index, number), file)
            print(f"wrote {file}")
    return 0


def _changed(texts: Sequence[str], method: str) -> dict[str, Any]:
    """The values of --set by field of the method."""
    found = importlib.import_module("qpt.cli.grid").read_settings(texts, [method])
    if foreign := [field for field in found if "." not in field]:
        raise QptError(f"--set {foreign[0]}: that belongs to training; a policy of {method} decides without it")
    return {field.removeprefix(f"{method}."): value for field, value in found.items()}


def table(results: Episodes, width: int = 120) -> Table:
    """One line for each limit; "safe" is said only when the whole interval of the mean cost lies within the limit.

    A narrow screen leaves the normalised scores out, so that no number is cut off.
    """
    lines = results.summary()
    first = lines[0]
    grid = Table(
        title=escape(f"{first['task']} · {first['algorithm']} · {first['episodes']} episodes a limit, 95 % intervals"),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    scores = ("normalized\nreturn", "normalized\ncost") if width >= 115 else ()
    for name in ("limit", "return", "cost", *scores, "P(cost\n≤ limit)", "worst\n10 %", "fallback"):
        grid.add_column(name, justify="right", overflow="fold")
    grid.add_column("")
    for line in lines:
        limit = line["cost_limit"]
        verdict = stats.verdict(line["cost_interval"], limit)
        normalized = (_with_interval(line, "normalized_return", 3), _with_interval(line, "normalized_cost", 2))
        grid.add_row(
            f"{limit:g}",
            _with_interval(line, "return", 1),
            _with_interval(line, "cost", 1),
            *(normalized if scores else ()),
            _with_interval(line, "within_limit", 2),
            f"{line['cost_cvar']:.1f}",
            "–" if math.isnan(line["fallback_share"]) else f"{line['fallback_share']:.0%}",
            verdict,
            style={"safe": "bold", "unsafe": "dim"}.get(verdict, ""),
        )
    return grid


def plane(results: Episodes, data: Trajectories) -> Any:
    """The data's (cost, return) plane with the policy's episodes in it, one colour and shape for each limit."""
    limits = list(dict.fromkeys(results.cost_limit.tolist()))
    title = f"{results.task[0]}: {results.algorithm[0]} at {len(limits)} cost limits, among the logged episodes"
    figure = plotting.cost_return_plane(data, limits, title)
    axes = figure.axes[0]
    for limit, (colour, shape) in zip(limits, itertools.cycle(MARKS), strict=False):
        part = results.select(results.cost_limit == limit)
        style = {"color": colour, "marker": shape, "s": 34, "edgecolors": "white", "linewidths": 0.6}
        axes.scatter(part.costs, part.returns, **style, zorder=5, label=f"policy, limit {limit:g}")
    axes.set_xlim(right=max(axes.get_xlim()[1], 1.04 * float(results.costs.max())))
    for legend in list(figure.legends):  # drawn anew, with what was added
        legend.remove()
    figure.legend(loc="outside lower left", ncols=3, frameon=False, handletextpad=0.5, fontsize=9)
    return figure


def _logged(source: str | None, checkpoint: Path | None) -> Trajectories:
    room = importlib.import_module("qpt.checkpoint")
    if source is None and checkpoint is not None:
        source = str(room.read_manifest(checkpoint).get("data", {}).get("source") or "")
    if not source:
        raise QptError("the picture needs the logged episodes; name them with --data FILE")
    return load_dataset(source)


def _with_interval(line: dict[str, Any], key: str, digits: int) -> str:
    mean, low, high = (f"{value:z.{digits}f}" for value in (line[key], *line[f"{key}_interval"]))  # z: no -0.0
    if math.isnan(line[key]):
        return "–"
    return mean if math.isnan(line[f"{key}_interval"][0]) else f"{mean}\n\\[{low}, {high}]"


def _check_files(out: Path | None, record: Path | None, picture: Path | None, folder: Path | None) -> None:
    """What cannot be done is said before the evaluation, which may take hours."""
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise QptError(f"a table is saved as .csv or .parquet, not as {out.name!r}; change the ending of --out")
    if out is not None and out.suffix == ".parquet":
        require("pyarrow.parquet", "parquet")
    if record is not None and record.suffix.lower() not in (".hdf5", ".h5", ".npz"):
        raise QptError(f"episodes are recorded as .hdf5 or .npz, not as {record.name!r}; change the ending of --record")
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise QptError(f"a picture is saved as .png, .svg or .pdf, not as {picture.name!r}; change its ending")
    if folder is not None:
        require("imageio.v3", "sims")
        check_folder(folder)
    for file in filter(None, (out, record, picture)):
        check_file(file)


def named_policy(name: str, task: Task) -> EpisodePolicy:
    if name == "random":
        return RandomPolicy(dimensions(task)[1])
    if name == "zero":
        return ConstantPolicy(np.zeros(dimensions(task)[1]))
    if name.startswith(PREFIX):
        return load_behaviour(name)
    module, _, function = name.partition(":")
    if module == "constant":
        return ConstantPolicy(_constant(function, dimensions(task)[1]))
    if not module or not function:
        raise QptError(f"there is no policy {name!r}; use random, zero, constant:X,X or module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder, as with `python -m`
    try:
        return CallablePolicy(getattr(importlib.import_module(module), function), name)
    except (ImportError, AttributeError) as error:
        raise QptError(f"the policy {name!r} cannot be imported: {error}") from error


def _constant(text: str, action_dim: int) -> list[float]:
    try:
        action = [float(value) for value in text.split(",")]
    except ValueError:
        action = []
    if len(action) != action_dim or not all(-1 <= value <= 1 for value in action):
        example = ",".join(["0.5"] * action_dim)
        raise QptError(f"a constant policy of {action_dim} numbers from -1 to 1 is needed, as in constant:{example}")
    return action


def draw(policy: EpisodePolicy, task: Task, cost_limit: float, seeds: tuple[int, int], path: Path) -> None:
    """Run one episode with pictures and write it as a GIF."""
    writer = require("imageio.v3", "sims")
    env = make_env(task, render=True)
    frames = []
    try:
        observation, _ = env.reset(seed=seeds[0])
        policy.reset(1, cost_limits=np.array([cost_limit]), seeds=np.array([seeds[1]], np.int64))
        active, step, done = np.ones(1, bool), 0, False
        every = max(1, math.ceil((task.horizon or FRAMES) / FRAMES))
        while not done:
            if step % every == 0:
                frames.append(np.asarray(env.render(), np.uint8))
            observation, reward, terminated, truncated, info = env.step(policy.act(observation[None], active)[0])
            policy.observe(np.array([reward], np.float32), np.array([info["cost"]], np.float32))
            step, done = step + 1, terminated or truncated
    finally:
        env.close()
    write_whole(path, writer.imwrite("<bytes>", frames, extension=".gif", duration=40, loop=0))


def main(args: Sequence[str]) -> int:
    return run(evaluate_command, args, "evaluate")
