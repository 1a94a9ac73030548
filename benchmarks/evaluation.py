"""Steps per second of `evaluate` with two workers against two independent bare processes, in the same run.

    python benchmarks/evaluation.py [--tasks BallCircle ...] [--slice 1.0] [--rounds 10] [--slots N] [--out FILE.json]

Both sides take random actions and count their resets. They take turns in short slices and the ratio is taken within a
round, because other programs on the machine disturb both alike; the table shows the median round and the middle half.
Lock-step suffers more from others than independent processes do (the slower worker is waited for, and one that slept
comes back to cold caches), so rounds in which others took under 5 % of the machine are shown apart, as "quiet".
The CPU column is the ratio in CPU time per step. Starting processes and making environments is counted on neither side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from qpt.envs import make_env
from qpt.envs.vector import EnvPool
from qpt.evaluation import CallablePolicy, _Run
from qpt.tasks import get_task

TASKS = ("BallCircle", "CarCircle", "HopperVelocity", "PointGoal1", "easysparse")


def bare(name: str, seed: int, connection: Any) -> None:
    """One simulator without our surface, stepped in a plain loop for as many seconds as it is told."""
    task = get_task(name)
    surface = make_env(task)
    reset, step = surface._simulator.reset, surface._simulator.step
    horizon = task.horizon or 10**9
    actions = np.random.default_rng(seed).uniform(-1, 1, (4096, *surface.action_space.shape)).astype(np.float32)
    reset(seed)
    length = 0
    while (seconds := connection.recv()) is not None:
        steps, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            out = step(actions[steps % 4096])
            steps, length = steps + 1, length + 1
            if out[-3] or out[-2] or length >= horizon:
                seed += 2
                reset(seed)
                length = 0
        connection.send((steps, time.perf_counter() - began, time.process_time() - cpu))
    os._exit(0)


class Bare:
    """Independent processes that are told when to run."""

    def __init__(self, name: str, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends = []
        for i in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=bare, args=(name, i, theirs), daemon=True).start()
            self.ends.append(ours)

    def rates(self, seconds: float) -> tuple[float, float, float]:
        """Steps per second of all together, per second of CPU, and the share of the machine that others took."""
        busy, began = busy_seconds(), time.perf_counter()
        for end in self.ends:
            end.send(seconds)
        results = [end.recv() for end in self.ends]
        spent = sum(r[2] for r in results)
        others = (busy_seconds() - busy - spent) / (time.perf_counter() - began) / (os.cpu_count() or 1)
        return sum(n / wall for n, wall, _ in results), sum(r[0] for r in results) / spent, others

    def close(self) -> None:
        for end in self.ends:
            end.send(None)


def busy_seconds() -> float:
    """CPU time that the whole machine has spent so far."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of this process and the workers so far."""
    total = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(name: str, workers: int, slots: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Alternate bare processes and the evaluation loop; rates and ratios of every round."""
    task = get_task(name)
    if task.suite == "metadrive":
        slots = workers  # one environment a process: more rows would idle
    rng = np.random.default_rng(0)
    policy = CallablePolicy(lambda observations: rng.uniform(-1, 1, (len(observations), task.action_dim or 1)))
    other = Bare(name, workers)
    rows = []
    with EnvPool(task, slots, workers) as pool:
        run = _Run(policy, pool, 20_000, np.array([10.0]), 0, False)
        while run.steps < 2 * slots:
            run.tick()
        other.rates(0.2)
        for _ in range(rounds):
            base, base_cpu, others = other.rates(seconds)
            busy = busy_seconds()
            before, cpu, began = run.steps, cpu_seconds(pool.pids()), time.perf_counter()
            while time.perf_counter() - began < seconds:
                run.tick()
            steps, wall, spent = run.steps - before, time.perf_counter() - began, cpu_seconds(pool.pids()) - cpu
            others = max(others, (busy_seconds() - busy - spent) / wall / (os.cpu_count() or 1))
            ratio, cpu_ratio = steps / wall / base, steps / spent / base_cpu
            rows.append({"bare": base, "pool": steps / wall, "ratio": ratio, "cpu": cpu_ratio, "others": others})
    other.close()
    quartiles = statistics.quantiles([row["ratio"] for row in rows], n=4)
    quiet = [row["ratio"] for row in rows if row["others"] < 0.05]
    return {
        "task": name,
        "slots": slots,
        "workers": workers,
        **{key: statistics.median(row[key] for row in rows) for key in ("bare", "pool", "ratio", "cpu", "others")},
        "middle_half": (quartiles[0], quartiles[2]),
        "quiet": statistics.median(quiet) if quiet else None,
        "quiet_rounds": len(quiet),
        "rounds": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[64])
    parser.add_argument("--slice", type=float, default=1.0, help="seconds a turn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("| task | slots | bare steps/s | evaluate steps/s | ratio (middle half) | quiet (rounds) | CPU | others |")
    print("|---|---|---|---|---|---|---|---|")
    results = []
    for name in args.tasks:
        for slots in args.slots:
            r = measure(name, args.workers, slots, args.slice, args.rounds)
            ratio = f"{r['ratio']:.2f} ({'–'.join(f'{x:.2f}' for x in r['middle_half'])})"
            quiet = "–" if r["quiet"] is None else f"{r['quiet']:.2f} ({r['quiet_rounds']})"
            row = (
                name,
                r["slots"],
                f"{r['bare']:.0f}",
                f"{r['pool']:.0f}",
                ratio,
                quiet,
                f"{r['cpu']:.2f}",
                f"{r['others']:.0%}",
            )
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            results.append(r)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
