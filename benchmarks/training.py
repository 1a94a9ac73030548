"""QPT's training steps a second on this machine: `python benchmarks/training.py [--device cuda] [--json FILE]`.

Data are made up: speed does not depend on what they say. Sizes: the demo's; the comparison's (batch 256) and the
paper's (batch 2048), both with K 10, 3 layers, 8 heads, width 128, dropout 0.1, four critics of width 256, 76
observations and 2 actions. `--check` instead compares every way to run a step with eager fp32 and exits with 1 where it
is too far off. Needs nothing but torch, numpy and the sources (PYTHONPATH=src).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from made_up import made_up

from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.data.trajectories import Trajectories
from qpt.stepping import Stepper
from qpt.turns import Turn

DEMO = QPTConfig(  # DEMO_FLAGS of the Makefile
    batch_size=128,
    width=64,
    layers=2,
    heads=4,
    context=3,
    critic_width=64,
    lr=1e-3,
    critic_lr=1e-3,
    warmup=100,
    dropout=0.0,
    attention_dropout=0.0,
)
# name: (config, observations); the paper's preset has the sizes above
SIZES: dict[str, tuple[QPTConfig, int]] = {
    "demo": (DEMO, 8),
    "comparison": (QPTConfig(), 76),
    "paper": (QPTConfig.preset("paper"), 76),
}
# How a step is run: (compile, capture)
WAYS: dict[str, tuple[bool, bool]] = {
    "eager": (False, False),
    "compiled": (True, False),
    "captured": (False, True),
    "compiled and captured": (True, True),
}


class Training:
    """A run without its files."""

    def __init__(
        self,
        config: QPTConfig,
        data: Trajectories,
        device: torch.device,
        way: str = "eager",
        *,
        bf16: bool = False,
        seed: int = 0,
        among_others: bool = False,
    ) -> None:
        compiled, captured = WAYS[way]
        torch.manual_seed(seed)
        self.method = QPT(config, Spec.from_data(data)).to(device)
        self.method.make_optimizers()
        self.method.autocast = bf16
        self.method.train()
        self.device = device
        sampler = self.method.make_sampler(data, device, seed)
        self.turn: Any = Turn(device) if among_others else nullcontext()
        stream = getattr(self.turn, "stream", None)
        self.stepper = Stepper(self.method, sampler, fast=captured, compile=compiled, stream=stream)

    def step(self) -> dict[str, torch.Tensor]:
        with self.turn:
            return self.stepper.step()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def set_precision(bf16: bool) -> None:
    """As `qpt train` does: TF32 for what bf16 leaves, true fp32 otherwise."""
    torch.set_float32_matmul_precision("high" if bf16 else "highest")


def milliseconds(runs: list[Training], seconds: float) -> float:
    """Of a step of each of the runs, which take turns; compilation and capture are not counted."""
    for _ in range(6):
        for run in runs:
            run.step()
    runs[0].wait()
    count, began = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - began < seconds:
        for _ in range(20 if runs[0].device.type == "cuda" else 1):
            for run in runs:
                run.step()
            count += 1
        runs[0].wait()
    return 1e3 * (time.perf_counter() - began) / count / len(runs)


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, device: torch.device, report: Callable[[dict[str, Any]], None]) -> None:
    on_cuda = device.type == "cuda"
    ways = ["eager", "captured", "compiled and captured"] if on_cuda else ["eager", "compiled"]
    for size in arguments.sizes or (list(SIZES) if on_cuda else ["demo", "comparison"]):
        config, observations = SIZES[size]
        data = made_up(observations)
        for bf16 in (False, True) if on_cuda or arguments.bf16 else (False,):
            set_precision(bf16)
            for way in arguments.ways or ways:
                took = milliseconds([Training(config, data, device, way, bf16=bf16)], arguments.seconds)
                report(row(size, way, bf16, 1, took))
                torch._dynamo.reset()
        if arguments.seeds > 1:
            way, bf16 = ("compiled and captured", True) if on_cuda else ("eager", False)
            runs = [
                Training(config, data, device, way, bf16=bf16, seed=seed, among_others=True)
                for seed in range(arguments.seeds)
            ]
            report(row(size, way, bf16, len(runs), milliseconds(runs, arguments.seconds)))
            torch._dynamo.reset()


def row(size: str, way: str, bf16: bool, seeds: int, took: float) -> dict[str, Any]:
    return {
        "size": size,
        "step": way,
        "precision": "bf16" if bf16 else "fp32",
        "seeds": seeds,
        "milliseconds": round(took, 3),  # of a step of one seed
        "steps_per_second": round(1e3 / took, 1),  # of all seeds together
    }


# -- the check ---------------------------------------------------------------------------------------------------------

CHECKED = (1, 10, 100)  # steps
# Largest relative difference from eager fp32 after 1, 10 and 100 steps: of the loss, and of the way that all weights
# went (the norm of the difference over the norm of the way). The first step of Adam goes by the signs of gradients
# alone, so that those near 0 weigh most there.
TOLERANCE: dict[str, tuple[tuple[float, float], ...]] = {
    "fp32": ((1e-5, 1e-2), (1e-4, 1e-2), (1e-3, 1e-2)),
    "bf16": ((1e-2, 2e-1), (1e-2, 5e-2), (1e-2, 5e-2)),
}
SMALL = replace(DEMO, batch_size=32, width=32, heads=2, context=4, critic_width=32)  # heads as wide as the paper's


def weights_of(run: Training) -> torch.Tensor:
    held = [p for o in run.method.optimizers.values() for g in o.param_groups for p in g["params"]]
    return torch.cat([p.detach().double().flatten().cpu() for p in held])


def deviations(
    way: str, bf16: bool, device: torch.device, config: QPTConfig = SMALL, steps: tuple[int, ...] = CHECKED
) -> list[tuple[float, float]]:
    """Relative differences of loss and way from eager fp32 after each of `steps`; the same batches, no dropout."""
    data = made_up(8, episodes=40, length=50)
    found: list[list[tuple[float, torch.Tensor]]] = []
    for kind, low in (("eager", False), (way, bf16)):
        set_precision(low)
        run = Training(config, data, device, kind, bf16=low)
        first, seen = weights_of(run), []
        for step in range(1, max(steps) + 1):
            metrics = run.step()
            if step in steps:
                run.wait()
                seen.append((float(metrics["loss"]), weights_of(run) - first))
        found.append(seen)
    set_precision(False)
    return [
        (abs(loss - wanted) / abs(wanted), float((went - path).norm() / path.norm()))
        for (wanted, path), (loss, went) in zip(*found, strict=True)
    ]


def check(device: torch.device, say: Callable[[str], None] = print) -> bool:
    """Compare every way that this device has with eager fp32; whether all are within `TOLERANCE`, without a warning."""
    ways = ["eager", "compiled"] + (["captured", "compiled and captured"] if device.type == "cuda" else [])
    fine = True
    say("| step | precision | after | loss off by | allowed | way off by | allowed |\n|---|---|---|---|---|---|---|")
    for way in ways:
        for bf16 in (False, True):
            name = "bf16" if bf16 else "fp32"
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*cannot be (captured|compiled).*")  # a fall-back is no test
                found = deviations(way, bf16, device)
            for step, got, allowed in zip(CHECKED, found, TOLERANCE[name], strict=True):
                fine &= got[0] <= allowed[0] and got[1] <= allowed[1]
                say(f"| {way} | {name} | {step} | {got[0]:.1e} | {allowed[0]:g} | {got[1]:.1e} | {allowed[1]:g} |")
            torch._dynamo.reset()
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), help="default: all; on a CPU without the paper's")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="how to run the step")
    parser.add_argument("--bf16", action="store_true", help="also bf16 on a CPU")
    parser.add_argument("--seeds", type=int, default=4, help="also that many together; 1 for none")
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--check", action="store_true", help="compare with eager fp32 instead of timing")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {arguments.threads} threads"
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}\n")
    if arguments.check:
        fine = check(device)
        print("\nall within tolerance" if fine else "\nNOT within tolerance")
        return 0 if fine else 1

    rows: list[dict[str, Any]] = []

    def report(one: dict[str, Any]) -> None:
        rows.append(one)
        print("| " + " | ".join(map(str, one.values())) + " |", flush=True)

    print("| size | step | precision | seeds | ms a step of one | steps/s of all |\n|---|---|---|---|---|---|")
    measure(arguments, device, report)
    if arguments.json:
        facts = {"device": where, "torch": torch.__version__, "python": platform.python_version(), "rows": rows}
        arguments.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
