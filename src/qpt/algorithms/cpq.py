"""CPQ, constraints-penalised Q-learning (Xu et al., 2022): unlikely actions count as costly, costly ones as worthless.

 - Cost critic: Bellman error, and a push that raises Q^c at actions unlike the data, as a VAE sees them (`cost_loss`).
 - Reward critic: bootstraps only through actions with Q^c <= d, the cost limit as a discounted sum (`reward_loss`).
 - Actor: maximises Q^r where Q^c <= d (`actor_loss`).

`variant="reference"` is what the published numbers were made with. "correct" differs in eight points:
 - the push has a gradient (the reference computes it with the target critics and without one, so that it does nothing);
 - unlikely actions are drawn as the policy acts, after the tanh (the reference feeds unsquashed ones);
 - the push's weight is steered by the mean cost of unlikely actions (the reference counts the likely three quarters as
   0 in that mean: it would push on to four times the cost that it is meant for);
 - the larger one of the twin cost critics counts (the reference takes the smaller one, which underestimates the cost);
 - where no action is feasible the actor descends the cost (in the reference it learns nothing there);
 - a terminal ends the cost sum (the reference goes on bootstrapping the cost after the task is over);
 - a timeout does not end the reward sum; what follows it is worth no more than a whole logged episode;
 - observations are normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qpt import parallel
from qpt.algorithms.base import (
    Context,
    Decision,
    LimitMode,
    Spec,
    adam,
    descend,
    discounted_limit,
    frozen_copy,
    soft_update,
    within_episode,
)
from qpt.algorithms.fields import check_fields
from qpt.algorithms.flat import side_by_side
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import VAE, SquashedGaussian, Standardize
from qpt.nets.mlp import StackedMLP


@dataclass(frozen=True)
class CPQConfig:
    """Every choice of CPQ; the defaults are the published ones."""

    steps: int = 100_000
    """Gradient steps."""
    batch_size: int = 512
    """Transitions a step."""
    cost_limit: float = 10.0
    """κ: the limit on an episode's cost that the policy is trained for."""
    variant: Literal["correct", "reference"] = "correct"
    """Without or with the defects of the published code."""
    discount: float = 0.99
    """Discount of rewards and costs."""
    reward_scale: float | None = 0.1
    """Factor of rewards; None: 10 / the mean return-to-go of the data."""
    width: int = 256
    """Width of the two hidden layers of actor and critics."""
    log_std: tuple[float, float] = (-20.0, 2.0)
    """Bounds of the actor's log standard deviation."""
    vae_width: int = 400
    """Width of the VAE's hidden layers."""
    vae_beta: float = 0.5
    """Weight of the VAE's divergence."""
    samples: int = 10
    """Policy actions at each state that are searched for unlikely ones."""
    unlikely: float = 0.25
    """Share of them, by the VAE's divergence, that counts as unlike the data."""
    push: float = 1.5
    """Mean cost that unlikely actions are pushed to, in units of the discounted limit."""
    actor_lr: float = 1e-4
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    vae_lr: float = 1e-3
    """Learning rate of the VAE."""
    alpha_lr: float = 1e-4
    """Rate of the push's weight α."""
    ema: float = 0.995
    """What the targets keep at every step."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            samples="at least 1",
            vae_width="at least 1",
            vae_beta="at least 0",
            unlikely="from 0 to 1",
            log_std="a low and a higher number",
        )

    @classmethod
    def preset(cls, name: str) -> CPQConfig:
        """ "default", or "paper": as published with DSRL, its defects included."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(cls(), variant="reference")
        raise QptError(f"CPQ has no preset {name!r}; choose default or paper")


class CPQ(nn.Module):
    """VAE, actor, twin critics for reward and for cost, and the push's weight."""

    limit_mode: LimitMode = "trained"
    deciding: frozenset[str] = frozenset()
    context = 1
    compilable = ("vae_loss", "reward_loss", "cost_loss", "actor_loss")
    log_alpha: Tensor

    def __init__(self, config: CPQConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.correct = config.variant == "correct"
        s, a = spec.observation_dim, spec.action_dim
        self.standardize = Standardize(spec.observation_mean, spec.observation_std, self.correct)
        self.vae = VAE(s, a, config.vae_width)
        self.actor = SquashedGaussian(s, a, config.width, config.log_std)
        sizes = [s + a, config.width, config.width, 1]
        self.reward_critics, self.cost_critics = StackedMLP(2, sizes, "relu"), StackedMLP(2, sizes, "relu")
        self.target_reward_critics = frozen_copy(self.reward_critics)
        self.target_cost_critics = frozen_copy(self.cost_critics)
        self.register_buffer("log_alpha", torch.zeros(()))
        self.threshold = float(discounted_limit(config.cost_limit, spec.horizon, config.discount))
        self.reward_scale = config.reward_scale or 10 / max(spec.mean_return_to_go, 1e-6)
        self.largest_return = self.reward_scale * max(abs(spec.return_min), abs(spec.return_max))
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.learned = {
            "vae": list(self.vae.parameters()),
            "critics": [*self.reward_critics.parameters(), *self.cost_critics.parameters()],
            "actor": list(self.actor.parameters()),
        }
        self.targets = side_by_side([*self.target_reward_critics.parameters(), *self.target_cost_critics.parameters()])
        rates = {"vae": c.vae_lr, "critics": c.critic_lr, "actor": c.actor_lr}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            name: adam(parameters, rates[name]) for name, parameters in self.learned.items()
        }

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> TransitionSampler:
        return TransitionSampler(data, self.config.batch_size, device=device, seed=seed)

    # -- networks ------------------------------------------------------------------------------------------------------

    def reward_value(self, critics: StackedMLP, seen: Tensor, actions: Tensor) -> Tensor:
        twins: Tensor = critics(torch.cat([seen, actions], -1))[..., 0]
        return twins.amin(0)

    def cost_value(self, critics: StackedMLP, seen: Tensor, actions: Tensor) -> Tensor:
        twins: Tensor = critics(torch.cat([seen, actions], -1))[..., 0]
        return twins.amax(0) if self.correct else twins.amin(0)

    # -- losses --------------------------------------------------------------------------------------------------------

    def vae_loss(self, seen: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
        return self.vae.loss(seen, actions, noise, self.config.vae_beta)

    def reward_loss(self, batch: TransitionBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error to r + γ 1[Q^c(s', a') <= d] Q^r(s', a'), and the mean Q^r; noise [B, A]."""
        with torch.no_grad():
            following = self.standardize(batch.next_observations)
            actions = self.actor.sample(following, noise)
            feasible = (self.cost_value(self.target_cost_critics, following, actions) <= self.threshold).to(noise)
            value = feasible * self.reward_value(self.target_reward_critics, following, actions)
            if self.correct:
                value = within_episode(value, batch.timeouts, self.largest_return)
            ended = batch.terminals if self.correct else torch.maximum(batch.terminals, batch.timeouts)
            target = self.reward_scale * batch.rewards + self.config.discount * (1 - ended) * value
        q = self.reward_critics(torch.cat([self.standardize(batch.observations), batch.actions], -1))[..., 0]
        return (q - target).square().mean(-1).sum(), q.detach().mean()

    def cost_loss(self, batch: TransitionBatch, noise: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squared error to c + γ Q^c(s', a') minus α times the push; also what is pushed, and the mean Q^c.

        noise [B, A] for a', draws [B, N, A] for the actions that are searched for unlikely ones.
        """
        seen, following = self.standardize(batch.observations), self.standardize(batch.next_observations)
        with torch.no_grad():
            value = self.cost_value(self.target_cost_critics, following, self.actor.sample(following, noise))
            if self.correct:
                value = within_episode(value, batch.timeouts, self.spec.cost_max)
            going = 1 - batch.terminals if self.correct else torch.ones_like(batch.terminals)
            target = batch.costs + self.config.discount * going * value
        q = self.cost_critics(torch.cat([seen, batch.actions], -1))[..., 0]  # [2, B]
        pushed = self.unlikely_cost(seen, draws)
        push = self.log_alpha.exp() * (pushed - self.push_target)
        return (q - target).square().mean(-1).sum() - push, pushed.detach(), q.detach().mean()

    @property
    def push_target(self) -> float:
        """What `unlikely_cost` is when unlikely actions cost 1.5 d: the likely ones count as 0 in its mean."""
        return self.config.push * self.threshold * (self.config.unlikely if self.correct else 1.0)

    def unlikely_cost(self, seen: Tensor, draws: Tensor) -> Tensor:
        """Mean over all drawn actions of 1[unlikely] Q^c(s, a)."""
        repeated = seen[:, None].expand(-1, draws.shape[1], -1)
        with torch.no_grad():
            mean, log_std = self.actor(repeated)
            raw = mean + log_std.exp() * draws
            actions = torch.tanh(raw) if self.correct else raw
            divergence = self.vae.divergence(repeated, actions)  # [B, N]
            place = math.ceil((divergence.numel() - 1) * (1 - self.config.unlikely))  # of the quantile
            unlikely = (divergence >= divergence.flatten().sort().values[place]).to(draws)
        if self.correct:
            return (unlikely * self.cost_value(self.cost_critics, repeated, actions)).mean()
        with torch.no_grad():
            return (unlikely * self.cost_value(self.target_cost_critics, repeated, actions)).mean()

    def actor_loss(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """-E[1[Q^c <= d] Q^r], plus E[1[Q^c > d] Q^c] in the correct variant; also the share that is feasible."""
        actions = self.actor.sample(seen, noise)
        cost = self.cost_value(self.cost_critics, seen, actions)
        feasible = (cost.detach() <= self.threshold).to(noise)
        loss = -feasible * self.reward_value(self.reward_critics, seen, actions)
        if self.correct:
            loss = loss + (1 - feasible) * cost
        return loss.mean(), feasible.mean()

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """VAE, critics, the push's weight, then the actor against the updated critics, then the targets."""
        c = self.config
        seen, actions = self.standardize(batch.observations), batch.actions
        vae_loss = self.vae_loss(
            seen, actions, torch.randn(len(seen), self.vae.latent, device=seen.device, dtype=seen.dtype)
        )
        descend(self.optimizers["vae"], vae_loss, [self.learned["vae"]])

        draws = torch.randn(len(seen), c.samples, actions.shape[1], device=seen.device, dtype=seen.dtype)
        reward_loss, reward_q = self.reward_loss(batch, torch.randn_like(actions))
        cost_loss, pushed, cost_q = self.cost_loss(batch, torch.randn_like(actions), draws)
        descend(self.optimizers["critics"], reward_loss + cost_loss, [self.learned["critics"]])
        with torch.no_grad():
            rise = c.alpha_lr * self.log_alpha.exp() * (self.push_target - parallel.mean(pushed))
            self.log_alpha.copy_((self.log_alpha + rise).clamp(-5, 5))

        loss, feasible = self.actor_loss(seen, torch.randn_like(actions))
        descend(self.optimizers["actor"], loss, [self.learned["actor"]])
        soft_update(self.targets, self.learned["critics"], 1 - c.ema)
        return {
            "loss": loss.detach(),
            "vae/loss": vae_loss.detach(),
            "critic/reward_loss": reward_loss.detach(),
            "critic/cost_loss": cost_loss.detach(),
            "critic/reward_q": reward_q,
            "critic/cost_q": cost_q,
            "critic/unlikely_cost": pushed,
            "critic/alpha": self.log_alpha.exp(),
            "actor/feasible": feasible,
        }

    def act(self, context: Context) -> Decision:
        return Decision(self.actor.mode(self.standardize(context.now(context.observations))), {})
