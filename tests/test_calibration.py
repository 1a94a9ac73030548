"""Predicted against realised values: the sums against a loop, the prediction against the critics asked directly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qpt import calibration, plotting
from qpt.algorithms.base import Spec
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.envs.toy import tradeoff
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.policy import Policy

SMALL = QPTConfig(width=8, layers=1, heads=2, context=3, critic_width=8, candidates=3, discount=0.9, cost_discount=0.8)


def test_calibration_equals_a_loop(tmp_path: Path) -> None:
    toy = tradeoff(0)
    torch.manual_seed(0)
    method = QPT(SMALL, Spec.from_data(toy.dataset(20), task=toy.task()))
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
