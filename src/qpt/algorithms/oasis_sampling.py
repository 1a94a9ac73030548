"""Sequences of states for OASIS' generator, and single transitions for its labelers, drawn on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qpt.data.sampling import TransitionBatch, TransitionSampler, Weighting, WindowSampler
from qpt.data.trajectories import Trajectories


class SequenceBatch(NamedTuple):
    """B sequences of H states, and single transitions beside them; past an episode's end its last state repeats."""

    states: Tensor  # [B, H, S]
    actions: Tensor  # [B, H, A] taken in each state
    mask: Tensor  # [B, H] bool: states of the episode
    totals: Tensor  # [B, 2] return and cost of the whole episode
    transitions: TransitionBatch


class SequenceSampler:
    """Draws an episode by weight and a start in it such that `kept` transitions follow where the episode has them."""

    def __init__(
        self,
        data: Trajectories,
        batch_size: int,
        window: int,
        kept: int,
        weighting: Weighting,
        cost_ceiling: float,
        device: torch.device,
        seed: int,
    ) -> None:
        count, zero = len(data), np.zeros(len(data))
        weights = WindowSampler._weights(data, np.arange(count), zero, weighting, cost_ceiling)
        # Final observations stand behind the steps of their episode, so that one of length L has L + 1 states.
        states = np.insert(data.observations, data.offsets[1:], data.final_observations, axis=0)
        actions = np.insert(data.actions, data.offsets[1:], 0, axis=0)
        self.batch_size, self.action_dim, self.kept = batch_size, data.action_dim, kept
        self._table = torch.from_numpy(np.concatenate([states, actions], 1)).to(device)
        self._cumulative = torch.from_numpy(np.cumsum(weights) / weights.sum()).to(device)
        self._start = torch.from_numpy(data.offsets[:-1] + np.arange(count)).to(device)
        self._length = torch.from_numpy(data.lengths).to(device)
        self._totals = torch.from_numpy(np.stack([data.returns, data.episode_costs], 1).astype(np.float32)).to(device)
        self._arange = torch.arange(window, device=device)
        self.transitions = TransitionSampler(data, batch_size, device=device, seed=seed)

    @property
    def generator(self) -> torch.Generator:
        return self.transitions.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self.transitions.generator = generator

    @property
    def states(self) -> Tensor:
        """Every logged state, final ones included: [N, S]."""
        return self._table[:, : -self.action_dim]

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Episodes and starts in them: [count] each."""
        u = torch.rand(2, count, generator=self.generator, device=self._table.device, dtype=torch.float64)
        episode = torch.searchsorted(self._cumulative, u[0], right=True).clamp_(max=len(self._cumulative) - 1)
        return episode, (u[1] * ((self._length[episode] - self.kept).clamp(min=0) + 1)).long()

    def starts(self, count: int) -> Tensor:
        """States to generate from: [count, S]."""
        episode, start = self.draw(count)
        return self._table[self._start[episode] + start, : -self.action_dim]

    def sample(self) -> SequenceBatch:
        episode, start = self.draw(self.batch_size)
        steps, last = start[:, None] + self._arange, self._length[episode][:, None]
        rows = self._table[self._start[episode][:, None] + torch.minimum(steps, last)]  # [B, H, S + A]
        a = self.action_dim
        return SequenceBatch(
            rows[..., :-a], rows[..., -a:], steps <= last, self._totals[episode], self.transitions.sample()
        )
