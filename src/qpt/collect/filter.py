"""DSRL's filter: from all recorded episodes to a dataset that covers the (cost, return) plane evenly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 20  # of the grid, in cost and in return
TOP = 3  # best episodes of each cost bin, kept before all others
CAREFUL = 10.0  # the cost up to which an episode counts as careful, or a quarter of a cap below 40
SHARE = 0.12  # of careful episodes, at least, where there are as many


def careful_cost(cap: float) -> float:
    """The cost up to which an episode counts as careful."""
    return min(CAREFUL, 0.25 * cap)


def cells(returns: Floats, costs: Floats, cap: float, low: float, high: float) -> tuple[Ints, Ints]:
    """The cost bin and the return bin of each episode; what lies outside counts to the outermost bin."""
    width = max(high - low, 1e-9)
    cost = np.clip((costs / max(cap, 1e-9) * BINS).astype(np.int64), 0, BINS - 1)
    row = np.clip(((returns - low) / width * BINS).astype(np.int64), 0, BINS - 1)
    return cost, row


def grid_filter(returns: Floats, costs: Floats, lengths: Ints, cap: float, wanted: int, seed: int = 0) -> Ints:
    """The episodes to keep, in order: none above the cap, and `wanted` of them where there are as many.

    The best of each cost bin come first. The others are drawn cell by cell, in numbers that grow with the square root
    of the steps a cell holds: a hard cap per cell would starve the region of low cost. Where that still leaves too few
    careful episodes, these are drawn apart.
    """
    if wanted < 1:
        raise QptError(f"at least one trajectory must be wanted, not {wanted}")
    within = np.flatnonzero(costs <= cap).astype(np.int64)
    if len(within) == 0:
        raise QptError(f"no recorded episode stays within the cost cap of {cap:g}; raise it, or collect for longer")
    if len(within) <= wanted:
        return within
    returns, costs, lengths = returns[within], costs[within], lengths[within]
    careful = costs <= careful_cost(cap)
    column, row = cells(returns, costs, cap, float(returns.min()), float(returns.max()))
    column = np.where(careful, column, column + BINS)  # a bin that both kinds share counts as two
    best = np.lexsort((-returns, column))
    rank = np.arange(len(best)) - np.searchsorted(column[best], column[best])  # place within its cost bin
    top = best[np.lexsort((column[best], rank))]  # all the best, then all the second best, ...
    kept = top[: min(wanted, int((rank < TOP).sum()))]
    rest = np.setdiff1d(np.arange(len(returns)), kept)
    cell, count = column * BINS + row, 2 * BINS**2
    weight = np.sqrt(np.bincount(cell, weights=lengths, minlength=count))
    there = np.bincount(cell[rest], minlength=count)
    quota = _quotas(weight, there, wanted - len(kept))
    low = np.arange(count) < BINS**2  # cells of careful episodes
    missing = int(np.ceil(SHARE * wanted)) - int(careful[kept].sum())
    if quota[low].sum() < missing:
        few = min(missing, int(there[low].sum()), wanted - len(kept))
        few = max(few, wanted - len(kept) - int(there[~low].sum()))
        quota = _quotas(weight, there * low, few) + _quotas(weight, there * ~low, wanted - len(kept) - few)
    shuffled = rest[np.random.default_rng([seed, 7]).permutation(len(rest))]
    order = shuffled[np.argsort(cell[shuffled], kind="stable")]
    own = cell[order]
    drawn = order[np.arange(len(order)) - np.searchsorted(own, own) < quota[own]]
    chosen: Ints = within[np.sort(np.concatenate([kept, drawn]))]
    return chosen


def _quotas(weight: Floats, available: Ints, total: int) -> Ints:
    """Whole numbers that sum to `total`, proportional to the weights as far as there are episodes."""
    if total == 0:
        return np.zeros_like(available)
    low, high = 0.0, float(total + available.max()) / max(float(weight[available > 0].min()), 1e-9)
    for _ in range(100):  # the factor at which the cells together give the total
        middle = 0.5 * (low + high)
        if np.minimum(middle * weight, available).sum() < total:
            low = middle
        else:
            high = middle
    exact = np.minimum(high * weight, available)
    quota = np.floor(exact + 1e-9).astype(np.int64)
    missing = total - int(quota.sum())
    open_cells = np.flatnonzero(quota < available)
    by_rest = open_cells[np.argsort(-(exact - quota)[open_cells], kind="stable")]
    quota[by_rest[:missing]] += 1
    return quota


def coverage(returns: Floats, costs: Floats, cap: float, low: float, high: float) -> float:
    """The share of the grid's cells that hold an episode within the cap."""
    within = costs <= cap
    column, row = cells(returns[within], costs[within], cap, low, high)
    return len(np.unique(column * BINS + row)) / BINS**2
