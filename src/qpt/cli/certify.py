"""`qpt certify`: is P(episode cost > limit) at most the asked risk? And calibration of the limit a policy is given."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qpt.certify import (
    Certificate,
    LimitCalibration,
    assumed_rates,
    calibrate_limit,
    calibrated,
    certify,
    check_run,
    check_statement,
    check_store,
    default_grid,
    store,
)
from qpt.cli.run import run
from qpt.errors import QptError
from qpt.sequential import Forecast, foretell, least_episodes
from qpt.tasks import get_task
from qpt.writing import check_file, write_json

EXIT = {"accepted": 0, "rejected": 3, "undecided": 4}  # 1 and 2 are errors, as everywhere


def certify_command(
    checkpoint: Path,
    limit: float,
    task: str | None = None,
    risk: float = 0.05,
    confidence: float = 0.95,
    max_episodes: int = 2000,
    batch: int = 20,
    seed: int = 0,
    workers: int | None = None,
    which: Literal["last", "best"] = "last",
    out: Path | None = None,
    apply_calibration: bool = False,
    calibrate: bool = False,
    grid: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="X [X ...]")] = None,
    calibration_episodes: int = 200,
) -> int:
    """Run episodes until "P(episode cost > limit) <= risk" is accepted or rejected at the asked confidence.

    Example: qpt certify --checkpoint runs/ball --limit 10 --risk 0.05 --confidence 0.95 --out certificate.json

    Exits with 0 when the statement is accepted (or a calibration was found), 3 when it is rejected (or none was found)
    and 4 when --max-episodes leave it undecided.

    Args:
        checkpoint: A run folder or a checkpoint folder.
        limit: The cost limit of an episode that the statement is about.
        task: The task; by default the one the checkpoint was trained for.
        risk: The share of episodes that may cost more than the limit.
        confidence: How sure a verdict must be; wrong ones are no more frequent than 1 minus this.
        max_episodes: Give up, undecided, after this many.
        batch: Episodes that are run before the next look.
        seed: Seed of the episodes; take one that was not used to choose the policy.
        workers: Simulator processes; by default one a core, 0 for none.
        which: The last or the best checkpoint of a run folder.
        out: Write the certificate (or the calibration) to this JSON file.
        apply_calibration: Give the policy the limit that an earlier --calibrate found.
        calibrate: Find the largest internal limit that keeps the risk, and store it beside the checkpoint.
        grid: Internal limits to calibrate among; by default tenths of the limit.
        calibration_episodes: Episodes at each of these.
    """
    check_statement(limit, risk, confidence)
    check_run(max_episodes, batch, seed)
    if calibrate and apply_calibration:
        raise QptError("--calibrate finds a calibration and --apply-calibration uses one; give one of the two")
    if out is not None:
        check_file(out)
    policy = importlib.import_module("qpt.policy").load_policy(checkpoint, which=which)
    if "OMP_NUM_THREADS" not in os.environ:  # small networks on the CPU gain nothing from more threads
        importlib.import_module("torch").set_num_threads(1)
    name = task or policy.spec.task
    if name is None:
        raise QptError("the checkpoint names no task; give one with --task")
    facts = get_task(name)
    console = Console() if sys.stdout.isatty() else Console(width=120)  # a pipe has no width of its own
    common: dict[str, Any] = {"risk": risk, "confidence": confidence, "seed": seed, "workers": workers}
    if calibrate:
        return _calibrate(console, policy, facts, limit, out, grid=grid, episodes=calibration_episodes, **common)
    if apply_calibration:
        policy = calibrated(policy, task=facts.name)
        console.print(f"Calibrated: for a limit of {limit:g} the policy is given {policy.internal_limit(limit):g}.")

    console.print(
        f"Statement: P(episode cost > {limit:g}) <= {risk:g}, at {confidence:.4g} confidence", highlight=False
    )
    console.print(_least(risk, confidence, max_episodes), highlight=False)
    console.print(forecast_table([foretell(p, risk, confidence, max_episodes) for p in assumed_rates(risk)]))
    with _bar(facts.name, max_episodes) as show:
        certificate = certify(policy, facts, limit, max_episodes=max_episodes, batch=batch, show=show, **common)
    console.print(result_table(certificate))
    console.print(sentence(certificate), highlight=False)
    if out is not None:
        write_json(out, certificate.to_json())
        print(f"wrote {out}")
    return EXIT[certificate.verdict]


def _calibrate(
    console: Console, policy: Any, facts: Any, limit: float, out: Path | None, *, grid: Any, **settings: Any
) -> int:
    check_store(policy.checkpoint)
    steps = len(set(grid)) if grid else len(default_grid(limit))
    console.print(
        f"Calibration for P(episode cost > {limit:g}) <= {settings['risk']:g}: at most {steps} internal limits, "
        f"{settings['episodes']} episodes each",
        highlight=False,
    )

    def show(step: float, violations: int, p_value: float) -> None:
        if sys.stderr.isatty():
            print(f"internal limit {step:g}: {violations} violations, p = {p_value:.2g}", file=sys.stderr)

    found = calibrate_limit(policy, facts, limit, grid=grid, show=show, **settings)
    console.print(calibration_table(found))
    if out is not None:
        write_json(out, vars(found))
        print(f"wrote {out}")
    if found.internal_limit is None:
        console.print(
            f"Not calibrated: at the lowest internal limit, {found.grid[0]:g}, the risk is not shown to be kept.",
            highlight=False,
        )
        return EXIT["rejected"]
    path = store(found, policy.checkpoint)
    print(
        f"Calibrated: given {found.internal_limit:g}, the policy keeps P(episode cost > {limit:g}) <= {found.risk:g} "
        f"({found.confidence:.4g} confidence); stored in {path}"
    )
    return EXIT["accepted"]


# -- what is printed -----------------------------------------------------------------------------------------------


def sentence(c: Certificate) -> str:
    counted = f"{c.violations} of {c.episodes} episodes cost more than {c.limit:g}"
    if c.decided_after is not None:
        counted += f"; decided after {c.decided_after}"
    if c.verdict == "accepted":
        return f"ACCEPTED: {c.statement}, with {c.confidence:.4g} confidence ({counted})."
    if c.verdict == "rejected":
        above = f"P(episode cost > {c.limit:g}) > {c.risk:g}"
        return f"REJECTED: {above}, with {c.confidence:.4g} confidence ({counted})."
    low, high = c.bounds
    return (
        f"UNDECIDED after {c.episodes} episodes: the probability lies between {low:.3g} and {high:.3g} ({counted}); "
        "allow more with --max-episodes, or ask for another risk."
    )


def result_table(c: Certificate) -> Table:
    grid = Table(title=escape(f"{c.task} · {c.algorithm} · cost limit {c.limit:g}"), box=SIMPLE_HEAD, pad_edge=False)
    for name in ("episodes", "violations", "share", "lower bound", "upper bound", "risk", "verdict"):
        grid.add_column(name, justify="left" if name == "verdict" else "right")
    share = c.violations / c.episodes
    numbers = (f"{x:.4f}" for x in (share, *c.bounds))
    grid.add_row(str(c.episodes), str(c.violations), *numbers, f"{c.risk:g}", c.verdict)
    return grid


def forecast_table(forecasts: Sequence[Forecast]) -> Table:
    grid = Table(title="How many episodes it will take", box=SIMPLE_HEAD, pad_edge=False)
    columns = ("if the true rate is", "mean", "half of the time", "9 of 10 times", "accepted", "rejected", "undecided")
    for name in columns:
        grid.add_column(name, justify="right")
    for f in forecasts:
        ends = (f"{100 * x:.1f} %" for x in (f.accepted, f.rejected, f.undecided))
        grid.add_row(f"{f.rate:.4g}", f"{f.mean:.0f}", str(f.median), str(f.most), *ends)
    return grid


def calibration_table(found: LimitCalibration) -> Table:
    grid = Table(title=escape(f"{found.task} · cost limit {found.limit:g}"), box=SIMPLE_HEAD, pad_edge=False)
    for name in ("internal limit", "episodes", "violations", "p-value", ""):
        grid.add_column(name, justify="left" if not name else "right")
    for step, violations, p_value in found.tested:
        passed = p_value <= 1 - found.confidence
        mark = "chosen" if step == found.internal_limit else "passed" if passed else "failed"
        grid.add_row(f"{step:g}", str(found.episodes), str(violations), f"{p_value:.2g}", mark)
    for step in found.grid[len(found.tested) :]:
        grid.add_row(f"{step:g}", "–", "–", "–", "not tested")
    return grid


def _least(risk: float, confidence: float, max_episodes: int) -> str:
    least = least_episodes(risk, confidence)
    if least is None:
        return "Even without any violation, more than 100000 episodes are needed to accept it."
    note = "" if least <= max_episodes else f"; --max-episodes {max_episodes} cannot be enough"
    return f"Without any violation, {least} episodes are needed to accept it{note}."


@contextmanager
def _bar(name: str, total: int) -> Iterator[Any]:
    """Progress on stderr: episodes, violations and bounds so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task(name, total=total, text="starting")

        def show(episodes: int, violations: int, bounds: tuple[float, float]) -> None:
            text = f"{violations} violations, P in \\[{bounds[0]:.3f}, {bounds[1]:.3f}]"
            bar.update(line, completed=episodes, text=text)

        yield show


def main(args: Sequence[str]) -> int:
    return run(certify_command, args, "certify")
