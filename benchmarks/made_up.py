"""A made-up log for timings: speed does not depend on what the data say."""

from __future__ import annotations

import numpy as np

from qpt.data.trajectories import Trajectories


def made_up(observation_dim: int = 76, action_dim: int = 2, episodes: int = 100, length: int = 200) -> Trajectories:
    rng = np.random.default_rng(0)
    n = episodes * length
    boldness = np.repeat(np.linspace(0, 0.3, episodes), length)
    return Trajectories.from_arrays(
        rng.normal(size=(n, observation_dim)),
        np.clip(rng.normal(size=(n, action_dim)) * 0.5, -1, 1),
        rng.random(n) + boldness,
        rng.random(n) < boldness,
        np.zeros(n, bool),
        np.arange(1, n + 1) % length == 0,
        final_observations=rng.normal(size=(episodes, observation_dim)),
    )
