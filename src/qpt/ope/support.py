"""Does the policy stay where the log is? Its actions against those logged in the most similar states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from qpt.data.trajectories import Trajectories

Floats = npt.NDArray[np.float64]
NEIGHBOURS = 10
PARTS = 10  # of an episode, in the profile
USUAL = 0.95  # of the logged actions count as within the spread


@dataclass(frozen=True)
class Support:
    """How far a policy's actions lie from the logged ones."""

    outside: float  # share of steps beyond the spread of logged actions in similar states; 0.05 for the log itself
    profile: tuple[float, ...]  # that share in each tenth of the longest episode's time
    distance: float  # mean distance from the action logged at the same step, in standard deviations of the actions


class Neighbours:
    """For a sample of logged steps: the actions logged in the nearest states of other episodes."""

    def __init__(self, data: Trajectories, seed: int = 0, queries: int = 2000, pool: int = 20_000) -> None:
        rng = np.random.default_rng([seed, 14])
        self.data, self.scale = data, np.maximum(data.actions.std(0), 1e-3)
        states = np.column_stack([data.observations, data.step_in_episode / max(int(data.lengths.max()), 1)])
        std = states.std(0)
        states = (states - states.mean(0)) / np.where(std > 1e-6, std, 1.0)
        self.rows = np.sort(rng.permutation(data.steps)[:queries])
        others = np.sort(rng.permutation(data.steps)[:pool])
        near = torch.from_numpy(states[others])
        count = min(NEIGHBOURS, len(others))
        found = []
        for rows in np.array_split(self.rows, max(len(self.rows) // 500, 1)):
            distance = torch.cdist(torch.from_numpy(states[rows]), near)
            same = data.episode_of_step[rows][:, None] == data.episode_of_step[others][None]
            if len(data) > 1:
                distance[torch.from_numpy(same)] = torch.inf
            found.append(others[distance.topk(count, largest=False).indices.numpy()])
        self.near = np.concatenate(found)  # [Q, k] rows of the data
        self.usual = float(np.quantile(self._gap(data.actions[self.rows]), USUAL))

    def _gap(self, actions: npt.NDArray[np.float32]) -> Floats:
        """Distance from the nearest of the actions logged in similar states, [Q]."""
        apart = (actions[:, None] - self.data.actions[self.near]) / self.scale
        gap: Floats = np.sqrt((apart.astype(np.float64) ** 2).sum(-1)).min(1)
        return gap

    def support(self, actions: npt.NDArray[np.float32]) -> Support:
        """Of a policy's actions at all logged steps, [N, A]."""
        outside = self._gap(actions[self.rows]) > self.usual
        length, share = max(int(self.data.lengths.max()), 1), float(outside.mean())
        parts = min(PARTS, length)
        part = self.data.step_in_episode[self.rows] * parts // length
        profile = [float(outside[part == p].mean()) if (part == p).any() else share for p in range(parts)]
        apart = (actions - self.data.actions) / self.scale
        return Support(share, tuple(profile), float(np.sqrt((apart**2).sum(1)).mean()))
