"""BC and BC-Safe: imitate the episodes that a filter lets through, by default those within the cost limit.

The baseline of DSRL (Liu et al., 2024): a deterministic policy tanh(MLP(s)), squared error to logged actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qpt.algorithms.base import Context, Decision, LimitMode, Spec, adam, descend
from qpt.algorithms.fields import check_fields
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import Standardize, perceptron


@dataclass(frozen=True)
class BCConfig:
    """Every choice of BC; the defaults are the published ones, with normalised observations."""

    steps: int = 100_000
    """Gradient steps."""
    batch_size: int = 512
    """Transitions a step."""
    cost_limit: float = 10.0
    """κ: the limit on an episode's cost that the filter is made for."""
    mode: Literal["safe", "all", "risky", "frontier", "boundary"] = "safe"
    """Episodes imitated: cost <= κ, every one, cost >= 2κ, near the reward frontier, or 0.5κ < cost <= 1.5κ."""
    frontier_width: float = 0.1
    """Mode frontier: how far below the best return within its cost an episode may lie, in ranges of returns."""
    width: int = 256
    """Width of the two hidden layers."""
    normalize: bool = True
    """Normalise observations by the data's mean and standard deviation."""
    lr: float = 1e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        check_fields(self, frontier_width="at least 0")

    @classmethod
    def preset(cls, name: str) -> BCConfig:
        """ "default", or "paper": as published with DSRL, on observations as they are."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(cls(), normalize=False)
        raise QptError(f"BC has no preset {name!r}; choose default or paper")


class BC(nn.Module):
    """One network, one loss."""

    limit_mode: LimitMode = "trained"
    deciding: frozenset[str] = frozenset()
    context = 1
    compilable = ("loss",)

    def __init__(self, config: BCConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        if config.mode in ("all", "frontier"):  # these filters know no limit
            self.limit_mode = "ignored"
        self.standardize = Standardize(spec.observation_mean, spec.observation_std, config.normalize)
        self.policy = perceptron([spec.observation_dim, config.width, config.width, spec.action_dim])
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimiser, after the module has moved to its device."""
        self.parameter_list = list(self.policy.parameters())
        self.optimizers: dict[str, torch.optim.Optimizer] = {"policy": adam(self.parameter_list, self.config.lr)}

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> TransitionSampler:
        c = self.config
        chosen = _filter(data, c)
        if not chosen.any():
            costs = data.episode_costs
            raise QptError(
                f"no episode is left by mode {c.mode} at a cost limit of {c.cost_limit:g}: the cheapest costs "
                f"{costs.min():g} and the dearest {costs.max():g}; {_advice(c, costs)}, or choose mode all"
            )
        return TransitionSampler(data.select(chosen), c.batch_size, device=device, seed=seed)

    def act_on(self, observations: Tensor) -> Tensor:
        return torch.tanh(self.policy(self.standardize(observations)))

    def loss(self, batch: TransitionBatch) -> Tensor:
        return nn.functional.mse_loss(self.act_on(batch.observations), batch.actions)

    def update(self, batch: TransitionBatch) -> dict[str, Tensor]:
        loss = self.loss(batch)
        descend(self.optimizers["policy"], loss, [self.parameter_list])
        return {"loss": loss.detach()}

    def act(self, context: Context) -> Decision:
        return Decision(self.act_on(context.now(context.observations)), {})


def _filter(data: Trajectories, c: BCConfig) -> npt.NDArray[np.bool_]:
    """Which episodes a mode imitates: [E]."""
    costs, limit = data.episode_costs, c.cost_limit
    if c.mode == "all":
        return np.ones(len(data), bool)
    if c.mode == "safe":
        return costs <= limit
    if c.mode == "risky":
        return costs >= 2 * limit
    if c.mode == "boundary":
        return (costs > 0.5 * limit) & (costs <= 1.5 * limit)
    near: npt.NDArray[np.bool_] = data.returns >= data.reward_frontier(costs) - c.frontier_width * np.ptp(data.returns)
    return near


def _advice(c: BCConfig, costs: npt.NDArray[np.float64]) -> str:
    """A limit that leaves something, with every digit: a rounded one might leave nothing again."""
    if c.mode == "boundary":
        costs = costs[costs > 0]  # around a limit of 0 there is nothing
        if not len(costs):
            return "all episodes are free of cost, so that no limit has a boundary; choose mode safe"
    limit = {
        "safe": costs.min(),
        "risky": costs.max() / 2,
        "boundary": costs[np.abs(costs - c.cost_limit).argmin()],
    }[c.mode]
    return f"set the cost limit to {limit:.17g}"
