"""Predicted against realised values: the sums against a loop, the prediction against the critics asked directly."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qpt import calibration, plotting
from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.checkpoint import write_checkpoint
from qpt.cli import main
from qpt.data import Trajectories, write
from qpt.envs.toy import tradeoff
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.policy import Policy

SMALL = QPTConfig(width=8, layers=1, heads=2, context=3, critic_width=8, candidates=3, discount=0.9, cost_discount=0.8)


def test_calibration_equals_a_loop(tmp_path: Path) -> None:
    toy = tradeoff(0)
    torch.manual_seed(0)
    method = QPT(replace(SMALL, limit_factor=0.5), Spec.from_data(toy.dataset(20), task=toy.task()))
    results = evaluate(Policy(method), toy.task(), episodes=3, cost_limits=(6.0, 24.0), workers=0, record=True)
    found = calibration.calibrate(method, results)
    data = results.trajectories
    assert data is not None
    for e in range(len(data)):
        part = range(data.offsets[e], data.offsets[e + 1])
        cost = sum(0.8**t * float(data.costs[i]) for t, i in enumerate(part))
        earned = sum(0.9**t * float(data.rewards[i]) for t, i in enumerate(part))
        assert found.realised_cost[e] == pytest.approx(cost)
        assert found.realised_return[e] == pytest.approx(earned)
        i = data.offsets[e]
        state = (torch.tensor(data.observations[i]) - method.transformer.mean) / method.transformer.std
        x = torch.cat([state, torch.tensor([-1.0, 0.0]), torch.tensor(data.actions[i])])  # first step, no budget
        asked = method.target_cost_critics(x)[:, 0].mean() / method.cost_scale
        assert found.predicted_cost[e] == pytest.approx(asked.item(), rel=1e-4)
        budget = min(0.5 * float(results.cost_limit[e]), method.spec.cost_max)  # reward critics know what is aimed at
        x = torch.cat([state, torch.tensor([-1.0, budget * 4 / method.spec.cost_max]), torch.tensor(data.actions[i])])
        asked = method.target_reward_critics(x)[:, 0].min() / method.reward_scale
        assert found.predicted_return[e] == pytest.approx(asked.item(), rel=1e-4)
    table = calibration.rows(found)
    assert [row["cost_limit"] for row in table] == [6.0, 24.0]
    assert table[0]["realised_cost"] == pytest.approx(found.realised_cost[:3].mean())
    plotting.save(calibration.figure(found, "toy"), tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_policies_without_critics_are_refused() -> None:
    toy = tradeoff(0)
    plain = replace(
        SMALL, train_with_reward_critic=False, train_with_cost_critic=False, inference_with_candidates=False
    )
    method = QPT(plain, Spec.from_data(toy.dataset(20), task=toy.task()))
    results = evaluate(Policy(method), toy.task(), episodes=1, workers=0)
    with pytest.raises(QptError, match="with critics"):
        calibration.calibrate(method, results)
    with pytest.raises(QptError, match="record=True"):
        calibration.calibrate(QPT(SMALL, method.spec), results)
    assert np.isfinite(results.returns).all()


def held_out_case(**changes: object) -> tuple[QPT, Trajectories]:
    toy = tradeoff(0)
    torch.manual_seed(0)
    method = QPT(replace(SMALL, **changes), Spec.from_data(toy.dataset(20), task=toy.task()))  # type: ignore[arg-type]
    return method, toy.dataset(6, seed=1)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("n_step", [None, 1])
def test_held_out_errors_equal_a_loop(n_step: int | None, careful: bool) -> None:
    method, data = held_out_case(n_step=n_step, clamp_cost=False, careful_costs=careful)
    for parameter in method.target_transformer.parameters():  # so that what it is told shows
        torch.nn.init.normal_(parameter, std=0.3)
    found = calibration.held_out(method, data)
    expected = []
    for e in range(len(data)):
        start, end = data.offsets[e], data.offsets[e + 1]

        def state(i: int, start: int = start) -> torch.Tensor:
            seen = (torch.tensor(data.observations[i]) - method.transformer.mean) / method.transformer.std
            return torch.cat([seen, torch.tensor([float((i - start) * 2 / method.spec.horizon - 1), 0.0])])

        for i in range(start, end):
            stop = min(i + method.n_step, end)
            came = sum(0.8 ** (j - i) * float(data.costs[j]) for j in range(i, stop))
            if stop < end and careful:
                first = max(start, stop - method.config.context + 1)
                window, steps = slice(first, stop + 1), torch.arange(first, stop + 1) - start
                told = (0.9 * torch.tensor(data.returns_to_go[window]), torch.zeros(stop + 1 - first))
                seen = (torch.tensor(data.observations[window]), torch.tensor(data.actions[window]), steps)
                hidden = method.target_transformer(*(x[None] for x in (*told, *seen)))[0, -1, 0]
                x = torch.cat([state(stop), torch.tanh(method.target_head(hidden))])
                value = method.target_cost_critics(x)[:, 0].mean().item()
            elif stop < end:
                value = method.values.each(torch.stack([state(stop)] * 2)[:, None])[1, 0, 0].item()
            if stop < end:
                came += 0.8 ** (stop - i) * value / method.cost_scale
            x = torch.cat([state(i), torch.tensor(data.actions[i])])
            predicted = method.target_cost_critics(x)[:, 0].mean().item() / method.cost_scale
            expected.append((predicted, came - predicted))
    assert np.stack([found.predicted, found.excess], 1) == pytest.approx(np.array(expected), abs=1e-4)


def test_the_offset_is_the_conformal_quantile() -> None:
    excess = np.random.default_rng(0).permutation(99) + 1.0
    found = calibration.HeldOut(predicted=np.where(excess > 50, 20.0, 5.0), excess=excess)
    assert found.offset(0.9) == 90
    assert found.offset(0.9, up_to=10) == 46  # the rank is ceil(51 * 0.9)
    with pytest.raises(QptError, match="50 held-out steps of a predicted cost up to 10 are too few"):
        found.offset(0.99, up_to=10)
    with pytest.raises(QptError, match="between 0 and 1"):
        found.offset(1.0)


def test_the_offset_covers_new_episodes() -> None:
    method, data = held_out_case()
    offset = calibration.held_out(method, data).offset(0.9)
    fresh = calibration.held_out(method, tradeoff(0).dataset(200, seed=2))
    assert 0.8 < (fresh.excess <= offset).mean() < 1


def test_what_held_out_episodes_cannot_tell() -> None:
    method, data = held_out_case(bootstrap="policy", budget_critics=False)
    with pytest.raises(QptError, match='bootstrap must be "expectile"'):
        calibration.held_out(method, data)
    other = Trajectories.from_arrays(np.zeros((2, 9)), np.zeros((2, 1)), [0, 0], [0, 0], [0, 1])
    with pytest.raises(QptError, match="other observations or actions"):
        calibration.held_out(held_out_case()[0], other)
    method, data = held_out_case()
    method.spec = replace(method.spec, horizon=int(data.lengths.max()) - 1)
    with pytest.raises(QptError, match=f"has {data.lengths.max()} steps, more than the horizon of"):
        calibration.held_out(method, data)


def test_the_command_with_held_out_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method, data = held_out_case()
    folder, rest = tmp_path / "run[/v1]", write(data, tmp_path / "rest.hdf5")
    write_checkpoint(folder, "qpt", method, asdict(method.config), {}, {"step": 0, "seed": 0})
    given = ["calibrate", "--checkpoint", str(folder), "--held-out", str(rest)]
    assert main([*given, "--limits", "100", "--level", "0.8"]) == 0
    offset = calibration.held_out(method, data).offset(0.8, 100.0)
    assert f"--checkpoint {folder} --set test_offset={offset:.2f}\n" in capsys.readouterr().out
    assert main([*given, "--out", str(tmp_path / "c.png")]) == 1
    assert "leave it or --held-out away" in capsys.readouterr().err
    trained = {"step": 0, "seed": 0, "data": {"fingerprint": data.fingerprint}}
    write_checkpoint(folder, "qpt", method, asdict(method.config), {}, trained)
    assert main(given) == 1
    assert "holds the data that the policy was trained on; hold some out with qpt data split" in capsys.readouterr().err


def test_a_held_out_log_that_was_cut_off_goes_on() -> None:
    """At a larger horizon the same timeouts end nothing: the last step has no target."""
    method, data = held_out_case()
    assert data.timeouts.any()
    whole = calibration.held_out(method, data)
    method.spec = replace(method.spec, horizon=method.spec.horizon + 1)
    assert len(calibration.held_out(method, data).excess) == len(whole.excess) - int(data.timeouts.sum())
