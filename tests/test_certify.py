"""Certificates: wrong no more often than they say, as long as foretold; calibrated limits keep the risk."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom

import qpt.certify as room
from qpt.certify import CalibratedPolicy, binomial_p_value, calibrate_limit, calibrated, certify, default_grid, store
from qpt.checkpoint import resolve
from qpt.cli import main
from qpt.envs.toy import OraclePolicy, Toy, tradeoff
from qpt.errors import QptError
from qpt.evaluation import CallablePolicy, RandomPolicy, evaluate
from qpt.policy import load_policy
from qpt.sequential import (
    SHARES,
    boundaries,
    bounds,
    decide,
    foretell,
    least_episodes,
    log_evidence_above,
    log_evidence_below,
)
from qpt.tasks import register_task


def at_most(events: int, runs: int, probability: float) -> bool:
    """Whether so many events can be explained by the probability: false by chance once in a million tests."""
    return bool(binom.sf(events - 1, runs, probability) > 1e-6)


def agrees(events: int, runs: int, probability: float) -> bool:
    return at_most(events, runs, probability) and at_most(runs - events, runs, 1 - probability)


def run_many(violated: Any, risk: float, confidence: float) -> tuple[Any, Any]:
    """Verdicts (1 accepted, -1 rejected, 0 undecided) and lengths of many sequences [runs, n] at once."""
    n = violated.shape[1]
    accept, reject = boundaries(risk, confidence, n)
    counts = np.cumsum(violated, axis=1)
    outcome = (counts <= accept[1:]).astype(int) - (counts >= reject[1:]).astype(int)
    first = np.argmax(outcome != 0, axis=1)
    verdict = outcome[np.arange(len(first)), first]
    return verdict, np.where(verdict == 0, n, first + 1)


# -- the sequential test -------------------------------------------------------------------------------------------


def plain_evidence(flags: list[bool], rate: float, alternatives: Any) -> float:
    """The mean over alternatives of the product of likelihood ratios, one episode at a time."""
    total = 0.0
    for q in alternatives:
        product = 1.0
        for flag in flags:
            product *= q / rate if flag else (1 - q) / (1 - rate)
        total += product / len(alternatives)
    return total


@pytest.mark.parametrize("rate", [0.03, 0.2, 0.7])
def test_evidence_is_a_product_of_likelihood_ratios(rate: float) -> None:
    flags = (np.random.default_rng(0).random(40) < 0.15).tolist()
    below, above = SHARES * rate, 1 - (1 - SHARES) * (1 - rate)
    assert (below < rate).all()
    assert (above > rate).all()
    assert log_evidence_below(sum(flags), 40, rate) == pytest.approx(math.log(plain_evidence(flags, rate, below)))
    assert log_evidence_above(sum(flags), 40, rate) == pytest.approx(math.log(plain_evidence(flags, rate, above)))


@pytest.mark.parametrize("true_rate", [0.05, 0.0501, 0.1, 0.6])
def test_evidence_is_a_supermartingale(true_rate: float) -> None:
    # The next expected value never exceeds the present one: "below" from the risk on, "above" (mirrored) up to it.
    for n, k in ((0, 0), (10, 0), (60, 2), (100, 30)):
        for evidence, p in ((log_evidence_below, true_rate), (log_evidence_above, 0.05**2 / true_rate)):
            now, hit, miss = (math.exp(evidence(*at, 0.05)) for at in ((k, n), (k + 1, n + 1), (k, n + 1)))
            assert p * hit + (1 - p) * miss <= now * (1 + 1e-9)
            if p == 0.05:
                assert p * hit + (1 - p) * miss == pytest.approx(now)


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.3, 0.9), (0.5, 0.99)])
def test_boundaries_are_where_the_evidence_says(risk: float, confidence: float) -> None:
    accept, reject = boundaries(risk, confidence, 120)
    enough = math.log(1 / (1 - confidence))
    for n in range(1, 121):
        below = [k for k in range(n + 1) if log_evidence_below(k, n, risk) >= enough]
        above = [k for k in range(n + 1) if log_evidence_above(k, n, risk) >= enough]
        assert below == list(range(accept[n] + 1))
        assert above == list(range(reject[n], n + 1))


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.2, 0.9), (0.01, 0.99)])
def test_both_errors_are_controlled_exactly(risk: float, confidence: float) -> None:
    # foretell follows the whole distribution, so these are the true probabilities of a wrong verdict.
    for rate in (risk, 1.2 * risk, 2 * risk):
        assert foretell(rate, risk, confidence, 1500).accepted <= 1 - confidence
    for rate in (risk, 0.8 * risk, 0.5 * risk):
        assert foretell(rate, risk, confidence, 1500).rejected <= 1 - confidence
    # and the test is not idle: the errors at the edge are of the order that is allowed
    edge = foretell(risk, risk, confidence, 1500)
    assert edge.accepted > 0.2 * (1 - confidence)
    assert edge.rejected > 0.2 * (1 - confidence)


def test_the_forecast_adds_up_and_is_right() -> None:
    rng = np.random.default_rng(1)
    risk, confidence, n, runs = 0.1, 0.95, 400, 5000
    for rate in (0.0, 0.03, 0.1, 0.16, 0.4):
        seen = foretell(rate, risk, confidence, n)
        assert seen.accepted + seen.rejected + seen.undecided == pytest.approx(1)
        verdict, length = run_many(rng.random((runs, n)) < rate, risk, confidence)
        assert agrees(int((verdict == 1).sum()), runs, seen.accepted)
        assert agrees(int((verdict == -1).sum()), runs, seen.rejected)
        assert abs(length.mean() - seen.mean) <= 5 * length.std() / math.sqrt(runs) + 1e-9
        assert at_most(int((length > seen.most).sum()), runs, 0.1)
        assert at_most(int((length < seen.median).sum()), runs, 0.5)
        assert at_most(int((length > seen.median).sum()), runs, 0.5)


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.01, 0.95), (0.5, 0.99)])
def test_the_least_number_of_episodes(risk: float, confidence: float) -> None:
    least = least_episodes(risk, confidence)
    assert least is not None
    assert decide(np.zeros(least, bool), risk, confidence) == ("accepted", least)
    assert decide(np.zeros(least - 1, bool), risk, confidence) == ("undecided", least - 1)
    assert foretell(0.0, risk, confidence, 2 * least).mean == pytest.approx(least)
    # no test can do with fewer than this, and ours pays at most half more for looking at any time
    fixed = math.ceil(math.log(1 - confidence) / math.log(1 - risk))
    assert fixed <= least <= 1.5 * fixed + 3
    assert least_episodes(risk, confidence, least - 1) is None


def test_decide_takes_the_first_crossing() -> None:
    flags = np.r_[np.zeros(200, bool), np.ones(200, bool)]
    verdict, n = decide(flags, 0.05, 0.95)
    assert (verdict, n) == ("accepted", least_episodes(0.05, 0.95))
    assert decide(flags[::-1], 0.05, 0.95)[0] == "rejected"


def test_bounds_cross_the_risk_exactly_at_a_verdict() -> None:
    accept, reject = boundaries(0.1, 0.95, 150)
    for n in range(1, 151, 21):
        for k in range(n + 1):
            low, high = bounds(k, n, 0.95)
            assert 0 <= low <= k / n <= high <= 1
            assert (high <= 0.1) == (k <= accept[n])
            assert (low >= 0.1) == (k >= reject[n])


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_bounds_hold_at_all_times_at_once(rate: float) -> None:
    runs, n = 2000, 150
    flags = np.random.default_rng(2).random((runs, n)) < rate
    counts = np.cumsum(flags, axis=1)
    # the true rate lies outside the bounds exactly where the evidence against it is enough
    for evidence in (log_evidence_below, log_evidence_above):
        table = [[evidence(k, m, rate) for k in range(m + 1)] for m in range(1, n + 1)]
        out = np.stack([np.array(table[m])[counts[:, m]] >= math.log(20) for m in range(n)], axis=1)
        assert at_most(int(out.any(axis=1).sum()), runs, 0.05)


# -- a toy CMDP ----------------------------------------------------------------------------------------------------


def cost_distribution(toy: Toy, probabilities: Any) -> Any:
    """P(episode cost = c) of a policy that draws its moves, exactly, by following (place, cost so far)."""
    most = int(toy.costs.max(axis=(1, 2)).sum())
    mass = np.zeros((len(toy.start), most + 1))
    mass[:, 0] = toy.start
    for t in range(toy.horizon):
        after = np.zeros_like(mass)
        for place, move in np.ndindex(*toy.costs.shape[1:]):
            cost = int(toy.costs[t, place, move])
            moved = probabilities[move] * mass[place, : most + 1 - cost]
            after[toy.following[t, place, move], cost:] += moved
        mass = after
    return mass.sum(axis=0)


@pytest.mark.parametrize(("quantile", "risk"), [(0.98, 0.05), (0.95, 0.05), (0.9, 0.05), (0.9, 0.2), (0.6, 0.2)])
def test_certificates_on_a_toy_are_wrong_no_more_often_than_they_say(quantile: float, risk: float) -> None:
    # Random driving on the ring: its exact cost distribution gives the true risk at every limit.
    costs = cost_distribution(tradeoff(0), np.full(3, 1 / 3))
    assert costs.sum() == pytest.approx(1)
    limit = int(np.argmax(np.cumsum(costs) >= quantile))
    true_risk = float(costs[limit + 1 :].sum())
    drawn = np.random.default_rng(3).choice(len(costs), size=(2000, 600), p=costs / costs.sum())
    verdict, _ = run_many(drawn > limit, risk, 0.95)
    wrong = int((verdict == (1 if true_risk > risk else -1)).sum())
    assert at_most(wrong, 2000, 0.05)
    expected = foretell(true_risk, risk, 0.95, 600)
    assert agrees(int((verdict == 1).sum()), 2000, expected.accepted)


def test_the_toy_costs_what_its_distribution_says() -> None:
    toy = tradeoff(0)
    exact = cost_distribution(toy, np.full(3, 1 / 3))
    episodes = evaluate(RandomPolicy(1), toy.task(), episodes=400, cost_limits=[6.0], workers=0)
    for limit in (25, 32, 40):
        assert agrees(int((episodes.costs > limit).sum()), 400, float(exact[limit + 1 :].sum()))


def test_certify_runs_until_it_is_decided() -> None:
    toy = tradeoff(0)
    seen: list[tuple[int, int]] = []
    done = certify(OraclePolicy(toy), toy.task(), 6.0, workers=0, show=lambda n, k, _: seen.append((n, k)))
    least = least_episodes(0.05, 0.95)
    assert (done.verdict, done.decided_after, done.episodes, done.violations) == ("accepted", least, 80, 0)
    assert done.bounds[0] == 0.0
    assert done.bounds[1] <= 0.05
    assert len(done.costs) == 80  # whole batches
    assert seen == [(20, 0), (40, 0), (60, 0), (80, 0)]
    assert [entry[:2] for entry in done.sequence] == seen

    rejected = certify(RandomPolicy(1), toy.task(), 6.0, workers=0, batch=5)
    assert rejected.verdict == "rejected"
    assert rejected.decided_after == decide(np.ones(50, bool), 0.05, 0.95)[1] == 2
    assert (rejected.episodes, rejected.violations) == (5, 5)
    assert rejected.bounds[0] >= 0.05

    short = certify(OraclePolicy(toy), toy.task(), 6.0, workers=0, max_episodes=30)
    assert (short.verdict, short.episodes, short.decided_after) == ("undecided", 30, None)
    assert short.bounds[1] > 0.05


def test_a_cost_that_is_no_number_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.certify.run_costs", lambda *_: np.full(60, np.nan))
    policy, task = OraclePolicy(tradeoff(0)), tradeoff(0).task()
    assert certify(policy, task, 6.0, batch=60).verdict == "rejected"
    assert calibrate_limit(policy, task, 6.0, episodes=60).internal_limit is None


def test_the_grid_ends_at_the_limit() -> None:
    assert all(max(default_grid(x / 100)) == x / 100 for x in range(1, 10_001))


def test_batches_are_of_different_episodes() -> None:
    toy = tradeoff(0)
    done = certify(RandomPolicy(1), toy.task(), 32.0, risk=0.4, workers=0, max_episodes=60, batch=15, confidence=0.999)
    parts = [tuple(done.costs[i : i + 15]) for i in range(0, len(done.costs), 15)]
    assert len(parts) > 2
    assert len(set(parts)) == len(parts)
    again = certify(RandomPolicy(1), toy.task(), 32.0, risk=0.4, workers=0, max_episodes=60, batch=15, confidence=0.999)
    assert again.costs == done.costs


# -- calibration ---------------------------------------------------------------------------------------------------


def test_p_values_are_exact() -> None:
    for n, k, r in ((59, 0, 0.05), (200, 4, 0.05), (500, 60, 0.1), (20, 20, 0.3)):
        assert binomial_p_value(k, n, r) == pytest.approx(binom.cdf(k, n, r))
        if k < n:
            assert binomial_p_value(k, n, r) == pytest.approx(beta.sf(r, k + 1, n - k))


def calibrate_simulated(
    rates: Any, monkeypatch: pytest.MonkeyPatch, runs: int, *, episodes: int, risk: float, confidence: float
) -> list[float | None]:
    """Calibrations of a policy whose violation rate at each internal limit 1, 2, … is known."""
    rng = np.random.default_rng(4)

    def costs(_policy: Any, _task: Any, given: float, many: int, *_: Any) -> Any:
        return np.where(rng.random(many) < rates[int(given) - 1], 99.0, 0.0)

    monkeypatch.setattr(room, "run_costs", costs)
    toy = tradeoff(0)
    grid = tuple(range(1, len(rates) + 1))
    settings: dict[str, Any] = {"grid": grid, "episodes": episodes, "risk": risk, "confidence": confidence}
    policy, task = OraclePolicy(toy), toy.task()
    return [calibrate_limit(policy, task, 10.0, **settings).internal_limit for _ in range(runs)]


@pytest.mark.parametrize(
    "rates",
    [
        [0.0, 0.02, 0.05, 0.101, 0.2],  # rising, with one just above the risk
        [0.101, 0.101, 0.101],  # none keeps it
        [0.0, 0.101, 0.0, 0.5],  # not monotone: the guarantee does not rest on an order
    ],
)
def test_calibrated_limits_keep_the_risk(rates: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 1500
    found = calibrate_simulated(rates, monkeypatch, runs, episodes=100, risk=0.1, confidence=0.9)
    wrong = sum(f is not None and max(rates[: int(f)]) > 0.1 for f in found)  # no limit that passed may break it
    assert at_most(wrong, runs, 0.1)
    assert wrong > 0  # the allowance is used: the test is not idle


def test_calibration_of_a_toy_policy_keeps_its_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    # A driver who spends the internal limit on average: slow or middling, at random. Its cost is then known exactly.
    toy, limit = tradeoff(0), 10.0
    grid = [2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0]
    speed = toy.costs[0, 0]
    exact = {}
    for given in grid:
        probabilities = np.where(speed == 1, given / 24, np.where(speed == 0, 1 - given / 24, 0.0))
        exact[given] = cost_distribution(toy, probabilities)
    risk_of = {given: float(d[int(limit) + 1 :].sum()) for given, d in exact.items()}
    assert risk_of[6.0] < 0.05 < risk_of[7.0] < risk_of[10.0]
    rng = np.random.default_rng(5)

    def costs(_policy: Any, _task: Any, given: float, many: int, *_: Any) -> Any:
        return rng.choice(len(exact[given]), size=many, p=exact[given] / exact[given].sum())

    monkeypatch.setattr(room, "run_costs", costs)
    policy, task = OraclePolicy(toy), toy.task()
    found = [calibrate_limit(policy, task, limit, grid=grid).internal_limit for _ in range(800)]
    assert at_most(sum(f is not None and risk_of[f] > 0.05 for f in found), 800, 0.05)
    assert sum(f in (5.0, 6.0) for f in found) > 700  # and it is not timid


def test_calibration_stops_at_the_first_failure() -> None:
    toy = tradeoff(0)
    found = calibrate_limit(OraclePolicy(toy), toy.task(), 6.0, episodes=60, workers=0, grid=(2, 4, 6))
    assert found.internal_limit == 6.0
    assert [(step, k) for step, k, _ in found.tested] == [(2, 0), (4, 0), (6, 0)]

    class Overspends(OraclePolicy):
        """Takes half as much again as it is given."""

        def reset(self, n: int, *, cost_limits: Any, seeds: Any) -> None:
            super().reset(n, cost_limits=1.5 * cost_limits, seeds=seeds)

        def restart(self, indices: Any, *, cost_limits: Any, seeds: Any) -> None:
            super().restart(indices, cost_limits=1.5 * cost_limits, seeds=seeds)

    found = calibrate_limit(Overspends(toy), toy.task(), 12.0, episodes=60, workers=0, grid=(12, 10, 8, 4))
    assert found.internal_limit == 8.0
    assert [step for step, _, _ in found.tested] == [4, 8, 10]
    wrapped = CalibratedPolicy(Overspends(toy), {12.0: 8.0})
    assert certify(Overspends(toy), toy.task(), 12.0, workers=0).verdict == "rejected"
    done = certify(wrapped, toy.task(), 12.0, workers=0)
    assert (done.verdict, done.limit, done.internal_limit) == ("accepted", 12.0, 8.0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p, t: certify(p, t, -1.0), "a cost limit is a finite number"),
        (lambda p, t: certify(p, t, 6.0, risk=1.0), "the risk is a probability"),
        (lambda p, t: certify(p, t, 6.0, confidence=1.0), "the confidence lies between"),
        (lambda p, t: certify(p, t, 6.0, batch=0), "at least one episode"),
        (lambda p, t: calibrate_limit(p, t, 6.0, grid=[7.0]), "lie between 0 and the stated limit"),
        (lambda p, t: calibrate_limit(p, t, 6.0, episodes=58), "take at least 59"),
        (lambda _, t: calibrate_limit(CallablePolicy(lambda o: o[:, :1]), t, 6.0), "nothing to calibrate"),
        (lambda p, _: CalibratedPolicy(p, {5.0: 3.0}).reset(1, cost_limits=[6.0]), "not calibrated for a limit of 6"),
    ],
)
def test_what_cannot_be_asked(ask: Callable[[Any, Any], Any], message: str) -> None:
    toy = tradeoff(0)
    with pytest.raises(QptError, match=message):
        ask(OraclePolicy(toy), toy.task())


# -- with a trained policy -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qpt.algorithms.cdt import CDTConfig
    from qpt.training import TrainConfig, train

    toy = tradeoff(0)
    register_task(toy.task("CertifyToy"))
    out = tmp_path_factory.mktemp("certify") / "run"
    small = CDTConfig(steps=2, batch_size=4, width=8, layers=1, heads=2, context=3)
    settings: dict[str, Any] = {"algorithm": "cdt", "config": small, "progress": False, "threads": 1, "device": "cpu"}
    return train(TrainConfig(task="CertifyToy", out=out, **settings), toy.dataset(30)).folder


def qpt_certify(run: Path, *args: str) -> int:
    return main(["certify", "--checkpoint", str(run), "--workers", "0", *args])


def test_the_command_accepts_rejects_and_gives_up(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new[/v1]" / "certificate.json"
    assert qpt_certify(trained, "--limit", "72", "--out", str(out)) == 0  # the most that an episode can cost
    text = capsys.readouterr().out
    assert text.endswith(f"wrote {out}\n")
    least = least_episodes(0.05, 0.95)
    assert text.index(f"{least} episodes are needed") < text.index("ACCEPTED: P(episode cost > 72) <= 0.05")
    found = json.loads(out.read_text())
    manifest = json.loads((resolve(trained) / "manifest.json").read_text())
    assert found["sha256"] == manifest["sha256"]
    assert (found["verdict"], found["task"], found["algorithm"], found["seed"]) == ("accepted", "CertifyToy", "cdt", 0)
    assert (found["decided_after"], found["episodes"], found["violations"]) == (least, 80, 0)
    assert len(found["costs"]) == 80
    assert found["bounds"][1] <= 0.05
    assert found["sequence"][-1][:2] == [80, 0]
    assert found["forecasts"][0]["mean"] == pytest.approx(least)
    assert {"qpt", "torch", "numpy"} <= set(found["provenance"]["versions"])

    assert qpt_certify(trained, "--limit", "0", "--task", "CertifyToy") == 3
    assert "REJECTED: P(episode cost > 0) > 0.05" in capsys.readouterr().out
    assert qpt_certify(trained, "--limit", "72", "--max-episodes", "10") == 4
    text = capsys.readouterr().out
    assert "UNDECIDED after 10 episodes" in text
    assert "--max-episodes 10 cannot be enough" in text


def test_a_calibration_is_stored_with_the_policy(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve(trained)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(QptError, match="has no calibration for CertifyToy; run: qpt certify --calibrate"):
        calibrated(load_policy(trained))
    few = ("--calibrate", "--calibration-episodes", "60")
    assert qpt_certify(trained, *few, "--limit", "0") == 3
    assert "Not calibrated" in capsys.readouterr().out
    assert not (folder / "calibration.json").exists()

    assert qpt_certify(trained, *few, "--limit", "72", "--grid", "6", "12", "--out", str(tmp_path / "c.json")) == 0
    text = capsys.readouterr().out
    assert "given 12, the policy keeps P(episode cost > 72) <= 0.05" in text
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert json.loads((tmp_path / "c.json").read_text())["tested"][0][:2] == [6.0, 0]

    plain = load_policy(trained)
    policy = calibrated(plain)
    policy.reset(3, cost_limits=[72.0, 72.0, 72.0], seeds=[0, 1, 2])
    assert plain.cost_limits.tolist() == [12.0, 12.0, 12.0]
    plain.set_cost_limit(5.0)
    policy.set_cost_limit(72.0, [1])
    policy.restart([2], cost_limits=72.0)
    assert plain.cost_limits.tolist() == [5.0, 12.0, 12.0]
    assert (policy.spec, policy.observation_dim) == (plain.spec, plain.observation_dim)  # all else is the policy's
    with pytest.raises(QptError, match=r"not calibrated for a limit of 20 \(it is for 72\)"):
        policy.set_cost_limit(20.0)
    # episodes with the calibrated policy at the stated limit are those of the plain one at the internal limit
    a = evaluate(policy, "CertifyToy", episodes=5, cost_limits=[72.0], workers=0)
    b = evaluate(plain, "CertifyToy", episodes=5, cost_limits=[12.0], workers=0)
    assert a.costs.tolist() == b.costs.tolist()
    assert a.returns.tolist() == b.returns.tolist()

    out = tmp_path / "certificate.json"
    assert qpt_certify(trained, "--limit", "72", "--apply-calibration", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert (found["limit"], found["internal_limit"]) == (72.0, 12.0)

    with pytest.raises(QptError, match="as it was trained, not of one with another target_factor"):
        calibrated(load_policy(trained, target_factor=0.5))
    assert calibrated(load_policy(trained, target_factor=1.0)).table == {72.0: 12.0}  # nothing is changed by it

    again = calibrate_limit(plain, "CertifyToy", 72.0, grid=[6.0], episodes=60, workers=0)
    store(again, trained)  # takes the place of the earlier one
    store(replace(again, limit=70.0), trained)
    assert calibrated(plain).table == {72.0: 6.0, 70.0: 6.0}
    with pytest.raises(QptError, match="no calibration to store"):
        store(replace(again, internal_limit=None), trained)


def test_an_exported_policy_keeps_its_calibration_and_can_be_certified(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from qpt.export import export_policy
    from qpt.runtime import OnnxPolicy

    folder = tmp_path / "copy"
    shutil.copytree(resolve(trained), folder)
    (folder / "calibration.json").unlink(missing_ok=True)
    store(calibrate_limit(load_policy(folder), "CertifyToy", 72.0, grid=[6.0], episodes=60, workers=0), folder)
    graph = export_policy(folder, tmp_path / "p.onnx").graph
    with pytest.raises(QptError, match="cost_limits=72"):
        OnnxPolicy(graph, calibrated=True).reset(1)
    done = certify(OnnxPolicy(graph, calibrated=True), "CertifyToy", 72.0, risk=0.2, workers=0)
    assert (done.verdict, done.limit, done.internal_limit) == ("accepted", 72.0, 6.0)
    assert done.sha256 == {"p.onnx": hashlib.sha256(graph.read_bytes()).hexdigest()}
    plain = certify(load_policy(folder), "CertifyToy", 6.0, risk=0.2, workers=0, max_episodes=20)
    assert list(done.costs)[:20] == list(plain.costs)  # the stated limit is mapped, the episodes are the same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_sha256": "0"}, "it belongs to other weights"),
        ({"format": 99}, "its format is 99"),
        ({"calibrations": [{"task": "CertifyToy"}]}, "cannot be used"),
        (None, "cannot be used"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(
    trained: Path,
    tmp_path: Path,
    change: dict[str, Any] | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(resolve(trained), folder)
    policy = load_policy(folder)
    store(calibrate_limit(policy, "CertifyToy", 72.0, grid=[6.0], episodes=60, workers=0), folder)
    path = folder / "calibration.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(QptError, match=message):
        calibrated(policy)
    monkeypatch.setattr(room, "evaluate", lambda *_, **__: pytest.fail("what cannot be stored is not measured"))
    assert qpt_certify(folder, "--limit", "72", "--calibrate", "--calibration-episodes", "60") == 1
    assert message in capsys.readouterr().err


def test_a_policy_trained_for_one_limit_can_be_certified_for_another() -> None:
    class Trained(OraclePolicy):
        limit_mode = "trained"
        trained_limit = 6.0

        def reset(self, n: int, *, cost_limits: Any, seeds: Any) -> None:
            assert (cost_limits == 6.0).all()
            super().reset(n, cost_limits=cost_limits, seeds=seeds)

    toy = tradeoff(0)
    assert certify(Trained(toy), toy.task(), 5.0, workers=0).verdict == "rejected"
    done = certify(Trained(toy), toy.task(), 12.0, workers=0)
    assert (done.verdict, done.limit, done.internal_limit) == ("accepted", 12.0, 6.0)


def test_usage_errors_of_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qpt_certify(trained, "--limit", "5", "--risk", "2") == 1
    assert "the risk is a probability" in capsys.readouterr().err
    for name, value, message in (
        ("--seed", "-1", "a seed is a whole"),
        ("--max-episodes", "0", "at least one episode"),
    ):
        assert qpt_certify(trained, "--limit", "5", name, value) == 1
        told = capsys.readouterr()
        assert message in told.err
        assert told.out == ""
    assert qpt_certify(trained, "--limit", "5", "--calibrate", "--grid", "nan") == 1
    assert "between 0 and the stated limit" in capsys.readouterr().err
    assert qpt_certify(trained, "--limit", "5", "--calibrate", "--apply-calibration") == 1
    assert "give one of the two" in capsys.readouterr().err
    assert qpt_certify(trained, "--limit", "5", "--out", str(tmp_path)) == 1
    assert "cannot be written" in capsys.readouterr().err
    copy = tmp_path / "copy"
    shutil.copytree(resolve(trained), copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["spec"]["task"] = None
    del manifest["checksum"]  # of what it was before
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert qpt_certify(copy, "--limit", "5") == 1
    assert "names no task; give one with --task" in capsys.readouterr().err
    assert qpt_certify(tmp_path, "--limit", "5") == 1
    assert "neither a checkpoint nor a run" in capsys.readouterr().err
