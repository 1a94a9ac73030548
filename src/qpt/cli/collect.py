"""`qpt collect`: make datasets of DSRL's kind in a simulator, in two stages."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qpt.behaviour import snapshots_of
from qpt.collect import learn, manifest
from qpt.collect.given import record_policy
from qpt.collect.learn import own_task
from qpt.collect.record import WANTED, Recorded, record
from qpt.collect.spool import remove
from qpt.collect.workers import cores
from qpt.data import write
from qpt.data.download import collected_dir
from qpt.errors import QptError
from qpt.tasks import Task, dsrl_tasks, get_task

USAGE = """usage: qpt collect COMMAND ...

  learn   learn behaviour policies along a task's schedule; hours, but qpt brings those of most tasks along
  record  play behaviour policies, or one of your own, and write a dataset: minutes

`qpt collect COMMAND --help` explains each."""
FILES = (".hdf5", ".h5", ".npz")


def main(args: Sequence[str]) -> int:
    if args and args[0] == "learn":
        return learn.main(args[1:], "qpt collect learn")
    if args and args[0] == "record":
        return _record(args[1:])
    if args and args[0] not in ("-h", "--help"):
        print(f"error: there is no command 'collect {args[0]}'; `qpt collect --help` lists them", file=sys.stderr)
        return 2
    print(USAGE)
    return 0 if args else 2


def _record(args: Sequence[str]) -> int:
    """argparse, and imports where they are needed: this also runs where numpy and a simulator are all there is."""
    parser = argparse.ArgumentParser(
        prog="qpt collect record",
        description="Play the behaviour policies of tasks, choose evenly from what they did, and write datasets. Run "
        "the same command again to go on after an interruption. One seed gives one dataset.",
        epilog="example: qpt collect record CarCircle --full --out car.hdf5",
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help="`qpt tasks` lists them")
    add("--all", action="store_true", help="all tasks of DSRL that have behaviour policies, one after the other")
    add("--env", metavar="MODULE:FACTORY", help="instead of tasks: an environment of your own that reports a cost")
    add(
        "--out",
        type=Path,
        metavar="PATH",
        help="file (.hdf5 or .npz) or folder; default: where --data-source collected looks",
    )
    add("--trajectories", type=int, metavar="N", help=f"how many to choose (default: {WANTED})")
    add("--full", action="store_true", help="as many trajectories as the published data have")
    add("--seed", type=int, default=0, help="seed of everything (default: 0)")
    add("--snapshots", type=Path, metavar="FILE", help="behaviour policies that `qpt collect learn` wrote")
    add(
        "--policy",
        metavar="P",
        help="record this policy alone: a checkpoint's folder, behaviour:TASK/N, or module:function",
    )
    add("--limits", type=float, nargs="+", default=(), metavar="X", help="cost limits for a --policy that takes any")
    add(
        "--cost-cap",
        type=float,
        metavar="X",
        help="leave out episodes that cost more; by default the largest published cost",
    )
    add("--horizon", type=int, metavar="N", help="cut episodes off after this many steps (for --env)")
    add("--workers", type=int, metavar="N", help="processes; by default one per core, 0 for none")
    add("--compact", action="store_true", help="store final observations instead of next observations: half the size")
    add("--npz", action="store_true", help="write .npz files into the folder (needs no h5py)")
    add("--no-picture", action="store_true", help="do not draw the plane of cost and return beside the file")
    add("--keep-episodes", action="store_true", help="keep OUT.parts with all recorded episodes when done")
    add("--overwrite", action="store_true", help="replace files that exist")
    options = parser.parse_args(args)
    _check(options)
    tasks = _tasks(options)
    single = options.out is not None and options.out.suffix.lower() in FILES
    folder = collected_dir() if options.out is None else options.out
    failed = []
    for number, task in enumerate(tasks):
        out = options.out if single else folder / f"{task.name}{'.npz' if options.npz else '.hdf5'}"
        if len(tasks) > 1:
            _tell(f"{task.name} (task {number + 1} of {len(tasks)})")
        try:
            _one(task, out, None if single else folder, options)
        except QptError as error:  # must not hold up the others
            if len(tasks) == 1:
                raise
            _tell(f"error: {task.name}: {error}")
            failed.append(task.name)
    if failed:
        raise QptError(f"{len(failed)} of {len(tasks)} tasks failed: {', '.join(failed)}; see above")
    return 0


def _check(options: argparse.Namespace) -> None:
    """What does not go together is said before anything is made."""
    if bool(options.tasks) + options.all + bool(options.env) != 1:
        raise QptError("give either tasks (`qpt tasks` lists them), --all, or --env module:factory")
    if options.limits and options.policy is None:
        raise QptError("--limits are those of --policy; leave them out, or name a policy to record")
    if options.full and options.trajectories is not None:
        raise QptError("--full and --trajectories exclude each other; give one of them")
    if options.env is None and options.horizon is not None:
        raise QptError("the horizon is part of a task; --horizon is for --env")
    one = options.env is not None or len(options.tasks) == 1
    if not one and (options.policy or options.snapshots):
        raise QptError("--policy and --snapshots are those of one task; name one")
    if options.policy and options.snapshots:
        raise QptError("--policy is recorded alone; leave --snapshots out")
    file = options.out is not None and options.out.suffix.lower() in FILES
    if options.out is not None and not file and options.out.suffix and not options.out.is_dir():
        raise QptError(
            f"a dataset is written as .hdf5 or .npz, not as {options.out.name!r}; change the ending of --out"
        )
    if file and not one:
        raise QptError(f"{options.out} is one file, but there are several tasks; give --out a folder")
    if not file and (options.policy or options.env):
        raise QptError("say with --out which file to write (.hdf5 or .npz)")


def _tasks(options: argparse.Namespace) -> list[Task]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder, as with `python -m`
    if options.env is not None:
        return [own_task(options.env, options.horizon, options.cost_cap)]
    if not options.all:
        return [get_task(name) for name in dict.fromkeys(options.tasks)]
    known = dsrl_tasks().values()
    for why, names in (
        ("no behaviour policies yet", [t.name for t in known if snapshots_of(t.name) is None]),
        ("no simulator installed", [t.name for t in known if snapshots_of(t.name) and not t.simulator_installed]),
    ):
        if names:
            _tell(f"left out, {why}: {', '.join(names)}")
    return [t for t in known if snapshots_of(t.name) is not None and t.simulator_installed]


def _one(task: Task, out: Path, folder: Path | None, options: argparse.Namespace) -> None:
    """Record one dataset; in a folder, one that is there already is left as it is."""
    wanted = task.trajectories if options.full else options.trajectories
    words = ["qpt", "collect", "record", *(["--env", options.env] if options.env else [task.name])]
    for name, value in (
        ("--policy", options.policy), ("--trajectories", wanted or WANTED), ("--seed", options.seed),
        ("--cost-cap", options.cost_cap), ("--horizon", options.horizon),
    ):  # fmt: skip
        words += [] if value is None else [name, f"{value}"]
    words += ["--limits", *(f"{limit:g}" for limit in options.limits)] if options.limits else []
    command = shlex.join(words)  # what the dataset depends on, and no more
    drawing = None if options.no_picture else out.with_suffix(".png")
    if out.exists() and not options.overwrite:
        known = manifest.read_manifest(folder).get(task.name, {}) if folder else {}
        if known.get("command") == command:
            _tell(f"{out} is there already")
            return
        raise QptError(f"{out} exists; give another --out, or --overwrite to replace it")
    if drawing and drawing.exists() and not options.overwrite:
        raise QptError(f"{drawing} exists; give another --out, --no-picture, or --overwrite to replace it")
    same = ""
    began, parts = time.monotonic(), out.with_name(out.name + ".parts")
    common: dict[str, Any] = {
        "trajectories": wanted, "seed": options.seed, "cost_cap": options.cost_cap, "workers": options.workers,
        "command": command, "report": _progress(task.name),
    }  # fmt: skip
    try:
        if options.policy:
            recorded = record_policy(options.policy, task, parts, cost_limits=options.limits, **common)
        else:
            recorded = record(task, parts, snapshots=options.snapshots, **common)
    except KeyboardInterrupt:
        _tell(f"what was recorded lies in {parts}; run the same command again to go on")
        raise
    write(recorded.trajectories, out, compact=options.compact)
    seconds = time.monotonic() - began
    if folder is not None:
        workers = cores() if options.workers is None else options.workers
        row = manifest.row(task, recorded, out, seconds, workers)
        manifest.add(folder, row)
        same = manifest.compared(row)
    if drawing:
        draw(recorded, task, drawing)
    if not options.keep_episodes:
        remove(parts)
    print("\n".join(filter(None, [_summary(recorded, task, out, seconds), same and f"  {same}"])), flush=True)


def _progress(name: str) -> Callable[[int, int], None]:
    """A line now and then."""
    began = told = time.monotonic()
    first: int | None = None

    def report(done: int, total: int) -> None:
        nonlocal told, first
        first = done if first is None else first
        now = time.monotonic()
        if now - told > 15 and done > first:
            told = now
            left = (total - done) * (now - began) / (done - first)
            _tell(f"{name}: {done} of {total} episodes, {left / 60:.1f} min left")

    return report


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _summary(recorded: Recorded, task: Task, out: Path, seconds: float) -> str:
    data, known = recorded.trajectories, ""
    if task.reward_min is not None and task.reward_max is not None:
        known = f" ({_whose(task)}: {task.reward_min:.1f} to {task.reward_max:.1f})"
    lines = [
        f"wrote {out}: {len(data)} trajectories, {data.steps} steps, chosen from {recorded.played} episodes "
        f"({recorded.steps} simulator steps, {seconds / 60:.1f} minutes)",
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


def draw(recorded: Recorded, task: Task, drawing: Path) -> None:
    """The (cost, return) plane beside the file, with the published data's extremes."""
    from qpt import plotting

    data, whose = recorded.trajectories, f"{_whose(task)}'s"
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
        _tell(f"no picture: {error}")
