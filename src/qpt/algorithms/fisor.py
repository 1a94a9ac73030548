"""FISOR: feasibility-guided safe offline RL with a diffusion policy (Zheng et al., ICLR 2024).

Hamilton–Jacobi feasibility values Q_h, V_h tell from which states violations can be avoided altogether; they are
learned by expectile regression on logged actions alone (`value_loss`, `critic_loss`). Where V_h > 0 a violation cannot
be avoided and the policy imitates what violates least; where V_h <= 0 it imitates what earns most among feasible
actions (`actor_weights`, `actor_loss`). The policy denoises 16 actions and takes the one with the lowest Q_h (`act`);
of several that are clearly feasible, the one that earns most. There is no cost limit in this notion of safety: one run
serves every limit.

The published settings need about a million steps: before that V_h > 0 nearly everywhere, and the lowest of 16 values
that should all be -1 is the most timid action. The defaults here are for shorter runs (see docs/methods/fisor.md);
`preset("paper")` keeps to the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from qpt.algorithms.base import (
    Context,
    Decision,
    LimitMode,
    Spec,
    adam,
    descend,
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
from qpt.nets.diffusion import ActionDenoiser, Diffusion, vp_betas
from qpt.nets.heads import Standardize
from qpt.nets.mlp import StackedMLP
from qpt.nets.noise import episode_normal


@dataclass(frozen=True)
class FISORConfig:
    """Every choice of FISOR."""

    # -- size of the run
    steps: int = 100_000
    """Steps; each updates the policy `policy_updates` times and the critics once."""
    batch_size: int = 512
    """Logged steps drawn at each step."""
    policy_updates: int = 1
    """Parts of the batch, one policy update each (paper: 2)."""
    critic_batch: int | None = None
    """The critics learn from so many of the batch (paper: 256); None: from all."""
    timeouts: Literal["seen", "end", "bootstrap"] = "seen"
    """Values know the step, and so see the timeout coming; or do not, and end there (paper), or go on. Where a state
    tells how far the episode has come (BallRun), the second takes a step back for time that is won, and the third has
    no logged step that would hold the values beyond the last."""

    # -- values
    width: int = 256
    """Width of the two hidden layers of critics and values."""
    normalize: bool = True
    """Networks see standardised observations (paper: raw)."""
    discount: float = 0.99
    """Discount of the reward value."""
    feasibility_discount: float = 0.95
    """Discount of the feasibility value; a false alarm fades at this rate from one backup to the next (paper: 0.99)."""
    expectile: float = 0.9
    """Expectile of the reward value; 1 - expectile is the feasibility value's."""
    violation: float = 5.0
    """h of a step with a cost; a step without has h = -1 (paper: 25, which takes far more steps to tell from 0)."""
    critic_lr: float = 1e-3
    """Learning rate of critics and values (paper: 3e-4)."""
    target_rate: float = 0.05
    """Rate of the target critics; values need several times 1 / (rate (1 - discount)) steps (paper: 0.005)."""

    # -- the diffusion policy
    diffusion_steps: int = 5
    """Denoising steps."""
    policy_width: int = 256
    """Width of the denoiser."""
    blocks: int = 3
    """Residual blocks of the denoiser."""
    dropout: float = 0.1
    """Dropout of the denoiser."""
    reward_temperature: float = 3.0
    """Inverse temperature of the weights in feasible states."""
    cost_temperature: float = 25.0
    """Inverse temperature of the weights in infeasible states, in units of 1 / h (paper: 5, with its larger h)."""
    reward_weight_max: float = 100.0
    """Largest weight in feasible states."""
    cost_weight_max: float = 150.0
    """Largest weight in infeasible states."""
    cost_weight_min: float = 0.0
    """Smallest weight in infeasible states (the authors use 1 for MetaDrive)."""
    lr: float = 3e-4
    """Learning rate of the policy."""
    lr_horizon: int | None = None
    """Policy updates in a cosine decay of the policy's learning rate to 0 (paper: 3 000 000); None: constant."""
    ema_rate: float = 0.001
    """Rate of the averaged denoiser that acts."""

    # -- deployment
    candidates: int = 16
    """Actions that are denoised; the one with the lowest feasibility value is taken."""
    feasible_enough: float | None = -0.5
    """Values at or below count as equal, and the highest Q_r of those decides; None: the lowest alone (paper)."""

    METADRIVE: ClassVar[dict[str, float]] = {"cost_weight_min": 1.0}  # what the authors set there

    def __post_init__(self) -> None:
        check_fields(
            self,
            feasibility_discount="above 0 and at most 1",
            violation="above 0",
            policy_updates="at least 1",
            critic_batch="at least 1",
            diffusion_steps="at least 1",
            policy_width="at least 1",
            blocks="at least 1",
            lr_horizon="at least 1",
            reward_temperature="at least 0",
            cost_temperature="at least 0",
            reward_weight_max="above 0",
            cost_weight_max="above 0",
            cost_weight_min="at least 0",
        )

    @classmethod
    def preset(cls, name: str) -> FISORConfig:
        """ "default", or "paper": sizes and schedule as published, the same for all tasks but `METADRIVE`'s."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(
                cls(),
                steps=1_000_000,
                batch_size=2048,
                policy_updates=2,
                critic_batch=256,
                timeouts="end",
                normalize=False,
                feasibility_discount=0.99,
                violation=25.0,
                critic_lr=3e-4,
                target_rate=0.005,
                cost_temperature=5.0,
                lr_horizon=3_000_000,
                feasible_enough=None,
            )
        raise QptError(f"FISOR has no preset {name!r}; choose default or paper")


class FISOR(nn.Module):
    """The networks, their targets and the training step."""

    limit_mode: LimitMode = "ignored"
    deciding = frozenset({"candidates", "feasible_enough"})
    compilable = ("value_loss", "critic_loss", "actor_loss")
    context = 1
    step: Tensor

    def __init__(self, config: FISORConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        if config.batch_size % config.policy_updates:
            raise QptError(f"a batch of {config.batch_size} cannot be cut into {config.policy_updates} equal parts")
        s, a, hidden = spec.observation_dim, spec.action_dim, [config.width] * 2
        judged = s + (config.timeouts == "seen")
        self.critics = StackedMLP(4, [judged + a, *hidden, 1], "relu")  # Q_r twice, Q_h twice
        self.values = StackedMLP(2, [judged, *hidden, 1], "relu")  # V_r, V_h
        self.target_critics = frozen_copy(self.critics)
        self.denoiser = ActionDenoiser(s, a, width=config.policy_width, blocks=config.blocks, dropout=config.dropout)
        self.acting_denoiser = frozen_copy(self.denoiser)
        self.diffusion = Diffusion(vp_betas(config.diffusion_steps))
        self.see = Standardize(spec.observation_mean, spec.observation_std, config.normalize)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        # An average step earns about 1 over the return range, as the temperatures expect.
        spread = spec.return_max - spec.return_min
        self.reward_scale = spec.horizon / spread if spread > 1e-6 else 1.0
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.critic_parameters, self.critic_targets = (
            list(self.critics.parameters()),
            side_by_side(self.target_critics.parameters()),
        )
        self.value_parameters = list(self.values.parameters())
        self.policy_parameters, self.policy_targets = (
            list(self.denoiser.parameters()),
            side_by_side(self.acting_denoiser.parameters()),
        )
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": adam(self.policy_parameters, c.lr),
            "values": adam(self.value_parameters, c.critic_lr),
            "critics": adam(self.critic_parameters, c.critic_lr),
        }

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> TransitionSampler:
        return TransitionSampler(data, self.config.batch_size, device=device, seed=seed)

    # -- losses --------------------------------------------------------------------------------------------------------

    def judged(self, observations: Tensor, steps: Tensor) -> Tensor:
        """What critics and values know of a state; the policy does not know the step."""
        seen: Tensor = self.see(observations)
        if self.config.timeouts != "seen":
            return seen
        return with_step(seen, steps, self.spec.horizon)

    def target_q(self, judged: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_r (the smaller twin) and Q_h (the larger twin) of the target critics."""
        q = self.target_critics(torch.cat([judged, actions], -1))[..., 0]
        return torch.minimum(q[0], q[1]), torch.maximum(q[2], q[3])

    def value_loss(self, batch: TransitionBatch) -> Tensor:
        """V_r: upper expectile of Q_r over logged actions; V_h: lower expectile of Q_h, the least harm within reach."""
        state, tau = self.judged(batch.observations, batch.steps), self.config.expectile
        with torch.no_grad():
            reward_q, harm_q = self.target_q(state, batch.actions)
        reward_v, harm_v = self.values(state)[..., 0]
        return expectile_loss(reward_q - reward_v, tau).mean() + expectile_loss(harm_q - harm_v, 1 - tau).mean()

    def critic_targets_of(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """r + γ V_r(s'), and (1 - γ) h + γ max(h, V_h(s')); an ended episode leaves r and h."""
        c = self.config
        ended = batch.terminals if c.timeouts == "bootstrap" else torch.maximum(batch.terminals, batch.timeouts)
        with torch.no_grad():
            reward_v, harm_v = self.values(self.judged(batch.next_observations, batch.steps + 1))[..., 0]
        harm = torch.where(batch.costs > 0, c.violation, -1.0)
        reward_target = batch.rewards * self.reward_scale + c.discount * (1 - ended) * reward_v
        ahead = c.feasibility_discount
        lasting = (1 - ahead) * harm + ahead * torch.maximum(harm, harm_v)
        return reward_target, torch.where(ended > 0, harm, lasting)

    def critic_loss(self, batch: TransitionBatch) -> Tensor:
        """Mean squared error of both twins to their targets."""
        reward_target, harm_target = self.critic_targets_of(batch)
        state = self.judged(batch.observations, batch.steps)
        q: Tensor = self.critics(torch.cat([state, batch.actions], -1))[..., 0]  # [4, B]
        return (q[:2] - reward_target).square().mean() + (q[2:] - harm_target).square().mean()

    @torch.no_grad()
    def actor_weights(self, judged: Tensor, actions: Tensor) -> Tensor:
        """1[V_h > 0] exp(β_h (V_h - Q_h)) + 1[V_h <= 0 and Q_h <= 0] exp(β_r (Q_r - V_r)), both clipped."""
        c = self.config
        reward_q, harm_q = self.target_q(judged, actions)
        reward_v, harm_v = self.values(judged)[..., 0]
        retreat = torch.exp(c.cost_temperature * (harm_v - harm_q)).clamp(c.cost_weight_min, c.cost_weight_max)
        advance = torch.exp(c.reward_temperature * (reward_q - reward_v)).clamp(max=c.reward_weight_max)
        return torch.where(harm_v > 0, retreat, torch.where(harm_q <= 0, advance, 0.0))

    def actor_loss(self, batch: TransitionBatch, step: Tensor, noise: Tensor) -> Tensor:
        """Weighted squared error of the predicted noise, summed over action dimensions."""
        seen = self.see(batch.observations)
        noisy = self.diffusion.corrupt(batch.actions, step, noise)
        error: Tensor = (self.denoiser(noisy, seen, step) - noise).square().sum(-1)
        return (self.actor_weights(self.judged(batch.observations, batch.steps), batch.actions) * error).mean()

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The policy on each part of the batch, then values, then critics with the new values: the published order."""
        c, optimizers = self.config, self.optimizers
        if c.lr_horizon:
            share = (self.step * c.policy_updates / c.lr_horizon).clamp(max=1.0)
            optimizers["policy"].param_groups[0]["lr"].copy_(c.lr * 0.5 * (1 + torch.cos(torch.pi * share)))
        self.step += 1
        size = c.batch_size // c.policy_updates
        for start in range(0, c.batch_size, size):
            part = TransitionBatch(*(field[start : start + size] for field in batch))
            step = torch.randint(c.diffusion_steps, (size,), device=part.actions.device)
            actor_loss = self.actor_loss(part, step, torch.randn_like(part.actions))
            descend(optimizers["policy"], actor_loss, [self.policy_parameters])
            soft_update(self.policy_targets, self.policy_parameters, c.ema_rate)

        part = TransitionBatch(*(field[: c.critic_batch] for field in batch))
        value_loss = self.value_loss(part)
        descend(optimizers["values"], value_loss, [self.value_parameters])
        critic_loss = self.critic_loss(part)
        descend(optimizers["critics"], critic_loss, [self.critic_parameters])
        soft_update(self.critic_targets, self.critic_parameters, c.target_rate)
        return {
            "policy/loss": actor_loss.detach(),
            "critic/value_loss": value_loss.detach(),
            "critic/loss": critic_loss.detach(),
        }

    # -- deployment ----------------------------------------------------------------------------------------------------

    def propose(self, seen: Tensor, noise: Tensor) -> Tensor:
        """Denoise candidates from given normal draws: seen [n, S], noise [n, m, T, A] -> actions [n, m, A]."""
        n, m = noise.shape[:2]
        states = seen[:, None].expand(-1, m, -1).flatten(0, 1)
        draws = noise.flatten(0, 1)
        actions = draws[:, 0]
        for place, step in enumerate(reversed(range(self.config.diffusion_steps)), start=1):
            when = torch.full((n * m,), step, device=actions.device)
            predicted = self.acting_denoiser(actions, states, when)
            more = draws[:, place] if step else actions  # the last step adds no noise
            clean = self.diffusion.clean(actions, step, predicted)
            actions = self.diffusion.denoise(actions, step, clean, more).clamp(-1, 1)
        return actions.view(n, m, -1)

    @torch.no_grad()
    def act(self, context: Context) -> Decision:
        c, a = self.config, self.spec.action_dim
        observations, steps = context.now(context.observations), context.now(context.steps)
        seen = self.see(observations)
        count = c.candidates * c.diffusion_steps * a
        noise = episode_normal(context.seeds, steps, count, stream=1).to(seen.dtype)
        actions = self.propose(seen, noise.view(-1, c.candidates, c.diffusion_steps, a))
        state = self.judged(observations, steps)
        reward_q, harm_q = self.target_q(state[:, None].expand(-1, c.candidates, -1), actions)  # [n, m]
        chosen = harm_q.argmin(1)
        if c.feasible_enough is not None:
            enough = harm_q <= c.feasible_enough
            chosen = torch.where(enough.any(1), reward_q.masked_fill(~enough, -torch.inf).argmax(1), chosen)
        rows = torch.arange(len(chosen), device=chosen.device)
        harm = harm_q[rows, chosen]
        return Decision(actions[rows, chosen], {"feasibility": harm, "fallback": (harm > 0).to(seen.dtype)})
