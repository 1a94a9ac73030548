"""OASIS: conditional distribution shaping for safe offline RL (Yao et al., NeurIPS 2024).

Instead of constraining a policy on data that fit the limit badly, make data that fit it. Three stages, one after the
other, each with its share of the steps:
 1. a diffusion model of state sequences, conditioned on the return and the cost of their episode, with an inverse
    dynamics model for the actions in between (`generator_loss`);
 2. labelers that tell reward and cost from a state and the next (`labeler_loss`);
 3. sequences are generated from logged states under conditions at the limit (`conditions`, `generate`), and BCQ-Lag
    learns from these alone (`qpt.algorithms.bcq_lag`).

Conditions come from the data's own frontier, so that every task and every limit will do; the published code lists them
by hand for six tasks and the limit 20. Labelers are plain perceptrons; the published ones also learn masks over their
inputs.

`variant="reference"` keeps two properties of the published labelers: an output is a sum of two sigmoids, which cannot
be negative and not above 2, of rewards times 0.1; and BCQ-Lag scales these rewards once more. BCQ-Lag itself then runs
in its own reference variant.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qpt.algorithms.base import Context, Decision, LimitMode, Spec, adam, descend, frozen_copy, masked_mean, soft_update
from qpt.algorithms.bcq_lag import BCQLag, BCQLagConfig
from qpt.algorithms.fields import check_fields
from qpt.algorithms.flat import side_by_side
from qpt.algorithms.oasis_sampling import SequenceBatch, SequenceSampler
from qpt.data.sampling import TransitionBatch, Weighting
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.diffusion import Diffusion, TemporalUNet, cosine_betas
from qpt.nets.heads import Standardize, perceptron
from qpt.nets.mlp import StackedMLP

GENERATOR, LABELERS, POLICY = range(3)  # the stages


@dataclass(frozen=True)
class OASISConfig:
    """Every choice of OASIS."""

    # -- size of the run
    steps: int = 100_000
    """Gradient steps of all stages together; a run that is resumed with more of them trains its policy longer."""
    generator_share: float = 0.4
    """Share of the steps for the generator."""
    labeler_share: float = 0.15
    """Share of the steps for the labelers; the rest is the policy's."""
    stage_min: int = 500
    """Fewest steps of generator and of labelers, however short the run."""
    batch_size: int = 256
    """Sequences a step of the generator, and transitions a step of the labelers and the policy."""
    cost_limit: float = 10.0
    """κ: the limit on an episode's cost that the policy is trained for."""
    variant: Literal["correct", "reference"] = "correct"
    """Labels of any sign and size, or the published sums of sigmoids and rewards that are scaled twice."""

    # -- the generator
    window: int = 32
    """States of a sequence; less where the horizon is shorter."""
    width: int = 64
    """Width of the U-Net (paper: 128); a multiple of 8."""
    inverse_width: int = 128
    """Width of the inverse dynamics model."""
    diffusion_steps: int = 20
    """Denoising steps."""
    predicts: Literal["states", "noise"] = "states"
    """What the U-Net learns to tell: the clean states, or the noise on them (paper). Where there is hardly anything but
    noise, a small error of the noise is a huge one of the states, which takes far more steps to learn away."""
    condition_dropout: float = 0.1
    """How often the condition is hidden in training."""
    weighting: Weighting = "low-cost"
    """How episodes are drawn; "low-cost" never sees those above the ceiling."""
    cost_ceiling: float = 70.0
    """Ceiling of low-cost weighting."""
    lr: float = 1e-3
    """Learning rate of the generator (paper: 3e-5, for 200k steps)."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of the generator."""
    warmup: int = 500
    """Steps of linear warm-up of the generator's learning rate."""
    clip: float = 0.25
    """Gradient-norm clip of the generator."""
    ema: float = 0.999
    """What the averaged generator keeps at every step (paper: about 0.9995); less at first."""

    # -- the labelers
    labeler_width: int = 256
    """Width of the labelers."""
    labeler_lr: float = 1e-3
    """Learning rate of the labelers (paper: 1e-4, for 150k steps)."""

    # -- what is generated
    sequences: int = 6_000
    """Sequences generated, in equal parts for each condition; checkpoints hold them."""
    kept: int = 16
    """Transitions kept of each sequence, from its start."""
    condition_costs: tuple[float, ...] = (0.5, 1.0)
    """Costs asked for, as multiples of the limit."""
    condition_returns: tuple[float, ...] = (0.9, 1.0)
    """Returns asked for at each cost, as multiples of the best logged within that cost."""
    guidance: float = 2.0
    """How far to go from the unconditional towards the conditional prediction, and beyond (1: just there)."""
    temperature: float = 0.5
    """Factor of the noise in generation."""
    clean_bound: float | None = None
    """Clip of the states foreseen on the way, in standard deviations; None: the farthest logged, in each dimension."""

    @property
    def generator_steps(self) -> int:
        return max(round(self.generator_share * self.steps), self.stage_min)

    @property
    def labeler_steps(self) -> int:
        return max(round(self.labeler_share * self.steps), self.stage_min)

    @property
    def policy_steps(self) -> int:
        return max(self.steps - self.generator_steps - self.labeler_steps, 0)

    def __post_init__(self) -> None:
        check_fields(
            self,
            diffusion_steps="at least 1",
            inverse_width="at least 1",
            labeler_width="at least 1",
            window="at least 2",
            sequences="at least 1",
            kept="at least 1",
            stage_min="at least 0",
            generator_share="from 0 to 1",
            labeler_share="from 0 to 1",
            clean_bound="above 0",
            condition_costs="one number or more",
            condition_returns="one number or more",
        )

    @classmethod
    def preset(cls, name: str) -> OASISConfig:
        """ "default", or "paper": the published sizes (200k, 150k and 25k steps), limit and defects."""
        if name == "default":
            return cls()
        if name == "paper":
            return replace(
                cls(),
                variant="reference",
                steps=375_000,
                generator_share=200 / 375,
                labeler_share=150 / 375,
                cost_limit=20.0,
                width=128,
                predicts="noise",
                lr=3e-5,
                ema=0.9995,
                labeler_lr=1e-4,
                sequences=12_000,
                condition_costs=(0.5, 0.75, 1.0),
                condition_returns=(0.9,),
                clean_bound=10.0,
            )
        raise QptError(f"OASIS has no preset {name!r}; choose default or paper")


class OASIS(nn.Module):
    """Generator, labelers, what was generated, and the policy that learns from it."""

    limit_mode: LimitMode = "trained"
    deciding: frozenset[str] = frozenset()
    compilable = ("generator_loss", "labeler_loss")
    step: Tensor
    ends: Tensor
    least: Tensor
    spread: Tensor
    bound: Tensor
    starts: Tensor
    states: Tensor
    actions: Tensor
    rewards: Tensor
    costs: Tensor

    def __init__(self, config: OASISConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        s, a = spec.observation_dim, spec.action_dim
        if config.width % 8:
            raise QptError(f"the width of OASIS' generator is a multiple of 8, not {config.width}")
        self.standardize = Standardize(spec.observation_mean, spec.observation_std)
        self.unet = TemporalUNet(s, 2, width=config.width)
        self.averaged_unet = frozen_copy(self.unet)
        self.inverse = perceptron([2 * s, config.inverse_width, config.inverse_width, a])
        self.diffusion = Diffusion(cosine_betas(config.diffusion_steps))
        outputs = 1 if config.variant == "correct" else 2
        self.labelers = StackedMLP(2, [2 * s, config.labeler_width, config.labeler_width, outputs])  # reward, cost
        self.policy = BCQLag(
            BCQLagConfig(batch_size=config.batch_size, cost_limit=config.cost_limit, variant=config.variant), spec
        )
        self.context = self.policy.context
        self.register_buffer("least", torch.tensor([spec.return_min, 0.0]))
        spread = torch.tensor([spec.return_max - spec.return_min, spec.cost_max])
        self.register_buffer("spread", torch.where(spread > 0, spread, 1.0))
        self.register_buffer("bound", torch.full((s,), config.clean_bound or 0.0))  # None: filled from the data
        longest = min(config.window, spec.horizon + 1)
        self.window = -(-longest // self.unet.shrink) * self.unet.shrink  # rounded up
        self.kept = min(config.kept, longest - 1)
        largest = max(abs(spec.return_min), abs(spec.return_max), 1e-6)
        self.label_scale = spec.horizon / largest if config.variant == "correct" else 0.1
        n, k = config.sequences, self.kept
        shapes = {"starts": (n, s), "states": (n, k + 1, s), "actions": (n, k, a), "rewards": (n, k), "costs": (n, k)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))
        # Where the first two stages end is fixed when a run begins, and kept when it is prolonged.
        ends = torch.tensor([config.generator_steps, config.generator_steps + config.labeler_steps])
        self.register_buffer("ends", ends)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self._read_clock()
        self.make_optimizers()

    # -- stages --------------------------------------------------------------------------------------------------------

    def _read_clock(self) -> None:
        self.host_step = int(self.step)  # the host decides on the stage without waiting for the device
        self._host_ends = self.ends.tolist()

    @property
    def phase(self) -> int:
        """The stage of the next step; a step captured in one stage must not be replayed in another."""
        return sum(self.host_step >= end for end in self._host_ends)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Those of the current stage: what earlier ones remember is not needed again."""
        return self._optimizers[self.phase]

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.unet_parameters = list(self.unet.parameters())
        self.unet_targets = side_by_side(self.averaged_unet.parameters())
        self.generator_parameters = [*self.unet_parameters, *self.inverse.parameters()]
        self.labeler_parameters = list(self.labelers.parameters())
        self.policy.make_optimizers()
        self._optimizers: list[dict[str, torch.optim.Optimizer]] = [
            {"generator": adam(self.generator_parameters, c.lr, weight_decay=c.weight_decay)},
            {"labelers": adam(self.labeler_parameters, c.labeler_lr)},
            self.policy.optimizers,
        ]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._read_clock()
        return result

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> SequenceSampler:
        c = self.config
        if c.policy_steps == 0:
            warnings.warn(
                f"{c.steps} steps leave none for the policy: the generator takes {c.generator_steps} and the labelers "
                f"{c.labeler_steps}; give more --steps, or a smaller --stage-min",
                stacklevel=2,
            )
        sampler = SequenceSampler(data, c.batch_size, self.window, self.kept, c.weighting, c.cost_ceiling, device, seed)
        self.starts.copy_(sampler.starts(len(self.starts)))
        if c.clean_bound is None:
            self.bound.copy_(self.standardize(sampler.states).abs().amax(0))
        return sampler

    # -- 1 and 2: generator and labelers -------------------------------------------------------------------------------

    def normalize_totals(self, totals: Tensor) -> Tensor:
        """Return and cost of episodes [..., 2], each from 0 to 1 in the data."""
        return (totals - self.least) / self.spread

    def generator_loss(self, batch: SequenceBatch, step: Tensor, noise: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors of what the U-Net predicts, but for the given first state, and of the actions in between."""
        clean = self.standardize(batch.states)
        noisy = self.diffusion.corrupt(clean, step, noise)
        noisy = torch.cat([clean[:, :1], noisy[:, 1:]], 1)
        predicted = self.unet(noisy, step, self.normalize_totals(batch.totals), keep)
        valid = batch.mask[:, 1:]
        wanted = clean if self.config.predicts == "states" else noise
        state_loss = masked_mean((predicted - wanted)[:, 1:].square().mean(-1), valid)
        between = self.inverse(torch.cat([clean[:, :-1], clean[:, 1:]], -1))
        action_loss = masked_mean((between - batch.actions[:, :-1]).square().mean(-1), valid)
        return state_loss, action_loss

    def label(self, seen: Tensor, following: Tensor) -> Tensor:
        """Scaled reward and cost of transitions between standardised states: [2, ...]."""
        raw: Tensor = self.labelers(torch.cat([seen, following], -1))
        return raw[..., 0] if self.config.variant == "correct" else torch.sigmoid(raw).sum(-1)

    def labeler_loss(self, batch: TransitionBatch) -> Tensor:
        wanted = torch.stack([self.label_scale * batch.rewards, batch.costs])
        given = self.label(self.standardize(batch.observations), self.standardize(batch.next_observations))
        return (given - wanted).square().mean(1).sum()

    # -- 3: generation -------------------------------------------------------------------------------------------------

    def conditions(self) -> list[tuple[float, float]]:
        """(return, cost) asked for: shares of the best logged return within each share of the limit."""
        c, wanted = self.config, []
        for cost in (share * c.cost_limit for share in c.condition_costs):
            best = self.spec.suggest_return(cost)
            wanted += [(best - (1 - share) * abs(best), cost) for share in c.condition_returns]
        return wanted

    @torch.no_grad()
    def generate(self, chunk: int = 512) -> None:
        """Fill the buffers: states by guided denoising from logged starts, actions and labels from pairs of states."""
        wanted = torch.tensor(self.conditions(), device=self.starts.device)
        wanted = self.normalize_totals(wanted[torch.arange(len(self.starts), device=wanted.device) % len(wanted)])
        for first in range(0, len(self.starts), chunk):
            part = slice(first, first + chunk)
            clean = self.denoise(self.standardize(self.starts[part]), wanted[part])[:, : self.kept + 1]
            seen, following = clean[:, :-1], clean[:, 1:]
            reward, cost = self.label(seen, following)
            self.states[part] = clean * self.standardize.std + self.standardize.mean
            self.actions[part] = self.inverse(torch.cat([seen, following], -1)).clamp(-1, 1)
            self.rewards[part] = reward / self.label_scale if self.config.variant == "correct" else reward
            self.costs[part] = cost  # may dip below 0: a clamp would raise the mean wherever the truth is 0

    def denoise(self, first: Tensor, wanted: Tensor) -> Tensor:
        """Sequences of standardised states from their first [n, S], under normalised conditions [n, 2]: [n, H, S]."""
        c, n = self.config, len(first)
        x: Tensor = c.temperature * torch.randn(n, self.window, first.shape[1], device=first.device)
        keep = torch.cat([torch.ones(n, device=x.device), torch.zeros(n, device=x.device)])
        for step in reversed(range(c.diffusion_steps)):
            x[:, 0] = first
            when = torch.full((2 * n,), step, device=x.device)
            informed, blind = self.averaged_unet(x.repeat(2, 1, 1), when, wanted.repeat(2, 1), keep).chunk(2)
            noise = c.temperature * torch.randn_like(x)
            clean = blind + c.guidance * (informed - blind)
            if c.predicts == "noise":
                clean = self.diffusion.clean(x, step, clean)
            x = self.diffusion.denoise(x, step, clean.clamp(-self.bound, self.bound), noise, posterior=True)
        x[:, 0] = first
        return x

    def draw_generated(self) -> TransitionBatch:
        """Transitions for the policy; none of them ends an episode."""
        rows = torch.randint(self.rewards.numel(), (self.config.batch_size,), device=self.rewards.device)
        sequence, place = rows // self.kept, rows % self.kept
        nothing = torch.zeros_like(self.rewards[0, 0]).expand(len(rows))
        return TransitionBatch(
            self.states[sequence, place],
            self.actions[sequence, place],
            self.rewards[sequence, place],
            self.costs[sequence, place],
            self.states[sequence, place + 1],
            nothing,
            nothing,
            place + 1,
            nothing,
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """A step of the current stage; the first of the last stage generates before it."""
        stage, begins = self.phase, self.host_step == self._host_ends[1]
        optimizers = self.optimizers
        self.host_step += 1
        self.step += 1
        if stage == GENERATOR:
            return self._update_generator(batch, optimizers["generator"])
        if stage == LABELERS:
            loss = self.labeler_loss(batch.transitions)
            descend(optimizers["labelers"], loss, [self.labeler_parameters])
            return {"labeler/loss": loss.detach()}
        if begins:
            self.generate()
        return self.policy.update(self.draw_generated())

    def _update_generator(self, batch: SequenceBatch, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        c, device, count = self.config, batch.states.device, len(batch.states)
        optimizer.param_groups[0]["lr"].copy_(c.lr * (self.step / max(c.warmup, 1)).clamp(max=1.0))
        step = torch.randint(c.diffusion_steps, (count,), device=device)
        keep = (torch.rand(count, device=device) >= c.condition_dropout).to(batch.states.dtype)
        state_loss, action_loss = self.generator_loss(batch, step, torch.randn_like(batch.states), keep)
        descend(optimizer, 0.5 * (state_loss + action_loss), [self.generator_parameters], c.clip)
        # A short run must not average its random beginning: the memory spans about a tenth of the steps, until `ema`'s.
        soft_update(self.unet_targets, self.unet_parameters, (10 / (10 + self.step)).clamp(min=1 - c.ema))
        return {"generator/loss": state_loss.detach(), "generator/inverse_loss": action_loss.detach()}

    def act(self, context: Context) -> Decision:
        return self.policy.act(context)
