"""Training steps a second of every method: `python benchmarks/methods.py [--device cuda] [--json FILE]`.

Data are made up (observations of 76 numbers, 2 actions, episodes of 200 steps): speed does not depend on what they say.
On CUDA the step is compiled and captured as in training; `--plain` measures it without.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from made_up import made_up

from qpt.algorithms.base import Spec, algorithm_classes, algorithm_names
from qpt.data.trajectories import Trajectories
from qpt.stepping import Stepper


def steps_per_second(
    name: str, config: Any, data: Trajectories, device: torch.device, seconds: float, fast: bool
) -> float:
    algorithm = algorithm_classes(name)[0](config, Spec.from_data(data)).to(device)
    algorithm.make_optimizers()
    on_cuda = device.type == "cuda"
    if hasattr(algorithm, "autocast"):
        algorithm.autocast = on_cuda
    algorithm.train()
    sampler = algorithm.make_sampler(data, device, 0)
    stepper = Stepper(algorithm, sampler, fast=fast and on_cuda, compile=fast and on_cuda)

    def wait() -> None:
        if on_cuda:
            torch.cuda.synchronize()

    for _ in range(6 if on_cuda else 2):  # compilation and capture are not counted
        stepper.step()
    wait()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20 if on_cuda else 1):
            stepper.step()
            count += 1
        wait()
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="methods; all of them if none is given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture on cuda")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device, data = torch.device(arguments.device), made_up()
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    rows = []
    print(
        f"{where}, torch {torch.__version__}\n\n"
        "| method | batch 64, steps/s | paper's batch | steps/s |\n|---|---|---|---|"
    )
    for name in arguments.names or algorithm_names():
        config_class = algorithm_classes(name)[1]
        paper = config_class.preset("paper")
        known = {f.name for f in fields(config_class)}
        loose = {"cost_limit": 100.0} if "cost_limit" in known else {}  # every method finds data that it may use
        row: dict[str, Any] = {"method": name, "paper_batch": paper.batch_size}
        for label, config in (("small", replace(paper, batch_size=64)), ("paper", paper)):
            config = replace(config, **loose)
            rate = steps_per_second(name, config, data, device, arguments.seconds, not arguments.plain)
            row[f"{label}_steps_per_second"] = round(rate, 1)
        rows.append(row)
        print(
            f"| {name} | {row['small_steps_per_second']} | {row['paper_batch']} | {row['paper_steps_per_second']} |",
            flush=True,
        )
    if arguments.json:
        facts = {"device": where, "torch": torch.__version__, "python": platform.python_version(), "rows": rows}
        arguments.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
