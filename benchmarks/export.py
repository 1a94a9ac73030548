"""Time of one decision, PyTorch and onnxruntime: `python benchmarks/export.py [--candidates 1 50] [--episodes 1 16]`.

A QPT of the default size (or that of --checkpoint), one thread each; medians of --runs decisions within an episode.
PyTorch tries other candidates only where the policy's own action fails the test: both cases are timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.checkpoint import write_checkpoint
from qpt.data import load_dataset
from qpt.export import export_policy
from qpt.policy import load_policy
from qpt.runtime import OnnxPolicy

WARM = 20  # decisions that are not counted: the window fills


def milliseconds(policies: Sequence[Any], n: int, runs: int) -> list[tuple[float, float]]:
    """Median and fastest tenth of each one's `act`, bookkeeping included; in turns, so that load falls on all alike."""
    rng = np.random.default_rng(0)
    for policy in policies:
        policy.reset(n, cost_limits=20.0, seeds=np.arange(n))
    times: list[list[float]] = [[] for _ in policies]
    for step in range(runs + WARM):
        seen = rng.normal(size=(n, policies[0].observation_dim))
        for policy, kept in zip(policies, times, strict=True):
            began = time.perf_counter()
            policy.act(seen)
            kept.append(1000 * (time.perf_counter() - began))
            policy.observe(np.ones(n), np.zeros(n))
            if step % 150 == 149:
                policy.restart(np.arange(n))
    return [(statistics.median(kept[WARM:]), float(np.quantile(kept[WARM:], 0.1))) for kept in times]


def untrained(folder: Path, mode: str) -> Path:
    """A checkpoint of the default size: weights change only how often the test fails."""
    method = QPT(QPTConfig(noise_mode=mode), Spec.from_data(load_dataset("embedded:ballcircle")))  # type: ignore[arg-type]
    return write_checkpoint(folder / mode, "qpt", method, asdict(method.config), {}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| noise | candidates | episodes | PyTorch ms, passes (p10) | fails (p10) | onnxruntime ms (p10) | graph MB |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for mode in ("episode", "step"):
            run = args.checkpoint or untrained(Path(scratch), mode)
            for count in args.candidates:
                settings: dict[str, Any] = {"candidates": count, "noise_mode": mode}
                done = export_policy(run, Path(scratch) / f"{mode}-{count}.onnx", **settings)
                size = done.graph.stat().st_size / 1e6
                for n in args.episodes:
                    passes = load_policy(run, **settings, cost_test="none")
                    fails = load_policy(run, **settings, test_offset=1e9)
                    times = milliseconds([passes, fails, OnnxPolicy(done.graph)], n, args.runs)
                    cells = " | ".join(f"{median:.2f} ({fast:.2f})" for median, fast in times)
                    print(f"| {mode} | {count} | {n} | {cells} | {size:.1f} |", flush=True)


if __name__ == "__main__":
    main()
