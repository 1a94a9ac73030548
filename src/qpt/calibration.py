"""Are QPT's critics right? What they predict beside what episodes brought: the policy's, or held-out logged ones."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qpt.algorithms.qpt import QPT
from qpt.algorithms.targets import n_step_targets
from qpt.data import Trajectories
from qpt.data.sampling import WindowBatch
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.plotting import new_figure
from qpt.writing import write_csv

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """One entry an episode: its limit, and predicted and realised (discounted as the critics do) cost and return."""

    cost_limit: Floats
    predicted_cost: Floats
    realised_cost: Floats
    predicted_return: Floats
    realised_return: Floats


@torch.no_grad()
def calibrate(method: QPT, episodes: Episodes) -> Calibration:
    """Ask the target critics about the first step of each recorded episode."""
    check(method)
    data = episodes.trajectories
    if data is None:
        raise QptError("the episodes hold no trajectories; evaluate with record=True")
    first, c = data.offsets[:-1], method.config
    device = method.step.device
    limits = torch.tensor(episodes.cost_limit, dtype=torch.float32, device=device)
    observations = torch.tensor(data.observations[first], device=device)
    actions = torch.tensor(data.actions[first], device=device)
    # As the policy asks them: with the limit that is aimed at.
    seen, unaware = method.features(observations, c.limit_factor * limits, torch.zeros_like(limits))
    reward_q = method.reduce(method.target_reward_critics(torch.cat([seen, actions], -1))[..., 0], c.reward_reduction)
    cost_q = method.reduce(method.target_cost_critics(torch.cat([unaware, actions], -1))[..., 0], c.cost_reduction)
    steps = data.step_in_episode

    def total(values: npt.NDArray[np.float32], discount: float) -> Floats:
        return np.add.reduceat(values.astype(np.float64) * discount**steps, first)

    return Calibration(
        cost_limit=episodes.cost_limit,
        predicted_cost=(cost_q / method.cost_scale).double().cpu().numpy(),
        realised_cost=total(data.costs, c.cost_discount),
        predicted_return=(reward_q / method.reward_scale).double().cpu().numpy(),
        realised_return=total(data.rewards, c.discount),
    )


@dataclass(frozen=True)
class HeldOut:
    """One entry a logged step: the cost that the test would go by, and by how much what came exceeds it."""

    predicted: Floats
    excess: Floats

    def offset(self, level: float, up_to: float = math.inf) -> float:
        """What to add to Q^c so that `level` of the steps whose predicted cost is at most `up_to` do not exceed it.

        The split-conformal quantile; the steps of an episode depend on each other, so count on less than their number.
        """
        if not 0 < level < 1:
            raise QptError(f"the level is a share of the steps, between 0 and 1, not {level:g}")
        excess = np.sort(self.excess[self.predicted <= up_to])
        rank = math.ceil((len(excess) + 1) * level)
        if rank > len(excess):
            within = "" if math.isinf(up_to) else f" of a predicted cost up to {up_to:g}"
            raise QptError(
                f"{len(excess)} held-out steps{within} are too few for a level of {level:g}; hold out more episodes"
            )
        return float(excess[rank - 1])


@torch.no_grad()
def held_out(method: QPT, data: Trajectories) -> HeldOut:
    """Compare Q^c of logged actions with the next n logged costs and the least cost from there on.

    On episodes that the critics have not learned from this is what they err by where the policy will go.
    """
    check(method)
    c, device = method.config, method.step.device
    if c.bootstrap != "expectile":
        raise QptError('held-out episodes say nothing about critics of the policy; bootstrap must be "expectile"')
    if (data.observation_dim, data.action_dim) != (method.spec.observation_dim, method.spec.action_dim):
        raise QptError("the held-out episodes have other observations or actions than those the policy learned from")
    if data.lengths.max() > method.spec.horizon:
        raise QptError(
            f"a held-out episode has {data.lengths.max()} steps, more than the horizon of {method.spec.horizon} that "
            "the policy was trained for; hold out episodes of its own task, or train with a longer --horizon"
        )
    predicted: list[Floats] = []
    excess: list[Floats] = []
    for start, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        part = slice(int(start), int(end))
        steps = torch.arange(end - start, device=device)
        observations, actions = (torch.tensor(x[part], device=device) for x in (data.observations, data.actions))
        _, unaware = method.features(observations, torch.zeros_like(steps), steps)
        cost_q = method.reduce(method.target_cost_critics(torch.cat([unaware, actions], -1))[..., 0], c.cost_reduction)
        if c.careful_costs:
            value = careful_value(method, observations, actions, torch.tensor(data.returns_to_go[part]), unaware)
        else:
            value = method.values.each(torch.stack([unaware, unaware]))[1, :, 0]
        costs = torch.tensor(data.costs[part], device=device) * method.cost_scale
        in_full = c.time_critics and end - start >= method.spec.horizon  # an earlier timeout cut the log off
        ended = torch.tensor(data.terminals[part] | (data.timeouts[part] & in_full), device=device)
        came, valid = n_step_targets(
            costs[None],
            (value.clamp(min=0) if c.clamp_cost else value)[None],
            torch.ones_like(ended)[None],
            ended[None],
            c.cost_discount,
            method.n_step,
        )
        for kept, values in ((predicted, cost_q), (excess, came[0] - cost_q)):
            kept.append((values / method.cost_scale)[valid[0]].double().cpu().numpy())
    return HeldOut(np.concatenate(predicted), np.concatenate(excess))


def careful_value(method: QPT, observations: Tensor, actions: Tensor, return_to_go: Tensor, unaware: Tensor) -> Tensor:
    """What going on carefully costs from every step of an episode [T], as the critics' targets have it."""
    device, context = observations.device, method.config.context
    now = torch.arange(len(observations), device=device)
    first = (now - context + 1).clamp(min=0)
    steps = first[:, None] + torch.arange(context, device=device)  # [T, K]: windows that end at each step
    rows, nothing = steps.clamp(max=len(now) - 1), torch.zeros(steps.shape, device=device)
    windows = WindowBatch(
        observations=observations[rows],
        actions=actions[rows],
        rewards=nothing,
        costs=nothing,
        return_to_go=return_to_go.to(device)[rows],
        cost_to_go=nothing,
        terminals=nothing,
        timeouts=nothing,
        steps=steps,
        mask=steps <= now[:, None],
    )
    acted = method.policy(method.carefully(windows), target=True, last=now - first)[:, 0]
    inputs = torch.cat([unaware, acted], -1)
    return method.reduce(method.target_cost_critics(inputs)[..., 0], method.config.cost_reduction)


def check(method: QPT) -> None:
    """Refuse a policy without critics."""
    if not isinstance(method, QPT) or not method.uses_critics:
        raise QptError("only a QPT policy with critics can be calibrated; this one has none")


def rows(result: Calibration) -> list[dict[str, float]]:
    """Means for each limit."""
    table = []
    for limit in np.unique(result.cost_limit):
        mask = result.cost_limit == limit
        names = ("predicted_cost", "realised_cost", "predicted_return", "realised_return")
        table.append({"cost_limit": float(limit)} | {n: float(getattr(result, n)[mask].mean()) for n in names})
    return table


def save(result: Calibration, path: str | Path) -> Path:
    """A .csv table with one row an episode, as `qpt report` reads it from a run folder."""
    columns = asdict(result)
    return write_csv(path, columns, zip(*(values.tolist() for values in columns.values()), strict=True))


def figure(result: Calibration, title: str) -> Any:
    """Every episode: predicted against realised cost, coloured by the limit; a right critic lies on the line."""
    drawing, axes = new_figure(6, 5)
    points = axes.scatter(result.predicted_cost, result.realised_cost, c=result.cost_limit, s=14, cmap="viridis")
    top = float(max(result.realised_cost.max(), result.predicted_cost.max(), 1.0))
    axes.plot([0, top], [0, top], color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("cost predicted at the first step")
    axes.set_ylabel("cost realised")
    axes.set_title(title, loc="left", fontsize=11)
    drawing.colorbar(points, label="cost limit")
    return drawing
