"""COptiDICE (Lee et al., 2022): reweight the data's occupancy to the best one within the cost limit, then imitate.

With e = r - λ c + γ ν(s') - ν(s) the optimal weight of a transition is w = f'^{-1}(e / α), f the soft χ² divergence.
 - ν minimises (1 - γ) E[ν(s0)] + E[w e - α f(w)] (`nu_loss`).
 - χ and τ give an upper bound of the weighted cost: ℓ = (1 - γ) χ(s0) + w (c + γ χ(s') - χ(s)), its batch reweighted by
   softmax(ℓ / τ) within a divergence of ε (`chi_loss`).
 - λ rises while that bound exceeds the limit per step (`multiplier_loss`).
 - The policy imitates with weight w, on slightly blurred data (`actor_loss`).

`variant="reference"` is what the published numbers were made with. "correct" differs in five points:
 - the limit is per step of the normalised occupancy, κ (1 - γ^T) / T (the reference compares that quantity with a
   discounted sum, 1 / (1 - γ) times as large, so that the constraint never binds);
 - the likelihood is that of the tanh-squashed policy which acts (the reference fits raw actions by the unsquashed
   Gaussian, so that an action of 1.0 is executed as 0.76);
 - initial states are a batch of their own (the reference marks them in the batch and divides by their share, which
   inside the softmax makes one of them outweigh all else);
 - ν and χ know the step, and so see a timeout coming (the reference ends there unawares; see `timeouts`);
 - observations are normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softplus

from qpt.algorithms.base import Context, Decision, LimitMode, Spec, adam, descend, discounted_limit, with_step
from qpt.algorithms.fields import check_fields
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import SquashedGaussian, Standardize, gaussian_log_prob
from qpt.nets.mlp import StackedMLP


@dataclass(frozen=True)
class COptiDICEConfig:
    """Every choice of COptiDICE; the defaults are the published ones."""

    steps: int = 100_000
    """Gradient steps."""
    batch_size: int = 512
    """Transitions a step."""
    cost_limit: float = 10.0
    """κ: the limit on an episode's cost that the policy is trained for."""
    variant: Literal["correct", "reference"] = "correct"
    """Without or with the defects of the published code."""
    timeouts: Literal["seen", "bootstrap"] = "seen"
    """ν and χ know the step and end at a timeout, or do not and go on. Where a state tells how far the episode has come
    (BallRun), the states behind a timeout have no step of their own, and ν falls there without end."""
    discount: float = 0.99
    """Discount of rewards and costs."""
    reward_scale: float | None = 0.1
    """Factor of rewards; None: 10 / the mean return-to-go of the data."""
    alpha: float = 0.5
    """α: how dear it is to leave the data's distribution."""
    cost_bound_divergence: float = 0.01
    """ε: how far the data may be reweighted against us in the upper bound of the cost."""
    blur: float = 0.1
    """Noise on states and actions in the imitation, in units of their standard deviations."""
    width: int = 256
    """Width of the two hidden layers of every network."""
    log_std: tuple[float, float] = (-20.0, 2.0)
    """Bounds of the actor's log standard deviation."""
    lr: float = 1e-4
    """Learning rate of networks and scalars."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            alpha="above 0",
            discount="above 0 and below 1",
            cost_bound_divergence="at least 0",
            blur="at least 0",
            log_std="a low and a higher number",
        )

    @classmethod
    def preset(cls, name: str) -> COptiDICEConfig:
        """ "default", or "paper": as published with DSRL, its defects included."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(cls(), variant="reference")
        raise QptError(f"COptiDICE has no preset {name!r}; choose default or paper")


class DICEBatch(NamedTuple):
    steps: TransitionBatch
    initial: Tensor  # [B, S] observations that episodes began with


class DICESampler(TransitionSampler):
    """Transitions, and beside them as many initial observations."""

    def __init__(self, data: Trajectories, batch_size: int, *, device: torch.device | str, seed: int) -> None:
        super().__init__(data, batch_size, device=device, seed=seed)
        self._initial = torch.from_numpy(data.observations[data.offsets[:-1]]).to(device)

    def sample(self) -> DICEBatch:  # type: ignore[override]
        steps = super().sample()
        rows = torch.randint(
            len(self._initial), (self.batch_size,), generator=self.generator, device=steps.costs.device
        )
        return DICEBatch(steps, self._initial[rows])


class COptiDICE(nn.Module):
    """Twin ν and χ, an actor, and the scalars λ and τ."""

    limit_mode: LimitMode = "trained"
    deciding: frozenset[str] = frozenset()
    context = 1
    compilable = ("occupancy_loss", "actor_loss")
    action_std: Tensor
    initial_share: Tensor

    def __init__(self, config: COptiDICEConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.correct = config.variant == "correct"
        s, a = spec.observation_dim, spec.action_dim
        self.standardize = Standardize(spec.observation_mean, spec.observation_std, self.correct)
        self.knows_step = self.correct and config.timeouts == "seen"
        sizes = [s + self.knows_step, config.width, config.width, 1]
        self.nu, self.chi = (StackedMLP(2, sizes, "relu") for _ in range(2))
        self.actor = SquashedGaussian(s, a, config.width, config.log_std)
        self.raw_lambda, self.raw_tau = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.register_buffer("action_std", torch.ones(a))  # these three are set from the data, see make_sampler
        self.register_buffer("initial_share", torch.tensor(1 / spec.horizon))
        self.register_buffer("observation_std", torch.ones(s))
        self.observation_std: Tensor  # of what the networks see
        self.threshold = float(discounted_limit(config.cost_limit, spec.horizon, config.discount))
        if self.correct:
            self.threshold *= 1 - config.discount
        self.reward_scale = config.reward_scale or 10 / max(spec.mean_return_to_go, 1e-6)
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        self.occupancy_parameters = [
            *self.nu.parameters(),
            *self.chi.parameters(),
            self.raw_lambda,
            self.raw_tau,
        ]
        self.actor_parameters = list(self.actor.parameters())
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "occupancy": adam(self.occupancy_parameters, self.config.lr),
            "actor": adam(self.actor_parameters, self.config.lr),
        }

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> DICESampler:
        self.action_std.copy_(torch.from_numpy(data.actions.std(0)))
        self.observation_std.copy_(torch.from_numpy(data.observations.std(0, dtype=np.float64)))
        self.observation_std /= self.standardize.std  # a column that is nearly constant stays so
        self.initial_share.fill_(len(data) / data.steps)
        return DICESampler(data, self.config.batch_size, device=device, seed=seed)

    # -- the occupancy -------------------------------------------------------------------------------------------------

    def advantage(self, batch: TransitionBatch) -> Tensor:
        """e = r - λ c + γ ν(s') - ν(s), without gradient to λ: [B]."""
        price = softplus(self.raw_lambda).detach()
        rewards = self.reward_scale * batch.rewards - price * batch.costs
        return rewards + self._difference(self.nu, batch)

    def _difference(self, net: StackedMLP, batch: TransitionBatch) -> Tensor:
        """γ v(s') - v(s), v the smaller twin, 0 after the end: [B]."""
        cut = self.knows_step or not self.correct
        ended = torch.maximum(batch.terminals, batch.timeouts) if cut else batch.terminals
        before = self._value(net, batch.observations, batch.steps)
        after = self._value(net, batch.next_observations, batch.steps + 1)
        return self.config.discount * (1 - ended) * after - before

    def _value(self, net: StackedMLP, observations: Tensor, steps: Tensor) -> Tensor:
        seen: Tensor = self.standardize(observations)
        twins: Tensor = net(with_step(seen, steps, self.spec.horizon) if self.knows_step else seen)[..., 0]
        return twins.amin(0)

    def _initial(self, net: StackedMLP, batch: DICEBatch) -> Tensor:
        """(1 - γ) v(s0), or the reference's (1 - γ) v(s) 1[s is initial] / share: [B]."""
        if self.correct:
            begun = torch.zeros(len(batch.initial), device=batch.initial.device)
            return (1 - self.config.discount) * self._value(net, batch.initial, begun)
        marked = (batch.steps.steps == 0).to(batch.initial) / self.initial_share
        return (1 - self.config.discount) * marked * self._value(net, batch.steps.observations, batch.steps.steps)

    def weights(self, batch: TransitionBatch) -> Tensor:
        """w of each transition, without gradient: [B]."""
        with torch.no_grad():
            return inverse_derivative(self.advantage(batch) / self.config.alpha)

    # -- losses --------------------------------------------------------------------------------------------------------

    def nu_loss(self, batch: DICEBatch) -> Tensor:
        e = self.advantage(batch.steps)
        w = inverse_derivative(e / self.config.alpha)
        return (self._initial(self.nu, batch) + w * e - self.config.alpha * divergence(w)).mean()

    def chi_loss(self, batch: DICEBatch, w: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of χ and τ together, and the upper bound of the cost per step."""
        tau = softplus(self.raw_tau)
        bound = self._initial(self.chi, batch) + w * (batch.steps.costs + self._difference(self.chi, batch.steps))  # ℓ
        with torch.no_grad():
            log_weights = log_softmax(bound / tau, 0) + math.log(len(bound))
            weights = log_weights.exp()
            kl = (weights * log_weights - weights + 1).mean()
            cost = (weights * w * batch.steps.costs).mean()
        return (weights * bound).mean() + tau * (self.config.cost_bound_divergence - kl), cost

    def multiplier_loss(self, cost: Tensor) -> Tensor:
        return softplus(self.raw_lambda) * (self.threshold - cost)

    def occupancy_loss(self, batch: DICEBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """χ, τ, ν and λ together: each loss reaches its own parameters alone, so one step equals one step each."""
        w = self.weights(batch.steps)
        chi_loss, cost = self.chi_loss(batch, w)
        nu_loss = self.nu_loss(batch)
        return chi_loss + nu_loss + self.multiplier_loss(cost), {
            "occupancy/nu_loss": nu_loss.detach(),
            "occupancy/chi_loss": chi_loss.detach(),
            "occupancy/cost_bound": cost,
            "occupancy/cost": (w * batch.steps.costs).mean(),
            "occupancy/weight": w.mean(),
        }

    def actor_loss(self, batch: TransitionBatch, w: Tensor, observation_noise: Tensor, action_noise: Tensor) -> Tensor:
        """-E[w log π(a | s)] on blurred states and actions; the noise is standard normal."""
        blur = self.config.blur
        seen = self.standardize(batch.observations) + blur * self.observation_std * observation_noise
        actions = batch.actions + blur * self.action_std * action_noise
        if self.correct:
            return -(w * self.actor.log_prob(seen, actions)).mean()
        return -(w * gaussian_log_prob(actions, *self.actor(seen)).sum(-1)).mean()

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: DICEBatch) -> dict[str, Tensor]:
        """The occupancy, then the actor with the weights that it gives now."""
        occupancy_loss, metrics = self.occupancy_loss(batch)
        descend(self.optimizers["occupancy"], occupancy_loss, [self.occupancy_parameters])
        noise = torch.randn_like(batch.steps.observations), torch.randn_like(batch.steps.actions)
        loss = self.actor_loss(batch.steps, self.weights(batch.steps), *noise)
        descend(self.optimizers["actor"], loss, [self.actor_parameters])
        return metrics | {
            "loss": loss.detach(),
            "occupancy/lambda": softplus(self.raw_lambda).detach(),
            "occupancy/tau": softplus(self.raw_tau).detach(),
        }

    def act(self, context: Context) -> Decision:
        return Decision(self.actor.mode(self.standardize(context.now(context.observations))), {})


def divergence(w: Tensor) -> Tensor:
    """The soft χ² generator: w (log w - 1) + 1 below 1, (w - 1)² / 2 above."""
    small = w.clamp(min=1e-10, max=1)  # where the other branch is taken, the logarithm must not spoil the gradient
    return torch.where(w < 1, small * (small.log() - 1) + 1, 0.5 * (w - 1).square())


def inverse_derivative(x: Tensor) -> Tensor:
    """f'^{-1}: e^x below 0, x + 1 above; never negative."""
    return torch.where(x < 0, x.clamp(max=0).exp(), x + 1)
