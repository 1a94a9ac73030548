"""BCQ-Lag: batch-constrained Q-learning (Fujimoto et al., 2019) with a Lagrange multiplier on a cost critic.

Actions come from a VAE of the data, moved by a small perturbation that is trained to maximise Q^r - λ (Q^c - d), where
d is the cost limit as a discounted sum and λ is steered by a PID controller (Stooke et al., 2020).

`variant="reference"` is what the published numbers were made with. "correct" differs in four points:
 - a terminal ends the cost sum (the reference goes on bootstrapping the cost after the task is over);
 - a timeout does not end the reward sum (the reference cuts it there, as if nothing could follow); what follows it is
   worth no more than a whole logged episode;
 - cost critics are combined by their larger value (the reference takes the smaller one, which underestimates the cost);
 - observations are normalised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

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
from qpt.algorithms.multiplier import PIDMultiplier
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import VAE, Perturbation, Standardize
from qpt.nets.mlp import StackedMLP
from qpt.nets.noise import episode_normal


@dataclass(frozen=True)
class BCQLagConfig:
    """Every choice of BCQ-Lag; the defaults are the published ones."""

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
    """Width of the two hidden layers of critics and perturbation."""
    vae_width: int = 400
    """Width of the VAE's hidden layers."""
    vae_beta: float = 0.5
    """Weight of the VAE's divergence."""
    reach: float = 0.05
    """How far the perturbation may move an action."""
    samples: int = 10
    """Actions tried at each next state."""
    caution: float = 0.75
    """Weight of the cautious one of two critic groups in the targets; the rest goes to the other."""
    kp: float = 0.1
    """Proportional gain of the multiplier."""
    ki: float = 0.003
    """Integral gain."""
    kd: float = 0.001
    """Derivative gain."""
    lr: float = 1e-3
    """Learning rate of every network."""
    ema: float = 0.995
    """What the targets keep at every step."""
    candidates: int = 1
    """At deployment: actions drawn, of which the best by Q^r - λ Q^c is taken (1 as published; BCQ itself: 10)."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            samples="at least 1",
            vae_width="at least 1",
            vae_beta="at least 0",
            reach="at least 0",
            caution="from 0 to 1",
            kp="at least 0",
            ki="at least 0",
            kd="at least 0",
        )

    @classmethod
    def preset(cls, name: str) -> BCQLagConfig:
        """ "default", or "paper": as published with DSRL, its defects included."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(cls(), variant="reference")
        raise QptError(f"BCQ-Lag has no preset {name!r}; choose default or paper")


class BCQLag(nn.Module):
    """VAE, perturbation, two groups of twin critics for reward and for cost, and the multiplier."""

    limit_mode: LimitMode = "trained"
    deciding = frozenset({"candidates"})
    context = 1
    compilable = ("vae_loss", "critic_loss", "actor_values")

    def __init__(self, config: BCQLagConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.correct = config.variant == "correct"
        s, a = spec.observation_dim, spec.action_dim
        self.standardize = Standardize(spec.observation_mean, spec.observation_std, self.correct)
        self.vae = VAE(s, a, config.vae_width)
        self.actor = Perturbation(s, a, config.width, config.reach)
        sizes = [s + a, config.width, config.width, 1]
        self.reward_critics, self.cost_critics = StackedMLP(4, sizes, "relu"), StackedMLP(4, sizes, "relu")
        self.multiplier = PIDMultiplier(config.kp, config.ki, config.kd)
        self.target_actor = frozen_copy(self.actor)
        self.target_reward_critics = frozen_copy(self.reward_critics)
        self.target_cost_critics = frozen_copy(self.cost_critics)
        self.threshold = float(discounted_limit(config.cost_limit, spec.horizon, config.discount))
        self.reward_scale = config.reward_scale or 10 / max(spec.mean_return_to_go, 1e-6)
        self.largest_return = self.reward_scale * max(abs(spec.return_min), abs(spec.return_max))
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        self.learned = {
            "vae": list(self.vae.parameters()),
            "critics": [*self.reward_critics.parameters(), *self.cost_critics.parameters()],
            "actor": list(self.actor.parameters()),
        }
        self.targets = side_by_side(
            [
                *self.target_reward_critics.parameters(),
                *self.target_cost_critics.parameters(),
                *self.target_actor.parameters(),
            ]
        )
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            name: adam(parameters, self.config.lr) for name, parameters in self.learned.items()
        }

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> TransitionSampler:
        return TransitionSampler(data, self.config.batch_size, device=device, seed=seed)

    # -- networks ------------------------------------------------------------------------------------------------------

    def reward_groups(self, critics: StackedMLP, seen: Tensor, actions: Tensor) -> Tensor:
        """The smaller one of each pair of twins: [2, ...]."""
        twins: Tensor = critics(torch.cat([seen, actions], -1))[..., 0].unflatten(0, (2, 2))
        return twins.amin(1)

    def cost_groups(self, critics: StackedMLP, seen: Tensor, actions: Tensor) -> Tensor:
        """The larger one of each pair of twins (reference: the smaller one): [2, ...]."""
        twins: Tensor = critics(torch.cat([seen, actions], -1))[..., 0].unflatten(0, (2, 2))
        return twins.amax(1) if self.correct else twins.amin(1)

    def values(self, seen: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Cautious Q^r and Q^c of the online critics: [...] each."""
        cost = self.cost_groups(self.cost_critics, seen, actions)
        return self.reward_groups(self.reward_critics, seen, actions).amin(0), (
            cost.amax(0) if self.correct else cost.amin(0)
        )

    # -- losses --------------------------------------------------------------------------------------------------------

    def vae_loss(self, seen: Tensor, actions: Tensor, noise: Tensor) -> Tensor:
        return self.vae.loss(seen, actions, noise, self.config.vae_beta)

    def critic_loss(self, batch: TransitionBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Squared errors of all critics to r + γ max_i [q min_j Q_j + (1 - q) max_j Q_j](s', a_i); noise [B, N, L].

        i runs over sampled actions, j over the two groups, and q is the caution.
        """
        c = self.config
        with torch.no_grad():
            following = self.standardize(batch.next_observations)[:, None].expand(-1, c.samples, -1)  # [B, N, S]
            actions = self.target_actor(following, self.vae.sample(following, noise))
            reward = self.reward_groups(self.target_reward_critics, following, actions)  # [2, B, N]
            reward_value = (c.caution * reward.amin(0) + (1 - c.caution) * reward.amax(0)).amax(-1)
            cost = self.cost_groups(self.target_cost_critics, following, actions)
            cautious, other = (cost.amax(0), cost.amin(0)) if self.correct else (cost.amin(0), cost.amax(0))
            cost_value = (c.caution * cautious + (1 - c.caution) * other).amax(-1)
            if self.correct:
                reward_going = cost_going = 1 - batch.terminals
                reward_value = within_episode(reward_value, batch.timeouts, self.largest_return)
                cost_value = within_episode(cost_value, batch.timeouts, self.spec.cost_max)
            else:
                reward_going = 1 - torch.maximum(batch.terminals, batch.timeouts)
                cost_going = torch.ones_like(batch.terminals)
            reward_target = self.reward_scale * batch.rewards + c.discount * reward_going * reward_value
            cost_target = batch.costs + c.discount * cost_going * cost_value
        logged = torch.cat([self.standardize(batch.observations), batch.actions], -1)
        reward_q, cost_q = self.reward_critics(logged)[..., 0], self.cost_critics(logged)[..., 0]  # [4, B]
        reward_loss = (reward_q - reward_target).square().mean(-1).sum()
        cost_loss = (cost_q - cost_target).square().mean(-1).sum()
        return reward_loss + cost_loss, {
            "critic/reward_loss": reward_loss.detach(),
            "critic/cost_loss": cost_loss.detach(),
            "critic/reward_q": reward_q.detach().mean(),
            "critic/cost_q": cost_q.detach().mean(),
        }

    def actor_values(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """E[Q^r] and E[Q^c] - d at perturbed samples of the VAE; the loss is -E[Q^r] + λ (E[Q^c] - d). noise [B, L]."""
        with torch.no_grad():
            proposed = self.vae.sample(seen, noise)
        reward, cost = self.values(seen, self.actor(seen, proposed))
        return reward.mean(), cost.mean() - self.threshold

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """VAE, critics, then the perturbation against the updated critics, then the targets."""
        c = self.config
        seen, actions, latent = self.standardize(batch.observations), batch.actions, self.vae.latent

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, device=seen.device, dtype=seen.dtype)

        vae_loss = self.vae_loss(seen, actions, noise(len(seen), latent))
        descend(self.optimizers["vae"], vae_loss, [self.learned["vae"]])
        critic_loss, metrics = self.critic_loss(batch, noise(len(seen), c.samples, latent))
        descend(self.optimizers["critics"], critic_loss, [self.learned["critics"]])
        reward_q, excess = self.actor_values(seen, noise(len(seen), latent))
        price = self.multiplier.update(excess.detach())
        loss = price * excess - reward_q
        descend(self.optimizers["actor"], loss, [self.learned["actor"]])
        soft_update(self.targets, [*self.learned["critics"], *self.learned["actor"]], 1 - c.ema)
        return metrics | {
            "loss": loss.detach(),
            "vae/loss": vae_loss.detach(),
            "actor/reward_q": reward_q.detach(),
            "actor/cost_excess": excess.detach(),
            "actor/multiplier": price,
        }

    def act(self, context: Context) -> Decision:
        seen, m = self.standardize(context.now(context.observations)), self.config.candidates
        draw = episode_normal(context.seeds, context.now(context.steps), m * self.vae.latent).to(seen)
        seen = seen[:, None].expand(-1, m, -1)
        actions = self.actor(seen, self.vae.sample(seen, draw.view(len(draw), m, -1)))  # [n, m, A]
        if m == 1:
            return Decision(actions[:, 0], {})
        reward, cost = self.values(seen, actions)
        best = (reward - self.multiplier.value * cost).argmax(1)
        return Decision(actions[torch.arange(len(best), device=best.device), best], {})
