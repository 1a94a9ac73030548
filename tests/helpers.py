"""Small made-up data that several test files share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qpt.data.trajectories import Trajectories


def tiny_data(
    episodes: int = 24, length: int = 20, seed: int = 0, *, observation_dim: int = 3, action_dim: int = 2
) -> Trajectories:
    """Episodes from timid to bold: boldness earns reward and, at times, cost.

    The first episodes are free of cost and the last ones cost most. Even episodes run to `length` and end by a timeout;
    odd ones are shorter and end by a terminal. Observations drift with the actions, so that the next one can be told.
    """
    rng = np.random.default_rng(seed)
    rows: dict[str, list[np.ndarray]] = {
        k: [] for k in ("observations", "actions", "rewards", "costs", "terminals", "timeouts", "final_observations")
    }
    push = rng.normal(size=(action_dim, observation_dim)) * 0.3
    for episode in range(episodes):
        boldness = episode / max(episodes - 1, 1)
        steps = length if episode % 2 == 0 else int(rng.integers(max(length // 2, 1), max(length, 2)))
        actions = np.clip(boldness * 1.6 - 0.8 + 0.2 * rng.normal(size=(steps, action_dim)), -1, 1)
        drift = np.cumsum(actions @ push + 0.05 * rng.normal(size=(steps, observation_dim)), axis=0)
        seen = rng.normal(size=observation_dim) + np.concatenate([np.zeros((1, observation_dim)), drift])
        rows["observations"].append(seen[:-1])
        rows["final_observations"].append(seen[-1:])
        rows["actions"].append(actions)
        rows["rewards"].append(1 + actions.mean(1) + 0.1 * seen[:-1, 0])
        rows["costs"].append((rng.random(steps) < boldness).astype(float) * (boldness > 0.2))
        last = np.arange(steps) == steps - 1
        rows["terminals"].append(last & (episode % 2 == 1))
        rows["timeouts"].append(last & (episode % 2 == 0))
    return Trajectories.from_arrays(**{k: np.concatenate(v) for k, v in rows.items()})


def bare_episodes(costs: npt.ArrayLike, returns: npt.ArrayLike) -> Trajectories:
    """Episodes of two steps with the given costs and returns, and nothing to see."""
    costs, returns = np.asarray(costs, np.float32), np.asarray(returns, np.float32)
    n = len(costs)
    first = np.stack([np.zeros(n), np.ones(n)], 1).ravel()
    return Trajectories.from_arrays(
        np.zeros((2 * n, 1)), np.zeros((2 * n, 1)), np.repeat(returns, 2) * first, np.repeat(costs, 2) * first, first
    )
