"""CAPS: constraint-adaptive policy switching (Chemingui et al., AAAI 2025).

One policy network carries H heads: the first is trained for reward alone, the last for least cost alone, those between
for mixtures (`mixture`). At every step each head proposes an action; among those whose expected discounted cost fits
the remaining budget, the one with the largest reward value is taken, else the one with the least cost (`act`). Training
never sees a limit, so any limit can be asked for.

`base="iql"`: critics and values by implicit Q-learning, heads by advantage-weighted imitation (`value_loss`,
`critic_loss`, `actor_loss`). `base="sac-bc"`: squashed-Gaussian heads that maximise their mixture of critics with
entropy and an imitation term (`backup`, `actor_critic_loss`). Costs are valued as costs here, the larger twin counting;
the published code values negative costs with the smaller twin, which is the same up to sign.

`variant="reference"` differs from "correct" in three things, as in the published code: σ of the IQL heads is 1
throughout (its parameters were never registered with the optimiser), a timeout cuts values that do not see it coming
(see `timeouts`), and the SAC+BC backup of costs holds the entropy term, so that its values are not costs alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

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
    with_step,
)
from qpt.algorithms.fields import check_fields
from qpt.algorithms.flat import side_by_side
from qpt.algorithms.targets import expectile_loss
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import Standardize, gaussian_log_prob
from qpt.nets.mlp import StackedMLP

LOG_STD = (-5.0, 2.0)  # the range of log σ


@dataclass(frozen=True)
class CAPSConfig:
    """Every choice of CAPS."""

    # -- size of the run
    steps: int = 100_000
    """Gradient steps."""
    batch_size: int = 512
    """Logged steps drawn at each step."""
    base: Literal["iql", "sac-bc"] = "iql"
    """How heads and critics learn: implicit Q-learning, or soft actor-critic with imitation."""
    variant: Literal["correct", "reference"] = "correct"
    """Learned σ, timeouts as below and plain cost values, or as in the published code."""
    timeouts: Literal["seen", "bootstrap"] = "seen"
    """Critics and values know the step and end at a timeout, or do not and go on. Where a state tells how far the
    episode has come (BallRun), no logged step holds the values beyond the last, and they run away."""

    # -- networks
    heads: int = 2
    """Heads of the policy, from reward alone to least cost alone."""
    width: int = 512
    """Width of the two hidden layers of every network."""
    normalize: bool = True
    """Networks see standardised observations (paper: raw)."""

    # -- learning
    lr: float = 3e-4
    """Learning rate of every network."""
    discount: float = 0.99
    """Discount of reward and cost values."""
    target_rate: float = 0.005
    """Rate of the target critics."""
    reward_scale: float = 0.1
    """Factor of rewards."""
    expectile: float = 0.7
    """Expectile of the reward value; 1 - expectile is the cost value's (the authors: 0.5 for MetaDrive). IQL only."""
    reward_temperature: float = 3.0
    """Inverse temperature of reward advantages. IQL only."""
    cost_temperature: float = 3.0
    """Inverse temperature of cost advantages. IQL only."""
    weight_max: float = 100.0
    """Largest weight of either advantage. IQL only."""
    q_weight: float = 2.5
    """Weight of the critics against imitation. SAC+BC only."""

    METADRIVE: ClassVar[dict[str, float]] = {"expectile": 0.5}  # what the authors set there

    def __post_init__(self) -> None:
        check_fields(
            self,
            q_weight="at least 0",
            reward_temperature="at least 0",
            cost_temperature="at least 0",
            weight_max="above 0",
        )

    @classmethod
    def preset(cls, name: str) -> CAPSConfig:
        """ "default", or "paper": as published, the defects of its code included."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(cls(), normalize=False, variant="reference")
        raise QptError(f"CAPS has no preset {name!r}; choose default or paper")


class HeadedPolicy(nn.Module):
    """A shared trunk with H heads; each gives the mean and the log σ of a Gaussian before squashing."""

    log_std: Tensor

    def __init__(self, observation_dim: int, action_dim: int, config: CAPSConfig) -> None:
        super().__init__()
        self.heads, self.by_state = config.heads, config.base == "sac-bc"
        w = config.width
        self.trunk = nn.Sequential(nn.Linear(observation_dim, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU())
        self.mean = nn.Linear(w, config.heads * action_dim)
        if self.by_state:
            self.spread = nn.Linear(w, config.heads * action_dim)
        elif config.variant == "correct":
            self.log_std = nn.Parameter(torch.zeros(config.heads, action_dim))
        else:
            self.register_buffer("log_std", torch.zeros(config.heads, action_dim))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] -> mean, log σ: [B, H, A] each."""
        hidden = self.trunk(seen)
        mean = self.mean(hidden).unflatten(-1, (self.heads, -1))
        if self.by_state:
            log_std = self.spread(hidden).unflatten(-1, (self.heads, -1))
        else:
            log_std = self.log_std.expand_as(mean)
        return mean, log_std.clamp(*LOG_STD)


class CAPS(nn.Module):
    """The networks, their targets and the training step."""

    limit_mode: LimitMode = "live"
    deciding: frozenset[str] = frozenset()
    context = 1

    def __init__(self, config: CAPSConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        if config.heads < 2:
            raise QptError(f"CAPS switches between at least 2 heads, not {config.heads}")
        s, a, hidden = spec.observation_dim, spec.action_dim, [config.width] * 2
        self.knows_step = config.variant == "correct" and config.timeouts == "seen"
        judged = s + self.knows_step
        self.critics = StackedMLP(4, [judged + a, *hidden, 1], "relu")  # Q_r twice, Q_c twice
        self.target_critics = frozen_copy(self.critics)
        self.policy = HeadedPolicy(s, a, config)
        if config.base == "iql":
            self.values = StackedMLP(2, [judged, *hidden, 1], "relu")  # V_r, V_c
            self.compilable: tuple[str, ...] = ("value_loss", "critic_loss", "actor_loss")
        else:
            self.log_temperature = nn.Parameter(torch.zeros(()))
            self.compilable = ("critic_loss", "actor_critic_loss")
        self.see = Standardize(spec.observation_mean, spec.observation_std, config.normalize)
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        lr = self.config.lr
        self.critic_parameters, self.critic_targets = (
            list(self.critics.parameters()),
            side_by_side(self.target_critics.parameters()),
        )
        self.policy_parameters = list(self.policy.parameters())
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": adam(self.policy_parameters, lr),
            "critics": adam(self.critic_parameters, lr),
        }
        if self.config.base == "iql":
            self.value_parameters = list(self.values.parameters())
            self.optimizers["values"] = adam(self.value_parameters, lr)
        else:
            self.optimizers["temperature"] = adam([self.log_temperature], lr)

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> TransitionSampler:
        return TransitionSampler(data, self.config.batch_size, device=device, seed=seed)

    # -- what both bases share -----------------------------------------------------------------------------------------

    def judged(self, observations: Tensor, steps: Tensor) -> Tensor:
        """What critics and values know of a state; the policy does not know the step."""
        seen: Tensor = self.see(observations)
        return with_step(seen, steps, self.spec.horizon) if self.knows_step else seen

    @staticmethod
    def q(critics: StackedMLP, seen: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_r (the smaller twin) and Q_c (the larger): the cautious side of both."""
        q = critics(torch.cat([seen, actions], -1))[..., 0]
        return torch.minimum(q[0], q[1]), torch.maximum(q[2], q[3])

    def mixture(self, reward: Tensor, safety: Tensor) -> Tensor:
        """What each head wants, from [B] or [B, H] to [B, H]: reward; reward + k / ((H - 1) / 2) safety; safety."""
        h = self.config.heads
        if reward.dim() == 1:
            reward, safety = reward[:, None].expand(-1, h), safety[:, None].expand(-1, h)
        share = torch.arange(h, device=reward.device, dtype=reward.dtype) / ((h - 1) / 2)
        last = torch.arange(h, device=reward.device) == h - 1
        return torch.where(last, safety, reward + share * safety)

    def critic_loss(self, batch: TransitionBatch, next_reward: Tensor, next_cost: Tensor) -> Tensor:
        """Mean squared error of both twins to r + γ next_reward and c + γ next_cost."""
        c = self.config
        cut = c.variant == "reference" or self.knows_step
        ended = torch.maximum(batch.terminals, batch.timeouts) if cut else batch.terminals
        going = c.discount * (1 - ended)
        state = self.judged(batch.observations, batch.steps)
        q: Tensor = self.critics(torch.cat([state, batch.actions], -1))[..., 0]  # [4, B]
        reward_error = q[:2] - (c.reward_scale * batch.rewards + going * next_reward)
        return reward_error.square().mean() + (q[2:] - (batch.costs + going * next_cost)).square().mean()

    def update(self, batch: TransitionBatch) -> dict[str, Tensor]:
        metrics = self._update_iql(batch) if self.config.base == "iql" else self._update_sac(batch)
        soft_update(self.critic_targets, self.critic_parameters, self.config.target_rate)
        return metrics

    # -- implicit Q-learning -------------------------------------------------------------------------------------------

    def value_loss(self, batch: TransitionBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Expectiles of the target critics over logged actions, and the advantages in reward and in safety."""
        state, tau = self.judged(batch.observations, batch.steps), self.config.expectile
        with torch.no_grad():
            reward_q, cost_q = self.q(self.target_critics, state, batch.actions)
        reward_v, cost_v = self.values(state)[..., 0]
        more, less = reward_q - reward_v, cost_v - cost_q
        loss = expectile_loss(more, tau).mean() + expectile_loss(less, tau).mean()
        return loss, more.detach(), less.detach()

    def head_weights(self, more: Tensor, less: Tensor) -> Tensor:
        """Exponentiated, clipped advantages, mixed for each head: [B, H]."""
        c = self.config
        reward = torch.exp(c.reward_temperature * more).clamp(max=c.weight_max)
        return self.mixture(reward, torch.exp(c.cost_temperature * less).clamp(max=c.weight_max))

    def actor_loss(self, batch: TransitionBatch, weights: Tensor) -> Tensor:
        """Weighted -log N(a; tanh μ, σ), averaged over batch and heads."""
        mean, log_std = self.policy(self.see(batch.observations))
        likelihood = gaussian_log_prob(batch.actions[:, None], torch.tanh(mean), log_std).sum(-1)  # [B, H]
        return -(weights * likelihood).mean()

    def _update_iql(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """Next values and advantages before any change, then values, critics, heads: the published order."""
        with torch.no_grad():
            next_reward, next_cost = self.values(self.judged(batch.next_observations, batch.steps + 1))[..., 0]
        value_loss, more, less = self.value_loss(batch)
        descend(self.optimizers["values"], value_loss, [self.value_parameters])
        critic_loss = self.critic_loss(batch, next_reward, next_cost)
        descend(self.optimizers["critics"], critic_loss, [self.critic_parameters])
        actor_loss = self.actor_loss(batch, self.head_weights(more, less))
        descend(self.optimizers["policy"], actor_loss, [self.policy_parameters])
        return {
            "policy/loss": actor_loss.detach(),
            "critic/loss": critic_loss.detach(),
            "critic/value_loss": value_loss.detach(),
        }

    # -- soft actor-critic with imitation ------------------------------------------------------------------------------

    def draw(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Squashed actions of every head and their log-likelihood: [B, H, A], [B, H]."""
        mean, log_std = self.policy(seen)
        raw = mean + torch.exp(log_std) * noise
        squeeze = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # log |d tanh / d raw|, without overflow
        return torch.tanh(raw), (gaussian_log_prob(raw, mean, log_std) - squeeze).sum(-1)

    @torch.no_grad()
    def backup(self, batch: TransitionBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Next values averaged over heads: min Q_r' - α log π, and max Q_c' (without entropy, if correct)."""
        actions, likelihood = self.draw(self.see(batch.next_observations), noise)
        state = self.judged(batch.next_observations, batch.steps + 1)
        reward_q, cost_q = self.q(self.target_critics, state[:, None].expand(-1, self.config.heads, -1), actions)
        entropy = -self.log_temperature.exp() * likelihood
        if self.config.variant == "reference":
            cost_q = cost_q - entropy
        return (reward_q + entropy).mean(1), cost_q.mean(1)

    def actor_critic_loss(self, batch: TransitionBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """α log π - 2.5 Q / |Q| + (a - π)² with each head's mixture of Q_r and -Q_c; and the mean log π."""
        actions, likelihood = self.draw(self.see(batch.observations), noise)
        state = self.judged(batch.observations, batch.steps)
        reward_q, cost_q = self.q(self.critics, state[:, None].expand(-1, self.config.heads, -1), actions)
        goal = self.mixture(reward_q, -cost_q)  # [B, H]
        scale = parallel.mean(goal.abs().mean(0)).clamp(min=1e-3)  # [H]
        imitation = (actions - batch.actions[:, None]).square().mean(-1)
        alpha = self.log_temperature.detach().exp()
        return (alpha * likelihood - self.config.q_weight * goal / scale + imitation).mean(), likelihood.mean().detach()

    def _update_sac(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """Critics, heads against the new critics, then the temperature towards an entropy of -A."""
        shape = (len(batch.actions), self.config.heads, self.spec.action_dim)
        noise = torch.randn(2, *shape, device=batch.actions.device, dtype=batch.actions.dtype)
        critic_loss = self.critic_loss(batch, *self.backup(batch, noise[0]))
        descend(self.optimizers["critics"], critic_loss, [self.critic_parameters])
        actor_loss, likelihood = self.actor_critic_loss(batch, noise[1])
        descend(self.optimizers["policy"], actor_loss, [self.policy_parameters])
        temperature_loss = -self.log_temperature.exp() * (likelihood - self.spec.action_dim)
        descend(self.optimizers["temperature"], temperature_loss, [[self.log_temperature]])
        return {
            "policy/loss": actor_loss.detach(),
            "critic/loss": critic_loss.detach(),
            "policy/temperature": self.log_temperature.detach().exp(),
        }

    # -- deployment ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, context: Context) -> Decision:
        """argmax Q_r over heads whose Q_c is below the discounted share of the remaining budget, else argmin Q_c."""
        observations, steps = context.now(context.observations), context.now(context.steps)
        seen, state = self.see(observations), self.judged(observations, steps)
        actions = torch.tanh(self.policy(seen)[0])  # [n, H, A]
        reward_q, cost_q = self.q(self.critics, state[:, None].expand(-1, self.config.heads, -1), actions)
        left = (self.spec.horizon - steps).clamp(min=1)
        budget = discounted_limit(context.now(context.cost_to_go).clamp(min=0), left, self.config.discount)
        feasible = cost_q < budget[:, None]
        best = torch.where(feasible, reward_q, -torch.inf).argmax(1)
        none = ~feasible.any(1)
        chosen = torch.where(none, cost_q.argmin(1), best)
        rows = torch.arange(chosen.shape[0], device=chosen.device)
        diagnostics = {
            "fallback": none.to(seen.dtype),
            "least_cost_head": (chosen == self.config.heads - 1).to(seen.dtype),
            "reward_q": reward_q[rows, chosen],
            "cost_q": cost_q[rows, chosen],
        }
        return Decision(actions[rows, chosen], diagnostics)
