"""FISOR: losses against loops, values that do not run away, and a problem whose safe answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import tiny_data
from qpt.algorithms.base import Spec, descend, preset_config, soft_update
from qpt.algorithms.fisor import FISOR, FISORConfig
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.noise import episode_normal
from qpt.policy import Policy
from qpt.tasks import get_task

torch.set_num_threads(1)  # the fastest for small networks
CONFIG = FISORConfig(width=16, policy_width=16, blocks=1, batch_size=32, dropout=0.0)


def make(config: FISORConfig = CONFIG, seed: int = 0) -> tuple[FISOR, TransitionBatch]:
    torch.manual_seed(seed)
    data = tiny_data()
    method = FISOR(config, Spec.from_data(data)).double()
    for parameter in method.target_critics.parameters():  # targets that differ from the critics
        parameter.add_(0.1 * torch.randn_like(parameter))
    batch = TransitionSampler(data, 64, seed=seed).sample()
    assert batch.terminals.sum() > 0
    assert batch.timeouts.sum() > 0
    return method, TransitionBatch(*(f.double() if f.is_floating_point() else f for f in batch))


def rows(method: FISOR, batch: TransitionBatch):
    """Everything a loop needs, one logged step at a time, in floats."""
    for i in range(len(batch.rewards)):
        clock = torch.tensor([int(batch.steps[i]) / method.spec.horizon * 2 - 1], dtype=torch.float64)
        tick = torch.tensor([2 / method.spec.horizon], dtype=torch.float64)
        seen = (batch.observations[i] - method.see.mean) / method.see.std
        after = (batch.next_observations[i] - method.see.mean) / method.see.std
        if method.config.timeouts == "seen":
            seen, after = torch.cat([seen, clock]), torch.cat([after, clock + tick])
        both = torch.cat([seen, batch.actions[i]])
        target = method.target_critics(both).flatten().tolist()
        online = method.critics(both).flatten().tolist()
        v, next_v = method.values(seen).flatten().tolist(), method.values(after).flatten().tolist()
        yield i, online, min(target[:2]), max(target[2:]), v, next_v


def test_value_loss_is_two_opposite_expectiles():
    method, batch = make()
    expected = 0.0
    for _, _, reward_q, harm_q, (reward_v, harm_v), _ in rows(method, batch):
        u, w = reward_q - reward_v, harm_q - harm_v
        expected += (0.9 if u > 0 else 0.1) * u * u + (0.9 if w < 0 else 0.1) * w * w
    assert method.value_loss(batch).item() == pytest.approx(expected / len(batch.rewards), rel=1e-6)


@pytest.mark.parametrize("timeouts", ["seen", "end", "bootstrap"])
def test_critic_loss_is_the_hamilton_jacobi_backup(timeouts):
    method, batch = make(replace(CONFIG, timeouts=timeouts))
    scale = method.spec.horizon / (method.spec.return_max - method.spec.return_min)
    expected = 0.0
    for i, online, _, _, _, (next_reward, next_harm) in rows(method, batch):
        h = 5.0 if batch.costs[i] > 0 else -1.0
        over = bool(batch.terminals[i]) or (timeouts != "bootstrap" and bool(batch.timeouts[i]))
        reward_target = scale * batch.rewards[i].item() + (0 if over else 0.99 * next_reward)
        harm_target = h if over else 0.05 * h + 0.95 * max(h, next_harm)
        expected += sum((q - reward_target) ** 2 for q in online[:2]) / 2
        expected += sum((q - harm_target) ** 2 for q in online[2:]) / 2
    assert method.critic_loss(batch).item() == pytest.approx(expected / len(batch.rewards), rel=1e-9)


def rolling(timeouts: str) -> tuple[FISOR, torch.Tensor, torch.Tensor]:
    """FISOR, places and steps of a ball that rolls on: 40 steps that earn as far as they go, 1 to 3, and a timeout."""
    rng, (episodes, length) = np.random.default_rng(0), (40, 40)
    speeds = rng.uniform(1, 3, (episodes, length))
    places = rng.uniform(0, 40, (episodes, 1)) + np.concatenate([np.zeros((episodes, 1)), speeds.cumsum(1)], 1)
    data = Trajectories.from_arrays(
        places[:, :-1].reshape(-1, 1),
        (speeds - 2).reshape(-1, 1),
        speeds.ravel(),
        np.zeros(speeds.size),
        np.zeros(speeds.size, bool),
        np.tile(np.arange(length) == length - 1, episodes),
        next_observations=places[:, 1:].reshape(-1, 1),
    )
    torch.manual_seed(0)
    fast = replace(CONFIG, timeouts=timeouts, batch_size=128, critic_lr=3e-3, target_rate=0.3)
    method = FISOR(fast, Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(1000):
        method.update(sampler.sample())
    return method, torch.tensor(data.observations), torch.arange(length).repeat(episodes)


def test_values_where_the_place_tells_the_time():
    gains = {}
    for timeouts in ("seen", "end", "bootstrap"):
        method, places, steps = rolling(timeouts)
        with torch.no_grad():
            values, behind = (method.values(method.judged(p, steps))[0, :, 0] for p in (places, places - 5))
        # nobody can earn more than 40 times 3
        assert (values.max().item() > 120 * method.reward_scale) == (timeouts == "bootstrap")
        gains[timeouts] = (behind - values)[(steps > 5) & (steps < 30)].mean().item() / method.reward_scale
    assert gains["end"] > 2  # it takes a place further back for time that is left
    assert abs(gains["seen"]) < 0.5 * gains["end"], gains


def test_actor_loss_weighs_by_feasibility():
    method, batch = make(replace(CONFIG, cost_temperature=0.5, cost_weight_max=2.0, reward_weight_max=1.5))
    with torch.no_grad():  # spread the values over all regimes
        for net in (method.values, method.target_critics):
            for parameter in net.parameters():
                parameter.mul_(3)
        method.values.biases[-1][1] -= method.values(method.judged(batch.observations, batch.steps))[1].median()
    step = torch.randint(5, (len(batch.rewards),))
    noise = torch.randn_like(batch.actions)
    expected, regimes = 0.0, set()
    for i, _, reward_q, harm_q, (reward_v, harm_v), _ in rows(method, batch):
        if harm_v > 0:
            weight, regime = min(math.exp(0.5 * (harm_v - harm_q)), 2.0), "unsafe"
        elif harm_q <= 0:
            weight, regime = min(math.exp(3.0 * (reward_q - reward_v)), 1.5), "safe"
        else:
            weight, regime = 0.0, "neither"
        regimes.add(regime)
        t = int(step[i])
        noisy = method.diffusion.signal[t] * batch.actions[i] + method.diffusion.noise[t] * noise[i]
        seen = (batch.observations[i] - method.see.mean) / method.see.std
        predicted = method.denoiser(noisy[None], seen[None], step[i : i + 1])[0]
        expected += weight * ((predicted - noise[i]) ** 2).sum().item()
    assert regimes == {"safe", "unsafe", "neither"}
    assert method.actor_loss(batch, step, noise).item() == pytest.approx(expected / len(batch.rewards), rel=1e-9)


@pytest.mark.parametrize("enough", [None, 0.0, -9.0])
def test_act_takes_the_lowest_feasibility_value_or_the_best_of_the_feasible(enough):
    method, _ = make(replace(CONFIG, feasible_enough=enough))
    with torch.no_grad():  # values of the 16 on both sides of 0
        for parameter in method.target_critics.parameters():
            parameter.mul_(2)
        for parameter in method.acting_denoiser.parameters():
            parameter.mul_(0.1)
    seen = torch.randn(2, 3, dtype=torch.float64)
    noise = episode_normal(torch.tensor([5, 6]), torch.zeros(2), 16 * 5 * 2, stream=1).view(2, 16, 5, 2)
    proposed = method.propose(method.see(seen), noise)
    assert proposed.abs().max() <= 1
    with torch.no_grad():
        state = method.judged(seen, torch.zeros(2))
        middle = method.target_q(state[:, None].expand(-1, 16, -1), proposed)[1].quantile(0.5)
        method.target_critics.biases[-1][2:] -= middle
    policy = Policy(method, dtype=torch.float64)
    policy.reset(2, seeds=[5, 6])
    actions = policy.act(seen.numpy())
    for row in range(2):
        values = [tuple(q.item() for q in method.target_q(state[row], a)) for a in proposed[row]]
        feasible = [i for i, (_, harm) in enumerate(values) if enough is not None and harm <= enough]
        assert bool(feasible) == (enough == 0.0)
        lowest = min(range(16), key=lambda i: values[i][1])
        best = max(feasible, key=lambda i: values[i][0]) if feasible else lowest
        np.testing.assert_allclose(actions[row], proposed[row, best].detach(), rtol=1e-5)
        assert feasible or best == lowest
    assert policy.limit_mode == "ignored"


def test_equal_returns_leave_rewards_as_they_are():
    data = tiny_data()
    spec = replace(Spec.from_data(data), return_min=5.0, return_max=5.0)
    assert FISOR(CONFIG, spec).reward_scale == 1.0


def test_paper_preset_cuts_the_batch_and_decays_the_learning_rate():
    paper = FISORConfig.preset("paper")
    assert (paper.batch_size, paper.policy_updates, paper.critic_batch, paper.steps) == (2048, 2, 256, 1_000_000)
    assert (paper.violation, paper.cost_temperature, paper.reward_temperature, paper.expectile) == (25, 5, 3, 0.9)
    assert (paper.discount, paper.feasibility_discount, paper.target_rate, paper.critic_lr) == (0.99, 0.99, 0.005, 3e-4)
    assert (paper.lr, paper.ema_rate, paper.candidates, paper.feasible_enough) == (3e-4, 0.001, 16, None)
    data = tiny_data()
    method = FISOR(replace(CONFIG, policy_updates=2, critic_batch=8, lr_horizon=8), Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    rates = []
    for _ in range(5):
        method.update(sampler.sample())
        rates.append(method.optimizers["policy"].param_groups[0]["lr"].item())
    assert rates == pytest.approx([3e-4 * 0.5 * (1 + math.cos(math.pi * 2 * t / 8)) for t in range(5)], abs=1e-9)
    assert method.optimizers["policy"].state[method.policy_parameters[0]]["step"] == 10
    assert preset_config("fisor", "paper", get_task("harddense")).cost_weight_min == 1.0
    assert preset_config("fisor", "paper", get_task("BallRun")) == paper
    with pytest.raises(QptError, match="cannot be cut"):
        FISOR(replace(CONFIG, policy_updates=3), Spec.from_data(data))
    with pytest.raises(QptError, match="no preset"):
        FISORConfig.preset("best")


def cliff(count: int) -> Trajectories:
    """Single steps: a > 0 earns 2 but costs; of the others a = -1/2 earns most (1) and the ends earn nothing."""
    actions = np.random.default_rng(0).uniform(-1, 1, count)
    return Trajectories.from_arrays(
        observations=np.ones((count, 1)),
        actions=actions[:, None],
        rewards=np.where(actions > 0, 2.0, 1 - 2 * np.abs(actions + 0.5)),
        costs=(actions > 0).astype(float),
        terminals=np.ones(count, bool),
    )


def test_learns_to_earn_without_ever_violating():
    torch.manual_seed(0)
    config = FISORConfig(
        width=64,
        policy_width=64,
        blocks=2,
        batch_size=128,
        lr=1e-3,
        critic_lr=1e-3,
        ema_rate=0.02,
        target_rate=0.05,
        violation=2.0,
        reward_temperature=10.0,
        dropout=0.0,
    )
    data = cliff(2000)
    method = FISOR(config, Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(1200):
        method.update(sampler.sample())
    policy = Policy(method)
    policy.reset(200, seeds=np.arange(200))
    actions = policy.act(np.ones((200, 1), np.float32))[:, 0]
    assert (actions > 0).mean() <= 0.01
    assert np.mean(1 - 2 * np.abs(actions + 0.5)) > 0.65  # safe actions at random earn 0.5


def corridor(episodes: int, length: int) -> Trajectories:
    """A walker between walls at -0.7 and 0.7 (a cost beyond them) whose steps of at most 0.1 are drawn at random."""
    rng = np.random.default_rng(0)
    actions = np.clip(rng.uniform(-0.4, 0.4, (episodes, 1)) + rng.normal(0, 0.5, (episodes, length)), -1, 1)
    place = np.zeros((episodes, length + 1))
    place[:, 0] = rng.uniform(-0.6, 0.6, episodes)
    for t in range(length):
        place[:, t + 1] = np.clip(place[:, t] + 0.1 * actions[:, t], -1, 1)
    return Trajectories.from_arrays(
        observations=place[:, :-1].reshape(-1, 1),
        actions=actions.reshape(-1, 1),
        rewards=np.abs(actions).ravel(),
        costs=(np.abs(place[:, 1:]) > 0.7).astype(float).ravel(),
        terminals=np.zeros(actions.size, bool),
        timeouts=np.tile(np.arange(length) == length - 1, episodes),
        final_observations=place[:, -1:],
    )


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_short_run_finds_the_feasible_region_with_the_default_but_not_with_the_published_settings(preset):
    """From anywhere inside a violation can be avoided, though most logged episodes (7 of 10) have one."""
    torch.manual_seed(0)
    config = replace(
        FISORConfig.preset(preset), width=32, batch_size=64, critic_batch=None, policy_updates=1, normalize=True
    )
    data = corridor(100, 50)
    method = FISOR(config, Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(1000):  # the critics alone: the policy is not asked
        batch = sampler.sample()
        descend(method.optimizers["values"], method.value_loss(batch), [method.value_parameters])
        descend(method.optimizers["critics"], method.critic_loss(batch), [method.critic_parameters])
        soft_update(method.critic_targets, method.critic_parameters, config.target_rate)
    place = torch.linspace(-1, 1, 41)[:, None]
    with torch.no_grad():
        infeasible = method.values(method.judged(place, torch.full((41,), 20)))[1, :, 0] > 0
    assert infeasible[place[:, 0].abs() > 0.85].all()
    inside = (~infeasible[place[:, 0].abs() < 0.5]).float().mean()
    assert inside > 0.7 if preset == "default" else inside == 0
