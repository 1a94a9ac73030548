"""Steps a second of `qpt collect learn` and where the time goes: simulator, policy, learner.

    python benchmarks/collect.py [--tasks BallRun CarCircle ...] [--steps 15000] [--json out.json]

Each task runs the first run of its schedule for a few updates, in one process with one thread. Times are those of the
processor, so that a busy machine does not count; on a free one the wall clock is the same. `free 2 cores` is how long
the task's whole schedule would then take on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from qpt.collect.runner import run
from qpt.collect.schedules import plans
from qpt.collect.workers import Pool
from qpt.tasks import get_task

TASKS = ("BallRun", "BallCircle", "CarRun", "CarCircle", "DroneRun", "DroneCircle", "AntRun", "HopperVelocity")


def measure(name: str, steps: int) -> dict[str, Any]:
    task = get_task(name)
    cap = float(task.cost_max or 100.0)
    whole = plans(name, cap)
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (plan,) = plans(name, cap, steps=steps, runs=1)
        with Pool(1) as pool:
            pool.run([partial(run, task, plan, cap, Path(folder), "")], lambda _, message: told.append(message))
    last = told[-1]
    times = {key: last["times"][key] for key in ("simulator", "policy", "learner")}
    total = sum(times.values())
    speed = last["steps"] / total
    return {
        "task": name,
        "steps_per_cpu_second": speed,
        "steps_per_wall_second": last["steps"] / last["times"]["wall"],
        **{f"share_{key}": value / total for key, value in times.items()},
        "schedule_steps": sum(plan.steps for plan in whole),
        "schedule_minutes_on_two_free_cores": sum(plan.steps for plan in whole) / speed / 2 / 60,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--json", help="write the numbers here as well")
    arguments = parser.parse_args()
    rows = []
    print("| task | steps/s of one core | simulator | policy | learner | steps of the schedule | free 2 cores |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.tasks:
        row = measure(name, arguments.steps)
        rows.append(row)
        shares = " | ".join(f"{row[f'share_{key}']:.0%}" for key in ("simulator", "policy", "learner"))
        print(
            f"| {name} | {row['steps_per_cpu_second']:,.0f} | {shares} | {row['schedule_steps']:,} | "
            f"{row['schedule_minutes_on_two_free_cores']:.1f} min |",
            flush=True,
        )
    if arguments.json:
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        Path(arguments.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
