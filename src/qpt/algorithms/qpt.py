"""QPT, the Q-learning Penalized Transformer: conditional imitation, pulled towards reward and away from cost by critics.

Equations of the paper: L_DT (`policy_loss`), n-step critic targets (`critic_loss`), the penalised objective with normalised
weights (`policy_loss`), candidate inference with a feasibility test (`qpt.algorithms.candidates`). What the paper leaves open,
and what goes beyond it, is a field of `QPTConfig`; `preset("paper")` is the paper to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qpt.algorithms import candidates
from qpt.algorithms.base import (
    Context,
    Decision,
    LimitMode,
    Spec,
    adam,
    descend,
    frozen_copy,
    masked_mean,
    soft_update,
)
from qpt.algorithms.targets import expectile_loss, n_step_targets
from qpt.data.augment import augment
from qpt.data.sampling import Weighting, WindowBatch, WindowSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.mlp import StackedMLP
from qpt.nets.transformer import TrajectoryTransformer

Reduction = Literal["min", "max", "mean"]


@dataclass(frozen=True)
class QPTConfig:
    """Every choice of QPT; the defaults are what measured best on the data sets of docs/results.md."""

    # -- size of the run
    steps: int = 30_000
    """Gradient steps."""
    batch_size: int = 256
    """Windows a step."""

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
    """The token is offset - scaled cost-to-go (CDT uses 50 with a scale of 1)."""
    head: Literal["tanh", "linear"] = "tanh"
    """Action head; "linear" is clamped to [-1, 1] when acting."""

    # -- data
    augmentation: bool = True
    """Relabel episodes with infeasible targets (switch 1 of the paper's ablation)."""
    augmentation_rule: Literal["paper", "osrl"] = "paper"
    """Algorithm 2 of the paper, or CDT's code."""
    augmentation_fraction: float = 0.2
    """Relabelled episodes, as a share of the logged ones."""
    weighting: Weighting = "uniform"
    """How episodes are drawn; "low-cost" is CDT's and never sees those above the ceiling."""
    cost_ceiling: float = 70.0
    """Ceiling of low-cost weighting."""

    # -- critics
    critic_width: int = 256
    """Width of the critics' three hidden layers."""
    discount: float = 1.0
    """Discount of the reward critics (paper's predecessor: 0.99)."""
    cost_discount: float = 1.0
    """Discount of the cost critics; 1 with time critics makes Q^c comparable with the undiscounted cost-to-go."""
    n_step: int | None = None
    """Steps until a target bootstraps; None: to the end of the window, as in the paper."""
    bootstrap: Literal["policy", "expectile"] = "expectile"
    """Value at the end of the n steps: of the target policy's action (paper), or an in-sample expectile over logged actions."""
    reward_expectile: float = 0.9
    """Expectile of the reward value (bootstrap "expectile"): above 0.5 leans towards the best logged actions."""
    cost_expectile: float = 0.1
    """Expectile of the cost value: below 0.5 values the least-cost continuation, so that the test means something at every limit."""
    budget_critics: bool = True
    """Reward critics know the remaining budget, drawn at random in training, and value only continuations whose least cost
    (by the cost critics) fits it; needs bootstrap "expectile"."""
    budget_margin: float = 0.5
    """Cost by which a continuation may exceed the budget and still count as fitting: the critics are not exact."""
    time_critics: bool = True
    """Critics know the step, and a timeout ends the episode for them: values of the episode, not of an endless task."""
    cost_reduction: Reduction = "mean"
    """Over the twin cost critics, in targets and in the test (paper: min)."""
    reward_scale: float | None = None
    """Factor of rewards in the critics; None: 10 / the mean return-to-go of the data."""
    critic_cost_scale: float | None = None
    """Factor of costs in the critics; None: 10 / the mean cost-to-go of the data."""
    clamp_cost: bool = False
    """Keep bootstrapped costs at or above 0."""

    # -- the objective
    train_with_reward_critic: bool = True
    """Use the reward term (switch 2 of the ablation)."""
    train_with_cost_critic: bool = True
    """Use the cost term (switch 3)."""
    eta_reward: float = 0.1
    """η1, weight of the reward term."""
    eta_cost: float = 0.1
    """η2, weight of the cost term."""
    cost_term: Literal["all", "excess"] = "excess"
    """Penalise the whole Q^c (paper), or only what exceeds the remaining budget."""
    normalizer: Literal["batch", "data"] = "data"
    """Scale of a term: the batch mean of |Q| on logged actions (paper), or a constant of the data that cannot shrink as the policy gets safer."""
    normalizer_floor: float = 0.01
    """Smallest batch normaliser, for data in which costs are almost never seen."""

    # -- optimisation
    lr: float = 3e-4
    """Learning rate of the policy."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of the policy."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's betas."""
    warmup: int = 500
    """Steps of linear warm-up of the policy's learning rate."""
    clip: float = 0.25
    """Gradient-norm clip of the policy."""
    critic_clip: float = 10.0
    """Gradient-norm clip of each kind of critic (paper: 0.25)."""
    ema: float = 0.995
    """ρ of the target policy: what it keeps at every step."""
    critic_ema: float = 0.99
    """ρ of the target critics (paper: that of the policy)."""

    # -- candidates and the test, at deployment
    inference_with_candidates: bool = True
    """Choose among candidates by the critics (switch 4 of the ablation)."""
    candidates: int = 50
    """Target pairs tried in one pass."""
    rtg_noise: float = 0.05
    """Spread of the candidates' return targets, relative to the target."""
    ctg_noise: float = 0.0
    """Spread of the candidates' cost-to-go, relative to the limit (paper: 0)."""
    action_noise: float = 0.0
    """Spread of noise added to the candidates' actions."""
    noise_mode: Literal["episode", "step"] = "episode"
    """Noise drawn once an episode (paper), or anew on the last token of each step (one shared history, faster)."""
    cost_test: Literal["literal", "horizon", "none"] = "literal"
    """Feasible: Q^c <= cost-to-go (paper), <= the cost-to-go spent evenly and discounted, or everything."""
    test_offset: float = 0.0
    """Added to Q^c in the test (see `qpt calibrate`)."""
    fallback: Literal["least-cost", "ignore", "tradeoff"] = "least-cost"
    """When no candidate is feasible: the least Q^c, the largest Q^r, or the trade-off."""
    selection: Literal["constrained", "tradeoff", "shield"] = "constrained"
    """Best feasible candidate (paper); argmax Q^r - λ Q^c; or the un-noised candidate unless it fails the test."""
    tradeoff: float = 1.0
    """λ of the trade-off, in reward per cost as the data scale them."""
    choice: Literal["argmax", "softmax"] = "argmax"
    """Take the best score, or draw by softmax over feasible ones."""
    target_factor: float = 1.0
    """Return target as a multiple of the best safe logged return."""
    reward_reduction: Reduction = "min"
    """Over the twin reward critics, in targets and scores."""

    @classmethod
    def preset(cls, name: str) -> QPTConfig:
        """The default, "transformer" (no critics), or "paper": to the letter, with its table and CDT's open choices."""
        if name == "default":
            return cls()
        if name == "transformer":  # the plain conditional transformer with augmentation: switches 2 to 4 off
            return replace(
                cls(), train_with_reward_critic=False, train_with_cost_critic=False, inference_with_candidates=False
            )
        if name == "paper":
            return replace(
                cls(),
                steps=100_000,
                batch_size=2048,
                return_scale=0.1,
                cost_scale=1.0,
                cost_offset=50.0,
                weighting="low-cost",
                discount=0.99,
                cost_discount=0.99,
                n_step=None,
                bootstrap="policy",
                budget_critics=False,
                time_critics=False,
                cost_reduction="min",
                reward_reduction="min",
                reward_scale=0.1,
                critic_cost_scale=1.0,
                critic_clip=0.25,
                critic_ema=0.995,
                clamp_cost=False,
                eta_reward=0.1,
                eta_cost=0.1,
                cost_term="all",
                normalizer="batch",
                lr=1e-4,
                critic_lr=1e-4,
                inference_with_candidates=True,
                candidates=50,
                rtg_noise=0.05,
                ctg_noise=0.0,
                action_noise=0.0,
                noise_mode="episode",
                cost_test="literal",
                fallback="least-cost",
                selection="constrained",
                choice="argmax",
            )
        raise QptError(f"QPT has no preset {name!r}; choose default, paper or transformer")


class QPT(nn.Module):
    """The networks, their targets and the training step."""

    limit_mode: LimitMode = "live"
    compilable = ("critic_loss", "policy_loss")

    def __init__(self, config: QPTConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec, self.context = config, spec, config.context
        largest = max(abs(spec.return_min), abs(spec.return_max), 1e-6)
        self.transformer = TrajectoryTransformer(
            torch.tensor(spec.observation_mean),
            torch.tensor(spec.observation_std),
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
        self.head = nn.Linear(config.width, spec.action_dim)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        extra = int(config.budget_critics) + int(config.time_critics)
        inputs, hidden = spec.observation_dim + extra, [config.critic_width] * 3
        self.reward_critics = StackedMLP(2, [inputs + spec.action_dim, *hidden, 1])
        self.cost_critics = StackedMLP(2, [inputs + spec.action_dim, *hidden, 1])
        self.values = StackedMLP(2, [inputs, *hidden, 1])  # of reward and of cost; learned with bootstrap "expectile"
        self.target_transformer, self.target_head = frozen_copy(self.transformer), frozen_copy(self.head)
        self.target_reward_critics, self.target_cost_critics = (
            frozen_copy(self.reward_critics),
            frozen_copy(self.cost_critics),
        )
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.step: Tensor
        self.reward_scale = config.reward_scale or 10 / max(spec.mean_return_to_go, 1e-6)
        self.cost_scale = config.critic_cost_scale or 10 / max(spec.mean_cost_to_go, 1.0)
        self.n_step = config.n_step or config.context
        # All four switches off leave the plain conditional transformer, which needs no critics.
        self.uses_critics = config.train_with_reward_critic or config.train_with_cost_critic or config.inference_with_candidates
        self.autocast = False  # set by the loop where bf16 pays
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.policy_parameters = [*self.transformer.parameters(), *self.head.parameters()]
        self.policy_targets = [*self.target_transformer.parameters(), *self.target_head.parameters()]
        self.critic_parameters = [*self.reward_critics.parameters(), *self.cost_critics.parameters()]
        self.critic_targets = [*self.target_reward_critics.parameters(), *self.target_cost_critics.parameters()]
        learned = [self.reward_critics, self.cost_critics, *([self.values] if c.bootstrap == "expectile" else [])]
        self.learned_critics = [
            list(part.parameters()) for part in learned
        ]  # clipped apart: neither signal drowns the other
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": adam(self.policy_parameters, c.lr, weight_decay=c.weight_decay, betas=c.betas),
            "critics": adam(sum(self.learned_critics, []), c.critic_lr, betas=c.betas),
        }

    # -- data --------------------------------------------------------------------------------------------------------------

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> WindowSampler:
        c, a = self.config, self.spec.augmentation
        relabelled = None
        if c.augmentation:
            relabelled = augment(
                data,
                rule=c.augmentation_rule,
                fraction=c.augmentation_fraction,
                max_reward=a.max_reward,
                degree=a.degree,
                max_reward_decrease=a.max_reward_decrease,
                seed=seed,
            )
        return WindowSampler(
            data,
            c.batch_size,
            c.context,
            relabelled=relabelled,
            weighting=c.weighting,
            cost_ceiling=c.cost_ceiling,
            device=device,
            seed=seed,
        )

    # -- networks ----------------------------------------------------------------------------------------------------------

    def squash(self, raw: Tensor) -> Tensor:
        return torch.tanh(raw) if self.config.head == "tanh" else raw

    def features(self, observations: Tensor, budgets: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """What the reward and the cost critics see of a state: the normalised observation and, where configured, the step.

        With budget critics there is a place for the remaining budget, which cost critics see as 0: least cost has no budget.
        """
        parts = [(observations - self.transformer.mean) / self.transformer.std]
        if self.config.time_critics:
            parts.append(steps[..., None].to(observations.dtype) * (2 / self.spec.horizon) - 1)
        if not self.config.budget_critics:
            seen = torch.cat(parts, -1)
            return seen, seen
        budget = budgets.clamp(min=0)[..., None] * (4 / max(self.spec.cost_max, 1.0))
        return torch.cat([*parts, budget], -1), torch.cat([*parts, torch.zeros_like(budget)], -1)

    @staticmethod
    def reduce(twins: Tensor, how: Reduction) -> Tensor:
        """[2, ...] -> [...]."""
        if how == "mean":
            return twins.mean(0)
        return torch.minimum(twins[0], twins[1]) if how == "min" else torch.maximum(twins[0], twins[1])

    def policy(self, batch: WindowBatch, target: bool = False) -> Tensor:
        """Actions at every step of the windows: [B, K, A]."""
        transformer, head = (self.target_transformer, self.target_head) if target else (self.transformer, self.head)
        with torch.autocast(batch.actions.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = transformer(batch.return_to_go, batch.cost_to_go, batch.observations, batch.actions, batch.steps)
            raw = head(hidden[:, :, 0])
        return self.squash(raw.float() if self.autocast else raw)

    # -- losses ------------------------------------------------------------------------------------------------------------

    def critic_loss(self, batch: WindowBatch, budget_draw: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean squared error of all four critics to their n-step targets (and of the values to their expectiles)."""
        c = self.config
        rewards, costs, budgets = batch.rewards * self.reward_scale, batch.costs * self.cost_scale, batch.cost_to_go
        if c.budget_critics:  # before each step of the window
            budgets = budget_draw[:, None] - (batch.costs.cumsum(1) - batch.costs)
        ended = batch.terminals.bool() | batch.timeouts.bool() if c.time_critics else batch.terminals
        seen, unaware = self.features(batch.observations, budgets, batch.steps)  # [B, K, F]
        logged, logged_cost = torch.cat([seen, batch.actions], -1), torch.cat([unaware, batch.actions], -1)
        with torch.no_grad():
            if c.bootstrap == "policy":
                acted = torch.cat([seen, self.policy(batch, target=True)], -1)
                reward_value = self.reduce(self.target_reward_critics(acted)[..., 0], c.reward_reduction)
                cost_value = self.reduce(self.target_cost_critics(acted)[..., 0], c.cost_reduction)
            else:
                reward_value, cost_value = self.values.each(torch.stack([seen, unaware]))[..., 0]
            if c.clamp_cost:
                cost_value = cost_value.clamp(min=0)
            reward_target, valid = n_step_targets(rewards, reward_value, batch.mask, ended, c.discount, self.n_step)
            cost_target, _ = n_step_targets(costs, cost_value, batch.mask, ended, c.cost_discount, self.n_step)
            fits = valid
            if c.budget_critics:  # what the logged steps and the least continuation cost must fit the budget
                fits = valid & (cost_target <= (budgets + c.budget_margin) * self.cost_scale)
        reward_q, cost_q = self.reward_critics(logged)[..., 0], self.cost_critics(logged_cost)[..., 0]  # [2, B, K]
        reward_loss = masked_mean((reward_q - reward_target).square().sum(0), fits)
        cost_loss = masked_mean((cost_q - cost_target).square().sum(0), valid)
        metrics = {
            "critic/reward_loss": reward_loss.detach(),
            "critic/cost_loss": cost_loss.detach(),
            "critic/reward_q": masked_mean(reward_q[0].detach(), batch.mask),
            "critic/cost_q": masked_mean(cost_q[0].detach(), batch.mask),
        }
        loss = reward_loss + cost_loss
        if c.bootstrap == "expectile":
            with torch.no_grad():
                reward_goal = self.reduce(self.target_reward_critics(logged)[..., 0], c.reward_reduction)
                cost_goal = self.reduce(self.target_cost_critics(logged_cost)[..., 0], c.cost_reduction)
                if c.budget_critics:
                    fits = batch.mask & (cost_goal <= (budgets + c.budget_margin) * self.cost_scale)
                else:
                    fits = batch.mask
            reward_v, cost_v = self.values.each(torch.stack([seen, unaware]))[..., 0]
            value_loss = masked_mean(expectile_loss(reward_goal - reward_v, c.reward_expectile), fits)
            value_loss = value_loss + masked_mean(expectile_loss(cost_goal - cost_v, c.cost_expectile), batch.mask)
            loss, metrics["critic/value_loss"] = loss + value_loss, value_loss.detach()
        return loss, metrics

    def policy_loss(self, batch: WindowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """L_DT - α1 E[Q^r(s, π)] + α2 E[Q^c(s, π)] over valid steps, α = η / E|Q(s, a)| without gradient."""
        c = self.config
        actions = self.policy(batch)
        imitation = masked_mean((actions - batch.actions).square().mean(-1), batch.mask)
        loss, metrics = imitation, {"policy/imitation": imitation.detach()}
        if not (c.train_with_reward_critic or c.train_with_cost_critic):
            return loss, metrics
        seen, unaware = self.features(batch.observations, batch.cost_to_go, batch.steps)
        if c.train_with_reward_critic:
            critics, logged = self.reward_critics, torch.cat([seen, batch.actions], -1)
            q = masked_mean(critics(torch.cat([seen, actions], -1))[..., 0].mean(0), batch.mask)
            scale = self._scale(critics, logged, batch.mask, self.spec.mean_return_to_go * self.reward_scale)
            loss, metrics["policy/reward_q"] = loss - c.eta_reward * q / scale, q.detach()
        if c.train_with_cost_critic:
            critics, logged = self.cost_critics, torch.cat([unaware, batch.actions], -1)
            each = critics(torch.cat([unaware, actions], -1))[..., 0].mean(0)
            if c.cost_term == "excess":
                each = (each - batch.cost_to_go.clamp(min=0) * self.cost_scale).clamp(min=0)
            q = masked_mean(each, batch.mask)
            scale = self._scale(critics, logged, batch.mask, self.spec.mean_cost_to_go * self.cost_scale)
            loss, metrics["policy/cost_q"] = loss + c.eta_cost * q / scale, q.detach()
        return loss, metrics

    @torch.no_grad()
    def _scale(self, critics: StackedMLP, logged: Tensor, mask: Tensor, constant: float) -> Tensor:
        if self.config.normalizer == "data":
            return torch.full((), max(constant, self.config.normalizer_floor), device=logged.device)
        return masked_mean(critics(logged)[..., 0].abs().mean(0), mask).clamp(min=self.config.normalizer_floor)

    # -- one step ----------------------------------------------------------------------------------------------------------

    def update(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Critics, then the policy against the updated critics, then the targets: the order of the paper's algorithm."""
        c = self.config
        metrics: dict[str, Tensor] = {}
        if self.uses_critics:
            critic_loss, metrics = self.critic_loss(batch, self._draw_budgets(batch))
            descend(self.optimizers["critics"], critic_loss, self.learned_critics, c.critic_clip)

        optimizer = self.optimizers["policy"]
        self.step += 1
        optimizer.param_groups[0]["lr"].copy_(c.lr * (self.step / max(c.warmup, 1)).clamp(max=1.0))
        loss, more = self.policy_loss(batch)
        norms = descend(optimizer, loss, [self.policy_parameters], c.clip)
        soft_update(self.policy_targets, self.policy_parameters, 1 - c.ema)
        if self.uses_critics:
            soft_update(self.critic_targets, self.critic_parameters, 1 - c.critic_ema)
        return metrics | more | {"loss": loss.detach(), "policy/gradient_norm": norms[0]}

    def _draw_budgets(self, batch: WindowBatch) -> Tensor:
        """Budgets at the start of each window, denser near 0 where they bind; drawn anew, for in hindsight they say nothing."""
        u = torch.rand(len(batch.rewards), device=batch.rewards.device, dtype=batch.rewards.dtype)
        return u.square() * self.spec.cost_max

    def act(self, context: Context) -> Decision:
        return candidates.decide(self, context)
