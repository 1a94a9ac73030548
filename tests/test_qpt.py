"""QPT's losses and choices against slow references that follow the paper's equations, in float64."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import bare_episodes, tiny_data
from qpt.algorithms import candidates
from qpt.algorithms.base import Context, Spec, discounted_limit
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.data.sampling import WindowBatch
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy

SMALL = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "context": 5,
    "critic_width": 16,
    "batch_size": 8,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def make(**changes: Any) -> tuple[QPT, WindowBatch]:
    data = tiny_data()
    torch.manual_seed(0)
    method = QPT(replace(QPTConfig(), **{**SMALL, **changes}), Spec.from_data(data)).double()
    for parameter in method.parameters():  # targets differ from online networks, and nothing is tiny
        torch.nn.init.normal_(parameter, std=0.3)
    batch = method.make_sampler(data, torch.device("cpu"), 1).sample()
    return method, WindowBatch(*(x.double() if x.is_floating_point() else x for x in batch))


def mlp(stack: Any, member: int, x: torch.Tensor) -> torch.Tensor:
    for i, (weight, bias) in enumerate(zip(stack.weights, stack.biases, strict=True)):
        x = x @ weight[member] + bias[member, 0]
        if i < len(stack.weights) - 1:
            x = x * torch.tanh(torch.nn.functional.softplus(x))
    return x[0]


def test_paper_critic_loss_equals_its_equation() -> None:
    """Σ_m ‖ Σ_j γ^{j-m} r_j + γ^{t-m} min_i Q'_i(s_t, π'(τ)_t) - Q_i(s_m, a_m) ‖², as for cost; means over valid m."""
    method, batch = make(
        reward_scale=0.1,
        critic_cost_scale=1.0,
        bootstrap="policy",
        budget_critics=False,
        time_critics=False,
        n_step=None,
        clamp_cost=False,
        cost_reduction="min",
        discount=0.97,
        cost_discount=0.97,
    )
    gamma = method.config.discount
    acted = method.policy(batch, target=True)
    sums = {"reward": 0.0, "cost": 0.0}
    count = 0
    for b in range(len(batch.rewards)):
        length = int(batch.mask[b].sum())
        t, ends = length - 1, bool(batch.terminals[b, length - 1])
        state = lambda p: (batch.observations[b, p] - method.transformer.mean) / method.transformer.std  # noqa: B023, E731
        for m in range(length if ends else t):
            count += 1
            for name, signal, online, target in (
                ("reward", batch.rewards[b] * 0.1, method.reward_critics, method.target_reward_critics),
                ("cost", batch.costs[b], method.cost_critics, method.target_cost_critics),
            ):
                stop = length if ends else t
                goal = sum(gamma ** (j - m) * signal[j] for j in range(m, stop))
                if not ends:
                    last = torch.cat([state(t), acted[b, t]])
                    goal = goal + gamma ** (t - m) * min(mlp(target, 0, last), mlp(target, 1, last))
                here = torch.cat([state(m), batch.actions[b, m]])
                sums[name] += sum((goal - mlp(online, i, here)).item() ** 2 for i in (0, 1))
    loss, metrics = method.critic_loss(batch, torch.zeros(len(batch.rewards)).double())
    assert metrics["critic/reward_loss"].item() == pytest.approx(sums["reward"] / count, rel=1e-9)
    assert metrics["critic/cost_loss"].item() == pytest.approx(sums["cost"] / count, rel=1e-9)
    assert loss.item() == pytest.approx((sums["reward"] + sums["cost"]) / count, rel=1e-9)


@pytest.mark.parametrize("n_step", [None, 2])
def test_careful_costs_are_those_of_a_policy_that_is_told_to_spend_no_more(n_step: int | None) -> None:
    """y_m = Σ_j c_j + max(mean_i Q'_i(s_q, π'(τ with cost-to-go 0 and 0.8 of the return-to-go)_q), 0)."""
    method, batch = make(careful_costs=True, careful_return=0.8, n_step=n_step, batch_size=24)
    batch = batch._replace(return_to_go=batch.return_to_go.abs())
    told = batch._replace(return_to_go=0.8 * batch.return_to_go, cost_to_go=torch.zeros_like(batch.cost_to_go))
    acted = method.policy(told, target=True)
    total, count, clamped = 0.0, 0, 0
    for b in range(len(batch.rewards)):
        length = int(batch.mask[b].sum())
        ends = bool(batch.terminals[b, length - 1]) or bool(batch.timeouts[b, length - 1])

        def inputs(p: int, action: torch.Tensor, b: int = b) -> torch.Tensor:
            seen = (batch.observations[b, p] - method.transformer.mean) / method.transformer.std
            time = batch.steps[b, p].double() * 2 / method.spec.horizon - 1
            return torch.cat([seen, torch.stack([time, torch.zeros_like(time)]), action])

        for m in range(length if ends else length - 1):
            stop = min(m + (n_step or 5), length if ends else length - 1)
            goal = batch.costs[b, m:stop].sum().item() * method.cost_scale
            if stop < length:
                ahead = inputs(stop, acted[b, stop])
                value = np.mean([mlp(method.target_cost_critics, i, ahead).item() for i in (0, 1)])
                clamped += value < 0
                goal += max(value, 0.0)
            here = inputs(m, batch.actions[b, m])
            total += sum((goal - mlp(method.cost_critics, i, here).item()) ** 2 for i in (0, 1))
            count += 1
    assert 0 < clamped < count
    _, metrics = method.critic_loss(batch, torch.ones(len(batch.rewards)).double())
    assert metrics["critic/cost_loss"].item() == pytest.approx(total / count, rel=1e-9)


def test_policy_loss_equals_its_equation() -> None:
    """L_DT - η1 E[Q^r(s, π)] / E|Q^r(s, a)| + η2 E[Q^c(s, π)] / E|Q^c(s, a)|."""
    method, batch = make(
        eta_reward=0.7,
        eta_cost=0.3,
        cost_term="all",
        normalizer="batch",
        budget_critics=False,
        time_critics=False,
        bootstrap="policy",
        train_with_reward_critic=True,
        train_with_cost_critic=True,
    )
    actions = method.policy(batch)
    errors, terms = [], {name: ([], []) for name in ("reward", "cost")}
    for b in range(len(batch.rewards)):
        for p in range(int(batch.mask[b].sum())):
            errors.append(((actions[b, p] - batch.actions[b, p]) ** 2).mean().item())
            state = (batch.observations[b, p] - method.transformer.mean) / method.transformer.std
            for name, stack in (("reward", method.reward_critics), ("cost", method.cost_critics)):
                on_policy, on_data = torch.cat([state, actions[b, p]]), torch.cat([state, batch.actions[b, p]])
                terms[name][0].append(np.mean([mlp(stack, i, on_policy).item() for i in (0, 1)]))
                terms[name][1].append(np.mean([abs(mlp(stack, i, on_data).item()) for i in (0, 1)]))
    expected = (
        np.mean(errors)
        - 0.7 * np.mean(terms["reward"][0]) / np.mean(terms["reward"][1])
        + 0.3 * np.mean(terms["cost"][0]) / np.mean(terms["cost"][1])
    )
    found = method.critic_loss(batch, torch.zeros(len(batch.rewards)).double())[1]
    sizes = [found["critic/reward_size"], found["critic/cost_size"]]
    assert [size.item() for size in sizes] == pytest.approx([np.mean(terms[name][1]) for name in terms], rel=1e-9)
    assert method.policy_loss(batch, actions, sizes)[0].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("normalizer", ["batch", "data"])
def test_a_weight_stays_bounded_where_cost_is_never_seen(normalizer: str) -> None:
    method, batch = make(eta_reward=0.0, eta_cost=0.3, cost_term="all", normalizer=normalizer, normalizer_floor=0.02)
    method.spec = replace(method.spec, mean_cost_to_go=1e-9)
    loss, metrics = method.policy_loss(batch, method.policy(batch), torch.tensor([1.0, 1e-9]).double())
    expected = metrics["policy/imitation"] + 0.3 * metrics["policy/cost_q"] / 0.02
    torch.testing.assert_close(loss, expected)


def test_the_policy_step_leaves_critics_alone_and_the_critic_step_the_policy() -> None:
    method, batch = make(train_with_reward_critic=True, eta_reward=1.0)
    method = method.float()
    method.make_optimizers()
    batch = WindowBatch(*(x.float() if x.is_floating_point() else x for x in batch))
    before = {k: v.clone() for k, v in method.state_dict().items()}
    loss, _ = method.policy_loss(batch, method.actions(batch), torch.ones(2))
    from qpt.algorithms.base import descend

    descend(method.optimizers["policy"], loss, [method.policy_parameters], 0.25)
    changed = {k for k, v in method.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all(k.startswith(("transformer.", "head.")) for k in changed)
    before = {k: v.clone() for k, v in method.state_dict().items()}
    loss, _ = method.critic_loss(batch, torch.ones(len(batch.rewards)))
    descend(method.optimizers["critics"], loss, method.learned_critics, 10.0)
    changed = {k for k, v in method.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all(k.startswith(("reward_critics.", "cost_critics.", "values.")) for k in changed)


def test_work_beside_has_a_stream_that_no_copy_shares() -> None:
    method, batch = make()
    with method.beside.work(batch.rewards.device):  # on a CPU in its turn
        actions = method.actions(batch)
    method.beside.join()
    assert torch.equal(actions, method.policy(batch))
    method.beside._stream = object()
    assert copy.deepcopy(method).beside._stream is None


@pytest.mark.parametrize("preset", ["default", "paper", "careful"])
def test_each_loss_compiles_to_one_graph(preset: str) -> None:
    """Where the compiler has to break one, nothing is fused across the break."""
    paper = QPTConfig.preset("paper")
    same = {name: getattr(paper, name) for name in ("bootstrap", "budget_critics", "time_critics", "normalizer")}
    method, batch = make(**(same if preset == "paper" else {"careful_costs": preset == "careful"}))
    method.float().autocast = True
    batch = WindowBatch(*(x.float() if x.is_floating_point() else x for x in batch))
    calls = {
        "actions": (batch,),
        "critic_loss": (batch, torch.rand(len(batch.rewards))),
        "policy_loss": (batch, batch.actions, [torch.ones(()), torch.ones(())]),
    }
    assert calls.keys() == set(method.compilable)
    for name, given in calls.items():
        torch._dynamo.reset()
        torch.compile(getattr(method, name), backend="eager", fullgraph=True)(*given)


def test_targets_have_no_dropout_while_the_policy_trains() -> None:
    method, batch = make(bootstrap="policy", budget_critics=False, dropout=0.5, attention_dropout=0.5)
    for _ in range(2):  # also after an evaluation in between
        method.train()
        budgets = torch.ones(len(batch.rewards)).double()
        targets = [method.policy(batch, target=True) for _ in range(2)]
        assert torch.equal(*targets)
        losses = [method.critic_loss(batch, budgets)[0] for _ in range(2)]
        assert torch.equal(*losses)
        assert not torch.equal(method.policy(batch), method.policy(batch))
        method.eval()
    again = copy.deepcopy(method).train()
    assert not again.target_transformer.training
    assert again.transformer.training


def test_targets_follow_by_their_rates() -> None:
    method, batch = make(ema=0.9, critic_ema=0.7)
    method = method.float()
    method.make_optimizers()
    before = {k: v.clone() for k, v in method.state_dict().items()}
    method.update(WindowBatch(*(x.float() if x.is_floating_point() else x for x in batch)))
    after = method.state_dict()
    for online, target, rate in (
        ("head.weight", "target_head.weight", 0.9),
        ("reward_critics.weights.0", "target_reward_critics.weights.0", 0.7),
    ):
        torch.testing.assert_close(after[target], rate * before[target] + (1 - rate) * after[online])


def test_budget_critics_learn_only_from_what_fits_the_budget() -> None:
    """With values at 0, the target is the reward, and only steps whose own cost fits the budget that is left count."""
    method, batch = make(
        budget_critics=True,
        time_critics=True,
        bootstrap="expectile",
        n_step=1,
        discount=1.0,
        cost_discount=1.0,
        budget_margin=0.25,
    )
    draw = torch.linspace(0, 5, len(batch.rewards)).double()
    for stack in (method.values, method.reward_critics):
        for parameter in stack.parameters():
            parameter.data.zero_()
    _, metrics = method.critic_loss(batch, draw)
    total, count, dropped = 0.0, 0, 0
    for b in range(len(batch.rewards)):
        length = int(batch.mask[b].sum())
        ends = bool(batch.terminals[b, length - 1]) or bool(batch.timeouts[b, length - 1])
        budget = draw[b].item()
        for m in range(length if ends else length - 1):
            cost = batch.costs[b, m].item()
            if cost <= budget + 0.25:
                total, count = total + 2 * (batch.rewards[b, m].item() * method.reward_scale) ** 2, count + 1
            else:
                dropped += 1
            budget -= cost
    assert dropped > 0
    assert metrics["critic/reward_loss"].item() == pytest.approx(total / count, rel=1e-9)


@pytest.mark.parametrize("time_critics", [True, False])
def test_a_timeout_before_the_horizon_is_no_end(time_critics: bool) -> None:
    """Critics that know the step end at the horizon; a log that was cut off earlier is learned as one that goes on."""
    method, batch = make(time_critics=time_critics, batch_size=64)
    draw = torch.full((len(batch.rewards),), 9.0).double()
    going_on = batch._replace(timeouts=torch.zeros_like(batch.timeouts))
    assert batch.timeouts.sum() > 0
    for horizon, cut in ((method.spec.horizon, False), (method.spec.horizon + 1, True)):
        method.spec = replace(method.spec, horizon=horizon)
        same = torch.equal(method.critic_loss(batch, draw)[0], method.critic_loss(going_on, draw)[0])
        assert same == (cut or not time_critics)


@pytest.mark.parametrize("penalty", [0.05, 0.4])
def test_an_action_that_does_not_fit_is_worth_less_than_its_state(penalty: float) -> None:
    """With critics at 0, the value of reward at 1.3 and that of cost at 0: the loss is the mean squared target."""
    method, batch = make(n_step=1, budget_margin=0.25, unfit_penalty=penalty)
    for stack in (method.values, method.reward_critics):
        for parameter in stack.parameters():
            parameter.data.zero_()
    method.values.biases[-1].data[0] = 1.3
    draw = torch.linspace(0, 1.5, len(batch.rewards)).double()
    _, metrics = method.critic_loss(batch, draw)
    targets, unfit, left_out = [], 0, 0
    for b in range(len(batch.rewards)):
        length = int(batch.mask[b].sum())
        ends = bool(batch.terminals[b, length - 1]) or bool(batch.timeouts[b, length - 1])
        budget = draw[b].item()
        for m in range(length if ends else length - 1):
            cost = batch.costs[b, m].item()
            follows = 0.0 if ends and m == length - 1 else 1.3
            if cost <= budget + 0.25:
                targets.append(batch.rewards[b, m].item() * method.reward_scale + follows)
            elif budget >= 0:
                targets.append(1.3 - penalty * method.spec.mean_return_to_go * method.reward_scale)
                unfit += 1
            else:
                left_out += 1
            budget -= cost
    assert unfit > 0
    assert left_out > 0
    assert metrics["critic/reward_loss"].item() == pytest.approx(2 * np.mean(np.square(targets)), rel=1e-9)


def test_support_loss_tells_logged_actions_from_drawn_ones() -> None:
    method, batch = make(support=0.5)
    draw = torch.ones(len(batch.rewards)).double()
    actions = 2 * torch.rand_like(batch.actions) - 1
    loss, metrics = method.critic_loss(batch, draw, actions)
    errors = []
    for b, m in batch.mask.nonzero().tolist():
        _, seen = method.features(batch.observations[b, m], draw[b], batch.steps[b, m])
        logged, drawn = (mlp(method.likelihood, 0, torch.cat([seen, a[b, m]])) for a in (batch.actions, actions))
        errors.append(-(torch.sigmoid(logged).log() + (1 - torch.sigmoid(drawn)).log()).item())
    assert metrics["critic/support_loss"].item() == pytest.approx(np.mean(errors), rel=1e-9)
    assert (loss - method.critic_loss(batch, draw)[0]).item() == pytest.approx(np.mean(errors), rel=1e-6)


def test_likely_candidates_pass_the_ratio_and_all_do_where_none_does() -> None:
    method, _ = make(support=0.5)
    context = random_context(method, 6)
    actions = (2 * torch.rand(6, 8, method.spec.action_dim) - 1).double()
    _, seen = method.features(
        context.now(context.observations), context.now(context.cost_to_go), context.now(context.steps)
    )
    with torch.no_grad():
        ratios = np.exp(
            [[mlp(method.likelihood, 0, torch.cat([seen[n], a])).item() for a in actions[n]] for n in range(6)]
        )
        method.config = replace(method.config, support=float(np.quantile(ratios[0], 0.4)))
        expected = ratios >= method.config.support
        expected[~expected.any(1)] = True
        found = candidates.supported(method, context, actions)
    assert 0 < expected[0].sum() < 8
    assert found is not None
    assert found.tolist() == expected.tolist()


def test_only_likely_candidates_count() -> None:
    method, _ = make(candidates=4, selection="constrained", cost_test="literal")
    context = random_context(method, 2)
    budget = context.now(context.cost_to_go)
    reward_q = torch.tensor([[1.0, 3.0, 2.0, 9.0]] * 2).double()
    cost_q = budget[:, None] + torch.tensor([[-3.0, -3.0, -2.0, 9.0], [7.0, 6.0, 8.0, 9.0]]).double()
    likely = torch.tensor([[True, False, True, True]] * 2)
    chosen, infeasible = candidates.choose(method, context, torch.zeros(2, 4, 1), reward_q, cost_q, likely)
    assert chosen.tolist() == [2, 0]  # not the better 1; not the cheaper 1
    assert infeasible.tolist() == [False, True]


def test_learning_rates_fall_to_0_at_the_end() -> None:
    method, batch = make(steps=10, decay=0.5, warmup=2, lr=1e-3, critic_lr=2e-3)
    method = method.float()
    method.make_optimizers()
    batch = WindowBatch(*(x.float() if x.is_floating_point() else x for x in batch))
    rates = []
    for _ in range(12):  # two beyond the end
        method.update(batch)
        rates.append([method.optimizers[name].param_groups[0]["lr"].item() for name in ("policy", "critics")])
    left = [min(max((10 - i) / 5, 0.0), 1.0) for i in range(12)]
    expected = [(1e-3 * min((i + 1) / 2, 1.0) * part, 2e-3 * part) for i, part in enumerate(left)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_cost_critics_do_not_see_the_budget() -> None:
    method, batch = make(budget_critics=True, time_critics=True, bootstrap="expectile")
    reward_a, cost_a = method.features(batch.observations, batch.cost_to_go, batch.steps)
    reward_b, cost_b = method.features(batch.observations, batch.cost_to_go + 3, batch.steps)
    assert torch.equal(cost_a, cost_b)
    assert not torch.equal(reward_a, reward_b)


def test_excess_penalises_only_what_is_beyond_the_budget() -> None:
    method, batch = make(
        eta_cost=1.0, train_with_reward_critic=False, cost_term="excess", normalizer="data", critic_cost_scale=1.0
    )
    actions = method.actions(batch)
    _, metrics = method.policy_loss(batch, actions, torch.ones(2).double())
    _, unaware = method.features(batch.observations, batch.cost_to_go, batch.steps)
    q = method.cost_critics(torch.cat([unaware, actions], -1))[..., 0].mean(0)
    each = [
        max(q[b, p].item() - max(batch.cost_to_go[b, p].item(), 0.0), 0.0)
        for b in range(len(q))
        for p in range(q.shape[1])
        if batch.mask[b, p]
    ]
    assert metrics["policy/cost_q"].item() == pytest.approx(np.mean(each), rel=1e-9)


# -- inference ---------------------------------------------------------------------------------------------------------


def random_context(method: QPT, n: int, seed: int = 0) -> Context:
    g = torch.Generator().manual_seed(seed)
    k, spec = method.context, method.spec
    last = torch.arange(n) % k
    return Context(
        torch.randn(n, k, spec.observation_dim, generator=g).double(),
        torch.randn(n, k, spec.action_dim, generator=g).double().clamp(-1, 1),
        torch.randn(n, k, generator=g).double() * 10,
        torch.randn(n, k, generator=g).double() * 5,
        torch.arange(k).expand(n, -1) + (torch.arange(n) % 3)[:, None],
        last,
        torch.rand(n, generator=g).double() * 20,
        torch.rand(n, generator=g).double() * 10,
        torch.arange(n) + 100,
    )


@torch.no_grad()
def contested_context(method: QPT, n: int) -> Context:
    """Episodes in which some candidates pass the test and others fail it, and every third in which all fail.

    The critics are made to see more cost, so that the budgets are above 0.
    """
    c, context = method.config, random_context(method, n)
    method.target_cost_critics.biases[-1].data += 5 * method.cost_scale
    for _ in range(3):  # what they cost depends a little on the budget
        aimed, told = candidates.aimed(method, context), candidates.frugal(method, context)
        cost_q = candidates.score(method, aimed, candidates.propose(method, told, c.candidates))[1]
        change = cost_q.mean(1) - (c.budget_margin if c.budget_critics else 0.0) - aimed.now(aimed.cost_to_go)
        context = context._replace(cost_to_go=context.cost_to_go + change[:, None])
    context.cost_to_go[::3] -= 1
    return context


def slow_decision(method: QPT, context: Context, row: int) -> tuple[torch.Tensor, float, float, bool]:
    """One episode, one candidate at a time, as the paper's inference reads: action, Q^r, Q^c, and if none passed."""
    c = method.config
    n = int(context.last[row]) + 1
    spent = context.cost_limit[row] - context.cost_to_go[row, :n]
    aim = c.limit_factor * context.cost_limit[row]
    cost_to_go = aim - spent
    most = torch.tensor(method.spec.cost_max).double()
    known = min(context.cost_limit[row], most)
    told = c.limit_factor * known
    if c.frugality is not None:
        suggested = method.spec.suggest_return(context.cost_limit[row].item(), c.frugality)
        for cost, reached in zip(method.spec.frontier_costs, method.spec.frontier_returns, strict=True):
            if reached >= max(context.return_target[row], suggested):
                told = min(told, max(torch.tensor(cost), known / 4))
    from qpt.nets.noise import episode_normal

    step = context.steps[row, n - 1] if c.noise_mode == "step" else torch.tensor(0)
    noise = episode_normal(context.seeds[row : row + 1], step[None], 2 * c.candidates)[0]
    size = max(abs(context.return_target[row].item()), 0.1 * (method.spec.return_max - method.spec.return_min))
    best, best_value, least, least_value = None, -np.inf, None, np.inf
    scored = []
    for j in range(c.candidates):
        dr = 0.0 if j == 0 else noise[j].item() * c.rtg_noise * size
        dc = 0.0 if j == 0 else noise[c.candidates + j].item() * c.ctg_noise * min(aim, most).item()
        r, g = context.return_to_go[row, :n].clone(), told - spent
        if c.noise_mode == "step":
            r[-1], g[-1] = r[-1] + dr, g[-1] + dc
        else:
            r, g = r + dr, g + dc
        if c.careful_costs and j == 1:
            r, g = context.return_to_go[row, :n], torch.zeros_like(spent)
            r = torch.stack([x * c.careful_return if x > 0 else x * (2 - c.careful_return) for x in r])
        hidden = method.transformer(
            r[None],
            g[None],
            context.observations[row : row + 1, :n],
            context.actions[row : row + 1, :n],
            context.steps[row : row + 1, :n],
        )
        action = torch.tanh(method.head(hidden[0, -1, 0]))
        state = (context.observations[row, n - 1] - method.transformer.mean) / method.transformer.std
        parts, blind = [state], [state]
        if c.time_critics:
            parts.append(context.steps[row, n - 1 : n].double() * 2 / method.spec.horizon - 1)
            blind = list(parts)
        if c.budget_critics:
            scale = method.spec.cost_max
            parts.append(cost_to_go[-1:].clamp(0, scale) * 4 / scale)
            blind.append(torch.zeros(1).double())
        tested = [action]
        for dimension in range(len(action) if c.test_radius else 0):
            for sign in (-1, 1):
                tested.append(action.clone())
                tested[-1][dimension] = min(max(action[dimension].item() + sign * c.test_radius, -1.0), 1.0)
        qr, qc = np.inf, -np.inf
        for one in tested:
            y = torch.cat([*parts, one])
            qr = min(qr, *(mlp(method.target_reward_critics, i, y).item() for i in (0, 1)))
            y = torch.cat([*blind, one])
            twins = [mlp(method.target_cost_critics, i, y).item() / method.cost_scale for i in (0, 1)]
            qc = max(qc, {"min": min(twins), "max": max(twins), "mean": sum(twins) / 2}[c.cost_reduction])
        limit = cost_to_go[-1].item()
        if c.cost_test == "horizon":
            h = max(method.spec.horizon - int(context.steps[row, n - 1]), 1)
            limit = sum(c.cost_discount**i for i in range(h)) / h * max(limit, 0.0)
        ratio = np.exp(mlp(method.likelihood, 0, torch.cat([*blind, action])).item()) if c.support else np.inf
        scored.append((action, qr, qc, ratio))
    likely = [one for one in scored if one[3] >= c.support]
    for action, qr, qc, _ in likely or scored:
        near, balance = -(action - scored[0][0]).norm().item(), qr - c.tradeoff * method.reward_scale * qc
        value = {"constrained": qr, "shield": near, "tradeoff": balance}[c.selection]
        fits = c.selection == "tradeoff" or qc <= limit + (c.budget_margin if c.budget_critics else 0.0)
        if fits and value > best_value:
            best, best_value = (action, qr, qc, False), value
        if qc < least_value:
            least, least_value = (action, qr, qc, True), qc
    return best or least  # type: ignore[return-value]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_a_frugal_target_is_the_cheapest_that_is_nearly_the_best_for_half_the_limit(share: float) -> None:
    rng = np.random.default_rng(0)
    data = bare_episodes(rng.integers(0, 30, 40), rng.uniform(-50, 100, 40))
    spec, returns, costs = Spec.from_data(data), data.returns, data.episode_costs
    frugal = 0
    for limit in np.arange(costs.min(), 40.0):
        limit = min(limit, costs.max())  # beyond, all limits are one
        best = returns[costs <= limit].max()
        near = [i for i in range(40) if costs[i] <= limit and returns[i] >= best - share * np.ptp(returns)]
        cheapest = min(costs[i] for i in near)
        expected = max(returns[i] for i in near if costs[i] == cheapest) if cheapest <= limit / 2 else best
        assert spec.suggest_return(limit, share) == pytest.approx(expected)
        frugal += expected < best
    assert (frugal > 0) == (share > 0)


def test_half_of_a_limit_beyond_all_that_was_logged_says_nothing() -> None:
    spec = Spec.from_data(bare_episodes([0, 20, 30], [0, 99, 100]))
    assert [spec.suggest_return(limit, 0.02) for limit in (30, 40, 1e6)] == [100, 100, 100]


def test_candidates_are_told_what_the_target_return_cost() -> None:
    method, _ = make(limit_factor=1.0, frugality=0.0)
    costs, returns = method.spec.frontier_costs, method.spec.frontier_returns
    top, second, most = costs[-1], costs[1], method.spec.cost_max
    rows = [  # target, limit, and what is told of the limit
        (returns[1], second + 0.5, second),  # the best within the limit cost less
        (0.5 * returns[1], second + 0.5, second),  # a target that was lowered costs the same
        (returns[2], second + 0.5, second + 0.5),  # a higher one took more than the limit: all of it may be spent
        (returns[2], top + 9, top),  # more is within the limit
        (returns[-1] + 1, top + 9, most),  # nobody has reached it: what anybody has spent
        (returns[0], 4.0, 1.0),  # it cost nothing, and a quarter of the limit is told
    ]
    targets, limits, told = torch.tensor(rows).double().T
    context = random_context(method, len(rows))._replace(return_target=targets, cost_limit=limits)
    kept_back = (context.cost_to_go - candidates.frugal(method, context).cost_to_go)[:, 0]
    assert kept_back.tolist() == pytest.approx((limits - told).tolist())
    method.config = replace(method.config, frugality=None)
    kept_back = (context.cost_to_go - candidates.frugal(method, context).cost_to_go)[:, 0]
    assert kept_back.tolist() == pytest.approx((limits - most).clamp(min=0).tolist())


def test_what_is_told_does_not_grow_beyond_all_that_was_logged() -> None:
    method, _ = make(frugality=None, limit_factor=0.9)
    limits = method.spec.cost_max * torch.tensor([0.5, 1.0, 1.05, 30.0]).double()
    context = random_context(method, 4)._replace(cost_limit=limits)
    told = limits + (candidates.frugal(method, context).cost_to_go - context.cost_to_go)[:, 0]
    assert (told / method.spec.cost_max).tolist() == pytest.approx([0.45, 0.9, 0.9, 0.9])


@pytest.mark.parametrize("changes", [{}, {"selection": "constrained"}, {"frugality": None}])
def test_limits_beyond_all_that_was_logged_are_one(changes: dict[str, Any]) -> None:
    """Networks saw no such budgets; what they make of them would be chance."""
    method, _ = make(ctg_noise=0.5, **changes)
    most = method.spec.cost_max
    decisions = []
    for limit in (4 * most, 1e6):
        policy = Policy(method, dtype=torch.float64)
        policy.reset(3, cost_limits=limit, seeds=[1, 2, 3])
        acted = []
        for step in range(4):
            observations = np.random.default_rng(step).normal(size=(3, method.spec.observation_dim))
            acted.append(policy.act(observations))
            policy.observe(np.ones(3), np.ones(3))
        decisions.append(np.stack(acted))
    np.testing.assert_allclose(*decisions, atol=1e-9)


PLAIN: dict[str, Any] = {
    "candidates": 6,
    "rtg_noise": 0.5,
    "ctg_noise": 0.0,
    "cost_test": "literal",
    "cost_reduction": "min",
    "budget_critics": False,
    "time_critics": False,
    "action_noise": 0.0,
    "selection": "constrained",
    "cost_discount": 0.97,
    "critic_cost_scale": 1.0,
}
DEFAULTS = {name: getattr(QPTConfig(), name) for name in PLAIN} | {"candidates": 6}


@pytest.mark.parametrize("noise_mode", ["episode", "step"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"cost_test": "horizon", "cost_reduction": "max"},
        {"budget_critics": True, "time_critics": True, "ctg_noise": 0.3},
        {"test_radius": 0.3, "ctg_noise": 0.3},
        {"limit_factor": 0.6, "ctg_noise": 0.3},
        {"frugality": None, "ctg_noise": 0.3},
        {"support": 0.9, "ctg_noise": 0.3},
        {"selection": "shield", "ctg_noise": 0.3},
        {"selection": "tradeoff", "ctg_noise": 0.3, "tradeoff": 0.7},
        {"cost_reduction": "mean", "ctg_noise": 0.3},
        DEFAULTS,
    ],
)
def test_decisions_equal_the_slow_reference(noise_mode: str, extra: dict[str, Any]) -> None:
    decides_as_the_slow_reference(**PLAIN | extra, noise_mode=noise_mode)


def test_careful_decisions_equal_the_slow_reference() -> None:
    decides_as_the_slow_reference(**PLAIN | {"careful_costs": True, "careful_return": 0.7, "ctg_noise": 0.3})


def decides_as_the_slow_reference(**config: Any) -> None:
    method, _ = make(**config)
    method.eval()
    # Budgets that are discounted over the horizon are smaller: none of the contested ones would do.
    context = (random_context if method.config.cost_test == "horizon" else contested_context)(method, 20)
    with torch.no_grad():
        decision = candidates.decide(method, context)
        own = candidates.propose(method, candidates.frugal(method, context), 1)[:, 0]
        found = decision.diagnostics
        for row in range(20):
            action, *scores, fallback = slow_decision(method, context, row)
            torch.testing.assert_close(decision.actions[row], action, rtol=0, atol=1e-10)
            assert [found[name][row].item() for name in ("reward_q", "cost_q")] == pytest.approx(scores, abs=1e-10)
            assert bool(found["fallback"][row]) == fallback
    assert (0 < found["fallback"].mean() < 1) == (method.config.selection != "tradeoff")  # both branches were taken
    others = (decision.actions - own).abs().amax(1) > 1e-10
    assert ((found["fallback"] == 0) & others).any()  # and not always the first candidate


@pytest.mark.parametrize(("history", "alike"), [(1, True), (2, False), (None, False)])
def test_with_a_history_of_one_step_the_past_counts_only_by_what_it_left(history: int | None, alike: bool) -> None:
    method, batch = make(candidates=5, history=history, bootstrap="policy", budget_critics=False, n_step=3)
    policy = Policy(method.eval(), dtype=torch.float64)
    policy.reset(2, cost_limits=6.0, seeds=[3, 3])
    seen = np.array([[[1.0, 0.0, 0.0], [-1.0, 2.0, 0.5]], [[0.3, 0.2, 0.1]] * 2])  # two pasts, one present
    policy.act(seen[0])
    policy.observe([1.0, 1.0], [2.0, 2.0])
    first, second = policy.act(seen[1])
    assert np.allclose(first, second, rtol=0, atol=1e-10) == alike
    # Training sees whole windows all the same.
    other, _ = make(candidates=5, bootstrap="policy", budget_critics=False, n_step=3)
    draw = torch.zeros(len(batch.rewards)).double()
    assert method.critic_loss(batch, draw)[0].item() == other.eval().critic_loss(batch, draw)[0].item()
    with pytest.raises(QptError, match="history"):
        make(history=6)


def test_with_careful_costs_the_careful_way_is_among_the_candidates() -> None:
    """With no spread all others are the policy's own; the second is told no cost and a share of the return."""
    method, _ = make(careful_costs=True, candidates=3, rtg_noise=0.0, ctg_noise=0.0)
    context = random_context(method.eval(), 4)
    context = context._replace(return_to_go=context.return_to_go.abs())
    with torch.no_grad():
        proposed = candidates.propose(method, context, 3)
        told = context._replace(
            return_to_go=0.9 * context.return_to_go, cost_to_go=torch.zeros_like(context.cost_to_go)
        )
        careful = candidates.propose(method, told, 1)[:, 0]
    torch.testing.assert_close(proposed[:, 1], careful, rtol=0, atol=1e-10)
    torch.testing.assert_close(proposed[:, 0], proposed[:, 2], rtol=0, atol=1e-10)
    assert ((proposed[:, 0] - careful).abs().amax(1) > 1e-6).all()


def test_careful_costs_that_mean_nothing_are_refused() -> None:
    with pytest.raises(QptError, match='careful costs need bootstrap "expectile"'):
        QPTConfig(careful_costs=True, bootstrap="policy", budget_critics=False)
    with pytest.raises(QptError, match='careful costs need noise_mode "episode"'):
        QPTConfig(careful_costs=True, noise_mode="step")
    with pytest.raises(QptError, match="careful_return"):
        QPTConfig(careful_return=0.0)


def test_a_careful_policy_is_asked_for_less_also_where_returns_are_negative() -> None:
    method, _ = make(careful_return=0.75)
    assert method.modest(torch.tensor([8.0, 0.0, -8.0])).tolist() == [6.0, 0.0, -10.0]


def test_selection_rules() -> None:
    method, _ = make(
        candidates=4,
        selection="constrained",
        cost_test="literal",
        tradeoff=2.0,
        reward_scale=1.0,
        critic_cost_scale=1.0,
    )
    context = random_context(method, 2)
    budget = context.now(context.cost_to_go)
    reward_q = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2).double()
    cost_q = budget[:, None] + torch.tensor([[-1.0, 0.0, 1.0, 2.0], [4.0, 3.0, 2.5, 3.5]]).double()
    actions = torch.zeros(2, 4, 1).double()  # only a shield looks at them
    chosen, infeasible = candidates.choose(method, context, actions, reward_q, cost_q)
    assert chosen.tolist() == [1, 2]  # best feasible; least cost
    assert infeasible.tolist() == [False, True]
    method.config = replace(method.config, fallback="ignore")
    assert candidates.choose(method, context, actions, reward_q, cost_q)[0].tolist() == [1, 3]
    for weight, expected in ((0.1, 3), (10.0, 2)):  # Q^r of 3 and 4 for costs that differ by 1
        method.config = replace(method.config, fallback="tradeoff", tradeoff=weight)
        assert candidates.choose(method, context, actions, reward_q, cost_q)[0].tolist() == [1, expected]
    method.config = replace(method.config, selection="tradeoff", tradeoff=0.1)
    expected = (reward_q - 0.1 * cost_q).argmax(1)
    assert torch.equal(candidates.choose(method, context, actions, reward_q, cost_q)[0], expected)
    method.config = replace(method.config, selection="constrained", cost_test="none")
    assert candidates.choose(method, context, actions, reward_q, cost_q)[0].tolist() == [3, 3]


def test_a_draw_never_takes_what_fails_the_test() -> None:
    method, _ = make(candidates=4, selection="constrained", cost_test="literal", choice="softmax")
    context = random_context(method, 1)
    width = sum(one.size for one in candidates.draws(method, 4))
    context = context._replace(noise=torch.ones(1, width).double())  # as float32 rounds what is nearly 1
    cost_q = context.now(context.cost_to_go)[:, None] + torch.tensor([[1000.0, -1.0, 1000.0, 1000.0]]).double()
    actions, reward_q = torch.zeros(1, 4, 1).double(), torch.zeros(1, 4).double()
    chosen, infeasible = candidates.choose(method, context, actions, reward_q, cost_q)
    assert chosen.tolist() == [1]
    assert not infeasible.any()


def test_draws_follow_the_scores_and_a_way_out_is_not_drawn() -> None:
    """By a softmax of Q^r among what passes; where nothing passes, always the least cost."""
    n = 4000
    method, _ = make(candidates=4, selection="constrained", choice="softmax")
    one = random_context(method, 1)
    context = one.rows(torch.zeros(n, dtype=torch.long))._replace(seeds=torch.arange(n))
    actions, reward_q = torch.zeros(n, 4, 1).double(), torch.tensor([[0.0, 1.0, 2.0, 9.0]] * n).double()
    cost_q = context.now(context.cost_to_go)[:, None] + torch.tensor([[-1.0, -1.0, -1.0, 99.0]]).double()
    chosen, _ = candidates.choose(method, context, actions, reward_q, cost_q)
    shares, expected = torch.bincount(chosen, minlength=4) / n, torch.softmax(reward_q[0, :3], 0)
    assert shares[3] == 0
    torch.testing.assert_close(shares[:3].double(), expected, atol=0.04, rtol=0)  # five standard deviations
    failing = cost_q + torch.tensor([[90.0, 70.0, 80.0, 0.0]]).double()
    chosen, infeasible = candidates.choose(method, context, actions, reward_q, failing)
    assert infeasible.all()
    assert (chosen == 1).all()


def test_an_offset_makes_the_test_stricter() -> None:
    method, _ = make(candidates=2, selection="constrained", budget_critics=False)
    context = random_context(method, 1)
    actions, reward_q = torch.zeros(1, 2, 1).double(), torch.tensor([[1.0, 2.0]]).double()
    cost_q = context.now(context.cost_to_go)[:, None] + torch.tensor([[-3.0, -1.0]]).double()
    for offset, expected in ((0.0, 1), (2.0, 0)):
        method.config = replace(method.config, test_offset=offset)
        assert candidates.choose(method, context, actions, reward_q, cost_q)[0].item() == expected


def test_candidates_differ_also_where_the_target_is_nothing() -> None:
    method, _ = make(candidates=4, rtg_noise=0.2, ctg_noise=0.0)
    context = random_context(method, 1)._replace(return_target=torch.zeros(1).double())
    moved, _ = candidates.shifts(method, context, 4)
    assert moved[0, 0] == 0
    assert len(set(moved[0].tolist())) == 4
    spread = 0.2 * 0.1 * (method.spec.return_max - method.spec.return_min)
    torch.testing.assert_close(
        moved[0], candidates.draw(method, context, 4, candidates.SHIFT)[0, :4] * spread * torch.tensor([0, 1, 1, 1])
    )


@pytest.mark.parametrize("price", [1.0, 5.0, 0.01])
def test_a_margin_is_in_the_unit_of_the_costs(price: float) -> None:
    """At most what it is for costs of 1: a cost that is worth a hundredth of that has a hundredth of the margin."""
    data = tiny_data()
    data = Trajectories.from_arrays(
        data.observations, data.actions, data.rewards, data.costs * price, data.terminals, data.timeouts
    )
    method = QPT(replace(QPTConfig(), **SMALL), Spec.from_data(data))
    assert method.margin == pytest.approx(0.5 * min(price, 1))
    batch, draw = method.make_sampler(data, torch.device("cpu"), 1).sample(), torch.zeros(8)
    _, budget = method.features(batch.observations, batch.cost_to_go, batch.steps)
    seen, _ = method.features(batch.observations, torch.full_like(batch.cost_to_go, method.spec.cost_max), batch.steps)
    torch.testing.assert_close(
        seen[..., -1], torch.full_like(seen[..., -1], 4)
    )  # whatever the unit, the dearest episode's cost looks the same
    assert (budget[..., -1] == 0).all()
    assert method.critic_loss(batch, draw)[0].isfinite()


@pytest.mark.parametrize(
    ("changes", "horizon", "refused"),
    [
        ({}, None, False),
        ({}, 30, True),
        ({"time_critics": False}, None, True),
        ({"discount": 0.99, "cost_discount": 0.99}, 30, False),
        ({"discount": 0.99}, 30, True),
    ],
)
def test_critics_without_a_discount_need_an_end(changes: dict[str, Any], horizon: int | None, refused: bool) -> None:
    data = tiny_data()
    data = Trajectories.from_arrays(  # all are cut off by time
        data.observations, data.actions, data.rewards, data.costs, data.terminals * 0, data.terminals | data.timeouts
    )
    method = QPT(replace(QPTConfig(), **SMALL | changes), Spec.from_data(data, horizon))
    if not refused:
        method.make_sampler(data, torch.device("cpu"), 0)
        return
    with pytest.raises(QptError, match=r"give --horizon 20 with time critics, or --discount 0\.99"):
        method.make_sampler(data, torch.device("cpu"), 0)
    plain = QPT(replace(QPTConfig.preset("transformer"), **SMALL), method.spec)
    plain.make_sampler(data, torch.device("cpu"), 0)  # has no critics


def test_the_networks_are_of_the_papers_depth_and_the_heads_differ_by_a_tanh() -> None:
    method, batch = make()
    for critics in (method.reward_critics, method.cost_critics, method.target_reward_critics):
        assert [tuple(weight.shape) for weight in critics.weights] == [(2, 7, 16), (2, 16, 16), (2, 16, 16), (2, 16, 1)]
    method.head.weight.data *= 10
    raw = method.policy(batch).atanh()
    method.config = replace(method.config, head="linear")
    torch.testing.assert_close(method.policy(batch), raw)
    assert raw.abs().max() > 1
    with torch.no_grad():
        acted = candidates.decide(method.eval(), random_context(method, 3)).actions
    assert acted.abs().max() == 1  # clamped


def test_each_switch_takes_away_its_own_part() -> None:
    for name in ("reward", "cost"):
        method, batch = make(**{f"train_with_{name}_critic": False})
        sizes = [torch.ones(()).double()] * 2
        loss, metrics = method.policy_loss(batch, method.policy(batch), sizes)
        assert f"policy/{name}_q" not in metrics
        other = {"reward": "cost", "cost": "reward"}[name]
        sign = {"reward": -1, "cost": 1}[other]
        q = metrics[f"policy/{other}_q"]
        scale = {"reward": 10.0, "cost": 10.0}[other]  # the data's constants, as the critics scale them
        torch.testing.assert_close(loss, metrics["policy/imitation"] + sign * 0.1 * q / scale)
    data, cpu = tiny_data(), torch.device("cpu")
    logged = QPT(replace(QPTConfig(), **SMALL, augmentation=False), Spec.from_data(data)).make_sampler(data, cpu, 0)
    more = QPT(replace(QPTConfig(), **SMALL), Spec.from_data(data)).make_sampler(data, cpu, 0)
    assert len(logged._start) == len(data)
    assert len(more._start) > len(data)


def test_without_clipping_a_step_is_taken_all_the_same() -> None:
    method, batch = make(clip=0.0, critic_clip=0.0)
    method = method.float()
    method.make_optimizers()
    metrics = method.update(WindowBatch(*(x.float() if x.is_floating_point() else x for x in batch)))
    assert "policy/gradient_norm" not in metrics
    assert metrics["loss"].isfinite()


def test_return_targets_from_the_data_or_as_published() -> None:
    method, _ = make()
    own = method.spec.suggest_return(10.0)
    for targets, task, pairs, expected in (
        ("data", "BallCircle", ((3.0, 10.0),), own),
        ("published", "BallCircle", None, 700.0),  # a checkpoint of a version that did not store them
        ("published", "a task of one's own", ((9.0, 20.0), (3.0, 0.0)), 6.0),
        ("published", "a task of one's own", (), own),
        ("published", None, (), own),
    ):
        method.config = replace(method.config, targets=targets, frugality=None)
        method.spec = replace(method.spec, task=task, published=pairs)
        method.spec = Spec.from_json(json.loads(json.dumps(method.spec.to_json())))
        assert method.suggest_return(10.0) == expected
    assert QPTConfig.preset("paper").targets == "published"


def test_a_policy_that_is_told_no_limit_aims_at_what_0_allows() -> None:
    method, _ = make()
    policy = Policy(method)
    policy.reset(2)
    assert policy.return_targets.tolist() == [method.suggest_return(0.0)] * 2
    policy.reset(1, return_targets=[3.0])
    assert policy.return_targets.tolist() == [3.0]


def test_the_shield_changes_the_first_candidate_as_little_as_the_test_lets_it() -> None:
    method, _ = make(candidates=4, selection="shield", cost_test="literal", budget_critics=False)
    context = random_context(method, 6)
    budget = context.now(context.cost_to_go)
    beyond = [
        [-1.0, -2.0, -3.0, -4.0],  # all pass: the first, though it has neither the most reward nor the least cost
        [0.0, 1.0, -2.0, 2.0],  # exactly at the budget is within it
        [0.5, -1.0, -3.0, 2.0],  # the first fails: the nearest of those that pass, not the best by Q^r
        [0.5, 2.0, 1.0, -0.1],  # only the last passes
        [2.0, 3.0, 1.0, 4.0],  # none passes: the least cost
        [0.5, 3.0, 1.0, 4.0],  # the same, and the first has it
    ]
    cost_q = budget[:, None] + torch.tensor(beyond).double()
    reward_q = torch.tensor([[5.0, 9.0, 7.0, 6.0]] * 6).double()
    actions = torch.tensor([[0.1, -0.5], [0.8, 0.5], [-0.2, -0.4], [0.9, 0.9]]).double().expand(6, -1, -1)
    chosen, infeasible = candidates.choose(method, context, actions, reward_q, cost_q)
    assert chosen.tolist() == [0, 0, 2, 3, 2, 0]
    assert infeasible.tolist() == [False, False, False, False, True, True]
    method.config = replace(method.config, selection="constrained")  # the same scores, chosen by reward
    assert candidates.choose(method, context, actions, reward_q, cost_q)[0].tolist() == [1, 2, 1, 3, 2, 0]


@pytest.mark.parametrize("noise_mode", ["episode", "step"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"choice": "softmax"},
        {"action_noise": 0.2, "test_radius": 0.2},
        {"fallback": "tradeoff", "cost_test": "horizon", "test_offset": 5.0},
        {"support": 0.9},
    ],
)
def test_a_shield_tries_the_others_only_where_the_policys_own_action_fails(
    noise_mode: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is that among all candidates, with less work: not for what passes, nor for who is not there."""
    method, _ = make(candidates=6, rtg_noise=0.5, ctg_noise=0.3, selection="shield", noise_mode=noise_mode, **extra)
    method.eval()
    context = random_context(method, 20)
    told, aimed = candidates.frugal(method, context), candidates.aimed(method, context)
    tried: list[tuple[int, int]] = []
    propose = candidates.propose

    def counting(method: QPT, context: Context, count: int) -> torch.Tensor:
        tried.append((len(context.last), count))
        return propose(method, context, count)

    with torch.no_grad():
        expected = candidates.among(method, told, aimed, 6)
        own = candidates.among(method, told, aimed, 1).diagnostics["fallback"] > 0
        monkeypatch.setattr(candidates, "propose", counting)
        found = candidates.decide(method, context)
        spared = tried == [(20, 1)] + [(1, 6)] * int(own.sum())
        tried.clear()
        away = torch.arange(20) % 2 == 0
        candidates.decide(method, context._replace(active=~away))
    torch.testing.assert_close(found.actions, expected.actions, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.diagnostics, expected.diagnostics, rtol=0, atol=1e-10)
    assert 0 < own.sum() < 20  # both kinds are among them
    if extra.get("support"):  # an action is likely or not among the others
        assert tried == [(20, 6)]
    else:
        assert spared
        assert tried == [(20, 1)] + [(1, 6)] * int((own & ~away).sum())


def test_horizon_budget_is_an_even_discounted_spend() -> None:
    expected = sum(0.99**i * 10 / 200 for i in range(200))
    assert discounted_limit(10.0, 200, 0.99) == pytest.approx(expected)
    assert discounted_limit(10.0, 200, 1.0) == 10.0


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bootstrap": "policy"}, "budget critics need"),
        ({"width": 30, "heads": 4}, "multiple of the heads"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"discount": 1.5}, "discount must be above 0 and at most 1"),
        ({"decay": 2.0}, "decay must be from 0 to 1"),
        ({"n_step": -1}, "n_step must be at least 1"),
        ({"context": 1}, "a context of at least 2"),
        ({"budget_critics": False, "unfit_penalty": 0.5}, "an unfit penalty needs budget critics"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QptError, match=message):
        replace(QPTConfig(), **changes)


def test_without_critics_one_step_is_a_context() -> None:
    assert replace(QPTConfig.preset("transformer"), context=1).context == 1


# What the paper"s table names, and what it leaves open: CDT"s choices, and everything off that goes beyond it.
TABLE = {
    "steps": 100000,
    "batch_size": 2048,
    "context": 10,
    "width": 128,
    "layers": 3,
    "heads": 8,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "critic_width": 256,
    "lr": 0.0001,
    "critic_lr": 0.0001,
    "weight_decay": 0.0001,
    "betas": (0.9, 0.999),
    "warmup": 500,
    "clip": 0.25,
    "critic_clip": 0.25,
    "ema": 0.995,
    "critic_ema": 0.995,
    "discount": 0.99,
    "cost_discount": 0.99,
    "eta_reward": 0.1,
    "eta_cost": 0.1,
    "candidates": 50,
}
OPEN = {
    "return_scale": 0.1,
    "cost_scale": 1.0,
    "cost_offset": 50.0,
    "head": "tanh",
    "augmentation": True,
    "augmentation_rule": "paper",
    "augmentation_fraction": 0.2,
    "weighting": "low-cost",
    "cost_ceiling": 70.0,
    "n_step": None,
    "bootstrap": "policy",
    "reward_expectile": 0.9,
    "cost_expectile": 0.1,
    "budget_critics": False,
    "budget_margin": 0.5,
    "unfit_penalty": None,
    "time_critics": False,
    "cost_reduction": "min",
    "reward_scale": 0.1,
    "critic_cost_scale": 1.0,
    "clamp_cost": False,
    "careful_costs": False,
    "careful_return": 0.9,
    "train_with_reward_critic": True,
    "train_with_cost_critic": True,
    "cost_term": "all",
    "normalizer": "batch",
    "normalizer_floor": 0.01,
    "decay": 0.0,
    "history": None,
    "limit_factor": 1.0,
    "frugality": None,
    "inference_with_candidates": True,
    "rtg_noise": 0.05,
    "ctg_noise": 0.0,
    "action_noise": 0.0,
    "noise_mode": "episode",
    "cost_test": "literal",
    "test_offset": 0.0,
    "test_radius": 0.0,
    "support": 0.0,
    "fallback": "least-cost",
    "selection": "constrained",
    "tradeoff": 1.0,
    "choice": "argmax",
    "targets": "published",
    "target_factor": 1.0,
    "reward_reduction": "min",
}


def test_paper_preset_is_the_papers_table() -> None:
    """All of it, so that no default that changes gets into it unseen."""
    paper = QPTConfig.preset("paper")
    assert {name: value for name, value in asdict(paper).items() if name in TABLE} == TABLE
    assert {name: value for name, value in asdict(paper).items() if name not in TABLE} == OPEN
    with pytest.raises(QptError, match="no preset"):
        QPTConfig.preset("papre")


def test_the_default_draws_every_episode() -> None:
    """Whatever limit may be asked for later: weights that fall with the cost leave out whole tasks' dear episodes."""
    data = tiny_data()
    method = QPT(replace(QPTConfig(), **SMALL | {"batch_size": 4096}, augmentation=False), Spec.from_data(data))
    batch = method.make_sampler(data, torch.device("cpu"), 0).sample()
    of = {row.tobytes(): episode for row, episode in zip(data.observations, data.episode_of_step, strict=True)}
    seen = np.bincount([of[row.tobytes()] for row in batch.observations[:, 0].numpy()], minlength=len(data))
    assert (seen > 0.5 * seen.mean()).all()
