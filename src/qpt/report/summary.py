"""From results to the lines of the headline table: means, intervals over seeds and episodes, and who is safe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qpt.experiments.scores import score
from qpt.report.sources import Result, Run
from qpt.stats import Interval


@dataclass(frozen=True)
class Line:
    """One method at one cost limit with one rule of choosing a checkpoint."""

    task: str
    cost_limit: float
    selection: str
    method: str
    runs: int
    episodes: int  # 0: only means of evaluations during training are known
    mean_return: float
    return_interval: Interval
    normalized_return: float
    normalized_return_interval: Interval
    cost: float
    cost_interval: Interval
    normalized_cost: float
    within: float  # share of episodes whose cost meets the limit
    within_interval: Interval
    cost_cvar: float  # mean cost of the worst tenth
    fallback: float
    verdict: str  # of the interval: "safe", "unsafe", "unclear"
    safe: bool  # of the mean, as in the paper's table
    best: bool = False  # the highest return among the safe ones


def lines(results: Sequence[Result], confidence: float = 0.95) -> list[Line]:
    """One line for each task, limit, selection and method; the best safe ones of each table are marked."""
    groups: dict[tuple[str, float, str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.task, r.cost_limit, r.selection, r.method), []).append(r)
    found = [_line(key, parts, confidence) for key, parts in groups.items()]
    return _mark_best(found)


def _line(key: tuple[str, float, str, str], parts: Sequence[Result], confidence: float) -> Line:
    parts = [p for p in parts if p.whole] or parts  # means of training do not mix with episodes
    columns = ("returns", "costs", "normalized_returns")
    returns, costs, normalized = (np.concatenate([getattr(p, name) for p in parts]) for name in columns)
    runs = np.repeat([p.run for p in parts], [len(p.costs) for p in parts])
    found = score(returns, costs, normalized, runs, key[1], confidence)
    whole = parts[0].whole
    return Line(
        *key,
        runs=len(np.unique(runs)),
        episodes=len(costs) if whole else 0,
        mean_return=found["return"],
        return_interval=found["return_interval"],
        normalized_return=found["normalized_return"],
        normalized_return_interval=found["normalized_return_interval"],
        cost=found["cost"],
        cost_interval=found["cost_interval"],
        normalized_cost=found["normalized_cost"],
        within=found["within_limit"] if whole else math.nan,
        within_interval=found["within_limit_interval"] if whole else (math.nan, math.nan),
        cost_cvar=found["cost_cvar"] if whole else math.nan,
        fallback=float(np.mean([p.fallback.mean() for p in parts])),
        verdict=found["verdict"],
        safe=found["cost"] <= key[1],
    )


def _mark_best(found: Sequence[Line]) -> list[Line]:
    """Ties count as far as the digits that are shown."""
    tops: dict[tuple[str, float, str], str] = {}
    for line in sorted((x for x in found if x.safe), key=lambda x: x.mean_return):
        tops[line.task, line.cost_limit, line.selection] = shown(line.mean_return)
    return [
        replace(x, best=x.safe and tops.get((x.task, x.cost_limit, x.selection)) == shown(x.mean_return)) for x in found
    ]


def shown(value: float, digits: int = 1) -> str:
    """A number as tables show it; a dash where there is none."""
    return "–" if not math.isfinite(value) else f"{value:z.{digits}f}"


# -- learning curves ---------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return and cost over training steps by task, method and limit: the mean of the seeds, lowest and highest."""
    found: dict[tuple[str, str, float], dict[int, list[tuple[float, float]]]] = {}
    for run in runs:
        for row in run.evaluations:
            for part in row["limits"]:
                key = (run.task, run.method, float(part["cost_limit"]))
                values = (float(part["return"]), float(part["cost"]))
                found.setdefault(key, {}).setdefault(int(row["step"]), []).append(values)
    return [
        {"task": task, "method": method, "limit": limit, **_bands(steps, ("return", "cost"))}
        for (task, method, limit), steps in found.items()
    ]


def training_metrics(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The logged metrics over training steps for each task and method, with bands over seeds."""
    found: dict[tuple[str, str, str], dict[int, list[tuple[float, ...]]]] = {}
    for run in runs:
        for row in run.metrics:
            for name, value in row.items():
                if name not in ("step", "steps_per_second") and isinstance(value, (int, float)):
                    steps = found.setdefault((run.task, run.method, name), {})
                    steps.setdefault(int(row["step"]), []).append((float(value),))
    return [
        {"task": task, "method": method, "metric": name, **_bands(steps, ("value",))}
        for (task, method, name), steps in found.items()
    ]


def _bands(steps: dict[int, list[Any]], names: Sequence[str]) -> dict[str, Any]:
    """Columns by step; long logs are thinned to what a screen can show."""
    order = sorted(steps)
    order = [order[i] for i in np.unique(np.linspace(0, len(order) - 1, min(len(order), 200)).round().astype(int))]
    columns: dict[str, Any] = {"steps": order, "seeds": max(len(v) for v in steps.values())}
    for place, name in enumerate(names):
        values = [[row[place] for row in steps[step]] for step in order]
        columns[name] = [float(np.mean(v)) for v in values]
        columns[f"{name}_low"], columns[f"{name}_high"] = [min(v) for v in values], [max(v) for v in values]
    return columns
