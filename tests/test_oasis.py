"""OASIS: losses against loops, the stages and their clock, conditions, variants, and a problem with a known answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import tiny_data
from qpt.algorithms.base import Spec
from qpt.algorithms.bcq_lag import BCQLag, BCQLagConfig
from qpt.algorithms.oasis import GENERATOR, LABELERS, OASIS, POLICY, OASISConfig, SequenceBatch
from qpt.checkpoint import MODEL, load_algorithm, resolve
from qpt.data.sampling import TransitionBatch
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy
from qpt.stepping import Stepper
from qpt.training import TrainConfig, train

torch.set_num_threads(1)  # the fastest for small networks
CPU = torch.device("cpu")
CONFIG = OASISConfig(
    width=8, inverse_width=16, labeler_width=16, batch_size=16, window=8, kept=5, sequences=24, diffusion_steps=4
)
STAGED = replace(CONFIG, steps=9, generator_share=3 / 9, labeler_share=2 / 9, stage_min=1)


def make(config: OASISConfig = CONFIG, data: Trajectories | None = None) -> tuple[OASIS, SequenceBatch]:
    torch.manual_seed(0)
    data = data or tiny_data()
    method = OASIS(config, Spec.from_data(data))
    batch = method.make_sampler(data, CPU, 0).sample()
    return method.double(), _double(batch)


def _double(batch):
    parts = (_double(f) if isinstance(f, tuple) else f.double() if f.is_floating_point() else f for f in batch)
    return type(batch)(*parts)


# -- the sampler -----------------------------------------------------------------------------------------------------


def test_sequences_are_consecutive_states_of_one_episode():
    data = tiny_data()
    method = OASIS(replace(CONFIG, window=32, kept=12, batch_size=200), Spec.from_data(data))
    assert method.window == 22  # the horizon has 20 steps, so 21 states, rounded up
    assert method.kept == 12
    batch = method.make_sampler(data, CPU, 0).sample()
    episodes = [
        np.concatenate([data.observations[a:b], data.final_observations[e : e + 1]])
        for e, (a, b) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True))
    ]
    found_starts = set()
    for i in range(200):
        length = int(batch.mask[i].sum())
        states = batch.states[i].numpy()
        place = [(e, t) for e, s in enumerate(episodes) for t in range(len(s)) if np.array_equal(s[t], states[0])]
        assert len(place) == 1
        e, t = place[0]
        found_starts.add(t)
        assert length == min(len(episodes[e]) - t, 22)
        assert length > 12 or t == 0  # all kept transitions are of the episode, where it is long enough
        np.testing.assert_array_equal(states[:length], episodes[e][t : t + length])
        np.testing.assert_array_equal(states[length:], np.repeat(episodes[e][-1:], 22 - length, 0))
        actions = data.actions[data.offsets[e] + t : data.offsets[e + 1]][:22]
        np.testing.assert_array_equal(batch.actions[i, : len(actions)].numpy(), actions)
        np.testing.assert_allclose(batch.totals[i].numpy(), [data.returns[e], data.episode_costs[e]], rtol=1e-5)
    assert len(found_starts) > 4


def test_low_cost_episodes_are_drawn_more_often():
    data = tiny_data()
    costs = {}
    for weighting in ("low-cost", "uniform"):
        config = replace(CONFIG, batch_size=4000, weighting=weighting, cost_ceiling=8.0)
        costs[weighting] = OASIS(config, Spec.from_data(data)).make_sampler(data, CPU, 0).sample().totals[:, 1]
    weights = np.maximum(8.0 - data.episode_costs, 0)
    assert costs["low-cost"].max() < 8
    assert costs["low-cost"].mean().item() == pytest.approx(
        (weights * data.episode_costs).sum() / weights.sum(), rel=0.1
    )
    assert costs["uniform"].mean().item() == pytest.approx(data.episode_costs.mean(), rel=0.1)


# -- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predicts", ["states", "noise"])
def test_generator_loss_against_loops(predicts):
    method, batch = make(replace(CONFIG, predicts=predicts))
    step, keep = torch.randint(4, (16,)), (torch.rand(16) > 0.5).double()
    noise = torch.randn_like(batch.states)
    state_loss, action_loss = method.generator_loss(batch, step, noise, keep)
    mean, std, spec = method.standardize.mean, method.standardize.std, method.spec
    state_errors, action_errors = [], []
    assert not batch.mask.all()
    for i in range(16):
        clean = (batch.states[i] - mean) / std
        noisy = method.diffusion.signal[step[i]] * clean + method.diffusion.noise[step[i]] * noise[i]
        noisy[0] = clean[0]
        goal, cost = batch.totals[i].tolist()
        totals = torch.tensor(
            [[(goal - spec.return_min) / (spec.return_max - spec.return_min), cost / spec.cost_max]],
            dtype=torch.float64,
        )
        predicted = method.unet(noisy[None], step[i : i + 1], totals, keep[i : i + 1])[0]
        for t in range(1, 8):
            if batch.mask[i, t]:
                wanted = clean[t] if predicts == "states" else noise[i, t]
                state_errors.append((predicted[t] - wanted).square().mean().item())
                action = method.inverse(torch.cat([clean[t - 1], clean[t]]))
                action_errors.append((action - batch.actions[i, t - 1]).square().mean().item())
    assert state_loss.item() == pytest.approx(np.mean(state_errors), rel=1e-5)
    assert action_loss.item() == pytest.approx(np.mean(action_errors), rel=1e-5)


@pytest.mark.parametrize("variant", ["correct", "reference"])
def test_labeler_loss_against_loops(variant):
    method, batch = make(replace(CONFIG, variant=variant))
    steps = batch.transitions
    spec = method.spec
    scale = spec.horizon / max(abs(spec.return_max), abs(spec.return_min)) if variant == "correct" else 0.1
    expected = 0.0
    for i in range(16):
        pair = [method.standardize(o[i]) for o in (steps.observations, steps.next_observations)]
        raw = method.labelers(torch.cat(pair))
        label = raw[:, 0] if variant == "correct" else 1 / (1 + (-raw).exp())
        reward, cost = label.tolist() if variant == "correct" else label.sum(1).tolist()
        expected += (reward - scale * steps.rewards[i].item()) ** 2 + (cost - steps.costs[i].item()) ** 2
    assert method.labeler_loss(steps).item() == pytest.approx(expected / 16, rel=1e-6)


def test_only_correct_labelers_can_learn_negative_rewards():
    count = 64
    states = torch.randn(count, 3)
    nothing = torch.zeros(count)
    batch = TransitionBatch(
        states, torch.zeros(count, 2), torch.full((count,), -1.0), nothing, states, nothing, nothing, nothing, nothing
    )
    learned = {}
    for variant in ("correct", "reference"):
        torch.manual_seed(0)
        config = replace(CONFIG, variant=variant, labeler_lr=1e-2)
        method = OASIS(config, Spec.from_data(tiny_data()))
        optimizer = method._optimizers[LABELERS]["labelers"]
        for _ in range(150):
            loss = method.labeler_loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen = method.standardize(states)
        learned[variant] = (method.label(seen, seen)[0] / method.label_scale).mean().item()
    assert learned["correct"] == pytest.approx(-1.0, abs=0.1)
    assert learned["reference"] >= 0


# -- generation ------------------------------------------------------------------------------------------------------


def test_conditions_come_from_the_frontier_and_the_limit():
    data = tiny_data()
    config = replace(CONFIG, cost_limit=6.0, condition_costs=(0.5, 1.0), condition_returns=(0.9, 1.0))
    expected = []
    for cost in (3.0, 6.0):
        best = data.returns[data.episode_costs <= cost].max()
        expected += [(0.9 * best, cost), (best, cost)]
    np.testing.assert_allclose(OASIS(config, Spec.from_data(data)).conditions(), expected)
    losing = Trajectories.from_arrays(
        data.observations,
        data.actions,
        data.rewards - 50,
        data.costs,
        data.terminals,
        data.timeouts,
        final_observations=data.final_observations,
    )
    wanted = OASIS(config, Spec.from_data(losing)).conditions()
    assert wanted[0][0] < wanted[1][0] < 0  # less than the best, also where returns are negative


def test_generated_transitions_fit_together():
    method, _ = make(replace(CONFIG, sequences=30))
    method.float()
    method.generate(chunk=7)
    starts = method.starts
    torch.testing.assert_close(method.states[:, 0], starts)
    data = tiny_data()
    assert all((np.abs(data.observations - s.numpy()).max(1) < 1e-5).any() for s in starts)
    seen, following = method.standardize(method.states[3, 2]), method.standardize(method.states[3, 3])
    action = method.inverse(torch.cat([seen, following])).clamp(-1, 1)
    reward, cost = method.label(seen, following)
    torch.testing.assert_close(method.actions[3, 2], action, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(method.rewards[3, 2], reward / method.label_scale, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(method.costs[3, 2], cost, rtol=1e-3, atol=1e-4)
    batch = method.draw_generated()
    parts = [method.states[:, :-1], method.actions, method.states[:, 1:]]
    parts += [method.rewards[..., None], method.costs[..., None]]
    rows = {tuple(row) for row in torch.cat(parts, -1).flatten(0, 1).tolist()}
    fields = [batch.observations, batch.actions, batch.next_observations, batch.rewards[:, None], batch.costs[:, None]]
    drawn = {tuple(row) for row in torch.cat(fields, -1).tolist()}
    assert len(drawn) > 10
    assert drawn <= rows
    assert batch.terminals.sum() == batch.timeouts.sum() == 0


@pytest.mark.parametrize("predicts", ["states", "noise"])
def test_guidance_goes_beyond_the_conditional_prediction(predicts):
    method, _ = make(replace(CONFIG, diffusion_steps=1, temperature=0.0, clean_bound=10.0, predicts=predicts))
    method.float()

    def predict(x, _, wanted, keep):
        return keep[:, None, None] * wanted.sum(1)[:, None, None] + torch.zeros_like(x) + 0.5

    method.averaged_unet.forward = predict
    first, wanted = torch.zeros(3, 3), torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    out = method.denoise(first, wanted)
    expected = 0.5 + 2.0 * wanted.sum(1)  # unconditional + 2 (conditional - unconditional)
    if predicts == "noise":
        expected = -method.diffusion.noise[0] * expected / method.diffusion.signal[0]
    torch.testing.assert_close(out[:, 1, 0], expected.clamp(-10, 10))
    assert torch.equal(out[:, 0], first)


def test_generation_stays_within_the_logged_range():
    data = tiny_data()
    method, _ = make(data=data)
    spec = method.spec
    states = np.concatenate([data.observations, data.final_observations])
    farthest = np.abs((states - np.array(spec.observation_mean)) / np.array(spec.observation_std)).max(0)
    np.testing.assert_allclose(method.bound.numpy(), farthest, rtol=1e-5)
    other = OASIS(CONFIG, spec)
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.bound.double(), method.bound)  # checkpoints hold it
    method.float()
    method.averaged_unet.forward = lambda x, *_: torch.full_like(x, 1e4)
    out = method.denoise(torch.zeros(2, 3), torch.zeros(2, 2))
    torch.testing.assert_close(out[:, 1:], method.bound.expand_as(out[:, 1:]))
    paper = OASIS(replace(OASISConfig.preset("paper"), width=8, sequences=4), spec)
    paper.make_sampler(data, CPU, 0)
    assert paper.bound.tolist() == [10.0] * 3  # as published


# -- stages ----------------------------------------------------------------------------------------------------------


def test_each_stage_moves_its_own_networks():
    data = tiny_data()
    torch.manual_seed(0)
    method = OASIS(STAGED, Spec.from_data(data))
    sampler = method.make_sampler(data, CPU, 0)
    parts = {GENERATOR: [method.unet, method.inverse], LABELERS: [method.labelers], POLICY: [method.policy]}
    assert isinstance(method.policy, BCQLag)
    stages = []
    for step in range(9):
        stage = method.phase
        stages.append(stage)
        before = {s: [p.clone() for net in nets for p in net.parameters()] for s, nets in parts.items()}
        metrics = method.update(sampler.sample())
        assert all(torch.isfinite(v) for v in metrics.values())
        for s, nets in parts.items():
            after = [p for net in nets for p in net.parameters()]
            moved = any(not torch.equal(a, b) for a, b in zip(before[s], after, strict=True))
            assert moved == (s == stage), (step, s)
        assert bool(method.states.any()) == (stage == POLICY)  # generated when the last stage begins, not before
    assert stages == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert int(method.step) == method.host_step == 9


def test_the_averaged_generator_forgets_its_random_beginning():
    data = tiny_data()
    torch.manual_seed(0)
    method = OASIS(replace(CONFIG, ema=0.9, steps=10_000), Spec.from_data(data))
    sampler = method.make_sampler(data, CPU, 0)
    for step in (1, 2, 500):
        method.step.fill_(step - 1)
        method.host_step = step - 1
        before = [p.clone() for p in method.averaged_unet.parameters()]
        method.update(sampler.sample())
        rate = max(10 / (10 + step), 0.1)
        pairs = zip(before, method.averaged_unet.parameters(), method.unet.parameters(), strict=True)
        for old, new, online in pairs:
            torch.testing.assert_close(new, old + rate * (online - old), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("interrupted_at", [2, 3, 5, 7])
def test_resuming_across_stages_is_exact(interrupted_at: int, tmp_path: Path):
    def run(out: Path, steps: int, resume: bool = False) -> None:
        config = replace(STAGED, steps=9)
        settings = TrainConfig(
            algorithm="oasis",
            config=config,
            device="cpu",
            out=out,
            checkpoint_every=interrupted_at,
            progress=False,
            resume=resume,
            keep=9,
            threads=1,
        )
        train(settings, tiny_data())
        if steps < 9:  # as if killed after that checkpoint
            for later in sorted((out / "checkpoints").glob("step-*"))[1:]:
                for file in later.iterdir():
                    file.unlink()
                later.rmdir()

    run(tmp_path / "whole", 9)
    run(tmp_path / "halves", interrupted_at)
    run(tmp_path / "halves", 9, resume=True)
    one, two = (load_file(resolve(tmp_path / name) / MODEL) for name in ("whole", "halves"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    loaded, _ = load_algorithm(resolve(tmp_path / "halves"))
    assert loaded.phase == POLICY
    assert loaded.host_step == 9
    assert loaded.states.any()


def test_a_prolonged_run_trains_the_policy_longer():
    short = OASIS(STAGED, Spec.from_data(tiny_data()))
    long = OASIS(replace(STAGED, steps=90), Spec.from_data(tiny_data()))
    assert (long.config.generator_steps, long.config.labeler_steps, long.config.policy_steps) == (30, 20, 40)
    short.step.fill_(6)
    long.load_state_dict(short.state_dict())
    assert long.phase == POLICY


def test_the_stepper_starts_anew_in_each_stage(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU: `_record` stands in for a capture, and a graph that only counts for its replay."""
    data = tiny_data()
    config = replace(STAGED, steps=18)
    method = OASIS(config, Spec.from_data(data))
    stepper = Stepper(method, method.make_sampler(data, CPU, 0), fast=False, compile=False)
    stepper._capture = True
    log: list[str] = []

    class Graph:
        def __init__(self, stage: int) -> None:
            self.stage = stage

        def replay(self) -> None:
            assert method.phase == self.stage
            log.append(f"replay {self.stage}")

    def plain():
        log.append(f"plain {method.phase}")
        return method.update(stepper.sampler.sample())

    def record():
        stage = method.phase
        log.append(f"record {stage}")
        metrics = method.update(stepper.sampler.sample())
        stepper._graph = Graph(stage)
        return metrics

    monkeypatch.setattr(stepper, "_plain", plain)
    monkeypatch.setattr(stepper, "_record", record)
    for _ in range(18):
        stepper.step()
    expected = []
    for stage, count in enumerate((6, 4, 8)):
        expected += [f"plain {stage}"] * 3 + [f"record {stage}"] + [f"replay {stage}"] * (count - 4)
    assert log == expected
    assert method.host_step == 18


def test_too_few_steps_are_said():
    short = replace(CONFIG, steps=600)
    assert (short.generator_steps, short.labeler_steps, short.policy_steps) == (500, 500, 0)
    with pytest.warns(UserWarning, match="600 steps leave none for the policy"):
        make(short)
    with pytest.raises(QptError, match="multiple of 8"):
        OASIS(replace(CONFIG, width=12), Spec.from_data(tiny_data()))


# -- a known answer ----------------------------------------------------------------------------------------------------


def ways(episodes: int = 120, horizon: int = 12) -> Trajectories:
    """From the middle, half of the episodes go up, earning 1 and costing 1 a step; the others go down, earning 0.3."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[np.ndarray]] = {k: [] for k in ("observations", "actions", "rewards", "costs", "final")}
    for episode in range(episodes):
        up = episode % 2 == 0
        actions = np.clip((0.8 if up else -0.6) + 0.1 * rng.normal(size=(horizon, 1)), -1, 1)
        place = 0.1 * rng.normal() + 0.25 * np.concatenate([[0.0], np.cumsum(actions)])
        rows["observations"].append(place[:-1, None])
        rows["final"].append(place[-1:, None])
        rows["actions"].append(actions)
        rows["rewards"].append(np.full(horizon, 1.0 if up else 0.3))
        rows["costs"].append(np.full(horizon, float(up)))
    last = np.arange(episodes * horizon) % horizon == horizon - 1
    joined = {k: np.concatenate(v) for k, v in rows.items()}
    return Trajectories.from_arrays(
        joined["observations"],
        joined["actions"],
        joined["rewards"],
        joined["costs"],
        np.zeros_like(last),
        last,
        final_observations=joined["final"],
    )


def test_generates_and_learns_the_safe_way():
    torch.manual_seed(0)
    data = ways()
    config = OASISConfig(
        steps=600,
        generator_share=350 / 600,
        labeler_share=100 / 600,
        stage_min=0,
        batch_size=32,
        cost_limit=2.0,
        diffusion_steps=10,
        window=12,
        kept=8,
        width=16,
        inverse_width=32,
        labeler_width=32,
        sequences=200,
        warmup=50,
        lr=3e-3,
        clip=1.0,
        ema=0.99,
        labeler_lr=3e-3,
    )
    spec = Spec.from_data(data)
    method = OASIS(config, spec)
    method.policy = BCQLag(BCQLagConfig(batch_size=32, cost_limit=2.0, width=32, vae_width=32), spec)
    method.make_optimizers()
    sampler = method.make_sampler(data, CPU, 0)
    for _ in range(config.steps):
        method.update(sampler.sample())
    near = method.states[:, 0, 0].abs() < 0.3  # from here, the data go both ways
    assert near.sum() > 10
    assert method.costs[near].mean() < 0.15  # the data: 0.5
    assert (method.actions[near] < 0).double().mean() > 0.85
    policy = Policy(method, trained_limit=2.0)
    policy.reset(50, seeds=np.arange(50))
    actions = policy.act(np.linspace(-0.2, 0.2, 50, dtype=np.float32)[:, None])[:, 0]
    assert (actions < 0).mean() > 0.9
