"""BC-Safe, BCQ-Lag, CPQ, COptiDICE: losses against loops in float64, variants told apart, small problems to solve."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import bare_episodes, tiny_data
from qpt.algorithms.base import Context, Spec, algorithm_classes
from qpt.algorithms.bc import BC, BCConfig
from qpt.algorithms.bcq_lag import BCQLag, BCQLagConfig
from qpt.algorithms.coptidice import COptiDICE, COptiDICEConfig, DICEBatch, divergence, inverse_derivative
from qpt.algorithms.cpq import CPQ, CPQConfig
from qpt.algorithms.multiplier import PIDMultiplier
from qpt.data.sampling import TransitionBatch, TransitionSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.heads import VAE, SquashedGaussian
from qpt.nets.mlp import StackedMLP

VARIANTS = ("correct", "reference")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def batch_of(size: int = 40, seed: int = 3) -> TransitionBatch:
    """Transitions in float64; the first rows are a terminal, a timeout and an initial state, whatever was drawn."""
    data = tiny_data()
    batch = TransitionSampler(data, size, seed=seed).sample()
    fields = {k: v.double() if v.is_floating_point() else v for k, v in batch._asdict().items()}
    fields["terminals"][:2], fields["timeouts"][:2] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    fields["steps"][2] = 0
    return TransitionBatch(**fields)


def made(cls: Any, config: Any) -> Any:
    algorithm = cls(config, Spec.from_data(tiny_data())).double()
    algorithm.make_optimizers()
    # Targets that differ from the online networks, so that a mix-up shows.
    for name, parameter in algorithm.named_parameters():
        if name.startswith("target_"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return algorithm


def member(net: StackedMLP, e: int, x: np.ndarray) -> float:
    """The output of one member for one input, layer by layer."""
    for i in range(len(net.weights)):
        x = x @ net.weights[i][e].detach().numpy() + net.biases[i][e, 0].detach().numpy()
        if i < len(net.weights) - 1:
            x = np.maximum(x, 0)
    return float(x[0])


def all_members(net: StackedMLP, seen: np.ndarray, action: np.ndarray | None = None) -> list[float]:
    x = seen if action is None else np.concatenate([seen, action])
    return [member(net, e, x) for e in range(net.members)]


def seen_by(algorithm: Any, observation: torch.Tensor) -> np.ndarray:
    """Normalised by hand in the correct variant, raw in the reference."""
    raw = observation.numpy()
    if getattr(algorithm.config, "variant", "correct") == "reference":
        return raw
    return (raw - np.float32(algorithm.spec.observation_mean)) / np.float32(algorithm.spec.observation_std)


def row(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)[None]


# -- shared pieces -----------------------------------------------------------------------------------------------------


def test_pid_multiplier_against_a_loop() -> None:
    multiplier, integral, previous = PIDMultiplier(0.1, 0.003, 0.001).double(), 0.0, 0.0
    for error in np.random.default_rng(0).normal(0.2, 2, 50):
        integral = max(integral + error, 0)
        wanted = max(0.1 * max(error, 0) + 0.003 * integral + 0.001 * max(error - previous, 0), 0)
        previous = error
        assert multiplier.update(torch.tensor(error)).item() == pytest.approx(wanted, rel=1e-12)
    assert len(multiplier.state_dict()) == 3  # travels with checkpoints


def test_vae_loss_and_divergence_against_distributions() -> None:
    vae = VAE(3, 2, 8).double()
    observations, actions, noise = (torch.randn(9, k, dtype=torch.float64) for k in (3, 2, 4))
    total = 0.0
    for s, a, z in zip(observations, actions.tanh(), noise, strict=True):
        mean, log_std = vae.encode(s[None], a[None])
        posterior = torch.distributions.Normal(mean, log_std.exp())
        kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).mean()
        assert vae.divergence(s[None], a[None]).item() == pytest.approx(kl.item())
        total += ((vae.decode(s[None], mean + log_std.exp() * z) - a) ** 2).mean().item() + 0.5 * kl.item()
    assert vae.loss(observations, actions.tanh(), noise, 0.5).item() == pytest.approx(total / 9)
    assert torch.equal(vae.sample(observations, noise * 100), vae.decode(observations, noise.sign() / 2))


def test_squashed_density_integrates_to_one() -> None:
    actor = SquashedGaussian(1, 1, 4, (-20.0, 2.0)).double()
    grid = torch.linspace(-0.999, 0.999, 20_001, dtype=torch.float64)[:, None]
    density = actor.log_prob(torch.zeros(len(grid), 1, dtype=torch.float64), grid).exp()
    assert torch.trapezoid(density, grid[:, 0]).item() == pytest.approx(1, abs=0.01)


# -- BC ----------------------------------------------------------------------------------------------------------------


def test_bc_loss_and_normalisation() -> None:
    batch = batch_of()
    for normalize in (True, False):
        bc = made(BC, BCConfig(width=8, normalize=normalize))
        errors = []
        for s, a in zip(batch.observations, batch.actions, strict=True):
            seen = seen_by(bc, s) if normalize else s.numpy()
            errors += ((np.tanh(bc.policy(row(seen)).detach().numpy()[0]) - a.numpy()) ** 2).tolist()
        assert bc.loss(batch).item() == pytest.approx(np.mean(errors))


@pytest.mark.parametrize("mode", ["safe", "all", "risky", "boundary", "frontier"])
def test_bc_modes_choose_the_right_episodes(mode: Any) -> None:
    data, limit = tiny_data(), 6.0
    bc = BC(BCConfig(cost_limit=limit, mode=mode, batch_size=4000), Spec.from_data(data))
    drawn = {round(float(x), 5) for x in bc.make_sampler(data, torch.device("cpu"), 0).sample().observations[:, 0]}
    wanted = set()
    for e in range(len(data)):
        cost, value = data.episode_costs[e], data.returns[e]
        best = max(data.returns[i] for i in range(len(data)) if data.episode_costs[i] <= cost)
        keep = {
            "safe": cost <= 6,
            "all": True,
            "risky": cost >= 12,
            "boundary": 3 < cost <= 9,
            "frontier": value >= best - 0.1 * (max(data.returns) - min(data.returns)),
        }[mode]
        if keep:
            wanted |= {round(float(x), 5) for x in data.observations[data.offsets[e] : data.offsets[e + 1], 0]}
    assert drawn <= wanted
    assert len(drawn) > 0.9 * len(wanted)
    assert bc.limit_mode == ("ignored" if mode in ("all", "frontier") else "trained")


def test_bc_without_a_safe_episode_says_what_to_do() -> None:
    data = tiny_data().select(np.arange(12, 24))
    bc = BC(BCConfig(cost_limit=5), Spec.from_data(data))
    with pytest.raises(QptError, match=r"the cheapest costs 9.*set the cost limit to 9"):
        bc.make_sampler(data, torch.device("cpu"), 0)
    with pytest.raises(QptError, match="set the cost limit to 10"):
        BC(BCConfig(cost_limit=50, mode="risky"), Spec.from_data(data)).make_sampler(data, torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("mode", "costs", "limit"),
    [
        ("safe", [12.3456432, 20.0], 5.0),  # six digits of it would be less
        ("risky", [1.0, 82.4237123], 60.0),
        ("boundary", [0.0, 0.0, 100.0], 10.0),  # the nearest is 0, around which nothing is
    ],
)
def test_the_limit_that_bc_advises_works(mode: Any, costs: list[float], limit: float) -> None:
    data = bare_episodes(costs, [1.0] * len(costs))
    spec, cpu = Spec.from_data(data), torch.device("cpu")
    with pytest.raises(QptError, match="set the cost limit to") as told:
        BC(BCConfig(mode=mode, cost_limit=limit), spec).make_sampler(data, cpu, 0)
    advised = float(re.findall(r"set the cost limit to ([\d.]+)", str(told.value))[0])
    BC(BCConfig(mode=mode, cost_limit=advised), spec).make_sampler(data, cpu, 0)
    free = bare_episodes([0.0, 0.0], [1.0, 2.0])
    with pytest.raises(QptError, match="no limit has a boundary"):
        BC(BCConfig(mode="boundary"), Spec.from_data(free)).make_sampler(free, cpu, 0)


# -- BCQ-Lag -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_bcq_lag_critic_loss_against_loops(variant: Any) -> None:
    bcq = made(BCQLag, BCQLagConfig(variant=variant, width=8, vae_width=8, samples=3))
    batch = batch_of(12)
    noise = torch.randn(12, 3, bcq.vae.latent, dtype=torch.float64)
    correct, loss = variant == "correct", 0.0
    for i in range(12):
        following, values, costs = row(seen_by(bcq, batch.next_observations[i])), [], []
        for z in noise[i]:
            action = (
                bcq.target_actor(following, bcq.vae.decode(following, z[None].clamp(-0.5, 0.5))).detach()[0].numpy()
            )
            q = all_members(bcq.target_reward_critics, following[0].numpy(), action)
            one, two = min(q[0], q[1]), min(q[2], q[3])
            values.append(0.75 * min(one, two) + 0.25 * max(one, two))
            q = all_members(bcq.target_cost_critics, following[0].numpy(), action)
            if correct:
                one, two = max(q[0], q[1]), max(q[2], q[3])
                costs.append(0.75 * max(one, two) + 0.25 * min(one, two))
            else:
                one, two = min(q[0], q[1]), min(q[2], q[3])
                costs.append(0.75 * min(one, two) + 0.25 * max(one, two))
        terminal, timeout = batch.terminals[i].item(), batch.timeouts[i].item()
        reward_end, cost_end = (terminal, terminal) if correct else (max(terminal, timeout), 0)
        target = 0.1 * batch.rewards[i].item() + 0.99 * (1 - reward_end) * max(values)
        cost_target = batch.costs[i].item() + 0.99 * (1 - cost_end) * max(costs)
        seen, action = seen_by(bcq, batch.observations[i]), batch.actions[i].numpy()
        loss += sum((q - target) ** 2 for q in all_members(bcq.reward_critics, seen, action)) / 12
        loss += sum((q - cost_target) ** 2 for q in all_members(bcq.cost_critics, seen, action)) / 12
    assert bcq.critic_loss(batch, noise)[0].item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("cls", "config"), [(BCQLag, BCQLagConfig(width=8, vae_width=8)), (CPQ, CPQConfig(width=8, vae_width=8))]
)
def test_what_follows_a_timeout_is_worth_no_more_than_a_logged_episode(cls: Any, config: Any) -> None:
    method, batch = made(cls, config), batch_of(12)
    batch = batch._replace(terminals=torch.zeros(12).double(), timeouts=torch.ones(12).double())
    with torch.no_grad():
        method.target_reward_critics.biases[-1].fill_(1e6)
        method.target_cost_critics.biases[-1].fill_(-1e6)  # so that CPQ finds all actions feasible
    spec, logged = method.spec, torch.cat([method.standardize(batch.observations), batch.actions], -1)
    best = 0.1 * batch.rewards + 0.99 * 0.1 * max(abs(spec.return_min), abs(spec.return_max))
    reward_error = (method.reward_critics(logged)[..., 0] - best).square().mean(-1).sum().item()
    cost = batch.costs - 0.99 * spec.cost_max
    cost_error = (method.cost_critics(logged)[..., 0] - cost).square().mean(-1).sum().item()
    if cls is BCQLag:
        got = method.critic_loss(batch, torch.randn(12, config.samples, method.vae.latent).double())[0]
        assert got.item() == pytest.approx(reward_error + cost_error)
    else:
        noise, draws = torch.randn(12, 2).double(), torch.randn(12, config.samples, 2).double()
        assert method.reward_loss(batch, noise)[0].item() == pytest.approx(reward_error)
        loss, pushed, _ = method.cost_loss(batch, noise, draws)
        assert (loss + method.log_alpha.exp() * (pushed - method.push_target)).item() == pytest.approx(cost_error)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bcq_lag_actor_values_against_loops(variant: Any) -> None:
    bcq = made(BCQLag, BCQLagConfig(variant=variant, width=8, vae_width=8, cost_limit=4))
    batch = batch_of(12)
    noise = torch.randn(12, bcq.vae.latent, dtype=torch.float64)
    rewards, costs = [], []
    for i in range(12):
        seen = row(seen_by(bcq, batch.observations[i]))
        action = bcq.actor(seen, bcq.vae.sample(seen, noise[i : i + 1])).detach()[0].numpy()
        rewards.append(min(all_members(bcq.reward_critics, seen[0].numpy(), action)))
        q = all_members(bcq.cost_critics, seen[0].numpy(), action)
        costs.append(max(q) if variant == "correct" else min(q))
    reward, excess = bcq.actor_values(bcq.standardize(batch.observations), noise)
    assert reward.item() == pytest.approx(np.mean(rewards))
    horizon = bcq.spec.horizon
    evenly = sum(0.99**t * 4 / horizon for t in range(horizon))
    assert excess.item() == pytest.approx(np.mean(costs) - evenly)


def test_bcq_lag_stays_near_the_vae_and_takes_the_best_candidate() -> None:
    bcq = made(BCQLag, BCQLagConfig(width=8, vae_width=8, candidates=6))
    bcq.multiplier.value.fill_(0.7)
    context = context_of(torch.randn(5, 3, dtype=torch.float64))
    chosen = bcq.act(context).actions
    seen = bcq.standardize(context.observations[:, 0])
    score = lambda actions: (lambda r, c: r - 0.7 * c)(*bcq.values(seen, actions))  # noqa: E731
    bcq.config = replace(bcq.config, candidates=1)
    assert not torch.equal(bcq.act(context).actions, chosen)
    assert (score(chosen) >= score(bcq.act(context).actions) - 1e-12).all()
    proposed = bcq.vae.sample(seen, torch.randn(5, bcq.vae.latent, dtype=torch.float64))
    assert (bcq.actor(seen, proposed) - proposed).abs().max() <= 0.05


# -- CPQ ---------------------------------------------------------------------------------------------------------------


def cpq_of(variant: Any) -> CPQ:
    cpq = made(CPQ, CPQConfig(variant=variant, width=8, vae_width=8, samples=4, cost_limit=0.1))
    seen = cpq.standardize(batch_of(16).observations)
    with torch.no_grad():  # the middle of what fresh critics say, so that both sides of the test occur
        cpq.threshold = cpq.cost_value(cpq.cost_critics, seen, cpq.actor.mode(seen)).median().item()
    return cpq


@pytest.mark.parametrize("variant", VARIANTS)
def test_cpq_losses_against_loops(variant: Any) -> None:
    cpq, batch, correct = cpq_of(variant), batch_of(16), variant == "correct"
    cpq.log_alpha.fill_(0.3)
    noise, more = torch.randn(16, 2, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)
    draws = torch.randn(16, 4, 2, dtype=torch.float64)
    pick, limit = (max if correct else min), cpq.threshold
    reward_loss = cost_loss = actor_loss = 0.0
    feasible, unlikely = [], []
    for i in range(16):
        seen, following = (seen_by(cpq, x[i]) for x in (batch.observations, batch.next_observations))
        terminal, timeout, logged = batch.terminals[i].item(), batch.timeouts[i].item(), batch.actions[i].numpy()
        act = lambda s, z: np.tanh(  # noqa: E731
            (lambda m, d: m.detach().numpy()[0] + np.exp(d.detach().numpy()[0]) * z.numpy())(*cpq.actor(row(s)))
        )
        # reward critic
        action = act(following, noise[i])
        safe = pick(all_members(cpq.target_cost_critics, following, action)) <= limit
        value = min(all_members(cpq.target_reward_critics, following, action)) if safe else 0.0
        target = 0.1 * batch.rewards[i].item() + 0.99 * (1 - (terminal if correct else max(terminal, timeout))) * value
        reward_loss += sum((q - target) ** 2 for q in all_members(cpq.reward_critics, seen, logged)) / 16
        # cost critic
        value = pick(all_members(cpq.target_cost_critics, following, act(following, more[i])))
        target = batch.costs[i].item() + 0.99 * (1 - (terminal if correct else 0)) * value
        cost_loss += sum((q - target) ** 2 for q in all_members(cpq.cost_critics, seen, logged)) / 16
        for z in draws[i]:
            action = act(seen, z) if correct else np.arctanh(act(seen, z))
            kl = cpq.vae.divergence(row(seen), row(action)).item()
            unlikely.append(
                (kl, pick(all_members(cpq.cost_critics if correct else cpq.target_cost_critics, seen, action)))
            )
        # actor
        action = act(seen, noise[i])
        cost = pick(all_members(cpq.cost_critics, seen, action))
        feasible.append(cost <= limit)
        gain = min(all_members(cpq.reward_critics, seen, action))
        actor_loss += (-gain if cost <= limit else (cost if correct else 0.0)) / 16
    cut = np.quantile([kl for kl, _ in unlikely], 0.75)
    pushed = np.mean([cost if kl >= cut else 0.0 for kl, cost in unlikely])
    assert 0 < np.mean(feasible) < 1  # both branches were tried
    assert cpq.reward_loss(batch, noise)[0].item() == pytest.approx(reward_loss)
    loss, got, _ = cpq.cost_loss(batch, more, draws)
    assert got.item() == pytest.approx(pushed)
    assert loss.item() == pytest.approx(cost_loss - math.exp(0.3) * (pushed - 1.5 * limit * (0.25 if correct else 1)))
    loss, share = cpq.actor_loss(cpq.standardize(batch.observations), noise)
    assert loss.item() == pytest.approx(actor_loss)
    assert share.item() == pytest.approx(np.mean(feasible))


def test_cpq_push_is_inert_in_the_reference_and_raises_cost_in_the_correct_variant() -> None:
    seen = torch.randn(32, 3, dtype=torch.float64)
    draws = torch.randn(32, 4, 2, dtype=torch.float64)
    assert not cpq_of("reference").unlikely_cost(seen, draws).requires_grad
    cpq = cpq_of("correct")
    optimizer = torch.optim.SGD(cpq.cost_critics.parameters(), 0.01)
    before = cpq.unlikely_cost(seen, draws)
    (-before).backward()
    optimizer.step()
    assert cpq.unlikely_cost(seen, draws).item() > before.item()


def test_cpq_infeasible_actor_learns_only_in_the_correct_variant() -> None:
    seen, noise = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    for variant, moves in (("correct", True), ("reference", False)):
        cpq = cpq_of(variant)
        cpq.threshold = -100.0
        gradient = torch.autograd.grad(cpq.actor_loss(seen, noise)[0], list(cpq.actor.parameters()))
        assert any(bool((g != 0).any()) for g in gradient) is moves


def test_cpq_alpha_follows_its_rule() -> None:
    cpq = cpq_of("correct")
    metrics = cpq.update(batch_of(16))
    wanted = 1e-4 * (0.25 * 1.5 * cpq.threshold - metrics["critic/unlikely_cost"].item())
    assert cpq.log_alpha.item() == pytest.approx(wanted, rel=1e-6)


# -- COptiDICE ---------------------------------------------------------------------------------------------------------


def test_soft_chi_square_pair() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    w = inverse_derivative(x).requires_grad_()
    (slope,) = torch.autograd.grad(divergence(w).sum(), w)
    torch.testing.assert_close(slope, x, rtol=1e-9, atol=1e-9)  # f' undoes its inverse


@pytest.mark.parametrize(
    ("variant", "timeouts"), [("correct", "seen"), ("correct", "bootstrap"), ("reference", "seen")]
)
def test_coptidice_losses_against_loops(variant: Any, timeouts: Any) -> None:
    config = COptiDICEConfig(variant=variant, timeouts=timeouts, width=8, cost_limit=4)
    dice, n, correct = made(COptiDICE, config), 16, variant == "correct"
    aware = correct and timeouts == "seen"

    def judged(observation: torch.Tensor, step: float) -> np.ndarray:
        seen = seen_by(dice, observation)
        return np.append(seen, 2 * step / dice.spec.horizon - 1) if aware else seen

    dice.make_sampler(tiny_data(), torch.device("cpu"), 0)
    with torch.no_grad():
        dice.raw_lambda.fill_(0.4)
        dice.raw_tau.fill_(-0.2)
    steps = batch_of(n)
    batch = DICEBatch(steps, torch.randn(n, 3, dtype=torch.float64))
    price, tau = math.log1p(math.exp(0.4)), math.log1p(math.exp(-0.2))
    share = len(tiny_data()) / tiny_data().steps
    nu_loss, w, bound = 0.0, [], []
    for i in range(n):
        step = steps.steps[i].item()
        seen, following = judged(steps.observations[i], step), judged(steps.next_observations[i], step + 1)
        ended = steps.terminals[i].item()
        if aware or not correct:
            ended = max(ended, steps.timeouts[i].item())
        nu, nu_next = min(all_members(dice.nu, seen)), min(all_members(dice.nu, following))
        chi, chi_next = min(all_members(dice.chi, seen)), min(all_members(dice.chi, following))
        cost = steps.costs[i].item()
        e = 0.1 * steps.rewards[i].item() - price * cost + 0.99 * (1 - ended) * nu_next - nu
        w.append(math.exp(e / 0.5) if e < 0 else e / 0.5 + 1)
        f = w[i] * (math.log(w[i]) - 1) + 1 if w[i] < 1 else (w[i] - 1) ** 2 / 2
        if correct:
            start = judged(batch.initial[i], 0)
            nu_start, chi_start = min(all_members(dice.nu, start)), min(all_members(dice.chi, start))
        else:
            mark = (steps.steps[i].item() == 0) / share
            nu_start, chi_start = mark * nu, mark * chi
        nu_loss += (0.01 * nu_start + w[i] * e - 0.5 * f) / n
        bound.append(0.01 * chi_start + w[i] * (cost + 0.99 * (1 - ended) * chi_next - chi))
    exponent = np.exp(np.array(bound) / tau)
    weights = n * exponent / exponent.sum()
    kl = np.mean(weights * np.log(weights) - weights + 1)
    cost_bound = np.mean(weights * w * steps.costs.numpy())
    threshold = sum(0.99**t * 4 / 20 for t in range(20)) * (0.01 if correct else 1)

    np.testing.assert_allclose(dice.weights(steps).numpy(), w)
    assert dice.nu_loss(batch).item() == pytest.approx(nu_loss)
    loss, cost = dice.chi_loss(batch, torch.tensor(w))
    assert cost.item() == pytest.approx(cost_bound)
    assert loss.item() == pytest.approx(np.mean(weights * bound) + tau * (0.01 - kl))
    assert dice.multiplier_loss(cost).item() == pytest.approx(price * (threshold - cost_bound))


def test_coptidice_one_backward_equals_one_for_each_loss() -> None:
    dice = made(COptiDICE, COptiDICEConfig(width=8))
    steps = batch_of(16)
    batch = DICEBatch(steps, torch.randn(16, 3, dtype=torch.float64))
    w = dice.weights(steps)
    together = torch.autograd.grad(dice.occupancy_loss(batch)[0], dice.occupancy_parameters)
    chi, cost = dice.chi_loss(batch, w)
    apart = [
        *torch.autograd.grad(dice.nu_loss(batch), list(dice.nu.parameters())),
        *torch.autograd.grad(chi, list(dice.chi.parameters()), retain_graph=True),
        *torch.autograd.grad(dice.multiplier_loss(cost), [dice.raw_lambda]),
        *torch.autograd.grad(chi, [dice.raw_tau]),
    ]
    for one, two in zip(together, apart, strict=True):
        torch.testing.assert_close(one, two)


def test_coptidice_actor_loss_against_distributions_and_the_tanh_mismatch() -> None:
    steps, w = batch_of(16), torch.rand(16, dtype=torch.float64)
    noise = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)
    for variant in VARIANTS:
        dice = made(COptiDICE, COptiDICEConfig(variant=variant, width=8))
        dice.make_sampler(tiny_data(), torch.device("cpu"), 0)
        loss = 0.0
        for i in range(16):
            blurred = steps.observations[i] + 0.1 * torch.tensor(dice.spec.observation_std) * noise[0][i]
            action = steps.actions[i] + 0.1 * torch.from_numpy(tiny_data().actions.std(0)) * noise[1][i]
            mean, log_std = dice.actor(row(seen_by(dice, blurred)))
            gaussian = torch.distributions.Normal(mean[0], log_std[0].exp())
            if variant == "correct":
                squashed = torch.distributions.TransformedDistribution(
                    gaussian, [torch.distributions.transforms.TanhTransform()]
                )
                loss -= (w[i] * squashed.log_prob(action.clamp(-0.999, 0.999)).sum()).item() / 16
            else:
                loss -= (w[i] * gaussian.log_prob(action).sum()).item() / 16
        assert dice.actor_loss(steps, w, *noise).item() == pytest.approx(loss, rel=1e-5)


def test_coptidice_does_not_blur_what_never_changes() -> None:
    data = tiny_data()
    still = replace(data, observations=data.observations * np.float32([1, 1, 1e-7]))
    dice = COptiDICE(COptiDICEConfig(width=8), Spec.from_data(still))
    dice.make_sampler(still, torch.device("cpu"), 0)
    assert dice.observation_std.tolist() == pytest.approx([1, 1, 0], abs=1e-4)


# -- small problems with known answers ---------------------------------------------------------------------------------


def two_ways(episodes: int = 60, length: int = 10, seed: int = 0) -> Trajectories:
    """Each step is a choice of its own: actions above 0 earn more and cost 1, others earn less and are free.

    reward = 1 + a, cost = 1[a > 0]; half of the episodes draw actions from [0, 1], half from [-1, 0]. Within a limit
    near 0 the best is to stay just below 0; without one it is to act as high as the data support.
    """
    rng = np.random.default_rng(seed)
    n = episodes * length
    actions = rng.random(n) - np.where(np.arange(n) // length % 2 == 0, 0, 1)
    timeouts = np.arange(1, n + 1) % length == 0
    return Trajectories.from_arrays(
        rng.normal(size=(n, 2)),
        actions[:, None],
        1 + actions,
        actions > 0,
        np.zeros(n, bool),
        timeouts,
        final_observations=rng.normal(size=(episodes, 2)),
    )


def context_of(observations: torch.Tensor) -> Context:
    n, zeros = len(observations), torch.zeros(len(observations), 1, dtype=observations.dtype)
    return Context(
        observations[:, None],
        zeros[..., None],
        zeros,
        zeros,
        torch.zeros(n, 1, dtype=torch.long),
        torch.zeros(n, dtype=torch.long),
        zeros[:, 0],
        zeros[:, 0],
        torch.arange(n),
    )


def learned_actions(name: str, config: Any, steps: int) -> torch.Tensor:
    """Actions at 200 fresh states after a short training on `two_ways`."""
    data = two_ways()
    algorithm = algorithm_classes(name)[0](config, Spec.from_data(data))
    sampler = algorithm.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(steps):
        algorithm.update(sampler.sample())
    algorithm.eval()
    with torch.no_grad():
        return algorithm.act(context_of(torch.randn(200, 2))).actions[:, 0]


def test_bc_safe_learns_the_safe_half() -> None:
    size = {"batch_size": 128, "width": 32, "lr": 3e-3}
    safe = learned_actions("bc-safe", BCConfig(cost_limit=1, **size), 200)
    mixed = learned_actions("bc-safe", BCConfig(mode="all", **size), 200)
    assert safe.mean().item() == pytest.approx(-0.5, abs=0.1)
    assert mixed.mean().item() == pytest.approx(0.0, abs=0.1)


def test_bcq_lag_obeys_its_limit() -> None:
    size = {"batch_size": 64, "width": 32, "vae_width": 32, "samples": 4, "reach": 1.0, "discount": 0.5, "ki": 0.03}
    tight = learned_actions("bcq-lag", BCQLagConfig(cost_limit=0.5, **size), 400)
    loose = learned_actions("bcq-lag", BCQLagConfig(cost_limit=100, **size), 400)
    assert (tight > 0.05).float().mean().item() < 0.1
    assert (loose > 0.3).float().mean().item() > 0.9


def test_cpq_obeys_its_limit() -> None:
    size = {"batch_size": 64, "width": 32, "vae_width": 32, "samples": 4, "actor_lr": 3e-3, "discount": 0.5}
    tight = learned_actions("cpq", CPQConfig(cost_limit=1, **size), 400)
    loose = learned_actions("cpq", CPQConfig(cost_limit=12, **size), 400)
    assert (tight > 0.05).float().mean().item() < 0.1
    assert (loose > 0.3).float().mean().item() > 0.9


def test_coptidice_obeys_its_limit() -> None:
    size = {"batch_size": 128, "width": 32, "lr": 5e-3, "discount": 0.9, "alpha": 0.1, "reward_scale": 1.0}
    tight = learned_actions("coptidice", COptiDICEConfig(cost_limit=1, **size), 300)
    loose = learned_actions("coptidice", COptiDICEConfig(cost_limit=100, **size), 300)
    assert tight.mean().item() < -0.05
    assert loose.mean().item() > 0.4
