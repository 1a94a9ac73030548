"""Does the fast path learn as eager fp32 does?  python benchmarks/curves.py --data FILE [--steps 5000] [--seeds 0 1 2]

Trains QPT's default preset on a data file, on CUDA: as the loop does there by default (bf16, compiled and captured) and
eagerly in full fp32, with each seed, and writes a JSON file with the mean of every loss over 50 steps and a picture
beside it. `--draw` only draws a JSON file again. Dropout draws other numbers in the two, so the curves are compared
with the spread over seeds, not with each other step by step. Needs torch, numpy, matplotlib and the sources.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qpt import plotting
from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.data import load_dataset
from qpt.stepping import Stepper

MEAN_OF = 50  # steps
LOSSES = {
    "policy/imitation": "imitation",
    "critic/reward_loss": "reward critics",
    "critic/cost_loss": "cost critics",
    "critic/value_loss": "values",
}


def train(data: Any, seed: int, steps: int, fast: bool, config: QPTConfig) -> list[list[float]]:
    """Means of each loss over 50 steps: rows of the step and the losses in the order of LOSSES."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.manual_seed(seed)
    method = QPT(replace(config, steps=steps), Spec.from_data(data)).to(device)
    method.make_optimizers()
    method.train()
    fast = fast and device.type == "cuda"
    method.autocast = fast
    stepper = Stepper(method, method.make_sampler(data, device, seed), fast=fast, compile=fast)
    rows, sums = [], torch.zeros(len(LOSSES), device=device)
    for step in range(1, steps + 1):
        metrics = stepper.step()
        sums += torch.stack([metrics[name].float() for name in LOSSES])
        if step % MEAN_OF == 0:
            rows.append([step, *(sums / MEAN_OF).tolist()])
            sums.zero_()
    return rows


def draw(found: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    figure, (panels,) = plotting.panels(1, len(LOSSES), 3.4 * len(LOSSES), 3.3)
    for k, (axes, title) in enumerate(zip(panels, LOSSES.values(), strict=True), start=1):
        for way, colour in (("fast", "#cc3311"), ("eager", "#004488")):
            for number, rows in enumerate(found[way].values()):
                values = np.array(rows)
                label = {"fast": "the default on CUDA", "eager": "eager fp32"}[way] if not number else None
                axes.plot(values[:, 0], values[:, k], color=colour, lw=0.9, alpha=0.8, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_yscale("log")
    panels[0].legend(fontsize=8, frameon=False)
    plotting.save(figure, path)


def table(found: dict[str, dict[str, list[list[float]]]]) -> None:
    """Means over the second half of training, one number a seed."""
    print("| loss, mean of the second half | the default on CUDA | eager fp32 |\n|---|---|---|")
    for k, title in enumerate(LOSSES.values(), start=1):
        cells = []
        for way in ("fast", "eager"):
            runs = [np.array(rows)[len(rows) // 2 :, k].mean() for rows in found[way].values()]
            cells.append(", ".join(f"{x:.4f}" for x in runs))
        print(f"| {title} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the data file, .hdf5 or .npz")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("curves.json"))
    parser.add_argument("--draw", action="store_true", help="draw --out as it is")
    options = parser.parse_args()
    if not options.draw:
        if options.data is None:
            parser.error("give a data file with --data")
        data = load_dataset(options.data)
        found: dict[str, dict[str, list[list[float]]]] = {"fast": {}, "eager": {}}
        for way, seed in ((w, s) for w in found for s in options.seeds):
            found[way][str(seed)] = train(data, seed, options.steps, way == "fast", QPTConfig())
            print(f"{way}, seed {seed}: done", flush=True)
        options.out.write_text(json.dumps(found), encoding="utf-8")
    found = json.loads(options.out.read_text(encoding="utf-8"))
    table(found)
    draw(found, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
