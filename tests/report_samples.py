"""Made-up runs and tables of episodes, with numbers that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qpt.episodes import Episodes

HOSTILE = "</script ><!--</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"&{{payload}}"


def table(
    values: dict[float, tuple[list[float], list[float]]],
    task: str = "BallCircle",
    algorithm: str = "qpt",
    checkpoint: str = "runs/a/checkpoints/step-000000300",
    fallback: float = float("nan"),
    **provenance: Any,
) -> Episodes:
    """Episodes at limits: {limit: (returns, costs)}."""
    parts = []
    for limit, (returns, costs) in values.items():
        n = len(returns)
        text = {"task": task, "algorithm": algorithm, "checkpoint": checkpoint}
        parts.append(
            Episodes(
                **{k: np.full(n, v) for k, v in text.items()},
                seed=np.zeros(n, np.int64),
                cost_limit=np.full(n, limit),
                episode=np.arange(n),
                returns=np.array(returns, float),
                costs=np.array(costs, float),
                lengths=np.full(n, 200),
                ended_by=np.full(n, "timeout"),
                fallback_share=np.full(n, fallback),
                normalized_return=np.array(returns, float) / 1000,
                normalized_cost=np.array(costs, float) / limit,
            )
        )
    whole = Episodes.concatenate(parts)
    return Episodes(**{**vars(whole), "provenance": provenance})


def run_folder(
    folder: Path,
    algorithm: str = "qpt",
    seed: int = 0,
    task: str | None = "BallCircle",
    source: str = "embedded:ballcircle",
    evaluations: list[tuple[int, dict[float, tuple[float, float]]]] | None = None,
    **config: Any,
) -> Path:
    """A run as `qpt train` leaves it: facts, metrics, and evaluations [(step, {limit: (return, cost)})]."""
    folder.mkdir(parents=True)
    facts = {
        "algorithm": algorithm,
        "config": {"steps": 200, "lr": 3e-4, **config},
        "seed": seed,
        "task": task,
        "data": {"source": source, "fingerprint": "f00d", "episodes": 500, "steps": 100000, "surrogate": True},
        "device": "cpu",
        "versions": {"qpt": "0.1.0", "torch": "2.13"},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    lines = [{"step": s, "steps_per_second": 9.0, "loss": 1 / s + seed} for s in (100, 200)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    rows = []
    for step, limits in evaluations or []:
        parts = [
            {
                "cost_limit": limit,
                "return": r,
                "cost": c,
                "normalized_return": r / 1000,
                "normalized_cost": c / limit,
            }
            for limit, (r, c) in limits.items()
        ]
        rows.append({"step": step, "limits": parts})
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    return folder
