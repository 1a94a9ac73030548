"""From results to the lines of the headline table: means, intervals over seeds and episodes, and who is safe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qpt import stats
from qpt.report.sources import Result, Run
from qpt.tasks import Task

Interval = tuple[float, float]
NONE: Interval = (math.nan, math.nan)
SAMPLES = 2_000  # bootstrap draws, enough for the digits that are shown; a benchmark has thousands of lines
FEWEST = 3  # values below which an interval would say nothing


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
    task, limit, selection, method = key
    parts = [p for p in parts if p.whole] or parts  # means of training do not mix with episodes
    costs = np.concatenate([p.costs for p in parts])
    whole = parts[0].whole
    groups = np.repeat([p.run for p in parts], [len(p.costs) for p in parts])

    def mean(values: Any) -> tuple[float, Interval]:
        """The mean of the runs' means, and its interval over runs and episodes."""
        each = [float(values[groups == run].mean()) for run in np.unique(groups)]
        if len(values) < FEWEST or np.isnan(values).any():
            return float(np.mean(each)), NONE
        nested = groups if len(each) > 1 and whole else None
        return float(np.mean(each)), stats.bootstrap_mean_interval(values, confidence, nested, samples=SAMPLES)

    returns, scores = (np.concatenate([getattr(p, k) for p in parts]) for k in ("returns", "normalized_returns"))
    value, value_interval = mean(returns)
    normalized = float(np.mean([scores[groups == run].mean() for run in np.unique(groups)]))
    cost, cost_interval = mean(costs)
    inside = int((costs <= limit).sum())
    low, high = cost_interval
    verdict = "" if math.isnan(low) else "safe" if high <= limit else "unsafe" if low > limit else "unclear"
    return Line(
        task,
        limit,
        selection,
        method,
        runs=len(np.unique(groups)),
        episodes=len(costs) if whole else 0,
        mean_return=value,
        return_interval=value_interval,
        normalized_return=normalized,
        normalized_return_interval=_rescaled(value_interval, returns, scores),
        cost=cost,
        cost_interval=cost_interval,
        normalized_cost=Task(task or "-").normalized_cost(cost, limit),
        within=inside / len(costs) if whole else math.nan,
        within_interval=stats.wilson_interval(inside, len(costs), confidence) if whole else NONE,
        cost_cvar=stats.cvar(costs, 0.1) if whole else math.nan,
        fallback=float(np.mean([p.fallback for p in parts])),
        verdict=verdict,
        safe=cost <= limit,
    )


def _rescaled(interval: Interval, returns: Any, scores: Any) -> Interval:
    """The interval of the normalised return, which is a straight line of the return: no second bootstrap."""
    low, high = int(np.argmin(returns)), int(np.argmax(returns))
    width = returns[high] - returns[low]
    if math.isnan(interval[0]) or width <= 0:
        return (float(scores[low]),) * 2 if width == 0 and not math.isnan(interval[0]) else NONE
    slope = (scores[high] - scores[low]) / width
    first, last = (float(scores[low] + slope * (end - returns[low])) for end in interval)
    return first, last


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
