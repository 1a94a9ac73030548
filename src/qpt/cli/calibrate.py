"""`qpt calibrate`: do the critics of a QPT policy predict what its episodes cost and earn?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qpt import calibration, plotting
from qpt.cli.judge import check_files, read_fingerprint
from qpt.cli.run import run
from qpt.data import load_dataset
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.policy import load_policy
from qpt.tasks import get_task


def calibrate(
    checkpoint: Path,
    task: str | None = None,
    limits: tuple[float, ...] = (10.0, 20.0, 40.0),
    episodes: int = 20,
    seed: int = 0,
    workers: int | None = None,
    out: Path | None = None,
    held_out: str | None = None,
    level: float = 0.9,
) -> int:
    """Run a QPT policy and compare what its critics predict at the first step with what each episode brought.

    With the default critics the predicted cost is the least that is possible from the start, so it lies below what a
    loose limit lets the policy spend; the paper's critics predict the cost of the policy itself.

    With --held-out no simulator is needed: logged episodes that the critics have not learned from show by how much they
    err, and what to add to Q^c in the test so that it is kept in a share --level of the steps.

    Example: qpt calibrate --checkpoint runs/ball --limits 10 20 40 --out calibration.png

    Example: qpt calibrate --checkpoint runs/ball --held-out rest.hdf5 --level 0.9

    Args:
        checkpoint: A run folder or a checkpoint folder of the algorithm qpt.
        task: The task; by default the one the policy was trained for.
        limits: Cost limits to run at.
        episodes: Episodes at each limit.
        seed: Seed of the episodes.
        workers: Simulator processes; by default one a core.
        out: A picture (.png, .svg, .pdf) or the numbers (.csv; `qpt report` shows those in RUN/calibration.csv).
        held_out: Logged episodes that were kept out of training (see `qpt data split`).
        level: Share of held-out steps that shall not cost more than the test says.
    """
    if not limits:
        raise QptError("give at least one cost limit with --limits")
    if held_out is not None:
        return _held_out(checkpoint, held_out, limits, level, out)
    check_files(out, None, (".csv", ".png", ".svg", ".pdf"))
    policy = load_policy(checkpoint)
    calibration.check(policy.method)
    name = task or policy.task
    if name is None:
        raise QptError("the checkpoint names no task; give one with --task")
    results = evaluate(
        policy,
        get_task(name),
        episodes=episodes,
        cost_limits=limits,
        seed=seed,
        workers=workers,
        progress=sys.stderr.isatty(),
        record=True,
    )
    found = calibration.calibrate(policy.method, results)
    table = Table("limit", "predicted cost", "realised cost", "predicted return", "realised return")
    for row in calibration.rows(found):
        table.add_row(*(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    if out is not None:
        if out.suffix == ".csv":
            calibration.save(found, out)
        else:
            plotting.save(calibration.figure(found, f"{name}: predicted and realised cost"), out)
        print(f"wrote {out}")
    return 0


def _held_out(checkpoint: Path, source: str, limits: tuple[float, ...], level: float, out: Path | None) -> int:
    if out is not None:
        raise QptError("--out holds what episodes in the simulator brought; leave it or --held-out away")
    policy, data = load_policy(checkpoint), load_dataset(source)
    if read_fingerprint(policy.checkpoint) == data.fingerprint:
        raise QptError(
            f"{source} holds the data that the policy was trained on; hold some out with qpt data split before training"
        )
    found = calibration.held_out(policy.method, data)
    table = Table("predicted cost up to", "steps", "mean excess", "share in excess", f"offset for {level:g}")
    for limit in limits:
        excess = found.excess[found.predicted <= limit]
        offset = found.offset(level, limit)
        table.add_row(
            f"{limit:g}", f"{len(excess):,}", f"{excess.mean():.2f}", f"{(excess > 0).mean():.0%}", f"{offset:.2f}"
        )
    Console().print(table)
    told = f"to use that of the last limit: qpt evaluate --checkpoint {checkpoint} --set test_offset={offset:.2f}"
    print(told)
    return 0


def main(args: Sequence[str]) -> int:
    return run(calibrate, args, "calibrate")
