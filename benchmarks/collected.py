"""Which aims the collected datasets meet, from the manifest that `qpt collect record` writes.

    python benchmarks/collected.py [FOLDER]

FOLDER holds datasets and their manifest.json; by default the manifest that comes with the package. The aims:

  reach     the best return within the cost cap is at least 90 % of the published data's
  careful   at least 10 % of the episodes cost at most 10
  safe      the best return at a cost of at most 10, normalised, is at least 95 % of the best mean return that a method
            of the paper's main table reaches on the published data while its mean cost keeps the limit of 10
  covered   at least a quarter of the 20 x 20 cells of cost and return hold an episode (of what stands in for published
            data here, the narrowest covers 30 %)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from qpt.collect.manifest import package_manifest, read_manifest
from qpt.experiments.paper import main_table
from qpt.tasks import dsrl_tasks


def safe_returns() -> dict[str, float]:
    """By task, the best normalised return of the paper's methods that keep a cost limit of 10."""
    best: dict[str, float] = {}
    for (task, _), score in main_table().items():
        if score.cost <= 1.0:
            best[task] = max(best.get(task, score.reward), score.reward)
    return best


def aims(row: dict[str, Any], safe: float | None) -> dict[str, bool]:
    task = dsrl_tasks()[row["task"]]
    found = -1.0 if row["careful_return"] is None else task.normalized_return(row["careful_return"])
    return {
        "reach": row["return"][2] >= 0.9 * float(task.reward_max or 0.0),
        "careful": row["careful_share"] >= 0.1,
        "safe": safe is None or found >= 0.95 * safe,
        "covered": row["coverage"] >= 0.25,
    }


def main() -> int:
    rows = read_manifest(Path(sys.argv[1])) if len(sys.argv) > 1 else package_manifest()
    if not rows:
        print("there is no manifest; record datasets first")
        return 1
    best, met = safe_returns(), 0
    print("| task | trajectories | best / published | cost ≤ 10 | best there (needed) | cells | core-h | MB | missed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, task in dsrl_tasks().items():
        if name not in rows:
            print(f"| {name} | – | | | | | | | |")
            continue
        row, safe = rows[name], best.get(name)
        found = aims(row, safe)
        met += all(found.values())
        careful = "–" if row["careful_return"] is None else f"{task.normalized_return(row['careful_return']):.2f}"
        columns = (
            name, row["trajectories"], f"{row['return'][2] / float(task.reward_max or 1.0):.2f}",
            f"{row['careful_share']:.0%}", f"{careful} ({'–' if safe is None else f'{safe:.2f}'})",
            f"{row['coverage']:.0%}", f"{row['core_hours']:.2f}", f"{row['megabytes']:.0f}",
            ", ".join(aim for aim, held in found.items() if not held) or "none",
        )  # fmt: skip
        print(f"| {' | '.join(map(str, columns))} |")
    print(f"\n{len(rows)} of {len(dsrl_tasks())} tasks have a dataset; {met} meet all aims")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
