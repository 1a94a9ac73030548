"""Steps per second of `evaluate` with two workers against two independent bare processes, in the same run.

    python benchmarks/evaluation.py [--tasks BallCircle ...] [--slots N ...] [--slice 1.0] [--rounds 12] [--out FILE]

Both sides take random actions and count their resets. They take turns in short slices and the ratio is taken within a
round, because other programs on the machine disturb both alike; the table shows the median round and the middle half.
Others take more from processes that wait for one another than from independent ones, so rounds in which they took
under 5 % of the cores are shown apart, as "quiet". CPU is what a step takes in all processes of a side, and does not
depend on the others' share. Starting processes and making environments is counted on neither side. The table goes to
stdout, then all numbers as JSON on one line, or to `--out`. From a checkout without an installed package:

    PYTHONPATH=src python benchmarks/evaluation.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from qpt.envs import make_env, one_per_process
from qpt.envs.vector import EnvPool
from qpt.evaluation.lockstep import Run
from qpt.evaluation.policies import CallablePolicy
from qpt.tasks import get_task

TASKS = ("BallCircle", "CarCircle", "HopperVelocity", "PointGoal1")


class Uniform(CallablePolicy):
    """Random actions as cheap as they can be; a generator for each episode would cost more in short ones."""

    def __init__(self, action_dim: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        super().__init__(lambda observations: rng.uniform(-1, 1, (len(observations), action_dim)))


def bare(name: str, seed: int, connection: Any) -> None:
    """One simulator without our surface, stepped in a plain loop for as many seconds as it is told."""
    task = get_task(name)
    surface = make_env(task)
    reset, step = surface._simulator.reset, surface._simulator.step
    horizon = task.horizon or 10**9
    actions = np.random.default_rng(seed).uniform(-1, 1, (4096, *surface.action_space.shape)).astype(np.float32)
    reset(seed)
    length = 0
    connection.send("ready")
    while (seconds := connection.recv()) is not None:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            out = step(actions[steps % 4096])
            steps, length = steps + 1, length + 1
            if out[-3] or out[-2] or length >= horizon:
                seed += 2
                reset(seed)
                length = 0
        connection.send((steps, time.perf_counter() - began))
    os._exit(0)


class Bare:
    """Independent processes that are told when to run."""

    def __init__(self, name: str, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends, self.pids = [], []
        for i in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=bare, args=(name, i, theirs), daemon=True)
            process.start()
            theirs.close()  # so that one that dies is noticed
            self.ends.append(ours)
            self.pids.append(process.pid or 0)
        for end in self.ends:
            end.recv()

    def run(self, seconds: float) -> tuple[float, int]:
        """Steps per second of all together, and their steps."""
        for end in self.ends:
            end.send(seconds)
        results = [end.recv() for end in self.ends]
        return sum(steps / wall for steps, wall in results), sum(steps for steps, _ in results)

    def close(self) -> None:
        for end in self.ends:
            end.send(None)


def busy_seconds() -> float:
    """CPU time that the whole machine has spent so far."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes and their threads so far, to the nanosecond."""
    threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure(name: str, workers: int, slots: int, groups: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Alternate bare processes and the evaluation loop; rates and ratios of every round."""
    task = get_task(name)
    if one_per_process(task):
        slots, groups = workers, 1  # more rows would idle
    policies = [Uniform(task.action_dim or 1, seed) for seed in range(groups)]
    other, parent, cores = Bare(name, workers), os.getpid(), os.cpu_count() or 1
    rows = []
    with EnvPool(task, slots, workers, groups=groups) as pool:
        run = Run(policies, pool, 20_000, np.array([10.0]), 0)
        while run.steps < 2 * slots:
            run.tick()
        other.run(0.2)
        for _ in range(rounds):
            busy, began, cpu = busy_seconds(), time.perf_counter(), cpu_seconds([*other.pids, parent])
            base, steps = other.run(seconds)
            spent = cpu_seconds([*other.pids, parent]) - cpu
            others = (busy_seconds() - busy - spent) / (time.perf_counter() - began) / cores
            bare_cpu = spent / steps

            busy, before, pids = busy_seconds(), run.steps, pool.pids()
            in_workers, in_parent, began = cpu_seconds(pids), cpu_seconds([parent]), time.perf_counter()
            while time.perf_counter() - began < seconds:
                run.tick()
            steps, wall = run.steps - before, time.perf_counter() - began
            in_workers, in_parent = cpu_seconds(pids) - in_workers, cpu_seconds([parent]) - in_parent
            others = max(others, (busy_seconds() - busy - in_workers - in_parent) / wall / cores)
            rows.append(
                {
                    "bare": base,
                    "pool": steps / wall,
                    "ratio": steps / wall / base,
                    "bare_cpu_us": 1e6 * bare_cpu,
                    "worker_cpu_us": 1e6 * in_workers / steps,
                    "parent_cpu_us": 1e6 * in_parent / steps,
                    "cpu_ratio": bare_cpu * steps / (in_workers + in_parent),
                    "others": others,
                }
            )
    other.close()
    quiet = [row["ratio"] for row in rows if row["others"] < 0.05]
    return {
        "task": name,
        "slots": slots,
        "groups": groups,
        "workers": workers,
        **{key: statistics.median(row[key] for row in rows) for key in rows[0]},
        "middle_half": statistics.quantiles([row["ratio"] for row in rows], n=4)[::2],
        "quiet": statistics.median(quiet) if quiet else None,
        "quiet_rounds": len(quiet),
        "rounds": rows,
    }


COLUMNS = {
    "task": "{task}",
    "slots": "{slots}",
    "bare steps/s": "{bare:.0f}",
    "evaluate steps/s": "{pool:.0f}",
    "ratio (middle half)": "{ratio:.2f} ({middle_half[0]:.2f}–{middle_half[1]:.2f})",
    "quiet (rounds)": "{quiet_text} ({quiet_rounds})",
    "CPU µs a step: bare": "{bare_cpu_us:.0f}",
    "workers + parent": "{worker_cpu_us:.0f} + {parent_cpu_us:.1f}",
    "CPU ratio": "{cpu_ratio:.2f}",
    "others": "{others:.0%}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[48], help="48 is the default of a cheap policy")
    parser.add_argument("--groups", type=int, nargs="+", default=[2], choices=(1, 2), help="batches on their own")
    parser.add_argument("--slice", type=float, default=1.0, help="seconds a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    results = []
    for name in args.tasks:
        for slots, groups in ((s, g) for s in args.slots for g in args.groups):
            result = measure(name, args.workers, slots, groups, args.slice, args.rounds)
            text = "–" if result["quiet"] is None else f"{result['quiet']:.2f}"
            cells = [cell.format(**result, quiet_text=text) for cell in COLUMNS.values()]
            print("| " + " | ".join(cells) + " |", flush=True)
            results.append(result)
    content = json.dumps({"cores": os.cpu_count(), "python": platform.python_version(), "results": results})
    if args.out is None:
        print(content)
    else:
        args.out.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
