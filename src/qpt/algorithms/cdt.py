"""CDT, the constrained decision transformer (Liu et al., 2023): imitation conditioned on return-to-go and cost-to-go.

A Gaussian policy is read from the state token. Its loss is the negative log-likelihood of the logged action minus an
entropy bonus whose temperature is learned (`policy_loss`), plus that of a classifier which tells from the action token
whether the step costs (`cost_loss`). Relabelled episodes teach what to do with targets beyond the data, and cheap
episodes are drawn more often.

`variant="reference"` is what the published numbers were made with. "correct" differs in four points:
 - log σ is bounded (the reference lets it fall without end where logged actions hardly vary: the likelihood explodes);
 - entropy and its target are both per action dimension (the reference compares a mean over dimensions with minus their
   number, so that the temperature only ever falls);
 - a step costs when its cost is above 0 (the reference truncates: MetaDrive's fractional costs count as none);
 - observations are normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qpt.algorithms.base import Context, Decision, LimitMode, Spec, adam, descend, masked_mean, relabelled_windows
from qpt.algorithms.fields import check_fields
from qpt.data.sampling import Weighting, WindowBatch, WindowSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import gaussian_log_prob
from qpt.nets.transformer import ACTION, STATE, TrajectoryTransformer

LOG_STD = (-5.0, 2.0)  # bounds in the correct variant


@dataclass(frozen=True)
class CDTConfig:
    """Every choice of CDT; the defaults share size, scales and learning rate with QPT's, so that the two compare."""

    # -- size of the run
    steps: int = 30_000
    """Gradient steps."""
    batch_size: int = 256
    """Windows a step."""
    variant: Literal["correct", "reference"] = "correct"
    """Without or with the defects of the published code."""

    # -- the transformer
    context: int = 10
    """Steps of history, K."""
    width: int = 128
    """Embedding size."""
    layers: int = 3
    """Blocks."""
    heads: int = 8
    """Attention heads."""
    dropout: float = 0.1
    """Dropout after embeddings and residual branches."""
    attention_dropout: float = 0.1
    """Dropout of attention weights."""
    return_scale: float | None = None
    """Factor of the return-to-go token; None: 10 / the largest return magnitude of the data."""
    cost_scale: float | None = None
    """Factor of the cost-to-go token; None: 10 / the largest episode cost of the data."""
    cost_offset: float = 0.0
    """The token is offset - scaled cost-to-go."""

    # -- the objective
    stochastic: bool = True
    """Gaussian likelihood with entropy bonus; False: squared error (without augmentation, a decision transformer)."""
    temperature: float = 0.1
    """Weight of the entropy bonus at the start."""
    temperature_lr: float = 1e-4
    """Learning rate of the temperature."""
    cost_weight: float = 0.02
    """Weight of the classifier of costly steps."""

    # -- data
    augmentation: bool = True
    """Relabel episodes with infeasible targets."""
    augmentation_rule: Literal["paper", "osrl"] = "osrl"
    """CDT's rule as published in code, or Algorithm 2 of the QPT paper."""
    augmentation_fraction: float = 0.2
    """Relabelled episodes, as a share of the logged ones (rule osrl: of those that its grid leaves)."""
    weighting: Weighting = "low-cost"
    """How episodes are drawn: in proportion to ceiling - cost, by length, or uniformly."""
    cost_ceiling: float = 70.0
    """Ceiling of low-cost weighting: episodes that cost more are never seen."""

    # -- optimisation
    lr: float = 3e-4
    """Learning rate."""
    weight_decay: float = 1e-4
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's betas."""
    warmup: int = 500
    """Steps of linear warm-up of the learning rate."""
    clip: float = 0.25
    """Gradient-norm clip; 0: none."""

    # -- deployment
    targets: Literal["data", "published"] = "data"
    """Return target for a limit: the best logged return within it, or the task's published pairs, interpolated."""
    target_factor: float = 1.0
    """Return target as a multiple of that."""

    def __post_init__(self) -> None:
        check_fields(self, temperature="above 0", cost_weight="at least 0")

    @classmethod
    def preset(cls, name: str) -> CDTConfig:
        """ "default", or "paper": as published with DSRL, its defects included."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(
                cls(),
                steps=100_000,
                batch_size=2048,
                variant="reference",
                return_scale=0.1,
                cost_scale=1.0,
                cost_offset=50.0,
                lr=1e-4,
                targets="published",
            )
        raise QptError(f"CDT has no preset {name!r}; choose default or paper")


class CDT(nn.Module):
    """The transformer, its heads, and the temperature."""

    limit_mode: LimitMode = "live"
    deciding = frozenset({"targets", "target_factor"})
    compilable = ("policy_loss",)
    step: Tensor

    def __init__(self, config: CDTConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec, self.context = config, spec, config.context
        self.correct = config.variant == "correct"
        largest = max(abs(spec.return_min), abs(spec.return_max), 1e-6)
        mean, std = torch.tensor(spec.observation_mean), torch.tensor(spec.observation_std)
        self.transformer = TrajectoryTransformer(
            mean if self.correct else torch.zeros_like(mean),
            std if self.correct else torch.ones_like(std),
            spec.action_dim,
            context=config.context,
            horizon=spec.horizon,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            return_scale=config.return_scale or 10 / largest,
            cost_scale=config.cost_scale or 10 / max(spec.cost_max, 1.0),
            cost_offset=config.cost_offset,
        )
        self.action_head = nn.Linear(config.width, 2 * spec.action_dim)  # mean and log σ
        self.cost_head = nn.Linear(config.width, 2)
        for head in (self.action_head, self.cost_head):
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature)))
        self.entropy_target = -1.0 if self.correct else -float(spec.action_dim)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.autocast = False  # set by the loop where bf16 pays
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.policy_parameters = [
            *self.transformer.parameters(),
            *self.action_head.parameters(),
            *self.cost_head.parameters(),
        ]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": adam(self.policy_parameters, c.lr, weight_decay=c.weight_decay, betas=c.betas)
        }
        if c.stochastic:
            self.optimizers["temperature"] = adam([self.log_temperature], c.temperature_lr)

    # -- data ----------------------------------------------------------------------------------------------------------

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> WindowSampler:
        return relabelled_windows(self.config, self.spec, data, device, seed)

    def suggest_return(self, cost_limit: float) -> float:
        """The return target that belongs to a limit; beyond the published pairs, that of the nearest one."""
        if self.config.targets == "data":
            return self.spec.suggest_return(cost_limit)
        published = self.spec.published_return(cost_limit)
        if published is None:
            raise QptError(
                f"the task {self.spec.task or '(none given)'} has no published targets; set targets to data, "
                "or give return targets"
            )
        return published

    # -- networks ------------------------------------------------------------------------------------------------------

    def hidden(self, batch: WindowBatch | Context, kinds: tuple[int, ...]) -> Tensor:
        """[B, K, len(kinds), D]; narrow only while it learns, so that decisions do not depend on how it was trained."""
        narrow = self.autocast and self.training
        with torch.autocast(batch.actions.device.type, torch.bfloat16, enabled=narrow):
            out: Tensor = self.transformer(
                batch.return_to_go, batch.cost_to_go, batch.observations, batch.actions, batch.steps, kinds
            )
        return out.float() if narrow else out

    def policy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log σ of the actions: [..., A] each."""
        mean, log_std = self.action_head(hidden).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD) if self.correct else log_std

    # -- losses --------------------------------------------------------------------------------------------------------

    def policy_loss(self, batch: WindowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """-E[log N(a; μ, σ)] - T E[entropy], means over valid steps and action dimensions, + the classifier's loss."""
        hidden = self.hidden(batch, (STATE, ACTION))
        mean, log_std = self.policy(hidden[:, :, 0])
        metrics = {"policy/squared_error": masked_mean((mean - batch.actions).square().mean(-1), batch.mask)}
        if self.config.stochastic:
            likelihood = masked_mean(gaussian_log_prob(batch.actions, mean, log_std).mean(-1), batch.mask)
            entropy = masked_mean(log_std.mean(-1), batch.mask) + 0.5 * math.log(2 * math.pi * math.e)
            loss = -likelihood - self.log_temperature.exp().detach() * entropy
            metrics |= {"policy/likelihood": likelihood, "policy/entropy": entropy}
        else:
            loss = metrics["policy/squared_error"]
        cost_loss = self.cost_loss(hidden[:, :, 1], batch)
        return loss + self.config.cost_weight * cost_loss, {
            k: v.detach() for k, v in (metrics | {"policy/cost_loss": cost_loss}).items()
        }

    def cost_loss(self, hidden: Tensor, batch: WindowBatch) -> Tensor:
        """Cross entropy of "this step costs", from the action token."""
        costly = (batch.costs > 0) if self.correct else (batch.costs >= 1)
        logits = torch.log_softmax(self.cost_head(hidden), -1)  # [B, K, 2]
        return masked_mean(-torch.where(costly, logits[..., 1], logits[..., 0]), batch.mask)

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: WindowBatch) -> dict[str, Tensor]:
        """The policy, then the temperature by the entropy that the policy had."""
        c, optimizer = self.config, self.optimizers["policy"]
        self.step += 1
        optimizer.param_groups[0]["lr"].copy_(c.lr * (self.step / max(c.warmup, 1)).clamp(max=1.0))
        loss, metrics = self.policy_loss(batch)
        norms = descend(optimizer, loss, [self.policy_parameters], c.clip)
        if c.stochastic:
            temperature = self.log_temperature.exp()
            pull = temperature * (metrics["policy/entropy"] - self.entropy_target)
            descend(self.optimizers["temperature"], pull, [[self.log_temperature]])
            metrics["policy/temperature"] = temperature.detach()
        return metrics | {"loss": loss.detach()} | dict(zip(("policy/gradient_norm",), norms, strict=False))

    def act(self, context: Context) -> Decision:
        """The mean action, kept within bounds."""
        mean, _ = self.policy(self.hidden(context, (STATE,))[:, :, 0])
        return Decision(context.now(mean).clamp(-1, 1), {})
