"""QPT's inference: candidate targets, their actions in one pass, and the critics' choice among what fits the budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qpt.algorithms.base import Context, Decision, discounted_limit
from qpt.algorithms.qpt_config import Reduction
from qpt.errors import QptError
from qpt.nets.mlp import StackedMLP
from qpt.nets.noise import episode_normal, episode_uniform

if TYPE_CHECKING:
    from qpt.algorithms.qpt import QPT


# What of the config is read when the policy decides, and can be another than in training.
FIELDS = frozenset(
    [
        "history",
        "limit_factor",
        "inference_with_candidates",
        "candidates",
        "rtg_noise",
        "ctg_noise",
        "action_noise",
        "noise_mode",
        "cost_test",
        "test_offset",
        "test_radius",
        "support",
        "fallback",
        "selection",
        "tradeoff",
        "choice",
        "targets",
        "target_factor",
        "frugality",
        "cost_reduction",
        "reward_reduction",
        "budget_margin",
    ]
)


@torch.no_grad()
def decide(method: QPT, context: Context) -> Decision:
    """One of the candidates' actions a_j with Q^c(s, a_j) <= remaining budget: best by Q^r, or as `choose` is told."""
    c, told, context = method.config, frugal(method, context), aimed(method, context)
    if not c.inference_with_candidates:
        actions = propose(method, told, 1)[:, 0]
        return Decision(actions, {"fallback": torch.zeros(actions.shape[0], device=actions.device)})
    if not method.uses_critics:
        raise QptError(
            "this policy was trained without critics and cannot choose among candidates; "
            "leave inference_with_candidates off"
        )
    if c.candidates == 1:  # nothing to choose, and still worth telling whether it passes
        return among(method, told, context, 1)
    # A graph (on a GPU, or exported with the noise as its input) does the same work whatever the values are.
    graph = context.last.device.type == "cuda" or context.noise is not None
    if c.selection == "shield" and not c.support and not graph:
        return shielded(method, told, context)
    return among(method, told, context, c.candidates)


def among(method: QPT, told: Context, context: Context, count: int) -> Decision:
    """The choice among so many candidates, which are `told` what to aim at and tested against the context's budget."""
    proposed = propose(method, told, count)  # [n, m, A]
    reward_q, cost_q = score(method, context, proposed)
    likely = supported(method, context, proposed)
    chosen, infeasible = choose(method, context, proposed, reward_q, cost_q, likely)
    rows = torch.arange(proposed.shape[0], device=proposed.device)
    return Decision(
        proposed[rows, chosen],
        {"fallback": infeasible.float(), "reward_q": reward_q[rows, chosen], "cost_q": cost_q[rows, chosen]},
    )


def shielded(method: QPT, told: Context, context: Context) -> Decision:
    """As `among` all candidates for a shield, but the others are tried only where the policy's own action fails."""
    own = among(method, told, context, 1)
    failed = own.diagnostics["fallback"] > 0
    if context.active is not None:
        failed &= context.active
    for row in failed.nonzero():  # one by one: so no last digit depends on which others fail, and it is faster
        other = among(method, told.rows(row), context.rows(row), method.config.candidates)
        own.actions[row] = other.actions
        for name, values in own.diagnostics.items():
            values[row] = other.diagnostics[name]
    return own


def aimed(method: QPT, context: Context) -> Context:
    """The context with the limit that is aimed at in place of the one that was set."""
    kept_back = (1 - method.config.limit_factor) * context.cost_limit
    return context._replace(
        cost_to_go=context.cost_to_go - kept_back[:, None], cost_limit=context.cost_limit - kept_back
    )


def frugal(method: QPT, context: Context) -> Context:
    """What candidates are told: the limit that is aimed at, or less cost where the return they are asked for took less.

    That is the target or, if higher, the return that would be suggested for the limit (`Spec.suggest_return`): a target
    that was lowered so that it can be reached does not make the limit any smaller. Never more than was ever spent.
    """
    c, spec, told = method.config, method.spec, aimed(method, context)
    limit = context.cost_limit.clamp(max=spec.cost_max)  # beyond the dearest episode nothing was learned
    asked_cost = limit - (1 - c.limit_factor) * limit
    if c.frugality is not None:
        costs, returns = method.frontier
        best = returns[(costs <= limit[:, None]).sum(1).clamp(min=1) - 1]
        near = (returns < (best - c.frugality * (spec.return_max - spec.return_min))[:, None]).sum(1)
        suggested = torch.where(costs[near] <= limit / 2, returns[near], best)
        asked = torch.maximum(suggested, context.return_target)
        cheapest = costs[(returns < (asked - 1e-6 * asked.abs())[:, None]).sum(1)]  # both are rounded
        # Told 0, a policy is beyond all that was logged at its first cost.
        asked_cost = torch.minimum(asked_cost, torch.maximum(cheapest, limit / 4))
    return told._replace(cost_to_go=told.cost_to_go - (told.cost_limit - asked_cost)[:, None])


LEAST_SPREAD = 0.1  # of the range of logged returns: the least that the spread of return targets is relative to


class Draw(NamedTuple):
    """Random numbers that a decision needs: so many, from the episode's seed, a stream, and maybe the step."""

    stream: int
    size: int
    uniform: bool  # in (0, 1), or else standard normal
    each_step: bool  # anew at each step, or once an episode


SHIFT, ACT, CHOOSE = 0, 1, 2  # streams


def draws(method: QPT, count: int) -> list[Draw]:
    """All draws of a decision among `count` candidates, in the order in which `Context.noise` holds them."""
    c = method.config
    needed = [Draw(SHIFT, 2 * count, uniform=False, each_step=c.noise_mode == "step")]
    if c.action_noise:
        needed.append(Draw(ACT, count * method.spec.action_dim, uniform=False, each_step=True))
    if c.choice == "softmax":
        needed.append(Draw(CHOOSE, count, uniform=True, each_step=True))
    return needed


def draw(method: QPT, context: Context, count: int, stream: int) -> Tensor:
    """The numbers of one stream, [n, ...]: the caller's where it gave them, else a function of seed and step."""
    start = 0
    for one in draws(method, count):
        if one.stream == stream:
            break
        start += one.size
    if context.noise is not None:
        return context.noise[:, start : start + one.size].clone()  # it will be written to
    step = context.now(context.steps) if one.each_step else torch.zeros_like(context.last)
    kind = episode_uniform if one.uniform else episode_normal
    return kind(context.seeds, step, one.size, stream).to(context.return_to_go.dtype)


def shifts(method: QPT, context: Context, count: int) -> tuple[Tensor, Tensor]:
    """What each candidate adds to the return-to-go and the cost-to-go, [n, m] each; the first adds nothing."""
    c = method.config
    if count == 1:
        nothing = torch.zeros_like(context.return_target)[:, None]
        return nothing, nothing
    noise = torch.unflatten(draw(method, context, count, SHIFT), 1, (2, count))
    noise[:, :, 0] = 0
    # Where the target is near 0, a share of it would make all candidates the same.
    size = context.return_target.abs().clamp(min=LEAST_SPREAD * (method.spec.return_max - method.spec.return_min))
    return (
        noise[:, 0] * c.rtg_noise * size[:, None],
        noise[:, 1] * c.ctg_noise * context.cost_limit.clamp(max=method.spec.cost_max)[:, None],
    )


def targets(method: QPT, context: Context, count: int, now: bool) -> tuple[Tensor, Tensor]:
    """Returns-to-go and costs-to-go of the candidates: [n, m] each if only `now` counts, else [n, m, K].

    With careful costs the second candidate is the careful one: what the critics take for possible can then be done.
    """
    returns, costs = context.return_to_go, context.cost_to_go
    more_return, more_cost = shifts(method, context, count)
    if now:
        returns, costs = context.now(returns), context.now(costs)
    else:
        more_return, more_cost = more_return[..., None], more_cost[..., None]
    moved_returns, moved_costs = returns[:, None] + more_return, costs[:, None] + more_cost
    if not method.config.careful_costs or count == 1:
        return moved_returns, moved_costs

    def second(moved: Tensor, careful: Tensor) -> Tensor:
        return torch.cat([moved[:, :1], careful[:, None], moved[:, 2:]], 1)

    return second(moved_returns, method.modest(returns)), second(moved_costs, torch.zeros_like(costs))


def propose(method: QPT, context: Context, count: int) -> Tensor:
    """Actions of the candidates: [n, m, A]. Histories differ in what was asked for, never in what happened."""
    c = method.config
    if c.noise_mode == "step":
        hidden = method.transformer.candidates(
            context.return_to_go,
            context.cost_to_go,
            context.observations,
            context.actions,
            context.steps,
            context.last,
            *targets(method, context, count, now=True),
        )
    else:

        def repeat(x: Tensor) -> Tensor:
            return x.repeat_interleave(count, 0)

        returns, costs = targets(method, context, count, now=False)
        hidden = method.transformer(  # [n * m, 1, 1, D]
            returns.flatten(0, 1),
            costs.flatten(0, 1),
            repeat(context.observations),
            repeat(context.actions),
            repeat(context.steps),
            last=repeat(context.last),
        )
        hidden = torch.unflatten(hidden[:, 0, 0], 0, (-1, count))  # [n, m, D]
    actions = method.squash(method.head(hidden))
    if c.action_noise and count > 1:
        noise = torch.unflatten(draw(method, context, count, ACT), 1, (count, -1))
        noise[:, 0] = 0
        actions = actions + c.action_noise * noise
    return actions.clamp(-1, 1)


def score(method: QPT, context: Context, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Target critics' values of the candidates, reward as the critics scale it and cost as logged: [n, m] each."""
    c = method.config
    budgets, steps = context.now(context.cost_to_go), context.now(context.steps)
    seen, unaware = method.features(context.now(context.observations), budgets, steps)
    count, size = actions.shape[1:]
    tried = actions
    if c.test_radius:  # between what the data support the critics only interpolate: the worst neighbour counts
        step = c.test_radius * torch.eye(size, dtype=actions.dtype, device=actions.device)
        around = torch.cat([torch.zeros_like(step[:1]), step, -step])
        tried = (actions[:, :, None] + around).clamp(-1, 1).flatten(1, 2)  # [n, m * (2A + 1), A]

    def q(critics: StackedMLP, features: Tensor, how: Reduction) -> Tensor:
        inputs = torch.cat([features[:, None].expand(-1, tried.shape[1], -1), tried], -1)
        return torch.unflatten(method.reduce(critics(inputs)[..., 0], how), 1, (count, -1))

    reward_q = q(method.target_reward_critics, seen, c.reward_reduction).amin(2)
    cost_q = q(method.target_cost_critics, unaware, c.cost_reduction).amax(2)
    return reward_q, cost_q / method.cost_scale


def supported(method: QPT, context: Context, actions: Tensor) -> Tensor | None:
    """Which candidates the logged actions make likely enough [n, m]: all where none is; None without support."""
    if not method.config.support:
        return None
    if method.likelihood is None:
        raise QptError("support needs a policy that was trained with it; train one with --support, or leave it at 0")
    budgets, steps = context.now(context.cost_to_go), context.now(context.steps)
    _, unaware = method.features(context.now(context.observations), budgets, steps)
    inputs = torch.cat([unaware[:, None].expand(-1, actions.shape[1], -1), actions], -1)
    likely: Tensor = method.likelihood(inputs)[0, ..., 0] >= math.log(method.config.support)
    return likely | ~likely.any(1, keepdim=True)


def choose(
    method: QPT, context: Context, actions: Tensor, reward_q: Tensor, cost_q: Tensor, likely: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Index of the chosen candidate [n], and whether none was feasible [n]; only `likely` ones count, if given.

    actions [n, m, A], the first candidate's is the policy's own; values of the critics [n, m].
    """
    c = method.config
    balance = reward_q - c.tradeoff * method.reward_scale * cost_q
    if c.selection == "tradeoff":
        feasible = torch.ones_like(cost_q, dtype=torch.bool)
        value = balance
    else:
        budget = context.now(context.cost_to_go)
        if c.cost_test == "horizon":
            remaining = (method.spec.horizon - context.now(context.steps)).clamp(min=1).to(budget.dtype)
            budget = discounted_limit(budget.clamp(min=0), remaining, c.cost_discount)
        margin = method.margin if c.budget_critics else 0.0
        feasible = cost_q + c.test_offset <= budget[:, None] + margin
        if c.cost_test == "none":
            feasible = torch.ones_like(feasible)
        # A shield changes as little as it must: the policy's own action where it passes, else the nearest that does.
        value = reward_q if c.selection == "constrained" else -(actions - actions[:, :1]).square().sum(-1)
    fallback = {"least-cost": -cost_q, "ignore": reward_q, "tradeoff": balance}[c.fallback]
    if likely is not None:
        feasible, fallback = feasible & likely, fallback.masked_fill(~likely, float("-inf"))
    infeasible = ~feasible.any(1)
    value = torch.where(infeasible[:, None], fallback, value.masked_fill(~feasible, float("-inf")))
    if c.choice == "softmax":  # drawn by the Gumbel trick, from the episode's own noise
        # Rounded to 1 a draw would be infinite, and with it what must not be chosen.
        uniform = draw(method, context, value.shape[1], CHOOSE).clamp(max=1 - 2**-24)
        drawn = value - torch.log(-torch.log(uniform))
        value = torch.where(infeasible[:, None], value, drawn)  # a way out is not left to chance
    chosen = value.argmax(1)
    if c.selection == "shield":  # also where the choice is drawn
        chosen = torch.where(feasible[:, 0], 0, chosen)
    return chosen, infeasible
