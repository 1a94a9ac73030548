"""How fast windows are drawn: `WindowSampler` against the two common ways, on the same data in one run.

    python benchmarks/sampling.py [--steps 1000000] [--windows 2048] [--context 10] [--json]

The two ways are written here after what they do, not after their code:

- "sum in every window" (the way of QT): a Python loop over the windows; in each, returns-to-go and costs-to-go are
  summed anew from the end of the episode back to the window, step by step.
- "slice every window" (the way of OSRL): returns-to-go are known beforehand; a loop draws an episode with
  `np.random.choice(p=...)`, slices each field, pads it, and the batch is stacked at the end.

All three give tensors of the same fields and shapes, on one thread each (two of them are Python loops). Ratios are
taken between medians of several batches; the exit code is 1 if WindowSampler is not 5 and 20 times faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qpt.data.sampling import WindowSampler
from qpt.data.trajectories import Trajectories

Fields = dict[str, torch.Tensor]
WANTED = {"slice every window": 5, "sum in every window": 20}  # how many times faster WindowSampler must be


def made_up(steps: int, horizon: int, observation_dim: int, action_dim: int) -> Trajectories:
    """Episodes of half a horizon to a whole one, `steps` in all."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(horizon // 2, horizon + 1, 2 * steps // horizon + 1)
    ends = np.minimum(np.cumsum(lengths), steps) - 1
    timeouts = np.zeros(steps, bool)
    timeouts[ends] = True
    timeouts[-1] = True
    return Trajectories.from_arrays(
        rng.normal(size=(steps, observation_dim)).astype(np.float32),
        rng.uniform(-1, 1, (steps, action_dim)).astype(np.float32),
        rng.normal(size=steps).astype(np.float32),
        (rng.random(steps) < 0.05).astype(np.float32),
        np.zeros(steps, bool),
        timeouts,
    )


def backwards(values: np.ndarray) -> np.ndarray:
    """Sums to the end, step by step."""
    sums, total = np.zeros_like(values), 0.0
    for step in reversed(range(len(values))):
        total += values[step]
        sums[step] = total
    return sums


def sum_in_every_window(data: Trajectories, windows: int, context: int) -> Callable[[], Fields]:
    rng = np.random.default_rng(0)
    episodes = [slice(int(a), int(b)) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    fields = {
        "observations": [data.observations[e] for e in episodes],
        "actions": [data.actions[e] for e in episodes],
        "rewards": [data.rewards[e] for e in episodes],
        "costs": [data.costs[e] for e in episodes],
        "terminals": [data.terminals[e].astype(np.float32) for e in episodes],
        "timeouts": [data.timeouts[e].astype(np.float32) for e in episodes],
    }
    lengths = [e.stop - e.start for e in episodes]
    probabilities = data.lengths / data.steps

    def sample() -> Fields:
        rows: dict[str, list[np.ndarray]] = {
            name: [] for name in [*fields, "return_to_go", "cost_to_go", "steps", "mask"]
        }
        drawn = rng.choice(len(episodes), size=windows, p=probabilities)
        for episode in drawn.tolist():
            start = int(rng.integers(lengths[episode]))
            end = min(start + context, lengths[episode])
            missing = context - (end - start)
            for name, values in fields.items():
                part = values[episode][start:end]
                rows[name].append(np.concatenate([part, np.zeros((missing, *part.shape[1:]), np.float32)]))
            for name, source in (("return_to_go", "rewards"), ("cost_to_go", "costs")):
                to_go = backwards(fields[source][episode][start:])[: end - start]
                rows[name].append(np.concatenate([to_go, np.zeros(missing, np.float32)]))
            rows["steps"].append(np.arange(start, start + context))
            rows["mask"].append(np.concatenate([np.ones(end - start, bool), np.zeros(missing, bool)]))
        return {name: torch.from_numpy(np.stack(values)) for name, values in rows.items()}

    return sample


def slice_every_window(data: Trajectories, windows: int, context: int) -> Callable[[], Fields]:
    np.random.seed(0)  # noqa: NPY002  (the way it is done)
    episodes = [slice(int(a), int(b)) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    fields = {
        "observations": [data.observations[e] for e in episodes],
        "actions": [data.actions[e] for e in episodes],
        "rewards": [data.rewards[e] for e in episodes],
        "costs": [data.costs[e] for e in episodes],
        "return_to_go": [data.returns_to_go[e] for e in episodes],
        "cost_to_go": [data.costs_to_go[e] for e in episodes],
        "terminals": [data.terminals[e].astype(np.float32) for e in episodes],
        "timeouts": [data.timeouts[e].astype(np.float32) for e in episodes],
    }
    probabilities = data.lengths / data.steps

    def one() -> dict[str, np.ndarray]:
        episode = int(np.random.choice(len(episodes), p=probabilities))  # noqa: NPY002
        length = episodes[episode].stop - episodes[episode].start
        start = int(np.random.randint(length))  # noqa: NPY002
        valid = min(context, length - start)
        window = {}
        for name, values in fields.items():
            part = values[episode][start : start + context]
            window[name] = np.pad(part, [(0, context - valid)] + [(0, 0)] * (part.ndim - 1))
        window["steps"] = np.arange(start, start + context)
        window["mask"] = np.pad(np.ones(valid, bool), (0, context - valid))
        return window

    def sample() -> Fields:
        rows = [one() for _ in range(windows)]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}

    return sample


def seconds(sample: Callable[[], Any], batches: int) -> float:
    """Median time of a batch, after one that does not count."""
    sample()
    times = []
    for _ in range(batches):
        began = time.perf_counter()
        sample()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=2048)
    parser.add_argument("--context", type=int, default=10)
    parser.add_argument("--horizon", type=int, default=1000)
    parser.add_argument("--observation-dim", type=int, default=76)
    parser.add_argument("--action-dim", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = made_up(args.steps, args.horizon, args.observation_dim, args.action_dim)
    sampler = WindowSampler(data, args.windows, args.context, weighting="length")
    times = {
        "WindowSampler": seconds(sampler.sample, 50),
        "slice every window": seconds(slice_every_window(data, args.windows, args.context), 5),
        "sum in every window": seconds(sum_in_every_window(data, args.windows, args.context), 5),
    }
    fast = times["WindowSampler"]
    if args.json:
        machine = {"processor": processor(), "torch": torch.__version__, "numpy": np.__version__}
        print(json.dumps({**vars(args), **machine, "seconds": times}, indent=1))
        return
    print(f"{args.windows} windows of {args.context} steps from {data.steps:,} steps in {len(data):,} episodes;")
    threads = f"{args.threads} thread{'s' * (args.threads > 1)} of torch"
    print(f"{args.observation_dim} observations, {args.action_dim} actions; {threads}; {processor()},")
    print(f"torch {torch.__version__}, numpy {np.__version__}\n")
    for name, taken in times.items():
        asked = f"  (at least {WANTED[name]} asked for)" if name in WANTED else ""
        print(f"{name:<22} {taken * 1e3:9.2f} ms a batch  {taken / fast:8.1f} x{asked}")
    if any(times[name] < ratio * fast for name, ratio in WANTED.items()):
        raise SystemExit("WindowSampler is slower than it should be")


if __name__ == "__main__":
    main()
