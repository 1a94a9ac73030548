"""The logged episodes of a task in the (cost, return) plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qpt.data import load_dataset

Floats = npt.NDArray[np.float64]
PLANE_POINTS = 1500  # more logged episodes than this are thinned in the picture; the frontier is of all


@dataclass(frozen=True, eq=False)
class Plane:
    """Costs and returns of the logged episodes of a task, and the best return within each cost."""

    source: str
    episodes: int
    costs: Floats
    returns: Floats
    frontier: list[tuple[float, float]]
    surrogate: bool


def read_plane(source: str) -> Plane:
    data = load_dataset(source)
    costs, returns = data.episode_costs, data.returns
    best = data.pareto_episodes()
    shown = np.arange(len(data))
    if len(data) > PLANE_POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(data), PLANE_POINTS, replace=False))
    frontier = [(float(costs[i]), float(returns[i])) for i in best]
    return Plane(source, len(data), costs[shown], returns[shown], frontier, data.is_surrogate)
