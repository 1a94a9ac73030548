"""The deployed policy: its tokens, episodes side by side, limits that change, and misuse; in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qpt.algorithms import candidates
from qpt.algorithms.base import Context, Decision
from qpt.algorithms.qpt import QPT
from qpt.checkpoint import MANIFEST
from qpt.errors import QptError
from qpt.policy import Policy, _Away, load_policy
from test_qpt import make


def policy_of(method: QPT, n: int, limits: Any = 10.0) -> Policy:
    policy = Policy(method.eval(), dtype=torch.float64)
    policy.reset(n, cost_limits=np.broadcast_to(limits, n), seeds=np.arange(n))
    return policy


def test_policy_tokens_are_targets_minus_what_was_realised() -> None:
    method, _ = make(candidates=1, inference_with_candidates=False)
    seen: list[Context] = []
    method.act = lambda c: (seen.append(c), candidates.decide(method, c))[1]  # type: ignore[method-assign]
    policy = policy_of(method, 2, [4.0, 9.0])
    rng = np.random.default_rng(0)
    observations, actions, rewards, costs = [], [], [], []
    for t in range(8):
        o = rng.normal(size=(2, 3))
        a = policy.act(o)
        observations.append(o), actions.append(a), rewards.append(rng.random(2)), costs.append(rng.integers(0, 2, 2))
        c = seen[-1]
        window = range(max(0, t - 4), t + 1)
        for row in range(2):
            for place, step in enumerate(window):
                earned, spent = sum(r[row] for r in rewards[:step]), sum(k[row] for k in costs[:step])
                assert c.return_to_go[row, place].item() == pytest.approx(policy.return_targets[row] - earned)
                assert c.cost_to_go[row, place].item() == pytest.approx([4.0, 9.0][row] - spent)
                assert int(c.steps[row, place]) == step
                np.testing.assert_allclose(c.observations[row, place], observations[step][row])
                if step < t:
                    np.testing.assert_array_equal(c.actions[row, place], actions[step][row])
            assert int(c.last[row]) == len(window) - 1
        policy.observe(rewards[-1], costs[-1])


def test_episodes_side_by_side_equal_episodes_alone() -> None:
    method, _ = make(candidates=5, rtg_noise=0.4, selection="constrained")  # so that noise decides
    rng = np.random.default_rng(1)
    together = policy_of(method, 3, [2.0, 5.0, 9.0])
    alone = [policy_of(method, 1, x) for x in (2.0, 5.0, 9.0)]
    for i, p in enumerate(alone):
        p.restart([0], seeds=[i])
    for t in range(12):
        o, r, k = rng.normal(size=(3, 3)), rng.random(3), rng.integers(0, 2, 3)
        active = np.array([True, t % 3 != 0, t > 4])
        a = together.act(o, active)
        together.observe(r, k)
        for row in np.flatnonzero(active):
            b = alone[row].act(o[row : row + 1])
            alone[row].observe(r[row : row + 1], k[row : row + 1])
            np.testing.assert_allclose(a[row], b[0], atol=1e-7)
        assert (a[~active] == 0).all()
        if t == 7:
            together.restart([0])
            alone[0].restart([0])


def test_the_fallback_share_counts_failed_tests_of_running_rows_since_they_began() -> None:
    method, _ = make(candidates=3, selection="constrained")
    policy = policy_of(method, 3, [2.0, 5.0, 9.0])
    failed = {1: 0.0, 4: 1.0, 6: 0.0, 9: 1.0}  # at these steps, in rows that run; 0 elsewhere too
    decide = method.act
    rng, expected = np.random.default_rng(0), np.zeros((2, 3))

    def told(context: Context) -> Decision:
        decision = decide(context)
        decision.diagnostics["fallback"][:] = torch.tensor([failed.get(step, 0.0), 1.0, 0.0])
        return decision

    method.act = told  # type: ignore[method-assign]
    for step in range(12):
        active = rng.random(3) < 0.6
        policy.act(rng.normal(size=(3, 3)), active)
        policy.observe(np.zeros(3), np.zeros(3))
        expected += np.stack([active, active * [failed.get(step, 0.0), 1.0, 0.0]])
        if step == 5:
            policy.restart([0])
            expected[:, 0] = 0
    np.testing.assert_allclose(policy.diagnostics()["fallback_share"], expected[1] / np.maximum(expected[0], 1))


def test_a_single_candidate_is_tested_too() -> None:
    """There is nothing else to take, but whoever asks shall hear that it fails."""
    method, _ = make(candidates=1)
    method.target_cost_critics.biases[-1].data += 1000 * method.cost_scale
    policy, bare = policy_of(method, 2), policy_of(make(inference_with_candidates=False)[0], 2)
    for one, share in ((policy, 1.0), (bare, 0.0)):
        one.act(np.zeros((2, 3)))
        one.observe([0, 0], [0, 0])
        assert one.diagnostics()["fallback_share"].tolist() == [share] * 2


def test_a_target_factor_multiplies_what_the_data_suggest() -> None:
    method, _ = make(candidates=1, target_factor=0.8)
    policy = policy_of(method, 1, 5.0)
    assert policy.return_targets[0] == pytest.approx(0.8 * method.spec.suggest_return(5.0, method.config.frugality))


@pytest.mark.parametrize("flags", [[0, 1], ["True", "False"], [1.0, np.nan], [True, None], [[True], [True, False]]])
def test_flags_are_flags(flags: Any) -> None:
    """Numbers of rows, which other calls take, would pass for them."""
    with pytest.raises(QptError, match="active flags"):
        policy_of(make(candidates=1)[0], 2).act(np.zeros((2, 3)), flags)


def test_a_reset_that_fails_begins_nothing() -> None:
    policy = policy_of(make(candidates=1)[0], 2)
    for limits in (torch.ones(2, requires_grad=True), [10**400, 1], [1j, 2]):
        with pytest.raises(QptError, match="a cost limit is a finite number"):
            policy.reset(2, cost_limits=limits)
        with pytest.raises(QptError, match="reset"):
            policy.act(np.zeros((2, 3)))


def test_a_new_limit_changes_the_next_decision_and_its_targets() -> None:
    method, _ = make(candidates=1)
    policy, same = policy_of(method, 1, 3.0), policy_of(method, 1, 3.0)
    o = np.ones((1, 3))
    for p in (policy, same):
        p.act(o)
        p.observe([1.0], [2.0])
    policy.set_cost_limit(12.0)
    assert policy.return_targets[0] == method.suggest_return(12.0) * method.config.target_factor
    assert not np.allclose(policy.act(o), same.act(o))
    fixed = Policy(method.eval(), dtype=torch.float64)
    fixed.reset(1, cost_limits=3.0, return_targets=[7.0])
    fixed.set_cost_limit(12.0)
    assert fixed.return_targets[0] == 7.0


def test_policy_refuses_misuse_in_a_sentence() -> None:
    method, _ = make(candidates=1)
    policy = Policy(method.eval(), dtype=torch.float64)
    with pytest.raises(QptError, match="reset"):
        policy.act(np.zeros((1, 3)))
    with pytest.raises(QptError, match="no decision"):
        policy.observe([0], [0])
    with pytest.raises(QptError, match="reset"):
        policy.set_cost_limit(1.0)
    for fact in ("cost_limits", "return_targets", "spent", "diagnostics"):
        with pytest.raises(QptError, match=r"call reset\(n\) first"):
            getattr(policy, fact)()
    policy.reset(2, cost_limits=1.0)
    with pytest.raises(QptError, match="row -1 does not exist"):
        policy.restart([-1, 0])
    with pytest.raises(QptError, match="2 active flags"):
        policy.act(np.zeros((2, 3)), [True])
    with pytest.raises(QptError, match="shape"):
        policy.act(np.zeros((1, 3)))
    with pytest.raises(QptError, match="NaN"):
        policy.act(np.full((2, 3), np.nan))
    with pytest.raises(QptError, match="at least 0"):
        policy.set_cost_limit(-1.0)
    policy.act(np.zeros((2, 3)))
    with pytest.raises(QptError, match="observe"):
        policy.act(np.zeros((2, 3)))
    with pytest.raises(QptError, match="NaN or infinite"):
        policy.observe([0, np.nan], [0, 0])
    with pytest.raises(QptError, match="costs must not be negative, but one is -2"):
        policy.observe([0, 0], [1, -2])
    assert policy.spent.tolist() == [0, 0]
    policy.observe([0, 0], [0, 0])
    with pytest.raises(QptError, match="no decision"):
        policy.observe([0, 0], [0, 0])
    for _ in range(method.spec.horizon - 1):
        policy.act(np.zeros((2, 3)))
        policy.observe([0, 0], [0, 0])
    with pytest.raises(QptError, match="past the horizon"):
        policy.act(np.zeros((2, 3)))
    clamped = Policy(method.eval(), past_horizon="clamp", dtype=torch.float64)
    clamped.reset(1, cost_limits=1.0)
    for _ in range(method.spec.horizon + method.context + 3):  # beyond all embeddings of steps that there are
        clamped.act(np.zeros((1, 3)))
        clamped.observe([0], [0])
    assert (clamped._window["steps"] == method.spec.horizon - 1).all()


def test_a_decision_waits_for_its_outcome_whichever_rows_are_next() -> None:
    policy, seen = policy_of(make(candidates=1)[0], 2), np.zeros((2, 3))
    policy.act(seen, [True, False])
    with pytest.raises(QptError, match="observe"):  # or what row 0 spends would never count
        policy.act(seen, [False, True])
    policy.observe([0, 0], [3, 9])
    assert policy.spent.tolist() == [3, 0]
    policy.act(seen, [True, False])
    policy.restart([0])  # nothing is waited for any more
    policy.act(seen, [False, True])
    policy.observe([0, 0], [9, 2])
    assert policy.spent.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda p: p.reset(2.5), "whole number of episodes, at least 1, not 2.5"),
        (lambda p: p.reset(0), "at least 1, not 0"),
        (lambda p: p.reset(2, cost_limits=[1, 2, 3]), r"at least 0, one for all or one for each of 2, not \[1, 2, 3\]"),
        (lambda p: p.reset(2, cost_limits=[[1], [2]]), "one for each of 2"),
        (lambda p: p.reset(2, cost_limits=["a", "b"]), "a cost limit is a finite number"),
        (lambda p: p.reset(2, cost_limits=[np.inf, 1]), "a cost limit is a finite number"),
        (lambda p: p.reset(2, return_targets=[1, 2, 3]), "one for each of 2"),
        (lambda p: p.restart([0], return_targets=[np.nan]), "a return target is a finite number"),
        (lambda p: p.restart([0], return_targets=-np.inf), "a return target is a finite number"),
        (lambda p: p.reset(2, seeds=[1, 2, 3]), "a seed is a whole number, one for all or one for each of 2"),
        (lambda p: p.restart([0], seeds=[0.5]), "a seed is a whole number"),
        (lambda p: p.restart([0.7]), r"whole numbers or flags, not \[0.7\]"),
        (lambda p: p.restart([[0, 1]]), "whole numbers or flags"),
        (lambda p: p.restart([0], cost_limits=-1), "at least 0"),
        (lambda p: p.restart([0], return_targets=5, seeds=9, cost_limits=-1), "at least 0"),
        (lambda p: p.restart([0], cost_limits=2, return_targets=5, seeds=0.5), "a seed is a whole number"),
        (lambda p: p.restart([True], cost_limits=2), "as many flags are needed, not 1"),
        (lambda p: p.reset(True), "whole number of episodes, at least 1, not True"),
        (lambda p: p.reset(2, cost_limits=-1), "at least 0"),
    ],
)
def test_episodes_that_cannot_begin_get_a_sentence(begin: Any, message: str) -> None:
    policy = policy_of(make(candidates=1)[0], 2)
    policy.act(np.zeros((2, 3)))
    policy.observe([0, 0], [3, 4])
    before = [policy.spent, policy.cost_limits, policy.return_targets, policy._seeds.copy(), policy._fixed.copy()]
    with pytest.raises(QptError, match=message):
        begin(policy)
    if "restart" in begin.__code__.co_names:  # it has ended no episode, and changed nothing
        after = [policy.spent, policy.cost_limits, policy.return_targets, policy._seeds, policy._fixed]
        assert [x.tolist() for x in after] == [x.tolist() for x in before]
    elif "episodes" not in message and "not 0" not in message:  # none of the new ones has begun
        with pytest.raises(QptError, match=r"call reset\(n\) first"):
            policy.act(np.zeros((2, 3)))


def test_one_value_is_that_of_all_rows_and_no_rows_may_restart() -> None:
    policy = policy_of(make(candidates=1)[0], 3)
    policy.restart(np.array([True, False, True]), cost_limits=2, return_targets=[7.0], seeds=np.uint64(5))
    assert (policy.cost_limits.tolist(), policy.return_targets[[0, 2]].tolist()) == ([2, 10, 2], [7, 7])
    assert policy._seeds.tolist() == [5, 1, 5]
    policy.restart([])


def test_choices_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(QptError, match="past_horizon is 'error' or 'clamp', not 'wrap'"):
        Policy(make()[0], past_horizon="wrap")  # type: ignore[arg-type]
    (tmp_path / MANIFEST).touch()  # also where there is nothing to choose
    with pytest.raises(QptError, match="which is 'last' or 'best', not 'first'"):
        load_policy(tmp_path, which="first")  # type: ignore[arg-type]


def test_a_limit_of_0_is_a_limit_and_is_kept_by_a_restart() -> None:
    method, _ = make(candidates=1)
    policy = Policy(method.eval(), trained_limit=7.0, dtype=torch.float64)
    policy.reset(2)
    assert policy.cost_limits.tolist() == [7.0, 7.0]
    policy.set_cost_limit(0.0)
    policy.restart([0, 1])
    assert policy.cost_limits.tolist() == [0.0, 0.0]


def test_a_mask_that_the_caller_changes_after_the_decision_changes_nothing() -> None:
    method, _ = make(candidates=1)
    policy, active = policy_of(method, 2), np.array([True, True])
    policy.act(np.zeros((2, 3)), active)
    active[1] = False
    policy.observe([0, 0], [2, 3])
    assert policy.spent.tolist() == [2, 3]


def test_what_travels_to_a_device_and_back_is_the_decision() -> None:
    method, _ = make(candidates=5, rtg_noise=0.4, selection="constrained")
    here, away = policy_of(method, 3, [2.0, 5.0, 9.0]), policy_of(method, 3, [2.0, 5.0, 9.0])
    rng = np.random.default_rng(2)
    away._ask = lambda c: travel(away, c)  # type: ignore[method-assign]
    for t in range(8):
        o, r, k = rng.normal(size=(3, 3)), rng.random(3), rng.integers(0, 2, 3)
        np.testing.assert_array_equal(away.act(o), here.act(o), err_msg=str(t))
        here.observe(r, k), away.observe(r, k)
    assert {k: v.tolist() for k, v in away.diagnostics().items()} == {
        k: v.tolist() for k, v in here.diagnostics().items()
    }


def travel(policy: Policy, context: Context) -> Any:
    """As on CUDA, with a device that is the host."""
    policy._away = policy._away or _Away((), policy.method, torch.device("cpu"), context)
    return policy._away.act(context)


def test_a_decision_is_a_number_or_an_error() -> None:
    """Finite values can be too large for the network; a NaN would go on to a motor."""
    method, _ = make(candidates=5)
    seen = np.zeros((2, 3))
    for limit, scale in ((1e39, 1.0), (10.0, 1e30)):  # the first is infinite in float32
        policy = Policy(method.float().eval())
        policy.reset(2, cost_limits=limit)
        with pytest.raises(QptError, match="the decision is not a number"):
            policy.act(seen + scale)
        policy.set_cost_limit(10.0)
        assert np.isfinite(policy.act(seen)).all()  # it can be asked for again
        policy.observe([1e39, 0], [0, 0])
        with pytest.raises(QptError, match="the decision is not a number"):
            policy.act(seen)
        assert np.isfinite(policy.act(seen, [False, True])).all()  # the other row goes on


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.act([["a", "b", "c"]] * 2),
        lambda p: p.act([[1, 2, 3], [1, 2]]),
        lambda p: p.act(np.zeros((2, 3)), [[True], [True, False]]),
        lambda p: p.act(np.full((2, 3), 1j)),
        lambda p: p.act(torch.zeros(2, 3, requires_grad=True)),
        lambda p: p.act([[10**400, 0, 0]] * 2),
        lambda p: (p.act(np.zeros((2, 3))), p.observe([0, 10**400], [0, 0])),
        lambda p: (p.act(np.zeros((2, 3))), p.observe(["a", 1], [0, 0])),
        lambda p: (p.act(np.zeros((2, 3))), p.observe([0, 0], [{}, 1])),
    ],
)
def test_what_are_no_numbers_gets_a_sentence(ask: Any) -> None:
    with pytest.raises(QptError, match="are an array of numbers, which this is not"):
        ask(policy_of(make(candidates=1)[0], 2))


def test_a_decision_that_failed_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook, or a GPU without memory: the same step is not taken for the next one."""
    method, _ = make(candidates=1)
    whole, cut = policy_of(method, 2), policy_of(method, 2)
    rng = np.random.default_rng(0)
    for t in range(9):
        seen = rng.normal(size=(2, 3))
        if t in (1, 7):  # before and after the window is full
            with monkeypatch.context() as patch:
                patch.setattr(cut, "_ask", lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    cut.act(rng.normal(size=(2, 3)))
        np.testing.assert_array_equal(cut.act(seen), whole.act(seen), err_msg=str(t))
        for policy in (cut, whole):
            policy.observe([1, 2], [0, 1])
