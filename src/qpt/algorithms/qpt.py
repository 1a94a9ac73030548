"""QPT, the Q-learning Penalized Transformer: conditional imitation, drawn to reward and away from cost by critics.

Equations of the paper: L_DT (`policy_loss`), n-step critic targets (`critic_loss`), the penalised objective with
normalised weights (`policy_loss`), candidate inference with a feasibility test (`qpt.algorithms.candidates`). What the
paper leaves open, and what goes beyond it, is a field of `QPTConfig`; `preset("paper")` is the paper to the letter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

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
    relabelled_windows,
    soft_update,
)
from qpt.algorithms.beside import Beside
from qpt.algorithms.flat import side_by_side
from qpt.algorithms.qpt_config import QPTConfig, Reduction
from qpt.algorithms.targets import expectile_loss, n_step_targets
from qpt.data.sampling import WindowBatch, WindowSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.mlp import StackedMLP, run_together
from qpt.nets.transformer import TrajectoryTransformer

__all__ = ["QPT", "QPTConfig"]


def with_actions(states: tuple[Tensor, Tensor], actions: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of reward and of cost critics; one tensor where both see the same."""
    seen, unaware = states
    joined = torch.cat([seen, actions], -1)
    return joined, joined if unaware is seen else torch.cat([unaware, actions], -1)


class QPT(nn.Module):
    """The networks, their targets and the training step."""

    limit_mode: LimitMode = "live"
    deciding = candidates.FIELDS
    compilable = ("actions", "critic_loss", "policy_loss")

    def __init__(self, config: QPTConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
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
            cost_scale=config.cost_scale or 10 / max(spec.cost_max, spec.cost_unit),
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
        # Tells logged actions from drawn ones: the logarithm of how many times as likely an action is among the logged.
        self.likelihood = StackedMLP(1, [inputs + spec.action_dim, *hidden, 1]) if config.support else None
        self.target_transformer, self.target_head = frozen_copy(self.transformer), frozen_copy(self.head)
        self.target_reward_critics = frozen_copy(self.reward_critics)
        self.target_cost_critics = frozen_copy(self.cost_critics)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.step: Tensor
        # Tensors, so that runs which differ in them alone share one compiled step.
        self.register_buffer(
            "etas", torch.tensor([config.eta_reward, config.eta_cost], dtype=torch.float64), persistent=False
        )
        self.etas: Tensor
        pareto = torch.tensor([[*spec.frontier_costs, float("inf")], [*spec.frontier_returns, float("inf")]])
        self.register_buffer("frontier", pareto, persistent=False)  # costs and returns, and what was never reached
        self.frontier: Tensor
        self.reward_scale = config.reward_scale or 10 / max(spec.mean_return_to_go, 1e-6)
        self.cost_scale = config.critic_cost_scale or 10 / max(spec.mean_cost_to_go, spec.cost_unit)
        self.margin = config.budget_margin * spec.cost_unit
        self.n_step = config.n_step or config.context
        # All four switches off leave the plain conditional transformer, which needs no critics.
        self.uses_critics = (
            config.train_with_reward_critic or config.train_with_cost_critic or config.inference_with_candidates
        )
        self.autocast = False  # set by the loop where bf16 pays
        self.beside = Beside()
        self.make_optimizers()

    @property
    def context(self) -> int:
        """Steps that a decision sees."""
        return self.config.history or self.config.context

    def make_optimizers(self) -> None:
        """(Re)build the optimisers, after the module has moved to its device."""
        c = self.config
        self.policy_parameters = [*self.transformer.parameters(), *self.head.parameters()]
        self.policy_targets = side_by_side([*self.target_transformer.parameters(), *self.target_head.parameters()])
        self.critic_parameters = [*self.reward_critics.parameters(), *self.cost_critics.parameters()]
        self.critic_targets = side_by_side(
            [*self.target_reward_critics.parameters(), *self.target_cost_critics.parameters()]
        )
        learned = [self.reward_critics, self.cost_critics, *([self.values] if c.bootstrap == "expectile" else [])]
        learned += [self.likelihood] if self.likelihood else []
        self.learned_critics = [list(part.parameters()) for part in learned]  # clipped apart: no signal drowns another
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": adam(self.policy_parameters, c.lr, weight_decay=c.weight_decay, betas=c.betas),
            "critics": adam(itertools.chain(*self.learned_critics), c.critic_lr, betas=c.betas),
        }

    # -- data ----------------------------------------------------------------------------------------------------------

    def make_sampler(self, data: Trajectories, device: torch.device, seed: int) -> WindowSampler:
        c, horizon = self.config, self.spec.horizon
        if self.uses_critics and max(c.discount, c.cost_discount) == 1 and not data.terminals.any():
            longest = int(data.lengths.max())
            if not c.time_critics or longest < horizon:  # nothing that values without a discount could settle on
                raise QptError(
                    "no logged episode comes to an end for the critics, which have a discount of 1: none has a terminal"
                    + (f", or reaches the horizon of {horizon} steps" if c.time_critics else "")
                    + f"; give --horizon {longest} with time critics, or --discount 0.99 --cost-discount 0.99"
                )
        return relabelled_windows(self.config, self.spec, data, device, seed)

    # -- networks ------------------------------------------------------------------------------------------------------

    def squash(self, raw: Tensor) -> Tensor:
        return torch.tanh(raw) if self.config.head == "tanh" else raw

    def features(self, observations: Tensor, budgets: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """What the reward and the cost critics see of a state: the normalised observation and, if configured, the step.

        With budget critics also the remaining budget, which cost critics see as 0: the least cost has no budget.
        """
        parts = [(observations - self.transformer.mean) / self.transformer.std]
        if self.config.time_critics:
            parts.append(steps[..., None].to(observations.dtype) * (2 / self.spec.horizon) - 1)
        if not self.config.budget_critics:
            seen = torch.cat(parts, -1)
            return seen, seen
        # What is left beyond the dearest episode makes no difference.
        most = max(self.spec.cost_max, self.spec.cost_unit)
        budget = budgets.clamp(0.0, most)[..., None] * (4 / most)
        return torch.cat([*parts, budget], -1), torch.cat([*parts, torch.zeros_like(budget)], -1)

    @staticmethod
    def reduce(twins: Tensor, how: Reduction) -> Tensor:
        """[2, ...] -> [...]."""
        if how == "mean":
            return twins.mean(0)
        return torch.minimum(twins[0], twins[1]) if how == "min" else torch.maximum(twins[0], twins[1])

    def policy(self, batch: WindowBatch, target: bool = False, last: Tensor | None = None) -> Tensor:
        """Actions at every step of the windows [B, K, A], or only at their `last` one [B, 1, A]."""
        transformer, head = (self.target_transformer, self.target_head) if target else (self.transformer, self.head)
        with torch.autocast(batch.actions.device.type, torch.bfloat16, enabled=self.autocast):
            inputs = (batch.return_to_go, batch.cost_to_go, batch.observations, batch.actions, batch.steps)
            hidden = transformer(*inputs, last=last)
            raw = head(hidden[:, :, 0])
        return self.squash(raw.float() if self.autocast else raw)

    def q(self, critics: StackedMLP, inputs: Tensor, frozen: bool = False) -> Tensor:
        """Values of twin critics, with autocast in float32 from their last layer on: [..., F] -> [2, ...]."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.autocast):
            values: Tensor = critics(inputs, frozen)[..., 0]
        return values

    def q_pair(self, reward: StackedMLP, cost: StackedMLP, inputs: Sequence[Tensor], frozen: bool = False) -> Tensor:
        """Values of reward and of cost critics [2, 2, ...], each of its input; with autocast all four at once."""
        if not self.autocast:
            return torch.stack([self.q(reward, inputs[0], frozen), self.q(cost, inputs[1], frozen)])
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            values = run_together([reward, cost], inputs, frozen)[..., 0]
        return torch.unflatten(values, 0, (2, 2))

    def acted_ahead(self, batch: WindowBatch, states: Tensor) -> Tensor:
        """Inputs of critics where targets bootstrap: states [B, K, F] and what the target policy does there."""
        last = None
        if self.n_step >= self.config.context:  # that is always the window's last step: [B, 1, ...] will do
            last = (batch.mask.sum(1) - 1).clamp(min=0)
            states = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1]))
        return torch.cat([states, self.policy(batch, target=True, last=last)], -1)

    def carefully(self, batch: WindowBatch) -> WindowBatch:
        """The windows as they look to a policy that shall spend no more, and may earn less for it."""
        return batch._replace(
            return_to_go=self.modest(batch.return_to_go), cost_to_go=torch.zeros_like(batch.cost_to_go)
        )

    def modest(self, return_to_go: Tensor) -> Tensor:
        """The returns-to-go that a careful policy is asked for: a share of them, or as much less where negative."""
        return return_to_go - (1 - self.config.careful_return) * return_to_go.abs()

    # -- losses --------------------------------------------------------------------------------------------------------

    def critic_loss(
        self, batch: WindowBatch, budget_draw: Tensor, action_draw: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean squared error of all four critics to their n-step targets (and of the values to their expectiles).

        With support, also the cross-entropy of telling logged actions from drawn ones [B, K, A].
        """
        c = self.config
        rewards, costs, budgets = batch.rewards * self.reward_scale, batch.costs * self.cost_scale, batch.cost_to_go
        if c.budget_critics:  # before each step of the window
            budgets = budget_draw[:, None] - (batch.costs.cumsum(1) - batch.costs)
        ended = batch.terminals
        if c.time_critics:  # the horizon is seen coming; an episode whose log was cut off earlier went on
            ended = torch.maximum(ended, batch.timeouts * (batch.steps >= self.spec.horizon - 1))
        seen, unaware = self.features(batch.observations, budgets, batch.steps)  # [B, K, F]
        logged = with_actions((seen, unaware), batch.actions)
        if c.bootstrap == "expectile":  # of reward and of cost: [2, B, K]
            with torch.autocast(seen.device.type, torch.bfloat16, enabled=self.autocast):
                values = self.values.each(torch.stack([seen, unaware]))[..., 0]
        with torch.no_grad():
            if c.bootstrap == "policy":
                acted = self.acted_ahead(batch, seen)
                ahead = self.q_pair(self.target_reward_critics, self.target_cost_critics, (acted, acted))
                reward_value = self.reduce(ahead[0], c.reward_reduction).expand_as(rewards)
                cost_value = self.reduce(ahead[1], c.cost_reduction).expand_as(rewards)
            else:
                reward_value, cost_value = values.detach()
                if c.careful_costs:
                    acted = self.acted_ahead(self.carefully(batch), unaware)
                    ahead = self.reduce(self.q(self.target_cost_critics, acted), c.cost_reduction)
                    cost_value = ahead.expand_as(costs)
            if c.clamp_cost:
                cost_value = cost_value.clamp(min=0)
            reward_target, valid = n_step_targets(rewards, reward_value, batch.mask, ended, c.discount, self.n_step)
            cost_target, _ = n_step_targets(costs, cost_value, batch.mask, ended, c.cost_discount, self.n_step)
            fits = valid
            if c.budget_critics:  # what the logged steps and the least continuation cost must fit the budget
                fits = valid & (cost_target <= (budgets + self.margin) * self.cost_scale)
                if c.unfit_penalty is not None:  # a spent budget is seen as 0, and says nothing of what fits 0
                    worse = reward_value - c.unfit_penalty * self.spec.mean_return_to_go * self.reward_scale
                    reward_target = torch.where(fits, reward_target, worse)
                    fits = valid & (fits | (budgets >= 0))
        reward_q, cost_q = self.q_pair(self.reward_critics, self.cost_critics, logged)  # [2, B, K]
        reward_loss = masked_mean((reward_q - reward_target).square().sum(0), fits)
        cost_loss = masked_mean((cost_q - cost_target).square().sum(0), valid)
        metrics = {
            "critic/reward_loss": reward_loss.detach(),
            "critic/cost_loss": cost_loss.detach(),
            "critic/reward_q": masked_mean(reward_q[0].detach(), batch.mask),
            "critic/cost_q": masked_mean(cost_q[0].detach(), batch.mask),
            "critic/reward_size": masked_mean(reward_q.detach().abs().mean(0), batch.mask),
            "critic/cost_size": masked_mean(cost_q.detach().abs().mean(0), batch.mask),
        }
        loss = reward_loss + cost_loss
        if c.bootstrap == "expectile":
            with torch.no_grad():
                goals = self.q_pair(self.target_reward_critics, self.target_cost_critics, logged)
                reward_goal = self.reduce(goals[0], c.reward_reduction)
                cost_goal = self.reduce(goals[1], c.cost_reduction)
                if c.budget_critics:
                    fits = batch.mask & (cost_goal <= (budgets + self.margin) * self.cost_scale)
                else:
                    fits = batch.mask
            value_loss = masked_mean(expectile_loss(reward_goal - values[0], c.reward_expectile), fits)
            value_loss = value_loss + masked_mean(expectile_loss(cost_goal - values[1], c.cost_expectile), batch.mask)
            loss, metrics["critic/value_loss"] = loss + value_loss, value_loss.detach()
        if self.likelihood is not None and action_draw is not None:
            genuine = self.q(self.likelihood, logged[1])[0]
            drawn = self.q(self.likelihood, torch.cat([unaware, action_draw], -1))[0]
            support_loss = masked_mean(softplus(-genuine) + softplus(drawn), batch.mask)
            loss, metrics["critic/support_loss"] = loss + support_loss, support_loss.detach()
        return loss, metrics

    def actions(self, batch: WindowBatch) -> Tensor:
        """What the policy does at every step of the windows: [B, K, A]."""
        return self.policy(batch)

    def policy_loss(
        self, batch: WindowBatch, actions: Tensor, sizes: Sequence[Tensor] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """L_DT - α1 E[Q^r(s, π)] + α2 E[Q^c(s, π)] over valid steps, α = η / E|Q(s, a)| without gradient.

        `actions` are the policy's, `sizes` E|Q^r(s, a)| and E|Q^c(s, a)| as the critics' loss found them.
        """
        c = self.config
        imitation = masked_mean((actions - batch.actions).square().mean(-1), batch.mask)
        loss, metrics = imitation, {"policy/imitation": imitation.detach()}
        if not (c.train_with_reward_critic or c.train_with_cost_critic):
            return loss, metrics
        seen = self.features(batch.observations, batch.cost_to_go, batch.steps)
        acted = with_actions(seen, actions)
        reward_q, cost_q = self.q_pair(self.reward_critics, self.cost_critics, acted, frozen=True).mean(1)  # [B, K]
        if c.train_with_reward_critic:
            q = masked_mean(reward_q, batch.mask)
            scale = self._scale(sizes[0], self.spec.mean_return_to_go * self.reward_scale)
            loss, metrics["policy/reward_q"] = loss - self.etas[0] * q / scale, q.detach()
        if c.train_with_cost_critic:
            if c.cost_term == "excess":
                cost_q = (cost_q - batch.cost_to_go.clamp(min=0) * self.cost_scale).clamp(min=0)
            q = masked_mean(cost_q, batch.mask)
            scale = self._scale(sizes[1], self.spec.mean_cost_to_go * self.cost_scale)
            loss, metrics["policy/cost_q"] = loss + self.etas[1] * q / scale, q.detach()
        return loss, metrics

    def _scale(self, size: Tensor, constant: float) -> Tensor:
        """What a term's weight η is divided by."""
        return (torch.full_like(size, constant) if self.config.normalizer == "data" else size).clamp(
            min=self.config.normalizer_floor
        )

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Critics, then the policy against the updated critics, then the targets, as in the paper's algorithm."""
        c = self.config
        metrics: dict[str, Tensor] = {}
        left: Tensor | float = 1.0
        sizes: list[Tensor] = []
        with self.beside.work(batch.rewards.device):  # the critics do not need it
            actions = self.actions(batch)
        if c.decay:
            left = ((c.steps - self.step) / (c.decay * c.steps)).clamp(0, 1)
        if self.uses_critics:
            if c.decay:
                self.optimizers["critics"].param_groups[0]["lr"].copy_(c.critic_lr * left)
            critic_loss, metrics = self.critic_loss(batch, self._draw_budgets(batch), self._draw_actions(batch))
            descend(self.optimizers["critics"], critic_loss, self.learned_critics, c.critic_clip)
            sizes = [metrics["critic/reward_size"], metrics["critic/cost_size"]]

        optimizer = self.optimizers["policy"]
        self.step += 1
        optimizer.param_groups[0]["lr"].copy_(c.lr * (self.step / max(c.warmup, 1)).clamp(max=1.0) * left)
        self.beside.join()
        loss, more = self.policy_loss(batch, actions, sizes)
        norms = descend(optimizer, loss, [self.policy_parameters], c.clip)
        soft_update(self.policy_targets, self.policy_parameters, 1 - c.ema)
        if self.uses_critics:
            soft_update(self.critic_targets, self.critic_parameters, 1 - c.critic_ema)
        metrics |= more | {"loss": loss.detach()}
        return metrics | dict(zip(("policy/gradient_norm",), norms, strict=False))

    def _draw_budgets(self, batch: WindowBatch) -> Tensor:
        """Budgets at the start of each window, denser near 0 where they bind; those of hindsight would say nothing."""
        u = torch.rand(len(batch.rewards), device=batch.rewards.device, dtype=batch.rewards.dtype)
        return u.square() * self.spec.cost_max

    def _draw_actions(self, batch: WindowBatch) -> Tensor | None:
        """Actions from anywhere in the range, for the classifier."""
        return 2 * torch.rand_like(batch.actions) - 1 if self.config.support else None

    def suggest_return(self, cost_limit: float) -> float:
        published = self.spec.published_return(cost_limit) if self.config.targets == "published" else None
        return self.spec.suggest_return(cost_limit, self.config.frugality or 0.0) if published is None else published

    def act(self, context: Context) -> Decision:
        return candidates.decide(self, context)
