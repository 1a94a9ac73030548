"""Intervals for means and IQM over seeds and episodes, P(safe), P(better), tail cost, selection rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]
FEWEST = 3  # values below which an interval would say nothing


# -- bootstrap -----------------------------------------------------------------------------------------------------


def bootstrap_mean_interval(
    values: npt.ArrayLike,
    confidence: float = 0.95,
    groups: npt.ArrayLike | None = None,
    samples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean.

    `groups` names the training seed (or run) of each value: then seeds are drawn first and episodes within each drawn
    seed, for episodes of one seed are not independent evidence about the method. The statistic is the mean of the
    seeds' means.
    """
    return _bootstrap(_values(values), groups, _mean, confidence, samples, seed)


def iqm(values: npt.ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half, with the two values on its edges counted in part."""
    return float(_iqm(_values(values)[None])[0])


def iqm_interval(
    values: npt.ArrayLike,
    confidence: float = 0.95,
    groups: npt.ArrayLike | None = None,
    samples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the interquartile mean; with `groups`, of the IQM of the seeds' means."""
    return _bootstrap(_values(values), groups, _iqm, confidence, samples, seed)


def paired_difference_interval(
    a: npt.ArrayLike, b: npt.ArrayLike, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> Interval:
    """Bootstrap interval of mean(a - b) where a[i] and b[i] belong together, e.g. by training seed."""
    first, second = _values(a), _values(b)
    if first.shape != second.shape:
        raise QptError(f"a paired comparison needs as many values on both sides, not {len(first)} and {len(second)}")
    return bootstrap_mean_interval(first - second, confidence, samples=samples, seed=seed)


def mean_over_seeds(
    values: npt.ArrayLike, seeds: npt.ArrayLike, confidence: float = 0.95, samples: int = 10_000
) -> tuple[float, Interval]:
    """The mean of the training seeds' means with its bootstrap interval; NaN where fewer than `FEWEST` values are."""
    array, names = _values(values), np.asarray(seeds)
    mean = float(np.mean([array[names == name].mean() for name in np.unique(names)]))
    if len(array) < FEWEST:
        return mean, (math.nan, math.nan)
    return mean, bootstrap_mean_interval(array, confidence, names, samples)


def caveat(seeds: int) -> str:
    """What a 95 % interval of `mean_over_seeds` is worth; nothing to say from ten training seeds on."""
    if seeds >= 10:
        return ""
    if seeds < 2:
        return "Intervals from 1 training seed say nothing about the next seed."
    return (
        f"95 % intervals over {seeds} training seeds cover less than they say: simulated, about 66 % with 2 seeds, "
        "78 % with 3, 86 % with 5 and 91 % with 10."
    )


def verdict(cost_interval: Interval, cost_limit: float) -> str:
    """Say "safe" or "unsafe" only where the whole interval of the mean cost lies within the limit or above it."""
    low, high = cost_interval
    return "safe" if high <= cost_limit else "unsafe" if low > cost_limit else "unclear"  # NaN is unclear


def _bootstrap(
    values: Floats,
    groups: npt.ArrayLike | None,
    statistic: Callable[[Floats], Floats],
    confidence: float,
    samples: int,
    seed: int,
) -> Interval:
    _check_confidence(confidence)
    rng = np.random.default_rng(seed)
    if np.isnan(values).any():
        return math.nan, math.nan
    if groups is None:
        drawn = (_resample(values, rng, count) for count in _portions(samples, len(values)))
    else:
        names = np.asarray(groups)
        if names.shape != values.shape:
            raise QptError(f"every value needs its group: there are {len(values)} values and {names.size} groups")
        parts = [values[names == name] for name in np.unique(names)]
        drawn = (_resample_groups(parts, rng, count) for count in _portions(samples, len(values) * len(parts)))
    results = np.concatenate([statistic(part) for part in drawn])
    tail = (1 - confidence) / 2
    low, high = np.quantile(results, [tail, 1 - tail])
    return float(low), float(high)


def _portions(samples: int, width: int) -> list[int]:
    """Numbers of draws that add up to `samples` and need little memory each."""
    each = max(1, min(samples, 4_000_000 // max(width, 1)))
    return [each] * (samples // each) + ([samples % each] if samples % each else [])


def _resample(values: Floats, rng: np.random.Generator, count: int) -> Floats:
    return values[rng.integers(len(values), size=(count, len(values)))]  # [count, n]


def _resample_groups(parts: list[Floats], rng: np.random.Generator, count: int) -> Floats:
    """Means of resampled episodes of resampled groups, [count, groups]."""
    g = len(parts)
    # means[:, k, j]: a fresh resample of group j for the k-th place, of which one j is drawn.
    means = np.stack([part[rng.integers(len(part), size=(count, g, len(part)))].mean(axis=2) for part in parts], axis=2)
    chosen = rng.integers(g, size=(count, g, 1))
    return np.asarray(np.take_along_axis(means, chosen, axis=2)[..., 0], np.float64)


def _mean(rows: Floats) -> Floats:
    return np.asarray(rows.mean(axis=1), np.float64)


def _iqm(rows: Floats) -> Floats:
    ordered = np.sort(rows, axis=1)
    n = rows.shape[1]
    # Each value covers 1/n of the distribution; its weight is the part of that inside [1/4, 3/4].
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return np.asarray(ordered @ (weights / weights.sum()), np.float64)


# -- proportions ---------------------------------------------------------------------------------------------------


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion: sensible at 0 and 1 and for few trials."""
    _check_proportion(successes, n, confidence)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(centre - half, 0.0)
    return low, 1.0 if successes == n else min(centre + half, 1.0)


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The exact (conservative) interval of a proportion: never covers less often than it says."""
    _check_proportion(successes, n, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _bisect(lambda p: 1 - _binomial_cdf(successes - 1, n, p) - tail)
    high = 1.0 if successes == n else _bisect(lambda p: tail - _binomial_cdf(successes, n, p))
    return low, high


def _binomial_cdf(k: int, n: int, p: float) -> float:
    if p in (0.0, 1.0):
        return 1.0 if p == 0.0 or k >= n else 0.0
    log_choose = (math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1))
    return math.fsum(math.exp(c + i * math.log(p) + (n - i) * math.log1p(-p)) for i, c in enumerate(log_choose))


def _bisect(increasing: Callable[[float], float]) -> float:
    """Where a rising function on [0, 1] crosses 0."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return (low + high) / 2


# -- comparisons and risk ------------------------------------------------------------------------------------------


def probability_of_improvement(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """P(A > B) for one run of each drawn at random, ties counted half (the Mann-Whitney U over its largest value).

    NaN where any of the values is.
    """
    first, second = _values(a), np.sort(_values(b))
    if np.isnan(first).any() or np.isnan(second).any():
        return math.nan
    below = np.searchsorted(second, first, side="left")
    not_above = np.searchsorted(second, first, side="right")
    return float((below + not_above).mean() / (2 * len(second)))


def cvar(costs: npt.ArrayLike, alpha: float) -> float:
    """The mean cost of the worst share `alpha` of episodes (1: the plain mean); the one on the edge counts in part."""
    if not 0 < alpha <= 1:
        raise QptError(f"the share of worst episodes lies above 0 and up to 1, not at {alpha:g}")
    worst = np.sort(_values(costs))[::-1]
    amount = alpha * len(worst)
    whole = min(int(amount + 1e-9), len(worst))
    total = float(worst[:whole].sum())
    if whole < len(worst):
        total += max(amount - whole, 0.0) * float(worst[whole])
    return total / amount


def select_checkpoint(rows: Sequence[Mapping[str, float]], cost_limit: float) -> int:
    """The index of the row to keep: the highest `return` of those whose `cost` meets the limit, else the lowest `cost`.

    Ties go to the lower cost (or higher return), then to the later row. Rows with a NaN are passed over.
    """
    order = [i for i, row in enumerate(rows) if not math.isnan(row["return"] + row["cost"])]
    if not order:
        raise QptError("there is no checkpoint to choose from: none has a return and a cost that are numbers")
    safe = [i for i in order if rows[i]["cost"] <= cost_limit]
    if safe:
        return max(safe, key=lambda i: (rows[i]["return"], -rows[i]["cost"], i))
    return max(order, key=lambda i: (-rows[i]["cost"], rows[i]["return"], i))


# -- checks --------------------------------------------------------------------------------------------------------


def _values(values: npt.ArrayLike) -> Floats:
    array = np.asarray(values, np.float64).reshape(-1)
    if not len(array):
        raise QptError("statistics need at least one value")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise QptError(f"the confidence lies between 0 and 1, not at {confidence:g}")


def _check_proportion(successes: int, n: int, confidence: float) -> None:
    _check_confidence(confidence)
    if n < 1 or not 0 <= successes <= n:
        raise QptError(f"{successes} of {n} is not a proportion")
