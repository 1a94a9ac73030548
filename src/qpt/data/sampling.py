"""Samplers: the data set lives on the device and a batch is one gather, drawn by a Generator of the sampler's own."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qpt.data.augment import Relabelled
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError

Weighting = Literal["low-cost", "length", "uniform"]


class WindowBatch(NamedTuple):
    """B windows of K consecutive steps; beyond an episode's end (mask False) all but `steps` is zero."""

    observations: Tensor  # [B, K, S]
    actions: Tensor  # [B, K, A]
    rewards: Tensor  # [B, K]
    costs: Tensor  # [B, K]
    return_to_go: Tensor  # [B, K]
    cost_to_go: Tensor  # [B, K]
    terminals: Tensor  # [B, K] 0/1: the task ended with this step
    timeouts: Tensor  # [B, K] 0/1: the episode was cut off after this step
    steps: Tensor  # [B, K] index of the step in its episode; goes on beyond the end
    mask: Tensor  # [B, K] bool


class TransitionBatch(NamedTuple):
    """B single steps."""

    observations: Tensor  # [B, S]
    actions: Tensor  # [B, A]
    rewards: Tensor  # [B]
    costs: Tensor  # [B]
    next_observations: Tensor  # [B, S]
    terminals: Tensor  # [B] 0/1
    timeouts: Tensor  # [B] 0/1
    steps: Tensor  # [B] index of the step in its episode (0 marks an initial state)
    cost_to_go: Tensor  # [B]


class Sampler(Protocol):
    """What the training loop asks of a sampler: batches without end, and a state that resumes them bit for bit."""

    generator: torch.Generator

    def sample(self) -> Any: ...


class WindowSampler:
    """Windows of K steps, right-padded: an episode is drawn by weight, then a start uniformly in it.

    Relabelled episodes (see `qpt.data.augment`) stand beside the logged ones as (base episode, shift of the
    return-to-go, shift of the cost-to-go). Weighting "low-cost" draws an episode in proportion to
    max(ceiling - cost, 0) of its (relabelled) cost, as CDT does, so episodes above the ceiling are never seen; "length"
    and "uniform" see every episode.
    """

    compilable = ("windows",)

    def __init__(
        self,
        data: Trajectories,
        batch_size: int,
        context: int,
        *,
        relabelled: Relabelled | None = None,
        weighting: Weighting = "uniform",
        cost_ceiling: float = 70.0,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.batch_size, self.context, self.observation_dim, self.action_dim = (
            batch_size,
            context,
            data.observation_dim,
            data.action_dim,
        )
        base = np.arange(len(data))
        shifts = np.zeros((len(data), 2), np.float32)
        if relabelled is not None and len(relabelled.base):
            base = np.concatenate([base, relabelled.base])
            shifts = np.concatenate(
                [shifts, np.stack([relabelled.return_shift, relabelled.cost_shift], 1).astype(np.float32)]
            )
        weights = self._weights(data, base, shifts[:, 1], weighting, cost_ceiling)
        # One row a step, all fields side by side: a batch is a single gather. The last row of zeros is the padding.
        table = np.concatenate(
            [
                data.observations,
                data.actions,
                np.stack([data.rewards, data.costs, data.returns_to_go, data.costs_to_go], 1),
                np.stack([data.terminals, data.timeouts], 1).astype(np.float32),
            ],
            axis=1,
        )
        self._table = torch.cat([torch.from_numpy(table), torch.zeros(1, table.shape[1])]).to(
            device
        )  # [N + 1, S + A + 6]
        self._cumulative = torch.from_numpy(np.cumsum(weights) / weights.sum()).to(device)  # [M] float64
        self._start = torch.from_numpy(data.offsets[:-1][base]).to(device)  # [M]
        self._length = torch.from_numpy(data.lengths[base]).to(device)  # [M]
        self._shifts = torch.from_numpy(shifts).to(device)  # [M, 2]
        self._arange = torch.arange(context, device=device)
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)

    @staticmethod
    def _weights(data: Trajectories, base: Any, cost_shift: Any, weighting: Weighting, ceiling: float) -> Any:
        if weighting == "low-cost":
            weights = np.maximum(ceiling - (data.episode_costs[base] + cost_shift), 0.0)
            if weights.sum() == 0:
                raise QptError(
                    f"every episode costs {ceiling:g} or more, so low-cost weighting has none; use --weighting uniform"
                )
            return weights
        if weighting == "length":
            return data.lengths[base].astype(np.float64)
        if weighting == "uniform":
            return np.ones(len(base))
        raise QptError(f"there is no weighting {weighting!r}; choose low-cost, length or uniform")

    def state_dict(self) -> dict[str, Tensor]:
        """All that decides the batches to come; `load_state_dict` goes on from there bit for bit."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"].cpu())

    def sample(self) -> WindowBatch:
        kind: dict[str, Any] = {"device": self._table.device, "dtype": torch.float64}
        return self.windows(torch.rand(2, self.batch_size, generator=self.generator, **kind))

    def windows(self, draw: Tensor) -> WindowBatch:
        """The windows that two numbers each from [0, 1) stand for: the episode, and the start in it."""
        episode = torch.searchsorted(self._cumulative, draw[0], right=True).clamp_(max=len(self._cumulative) - 1)  # [B]
        length = self._length[episode]
        start = (draw[1] * length).long()
        steps = start[:, None] + self._arange  # [B, K]
        mask = steps < length[:, None]
        rows = torch.where(mask, self._start[episode][:, None] + steps, len(self._table) - 1)
        # index_select: on a CPU three times faster than table[rows]
        batch = self._table.index_select(0, rows.flatten()).view(*rows.shape, -1)  # [B, K, S + A + 6]
        s, a = self.observation_dim, self.action_dim
        observations, actions, scalars = batch[..., :s], batch[..., s : s + a], batch[..., s + a :]
        to_go = (scalars[..., 2:4] + self._shifts[episode][:, None]) * mask[..., None]
        return WindowBatch(
            observations,
            actions,
            scalars[..., 0],
            scalars[..., 1],
            to_go[..., 0],
            to_go[..., 1],
            scalars[..., 4],
            scalars[..., 5],
            steps,
            mask,
        )


class TransitionSampler:
    """Single steps, drawn uniformly from all steps."""

    def __init__(
        self, data: Trajectories, batch_size: int, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.batch_size, self.observation_dim, self.action_dim = batch_size, data.observation_dim, data.action_dim
        following = np.arange(1, data.steps + 1)
        following[data.offsets[1:] - 1] = data.steps + np.arange(len(data))  # final observations stand behind all steps
        rows = [
            data.actions,
            np.stack([data.rewards, data.costs, data.terminals, data.timeouts, data.costs_to_go], 1).astype(np.float32),
        ]
        self._observations = torch.from_numpy(np.concatenate([data.observations, data.final_observations])).to(device)
        self._table = torch.from_numpy(np.concatenate(rows, axis=1)).to(device)  # [N, A + 5]
        self._index = torch.from_numpy(np.stack([following, data.step_in_episode], 1)).to(device)  # [N, 2]
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Tensor]:
        """All that decides the batches to come; `load_state_dict` goes on from there bit for bit."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"].cpu())

    def sample(self) -> TransitionBatch:
        rows = torch.randint(len(self._table), (self.batch_size,), generator=self.generator, device=self._table.device)
        table, index, a = self._table.index_select(0, rows), self._index[rows], self.action_dim
        return TransitionBatch(
            self._observations.index_select(0, rows),
            table[:, :a],
            table[:, a],
            table[:, a + 1],
            self._observations.index_select(0, index[:, 0]),
            table[:, a + 2],
            table[:, a + 3],
            index[:, 1],
            table[:, a + 4],
        )
