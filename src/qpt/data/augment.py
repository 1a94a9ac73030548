"""Augmentation by relabelling: teach that a target beyond the data asks for the best safe episode.

A relabelled episode is a row (base episode, shift of its returns-to-go, shift of its costs-to-go); nothing is copied.
Two rules:

- "paper": Algorithm 2. A cost target κ uniform over the costs of the data; a return target ρ uniform between the
  reward frontier RF(κ) and `max_reward`; the base is the episode with the highest return among those with cost <= κ.
  Targets whose frontier reaches `max_reward` are skipped.
- "osrl": what CDT's published numbers were made with. Crowded and lonely cells of the (cost, return) plane are
  thinned, a polynomial is fitted to the Pareto set, cost targets are evenly spaced, and the base is the nearest episode
  within the cost target, or a near one that is safer where several targets would share it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from qpt.data.checks import default_max_bytes
from qpt.data.trajectories import Trajectories, pareto
from qpt.errors import QptError
from qpt.tasks import Augmentation, Task

if TYPE_CHECKING:
    from numpy.polynomial import Polynomial

Rule = Literal["paper", "osrl"]
Floats = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

_COST_CELLS, _RETURN_CELLS = 10, 50  # OSRL's grid
_MOST, _FEW = 10, 2  # a cell keeps at most so many episodes, and none if it has no more than so few
_HIGHEST_DEGREE = 4  # the highest of the published constants
_TARGET = "#228833"  # a green that colour-blind readers tell from the plane's blue and red


@dataclass(frozen=True, eq=False)
class Relabelled:
    """Episodes with other targets: row i is episode base[i] with its returns-to-go and costs-to-go shifted."""

    base: Index  # [M] episode index
    return_shift: npt.NDArray[np.float32]  # [M] target_return - return of the base
    cost_shift: npt.NDArray[np.float32]  # [M] target_cost - cost of the base, never negative
    target_return: Floats  # [M] ρ
    target_cost: Floats  # [M] κ
    rule: Rule
    max_reward: float  # where the return targets end
    fit: Polynomial | None = None  # OSRL's frontier f(κ)
    skipped: int = 0  # targets that had no room below max_reward
    notes: tuple[str, ...] = ()  # what was out of the ordinary

    def __len__(self) -> int:
        return len(self.base)


def augment(
    trajectories: Trajectories,
    *,
    rule: Rule = "paper",
    fraction: float = 0.2,
    max_reward: float | None = None,
    degree: int | None = None,
    max_reward_decrease: float | None = None,
    min_reward: float = 1.0,
    beta: float = 1.0,
    seed: int = 0,
    task: Task | None = None,
) -> Relabelled:
    """Relabel episodes: `fraction` times as many rows as there are episodes ("osrl": as the grid left).

    `max_reward`, `degree` and `max_reward_decrease` come from the arguments, or the task's published constants, or else
    the data: max_reward is the best return plus 10 % of the range of returns ("osrl": plus min_reward); degree the
    highest, up to 4, whose fit rises everywhere and stays below max_reward; max_reward_decrease 20 % of the range.
    For "osrl" alone: `degree`, `max_reward_decrease` (how much worse a stand-in may be), `min_reward` (how far targets
    stay above the fit) and `beta` (softens distances).
    """
    if rule not in ("paper", "osrl"):
        raise QptError(f"there is no augmentation rule {rule!r}; choose paper or osrl")
    if not (math.isfinite(fraction) and fraction >= 0):
        raise QptError(f"the fraction of relabelled episodes must be 0 or more, not {fraction:g}")
    # The rule "osrl" compares each of them with each logged episode.
    each = 64 * (len(trajectories) if rule == "osrl" else 1)
    if fraction * len(trajectories) * each > default_max_bytes():
        raise QptError(f"{fraction:g} relabelled episodes for each logged one do not fit into memory; ask for fewer")
    if degree is not None and degree < 0:
        raise QptError(f"the degree of the frontier must be 0 or more, not {degree}")
    if not (math.isfinite(beta) and beta > 0 and math.isfinite(min_reward)):
        raise QptError("beta must be positive and min_reward a number")
    if max_reward_decrease is not None and not max_reward_decrease >= 0:
        raise QptError(f"max_reward_decrease must be 0 or more, not {max_reward_decrease:g}")
    if seed < 0:
        raise QptError(f"a seed is a whole number of at least 0, not {seed}")
    published = task.augmentation if task is not None else Augmentation()
    returns, costs = trajectories.returns, trajectories.episode_costs
    best, spread = float(returns.max()), float(np.ptp(returns))
    spread = spread or max(abs(best), 1.0)  # equal returns: a tenth of their size stands in for their range
    notes: list[str] = []

    if max_reward is None:
        max_reward = published.max_reward
    if max_reward is None:
        max_reward = best + 0.1 * spread + (min_reward if rule == "osrl" else 0.0)
    elif not math.isfinite(max_reward):
        raise QptError(f"max_reward must be a number, not {max_reward}")
    elif max_reward <= best:
        notes.append(
            f"max_reward {max_reward:g} is not above the best return {best:g}; a larger one gives more targets"
        )

    rng = np.random.default_rng(seed)
    fit = None
    if rule == "paper":
        base, target_cost, target_return, wanted = _paper(returns, costs, fraction, max_reward, rng)
    else:
        if max_reward_decrease is None:
            max_reward_decrease = published.max_reward_decrease
        if max_reward_decrease is None:
            max_reward_decrease = 0.2 * spread
        degree = published.degree if degree is None else degree
        kept = _grid_filter(returns, costs, rng)
        if len(kept) == 0:
            kept = np.arange(len(returns))
            notes.append("every cell of the grid is nearly empty; all episodes are used")
        fit, degree_note = _fit_frontier(returns[kept], costs[kept], degree, max_reward, min_reward)
        notes += degree_note
        base, target_cost, target_return, wanted = _osrl(
            returns[kept], costs[kept], fit, fraction, max_reward, max_reward_decrease, min_reward, beta, rng
        )
        base = kept[base]

    skipped = wanted - len(base)
    if skipped:
        notes.append(
            f"{skipped} of {wanted} targets are skipped: the frontier leaves no room below max_reward {max_reward:g}"
        )
    return Relabelled(
        base=base,
        return_shift=(target_return - returns[base]).astype(np.float32),
        cost_shift=(target_cost - costs[base]).astype(np.float32),
        target_return=target_return,
        target_cost=target_cost,
        rule=rule,
        max_reward=max_reward,
        fit=fit,
        skipped=skipped,
        notes=tuple(notes),
    )


# -- the paper's rule --------------------------------------------------------------------------------------------------


def _paper(
    returns: Floats, costs: Floats, fraction: float, max_reward: float, rng: np.random.Generator
) -> tuple[Index, Floats, Floats, int]:
    wanted = int(fraction * len(returns))
    target_cost = rng.uniform(costs.min(), costs.max(), wanted)
    above = rng.uniform(size=wanted)
    # The best episode with C <= κ is the last of the Pareto set with C <= κ; its return is RF(κ).
    best = pareto(returns, costs)
    base = best[np.searchsorted(costs[best], target_cost, side="right") - 1]
    room = max_reward - returns[base]
    target_return = returns[base] + above * room
    keep = room > 0
    return base[keep], target_cost[keep], target_return[keep], wanted


# -- OSRL's rule -------------------------------------------------------------------------------------------------------


def _grid_filter(returns: Floats, costs: Floats, rng: np.random.Generator) -> Index:
    """Episodes of cells that hold more than 2, at most 10 of each at random; in their old order."""
    cell = _bins(costs, _COST_CELLS) * _RETURN_CELLS + _bins(returns, _RETURN_CELLS)
    order = np.lexsort((rng.random(len(cell)), cell))  # by cell, shuffled inside
    _, first, inverse, size = np.unique(cell[order], return_index=True, return_inverse=True, return_counts=True)
    rank = np.arange(len(cell)) - first[inverse]
    return np.sort(order[(rank < _MOST) & (size[inverse] > _FEW)]).astype(np.int64)


def _bins(values: Floats, count: int) -> Index:
    width = np.ptp(values) / count
    if width == 0:
        return np.zeros(len(values), np.int64)
    bins: Index = np.minimum((values - values.min()) // width, count - 1).astype(np.int64)  # the maximum is in the last
    return bins


def _fit_frontier(
    returns: Floats, costs: Floats, degree: int | None, max_reward: float, min_reward: float
) -> tuple[Polynomial, list[str]]:
    """A polynomial through the Pareto set; its degree is bounded by the points there are."""
    best = pareto(returns, costs)
    x, y = costs[best], returns[best]
    most = len(best) - 1
    grid = np.linspace(costs.min(), costs.max(), 200)
    if degree is not None:
        fit = _polynomial(x, y, min(degree, most))
        if degree > most:
            return fit, [f"the Pareto set has {most + 1} points; the frontier's degree is {most} instead of {degree}"]
        falls = float((np.maximum.accumulate(fit(grid)) - fit(grid)).max())
        if falls > 0.01 * np.ptp(returns):
            return fit, [f"the frontier's fit of degree {degree} falls by {falls:g} somewhere; try a lower degree"]
        return fit, []
    for candidate in range(min(most, _HIGHEST_DEGREE), -1, -1):
        fit = _polynomial(x, y, candidate)
        if _rises(fit(grid)) and fit(grid[-1]) + min_reward <= max_reward:
            break
    return fit, []


def _polynomial(x: Floats, y: Floats, degree: int) -> Polynomial:
    from numpy.polynomial import Polynomial

    with warnings.catch_warnings():  # nearly equal costs: the least-squares answer is still finite
        warnings.simplefilter("ignore", np.exceptions.RankWarning)
        return Polynomial.fit(x, y, degree)


def _rises(values: Floats) -> bool:
    return bool((np.diff(values) >= -1e-9 * max(float(np.abs(values).max()), 1e-30)).all())


def _osrl(
    returns: Floats,
    costs: Floats,
    fit: Polynomial,
    fraction: float,
    max_reward: float,
    max_reward_decrease: float,
    min_reward: float,
    beta: float,
    rng: np.random.Generator,
) -> tuple[Index, Floats, Floats, int]:
    wanted = int(fraction * len(returns))
    target_cost = np.linspace(costs.min(), costs.max(), wanted)
    lowest = np.asarray(fit(target_cost), np.float64) + min_reward
    target_return = lowest + rng.random(wanted) * (max_reward - lowest)
    choice = rng.random(wanted)
    keep = lowest < max_reward  # OSRL samples the reversed interval here, which lies below its frontier
    target_cost, target_return, choice = target_cost[keep], target_return[keep], choice[keep]

    distance = np.hypot(target_cost[:, None] - costs, target_return[:, None] - returns)  # [M, n]
    base: Index = np.argmin(np.where(costs <= target_cost[:, None], distance, np.inf), axis=1).astype(np.int64)

    # The first target keeps its nearest episode; others of the same one draw among safer ones that are nearly as good.
    _, first = np.unique(base, return_index=True)
    again = np.setdiff1d(np.arange(len(base)), first)
    shared, cost, value = base[again], costs[base[again], None], returns[base[again], None]
    weight = 1.0 / (np.hypot(costs - cost, returns - value) + beta)  # [D, n]
    weight *= (costs <= cost) & (returns >= value - max_reward_decrease)
    cumulative = np.cumsum(weight, axis=1)
    # Strictly above, so that an episode of weight 0 is never drawn; `shared` itself always has weight.
    drawn = cumulative > choice[again, None] * cumulative[:, -1:]
    base[again] = np.where(drawn.any(axis=1), drawn.argmax(axis=1), shared)
    return base, target_cost, target_return, wanted


# -- the picture -------------------------------------------------------------------------------------------------------


def figure(trajectories: Trajectories, relabelled: Relabelled, title: str = "", arrows: int = 60) -> Any:
    """The (cost, return) plane with arrows from base episodes to their relabelled pairs, at most `arrows` of them."""
    from qpt.plotting import INK, cost_return_plane

    picture = cost_return_plane(trajectories, (), title)
    axes = picture.axes[0]
    cost, value, base = relabelled.target_cost, relabelled.target_return, relabelled.base
    axes.scatter(cost, value, s=13, color=_TARGET, alpha=0.6, linewidths=0, zorder=4, label="relabelled pair")
    by_cost = np.lexsort((value, cost))  # arrows evenly over the cost targets
    style = {
        "arrowstyle": "-|>",
        "color": INK,
        "alpha": 0.45,
        "lw": 0.7,
        "mutation_scale": 6,
        "shrinkA": 0,
        "shrinkB": 2,
    }
    for row in by_cost[np.linspace(0, len(by_cost) - 1, min(arrows, len(by_cost))).astype(np.int64)]:
        start = (trajectories.episode_costs[base[row]], trajectories.returns[base[row]])
        axes.annotate("", (cost[row], value[row]), start, arrowprops=style, zorder=3.5)
    bases = np.unique(base)
    points = (trajectories.episode_costs[bases], trajectories.returns[bases])
    ring = {"facecolors": "white", "edgecolors": INK, "linewidths": 1.1}
    axes.scatter(*points, s=26, **ring, zorder=5, label="base episode")
    axes.axhline(relabelled.max_reward, color=_TARGET, linewidth=1.0, linestyle=":", zorder=1.5, label="max_reward")
    if relabelled.fit is not None and len(cost):
        x = np.linspace(cost.min(), cost.max(), 200)
        axes.plot(x, relabelled.fit(x), color=INK, linewidth=1.4, linestyle="--", zorder=3.2, label="fitted frontier")
    for legend in list(picture.legends):  # drawn anew, with what was added
        legend.remove()
    picture.legend(loc="outside lower left", ncols=3, frameon=False, handletextpad=0.5, fontsize=9)
    return picture
