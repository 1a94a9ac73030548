"""The tables of careful costs (docs/qpt-choices.md) from careful.csv: means, and returns at the same realised cost.

python docs/results/careful.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

TRANSFORMER = ("transformer", "asked for 0.9 of the return", "asked for 0.8 of it")
Points = dict[float, tuple[float, float]]  # of one seed: limit -> (cost, return)


def read() -> dict[str, dict[str, dict[int, Points]]]:
    """Task, choice and seed -> its points."""
    table: dict[str, dict[str, dict[int, Points]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    with (Path(__file__).parent / "careful.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points = table[row["task"]][row["choice"]][int(row["seed"])]
            points[float(row["cost_limit"])] = (float(row["cost"]), float(row["return"]))
    return table


def at_cost(lines: list[list[tuple[float, float]]], cost: float) -> float:
    """The best return of the lines that reach down to a cost; where none does, that of the cheapest point."""
    able = [float(np.interp(cost, *zip(*line, strict=True))) for line in lines if line[0][0] <= cost]
    return max(able) if able else min(line[0] for line in lines)[1]


def main() -> None:
    rng = np.random.default_rng(0)
    for task, choices in read().items():
        for choice, seeds in choices.items():
            print(f"\n{task}, {choice}, {len(seeds)} seed(s)")
            for limit in sorted(next(iter(seeds.values()))):
                cost, earned = np.mean([points[limit] for points in seeds.values()], 0)
                line = f"{limit:4g}: {earned:6.1f} @ {cost:5.1f}"
                if choice not in TRANSFORMER:
                    more = np.array(
                        [
                            points[limit][1]
                            - at_cost([sorted(choices[name][seed].values()) for name in TRANSFORMER], points[limit][0])
                            for seed, points in seeds.items()
                        ]
                    )
                    low, high = np.quantile(
                        more[rng.integers(len(more), size=(10_000, len(more)))].mean(1), [0.025, 0.975]
                    )
                    line += f"   at the same cost {more.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
                print(line)


if __name__ == "__main__":
    main()
