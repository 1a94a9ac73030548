"""CDT: losses against loops in float64, variants told apart, targets, and a small problem that it must solve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny_data
from qpt.algorithms.base import Spec
from qpt.algorithms.cdt import CDT, CDTConfig
from qpt.data.sampling import WindowBatch, WindowSampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.transformer import ACTION, STATE
from qpt.policy import Policy
from qpt.tasks import get_task

SMALL = {"width": 16, "layers": 2, "heads": 2, "context": 4, "dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def made(**settings: Any) -> CDT:
    cdt = CDT(CDTConfig(**{**SMALL, **settings}), Spec.from_data(tiny_data())).double()
    with torch.no_grad():  # heads that say something, so that a mix-up of tokens shows
        for head in (cdt.action_head, cdt.cost_head):
            head.weight.normal_(0, 0.5)
            head.bias.normal_(0, 0.5)
    return cdt


def windows(size: int = 12) -> WindowBatch:
    batch = WindowSampler(tiny_data(), size, 4, seed=1).sample()
    values = {k: v.double() if v.is_floating_point() else v for k, v in batch._asdict().items()}
    values["costs"] = values["costs"] * torch.rand_like(values["costs"]) * 2  # below, at and above 1
    assert not values["mask"].all()
    return WindowBatch(**values)


@pytest.mark.parametrize("variant", ["correct", "reference"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_policy_loss_against_loops(variant: Any, stochastic: bool) -> None:
    cdt, batch, correct = made(variant=variant, stochastic=stochastic), windows(), variant == "correct"
    with torch.no_grad():
        cdt.action_head.bias[2:] = torch.tensor([-7.0, 1.0])  # log σ of the first dimension is below its bound
    hidden = cdt.transformer(
        batch.return_to_go, batch.cost_to_go, batch.observations, batch.actions, batch.steps, (STATE, ACTION)
    )
    likelihood, entropy, error, classifier = [], [], [], []
    for b in range(12):
        for k in range(4):
            if not batch.mask[b, k]:
                continue
            out = cdt.action_head(hidden[b, k, 0])
            for d in range(2):
                mean, log_std = out[d].item(), out[2 + d].item()
                if correct:
                    log_std = min(max(log_std, -5.0), 2.0)
                gap = batch.actions[b, k, d].item() - mean
                likelihood.append(-0.5 * (gap / math.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi))
                entropy.append(0.5 + 0.5 * math.log(2 * math.pi) + log_std)
                error.append(gap**2)
            logits = cdt.cost_head(hidden[b, k, 1]).tolist()
            cost = batch.costs[b, k].item()
            label = int(cost > 0) if correct else int(cost)
            classifier.append(math.log(sum(map(math.exp, logits))) - logits[label])
    loss, metrics = cdt.policy_loss(batch)
    main = -np.mean(likelihood) - 0.1 * np.mean(entropy) if stochastic else np.mean(error)
    assert loss.item() == pytest.approx(main + 0.02 * np.mean(classifier), rel=1e-6)
    assert metrics["policy/cost_loss"].item() == pytest.approx(np.mean(classifier))
    labels = {int(c > 0) - int(c) for c in batch.costs[batch.mask].tolist()}
    assert labels == {0, 1}  # some costs lie between 0 and 1, where the variants differ


def test_temperature_moves_towards_the_entropy_target() -> None:
    # Entropy -1.5 a dimension lies below the target of -1 and above the reference's -2: they must move opposite ways.
    for variant, rises in (("correct", True), ("reference", False)):
        cdt = made(variant=variant)
        with torch.no_grad():
            cdt.action_head.weight.zero_()
            cdt.action_head.bias[2:] = -1.5 - 0.5 * math.log(2 * math.pi * math.e)
        before = cdt.log_temperature.item()
        metrics = cdt.update(windows())
        assert metrics["policy/entropy"].item() == pytest.approx(-1.5)
        assert (cdt.log_temperature.item() > before) is rises


def test_reference_sees_raw_observations() -> None:
    spec = Spec.from_data(tiny_data())
    assert made(variant="correct").transformer.mean.tolist() == pytest.approx(spec.observation_mean)
    assert made(variant="reference").transformer.mean.tolist() == [0.0, 0.0, 0.0]


def test_low_cost_weighting_and_relabelling_are_used() -> None:
    data = tiny_data()
    cdt = CDT(CDTConfig(**SMALL, cost_ceiling=7, batch_size=2000, augmentation=False), Spec.from_data(data))
    drawn = set(cdt.make_sampler(data, torch.device("cpu"), 0).sample().observations[:, 0, 0].tolist())
    cheap = np.isin(data.observations[:, 0], list(drawn))
    assert (data.episode_costs[data.episode_of_step[cheap]] < 7).all()
    plain = CDT(CDTConfig(**SMALL, augmentation=False), Spec.from_data(data))
    more = CDT(CDTConfig(**SMALL, augmentation_fraction=1.0), Spec.from_data(data))
    best = data.returns_to_go.max()
    assert plain.make_sampler(data, torch.device("cpu"), 0).sample().return_to_go.max() <= best
    assert more.make_sampler(data, torch.device("cpu"), 0).sample().return_to_go.max() > best


def test_targets_from_data_or_published() -> None:
    data = tiny_data()
    spec = Spec.from_data(data, horizon=300, task=get_task("CarCircle"))
    policy = Policy(CDT(CDTConfig(**SMALL, targets="published"), spec))
    policy.reset(5, cost_limits=[5.0, 10.0, 15.0, 35.0, 99.0])
    assert policy.return_targets.tolist() == [450, 450, 475, 525, 550]
    policy = Policy(CDT(CDTConfig(**SMALL, target_factor=2.0), spec))
    policy.reset(1, cost_limits=10.0)
    assert policy.return_targets[0] == pytest.approx(2 * data.returns[data.episode_costs <= 10].max())
    with pytest.raises(QptError, match="no published targets"):
        Policy(CDT(CDTConfig(**SMALL, targets="published"), Spec.from_data(data))).reset(1, cost_limits=10.0)


def test_decisions_do_not_depend_on_the_precision_of_training() -> None:
    method, seen = made().float(), np.random.default_rng(0).normal(size=(2, 3))
    actions = []
    for narrow in (False, True):
        method.autocast = narrow
        policy = Policy(method.train())
        policy.reset(2, cost_limits=5.0)
        actions.append(policy.act(seen))
    assert np.array_equal(*actions)


def levels(episodes: int = 40, length: int = 10) -> Trajectories:
    """Each episode keeps to one level of boldness: action = level, reward = level, cost in that share of its steps."""
    rng = np.random.default_rng(0)
    level = np.repeat(np.arange(episodes) % 5 / 4, length)  # 0, 0.25, ..., 1
    n = len(level)
    place = np.arange(n) % length
    return Trajectories.from_arrays(
        rng.normal(size=(n, 2)),
        np.clip(level + rng.normal(0, 0.05, n), -1, 1)[:, None],
        level,
        np.floor((place + 1) * level) > np.floor(place * level),
        np.zeros(n, bool),
        place == length - 1,
    )


@pytest.mark.parametrize("variant", ["correct", "reference"])
def test_learns_to_act_by_its_limit(variant: Any) -> None:
    data = levels()
    config = CDTConfig(
        variant=variant, batch_size=64, warmup=20, lr=3e-3, width=32, layers=1, heads=2, context=3, augmentation=False
    )
    cdt = CDT(config, Spec.from_data(data))
    sampler = cdt.make_sampler(data, torch.device("cpu"), 0)
    cdt.train()
    for _ in range(300):
        cdt.update(sampler.sample())
    limits = np.array([0.0, 2.0, 5.0, 7.0, 10.0])
    policy = Policy(cdt)
    policy.reset(5, cost_limits=limits)
    rng, wanted, spent = np.random.default_rng(1), np.arange(5) / 4, np.zeros(5)
    for t in range(10):  # a live episode of each limit; what its level earns and costs comes back
        actions = policy.act(rng.normal(size=(5, 2)))[:, 0]
        np.testing.assert_allclose(actions, wanted, atol=0.15)
        cost = np.floor((t + 1) * wanted) > np.floor(t * wanted)
        spent += cost
        policy.observe(wanted, cost)
    np.testing.assert_array_equal(spent, limits)
