"""Steps per second of every task through `make_env` and in the bare simulator, side by side in one process.

    python benchmarks/simulators.py [--tasks BallRun AntVelocity ...] [--seconds 1.0] [--json out.json]

Both sides share one simulator and its episodes: a coin decides for every step whether it goes through the surface or to
the simulator's own `step`, so that both meet the same states and the same mood of the machine. Compared are the medians
of the time of one step; resets are not timed. A task passes if the surface adds at most 10 % or 10 µs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import numpy as np

from qpt.envs import make_env
from qpt.tasks import dsrl_tasks

SLACK_SHARE, SLACK_MICROSECONDS = 0.10, 10.0


def measure(name: str, seconds: float) -> dict[str, float | str | bool]:
    """Medians of the time of one step in microseconds, bare and through the surface."""
    env = make_env(name)
    rng = np.random.default_rng(0)
    times: tuple[list[float], list[float]] = ([], [])
    begin, seed = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        env.reset(seed=seed)
        seed += 1
        for _ in range(env.horizon or 1000):
            action = rng.uniform(-1, 1, env.action_dim).astype(np.float32)
            wrapped = bool(rng.integers(2))
            step = env.step if wrapped else env.simulator.step
            before = time.thread_time_ns()
            result: Any = step(action)
            times[wrapped].append(1e-3 * (time.thread_time_ns() - before))
            # ..., terminated, truncated, info; MetaDrive's four: ..., done, info.
            if (result[2] if len(result) == 4 else result[-3] or result[-2]) or time.perf_counter() - begin > seconds:
                break
    env.close()
    bare, ours = (statistics.median(side) for side in times)
    return {
        "task": name,
        "bare_steps_per_second": 1e6 / bare,
        "steps_per_second": 1e6 / ours,
        "added_microseconds": ours - bare,
        "added_percent": 100 * (ours - bare) / bare,
        "passes": ours - bare <= max(SLACK_MICROSECONDS, SLACK_SHARE * bare),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(dsrl_tasks()))
    parser.add_argument("--seconds", type=float, default=1.0, help="per task, at least")
    parser.add_argument("--json", help="write the numbers here as well")
    arguments = parser.parse_args()
    rows = []
    print("| task | bare, steps/s | qpt, steps/s | added µs | added % | |\n|---|---|---|---|---|---|")
    for name in arguments.tasks:
        row = measure(name, arguments.seconds)
        rows.append(row)
        print(
            f"| {name} | {row['bare_steps_per_second']:.0f} | {row['steps_per_second']:.0f} | "
            f"{row['added_microseconds']:.1f} | {row['added_percent']:.1f} | {'' if row['passes'] else 'SLOW'} |",
            flush=True,
        )
    if arguments.json:
        machine = {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "processor": platform.processor(),
        }
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    return 0 if all(row["passes"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
