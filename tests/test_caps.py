"""CAPS: losses of both bases against loops, the differences of the variants, and a budget that is kept by switching."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import tiny_data
from qpt.algorithms.base import Context, Spec, preset_config
from qpt.algorithms.caps import CAPS, CAPSConfig
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy
from qpt.tasks import get_task

torch.set_num_threads(1)  # the fastest for small networks
CONFIG = CAPSConfig(width=16, batch_size=32, heads=3)


def make(**changes) -> tuple[CAPS, TransitionBatch]:
    torch.manual_seed(0)
    data = tiny_data()
    method = CAPS(replace(CONFIG, **changes), Spec.from_data(data)).double()
    with torch.no_grad():
        for parameter in method.target_critics.parameters():  # targets that differ from the critics
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = TransitionSampler(data, 64).sample()
    assert batch.terminals.sum() > 0
    assert batch.timeouts.sum() > 0
    return method, TransitionBatch(*(f.double() if f.is_floating_point() else f for f in batch))


def seen_of(method: CAPS, observation: torch.Tensor) -> torch.Tensor:
    return (observation - method.see.mean) / method.see.std


def twins(critics, seen: torch.Tensor, action: torch.Tensor) -> tuple[float, float]:
    q = critics(torch.cat([seen, action])).flatten().tolist()
    return min(q[:2]), max(q[2:])


def judged_of(method: CAPS, observation: torch.Tensor, step: int) -> torch.Tensor:
    """What critics know: in the correct variant also the step, unless they bootstrap at timeouts."""
    seen = seen_of(method, observation)
    if method.config.variant == "reference" or method.config.timeouts == "bootstrap":
        return seen
    return torch.cat([seen, torch.tensor([2 * step / method.spec.horizon - 1], dtype=seen.dtype)])


def over(batch: TransitionBatch, i: int, variant: str, timeouts: str = "seen") -> bool:
    return bool(batch.terminals[i]) or ((variant, timeouts) != ("correct", "bootstrap") and bool(batch.timeouts[i]))


WAYS = [("correct", "seen"), ("correct", "bootstrap"), ("reference", "seen")]


@pytest.mark.parametrize("timeouts", ["seen", "bootstrap"])
def test_value_loss_and_advantages(timeouts):
    method, batch = make(timeouts=timeouts)
    loss, more, less = method.value_loss(batch)
    expected = 0.0
    for i in range(len(batch.rewards)):
        state = judged_of(method, batch.observations[i], int(batch.steps[i]))
        reward_q, cost_q = twins(method.target_critics, state, batch.actions[i])
        reward_v, cost_v = method.values(state).flatten().tolist()
        assert more[i].item() == pytest.approx(reward_q - reward_v)
        assert less[i].item() == pytest.approx(cost_v - cost_q)
        for u in (reward_q - reward_v, -cost_q + cost_v):  # the same expectile of negative costs
            expected += (0.7 if u > 0 else 0.3) * u * u
    assert loss.item() == pytest.approx(expected / len(batch.rewards), rel=1e-6)


@pytest.mark.parametrize(("variant", "timeouts"), WAYS)
def test_critic_loss_tells_terminals_from_timeouts(variant, timeouts):
    method, batch = make(variant=variant, timeouts=timeouts)
    next_reward, next_cost = torch.randn(2, 64, dtype=torch.float64)
    expected = 0.0
    for i in range(64):
        state = judged_of(method, batch.observations[i], int(batch.steps[i]))
        q = method.critics(torch.cat([state, batch.actions[i]])).flatten().tolist()
        going = 0.0 if over(batch, i, variant, timeouts) else 0.99
        reward_target = 0.1 * batch.rewards[i].item() + going * next_reward[i].item()
        cost_target = batch.costs[i].item() + going * next_cost[i].item()
        expected += sum((x - reward_target) ** 2 for x in q[:2]) / 2 + sum((x - cost_target) ** 2 for x in q[2:]) / 2
    assert method.critic_loss(batch, next_reward, next_cost).item() == pytest.approx(expected / 64, rel=1e-9)


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_heads_go_from_reward_to_safety(heads):
    method, _ = make(heads=heads)
    more, less = torch.tensor([0.5, -1.0, 9.0]), torch.tensor([-0.2, 0.3, 0.1])
    weights = method.head_weights(more, less)
    for i in range(3):
        reward, safety = min(math.exp(3 * more[i]), 100.0), min(math.exp(3 * less[i]), 100.0)
        expected = [reward, *(reward + k / ((heads - 1) / 2) * safety for k in range(1, heads - 1)), safety]
        assert weights[i].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", ["correct", "reference"])
def test_imitation_loss_and_its_sigma(variant):
    method, batch = make(variant=variant)
    if variant == "correct":
        with torch.no_grad():
            method.policy.log_std.copy_(torch.linspace(-1, 0.5, 6).view(3, 2))
    weights = torch.rand(64, 3, dtype=torch.float64)
    log_std = method.policy.log_std.detach()
    expected = 0.0
    for i in range(64):
        mean = torch.tanh(method.policy(seen_of(method, batch.observations[i])[None])[0][0])
        for h in range(3):
            normal = torch.distributions.Normal(mean[h], log_std[h].exp())
            expected -= weights[i, h].item() * normal.log_prob(batch.actions[i]).sum().item()
    assert method.actor_loss(batch, weights).item() == pytest.approx(expected / (64 * 3), rel=1e-9)


def test_only_the_correct_variant_learns_sigma():
    for variant, learns in (("correct", True), ("reference", False)):
        method, batch = make(variant=variant)
        assert any(p is method.policy.log_std for p in method.policy_parameters) == learns
        method.make_optimizers()
        for _ in range(3):
            method.update(batch)
        assert bool((method.policy.log_std != 0).any()) == learns
    reference, batch = make(variant="reference")
    mean = torch.tanh(reference.policy(reference.see(batch.observations))[0])
    squares = (batch.actions[:, None] - mean).square().sum(-1).mean()  # σ = 1: half the squared error and a constant
    constant = 0.5 * 2 * math.log(2 * math.pi)
    expected = 0.5 * squares.item() + constant
    assert reference.actor_loss(batch, torch.ones(64, 3)).item() == pytest.approx(expected, rel=1e-9)


def test_squashed_likelihood_is_that_of_a_transformed_normal():
    method, batch = make(base="sac-bc")
    noise = torch.randn(64, 3, 2, dtype=torch.float64)
    seen = method.see(batch.observations)
    actions, likelihood = method.draw(seen, noise)
    mean, log_std = method.policy(seen)
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform()
    )
    torch.testing.assert_close(likelihood, squashed.log_prob(actions).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["correct", "reference"])
def test_backup_averages_heads_and_only_the_reference_adds_entropy_to_costs(variant):
    method, batch = make(base="sac-bc", variant=variant)
    with torch.no_grad():
        method.log_temperature.fill_(-1.0)
    noise = torch.randn(64, 3, 2, dtype=torch.float64)
    reward, cost = method.backup(batch, noise)
    alpha = math.exp(-1.0)
    for i in range(64):
        seen = seen_of(method, batch.next_observations[i])
        actions, likelihood = method.draw(seen[None], noise[i : i + 1])
        state = judged_of(method, batch.next_observations[i], int(batch.steps[i]) + 1)
        parts = [twins(method.target_critics, state, actions[0, h].detach()) for h in range(3)]
        entropies = [-alpha * likelihood[0, h].item() for h in range(3)]
        assert reward[i].item() == pytest.approx(sum(p[0] + e for p, e in zip(parts, entropies, strict=True)) / 3)
        extra = sum(entropies) if variant == "reference" else 0.0
        assert cost[i].item() == pytest.approx((sum(p[1] for p in parts) - extra) / 3)


def test_actor_critic_loss_against_loops():
    method, batch = make(base="sac-bc")
    noise = torch.randn(64, 3, 2, dtype=torch.float64)
    goals, rest = np.zeros((64, 3)), np.zeros((64, 3))
    for i in range(64):
        seen = seen_of(method, batch.observations[i])
        actions, likelihood = method.draw(seen[None], noise[i : i + 1])
        state = judged_of(method, batch.observations[i], int(batch.steps[i]))
        for h in range(3):
            reward_q, cost_q = twins(method.critics, state, actions[0, h].detach())
            goals[i, h] = (reward_q, reward_q - cost_q, -cost_q)[h]  # the middle one of three: k / ((H - 1) / 2) = 1
            rest[i, h] = likelihood[0, h].item() + (actions[0, h] - batch.actions[i]).square().mean().item()
    expected = (rest - 2.5 * goals / np.abs(goals).mean(0)).mean()
    assert method.actor_critic_loss(batch, noise)[0].item() == pytest.approx(expected, rel=1e-9)


def test_act_switches_by_the_remaining_budget():
    """Heads with known values, compared with the rule written as a loop."""
    method, _ = make(heads=4)
    generator = torch.Generator().manual_seed(3)
    n, reward, cost = 200, torch.randn(200, 4, generator=generator), torch.rand(200, 4, generator=generator) * 8
    method.q = lambda *_: (reward, cost)  # type: ignore[method-assign]
    observations = torch.randn(n, 1, 3, dtype=torch.float64)
    steps = torch.randint(method.spec.horizon, (n, 1))
    budget = torch.linspace(-3, 12, n)[:, None].double()
    zeros = torch.zeros(n)
    context = Context(
        observations, torch.zeros(n, 1, 2), zeros[:, None], budget, steps, zeros.long(), zeros, zeros, zeros.long()
    )
    decision = method.act(context)
    proposed = torch.tanh(method.policy(method.see(observations[:, 0]))[0])
    fallbacks = 0
    for i in range(n):
        left = method.spec.horizon - int(steps[i])
        limit = max(budget[i].item(), 0) * (1 - 0.99**left) / (0.01 * left)
        fits = [h for h in range(4) if cost[i, h] < limit]
        fallbacks += not fits
        head = max(fits, key=lambda h: reward[i, h]) if fits else min(range(4), key=lambda h: cost[i, h])
        assert torch.equal(decision.actions[i], proposed[i, head])
        assert decision.diagnostics["fallback"][i] == float(not fits)
    assert 10 < fallbacks < n - 10


def test_the_papers_preset_is_the_published_code_and_knows_metadrive():
    paper = preset_config("caps", "paper", get_task("BallRun"))
    assert (paper.variant, paper.normalize, paper.expectile) == ("reference", False, 0.7)
    assert preset_config("caps", "paper", get_task("easymean")) == replace(paper, expectile=0.5, steps=200_000)
    assert preset_config("oasis", "paper").variant == "reference"


def test_one_head_cannot_switch():
    with pytest.raises(QptError, match="at least 2 heads"):
        make(heads=1)


def gamble(episodes: int = 400, horizon: int = 5) -> Trajectories:
    """Each of five steps: a > 0 earns 1 and costs 1, others neither; logged actions are uniform."""
    actions = np.random.default_rng(0).uniform(-1, 1, (episodes * horizon, 1))
    clock = np.tile(np.arange(horizon) / horizon, episodes)[:, None]
    return Trajectories.from_arrays(
        observations=clock,
        actions=actions,
        rewards=(actions[:, 0] > 0).astype(float),
        costs=(actions[:, 0] > 0).astype(float),
        terminals=clock[:, 0] == (horizon - 1) / horizon,
    )


@pytest.mark.parametrize("base", ["iql", "sac-bc"])
def test_keeps_every_budget_with_one_policy(base):
    torch.manual_seed(0)
    data = gamble()
    config = CAPSConfig(base=base, width=32, batch_size=128, lr=3e-3, discount=0.9, target_rate=0.05, reward_scale=1.0)
    method = CAPS(config, Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(600):
        method.update(sampler.sample())
    policy = Policy(method)
    limits = np.repeat([0.0, 2.0, 5.0], 20)
    policy.reset(60, cost_limits=limits, seeds=np.arange(60))
    for t in range(5):
        bold = (policy.act(np.full((60, 1), t / 5, np.float32))[:, 0] > 0).astype(float)
        policy.observe(bold, bold)
    none, some, all_of_it = policy.spent.reshape(3, 20).mean(1)
    assert none <= 0.1
    assert 1.0 <= some <= 2.0
    assert all_of_it >= 4.5
