"""What is said of a method at one limit by one rule: the same numbers in benches, reproductions and reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import stats
from qpt.tasks import Task

Floats = npt.NDArray[np.float64]
SAMPLES = 2_000  # bootstrap draws, enough for the digits that are shown; a large bench has thousands of lines


def score(
    returns: Floats,
    costs: Floats,
    normalized_returns: Floats,
    seeds: npt.NDArray[Any],
    cost_limit: float,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Means of the training seeds' means with intervals and spread, P(cost ≤ limit), tail cost and the verdict.

    The arrays have an entry an episode; `seeds` names the training run of each. Intervals of means come from drawing
    runs, then episodes within each. `within_limit` counts episodes, with Wilson's interval: it speaks of these
    policies, not of the next seed. Normalised scores are straight lines of the plain ones, and so are their intervals.
    """
    limit = float(cost_limit)
    value, value_interval = stats.mean_over_seeds(returns, seeds, confidence, SAMPLES)
    cost, cost_interval = stats.mean_over_seeds(costs, seeds, confidence, SAMPLES)
    within = int((costs <= limit).sum())

    def of_limit(value: float) -> float:
        return Task("-").normalized_cost(value, limit)

    def by_seed(values: Floats) -> list[float]:
        return [float(values[seeds == seed].mean()) for seed in np.unique(seeds)]

    return {
        "return": value,
        "return_interval": value_interval,
        "cost": cost,
        "cost_interval": cost_interval,
        "normalized_return": float(np.mean(by_seed(normalized_returns))),
        "normalized_return_interval": _rescaled(value_interval, returns, normalized_returns),
        "normalized_return_std": spread(by_seed(normalized_returns)),
        "normalized_cost": of_limit(cost),
        "normalized_cost_interval": (of_limit(cost_interval[0]), of_limit(cost_interval[1])),
        "normalized_cost_std": spread([of_limit(mean) for mean in by_seed(costs)]),
        "within_limit": within / len(costs),
        "within_limit_interval": stats.wilson_interval(within, len(costs), confidence),
        "cost_cvar": stats.cvar(costs, 0.1),
        "verdict": stats.verdict(cost_interval, limit),
    }


def spread(values: npt.ArrayLike) -> float:
    """The standard deviation over seeds; one seed has none."""
    array = np.asarray(values, np.float64)
    return float(array.std(ddof=1)) if len(array) > 1 else math.nan


def _rescaled(interval: stats.Interval, plain: Floats, scaled: Floats) -> stats.Interval:
    """The interval on the scale of `scaled`, a straight line of `plain`: no second bootstrap."""
    low, high = int(np.argmin(plain)), int(np.argmax(plain))
    width = plain[high] - plain[low]
    if math.isnan(interval[0]) or not width >= 0:
        return math.nan, math.nan
    slope = (scaled[high] - scaled[low]) / width if width else 0.0
    first, last = (float(scaled[low] + slope * (end - plain[low])) for end in interval)
    return first, last
