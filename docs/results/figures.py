"""Draw the pictures and print the tables of docs/results.md from comparison.json:  python docs/results/figures.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qpt import stats

HERE = Path(__file__).parent
NAMES = {
    ("transformer", "one"): "conditional transformer",
    ("qpt", "one"): "QPT, one candidate",
    ("qpt", "shield"): "QPT, shield (the default then)",
    ("qpt", "constrained"): "QPT, best of 50",
    ("paper", "one"): "paper preset, one candidate (2 seeds)",
    ("paper", "literal"): "paper preset, literal test (2 seeds)",
}


def collect() -> dict[tuple[str, str, str], dict[float, list[tuple[float, float]]]]:
    """(task, training, inference) -> limit -> one (return, cost) a training seed."""
    table: dict[tuple[str, str, str], dict[float, list[tuple[float, float]]]] = {}
    for row in json.loads((HERE / "comparison.json").read_text())["rows"]:
        key = (row["task"], row["training"], row["inference"])
        pair = (float(np.mean(row["returns"])), float(np.mean(row["costs"])))
        table.setdefault(key, {}).setdefault(row["cost_limit"], []).append(pair)
    return table


def main() -> None:
    table = collect()
    for task in ("BallCircle", "BallRun"):
        figure = Figure(figsize=(10, 4), layout="constrained")
        plane, follow = figure.subplots(1, 2)
        for (training, inference), name in NAMES.items():
            limits = table.get((task, training, inference))
            if not limits:
                continue
            cells = []
            for limit, pairs in limits.items():
                returns, costs = np.array(pairs).T
                cells.append((limit, returns.mean(), costs.mean(), *stats.bootstrap_mean_interval(costs)))
            rows = np.array(cells)
            print(
                f"{task:10s} {name:38s}",
                " ".join(f"{k:g}: {r:.0f} @ {c:.1f} [{a:.1f}, {b:.1f}]" for k, r, c, a, b in rows),
            )
            plane.plot(rows[:, 2], rows[:, 1], "o-", ms=3, lw=1, label=name)
            follow.plot(rows[:, 0], rows[:, 2], "o-", ms=3, lw=1, label=name)
        top = max(max(x) for x in (list(v) for k, v in table.items() if k[0] == task))
        follow.plot([0, top], [0, top], color="grey", lw=1, ls="--", label="cost = limit")
        labels: list[tuple[Any, str, str]] = [(plane, "mean cost", "mean return"), (follow, "cost limit", "mean cost")]
        for axes, x, y in labels:
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.spines[["top", "right"]].set_visible(False)
        follow.legend(fontsize=7, frameon=False)
        plane.set_title(f"{task}: return against cost", fontsize=10)
        follow.set_title(f"{task}: mean cost against the limit", fontsize=10)
        figure.savefig(HERE / f"{task.lower()}.png", dpi=130)


if __name__ == "__main__":
    main()
