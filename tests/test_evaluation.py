"""Evaluation: the same rows whatever the workers, the deaths and the slots; tables; scores; the command."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import qpt.evaluation
from faulty_envs import Blind, once, raises, slow, walk, walk_task
from helpers import tiny_data
from qpt import stats
from qpt.algorithms.bc import BCConfig
from qpt.algorithms.qpt import QPTConfig
from qpt.cli import main
from qpt.cli.evaluate import table as printed_table
from qpt.envs import make_env
from qpt.envs.toy import OraclePolicy, tradeoff
from qpt.envs.vector import EnvPool
from qpt.episodes import _COLUMNS, Episodes, command, origins, provenance
from qpt.errors import QptError
from qpt.evaluation import CallablePolicy, ConstantPolicy, RandomPolicy, episode_seeds, evaluate
from qpt.policy import Policy, load_policy
from qpt.tasks import Task, dsrl_tasks
from qpt.training import TrainConfig, train


class NoisyPolicy:
    """Uses all that a policy is given: a product over the batch, the limit, noise per episode, what was observed."""

    limit_mode = "live"
    observation_dim: int | None = 3
    algorithm = "noisy"
    weights = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)

    def reset(self, n: int, *, cost_limits: Any, seeds: Any) -> None:
        self.calls: list[tuple[int, int]] = []
        self.left, self.steps = np.zeros(n), np.zeros(n)
        self.rngs: list[Any] = [None] * n
        self.restart(np.arange(n), cost_limits=cost_limits, seeds=seeds)

    def restart(self, indices: Any, *, cost_limits: Any, seeds: Any) -> None:
        self.left[indices], self.steps[indices] = cost_limits, 0
        for i, seed in zip(indices, seeds, strict=True):
            self.rngs[i] = np.random.default_rng(seed)

    def act(self, observations: Any, active: Any) -> Any:
        self.calls.append((len(observations), int(active.sum())))
        self.active = active.copy()
        assert not observations[~active].any()
        actions = np.tanh(observations @ self.weights + 0.1 * self.left[:, None])
        for i in np.flatnonzero(active):
            actions[i] += self.rngs[i].normal(size=2) * 0.1
        return actions

    def observe(self, rewards: Any, costs: Any) -> None:  # noqa: ARG002
        self.left -= np.where(self.active, costs, 0.0)
        self.steps += self.active

    def diagnostics(self) -> dict[str, Any]:
        return {"fallback_share": self.steps / 100}


class ForkingPolicy(NoisyPolicy):
    """The same in two batches; both note the shapes they were asked for in `calls`."""

    def fork(self) -> ForkingPolicy:
        self.other = ForkingPolicy()
        return self.other


def rows(episodes: Episodes) -> dict[str, list[Any]]:
    return {name: getattr(episodes, name).tolist() for name in _COLUMNS}


def reference(task: Task, episodes: int, limits: tuple[float, ...], seed: int) -> list[tuple[float, float, int, bool]]:
    """One episode after the other, in plain loops."""
    results = []
    for k, limit in enumerate(limits):
        for i in range(episodes):
            env_seed, noise_seed = episode_seeds(seed, k, i)
            env, policy = make_env(task), NoisyPolicy()
            observation, _ = env.reset(seed=env_seed)
            policy.reset(1, cost_limits=np.array([limit]), seeds=np.array([noise_seed]))
            total, spent, steps, done = 0.0, 0.0, 0, False
            while not done:
                action = np.clip(policy.act(observation[None], np.array([True]))[0], -1, 1)
                observation, reward, terminated, truncated, info = env.step(action)
                policy.observe(np.array([reward]), np.array([info["cost"]]))
                total, spent, steps, done = total + reward, spent + info["cost"], steps + 1, terminated or truncated
            results.append((total, spent, steps, terminated))
    return results


def test_rows_are_those_of_single_episodes_run_one_by_one() -> None:
    limits = (3.0, 12.0)
    episodes = evaluate(NoisyPolicy(), walk_task(), episodes=9, cost_limits=limits, seed=5, workers=0, slots=4)
    expected = reference(walk_task(), 9, limits, 5)
    assert episodes.returns == pytest.approx([e[0] for e in expected], rel=1e-4, abs=1e-4)
    assert episodes.costs.tolist() == [e[1] for e in expected]
    assert episodes.lengths.tolist() == [e[2] for e in expected]
    assert episodes.ended_by.tolist() == ["terminal" if e[3] else "timeout" for e in expected]
    assert set(episodes.ended_by) == {"terminal", "timeout"}  # both kinds occur
    assert episodes.fallback_share.tolist() == (episodes.lengths / 100).tolist()
    assert episodes.cost_limit.tolist() == [3.0] * 9 + [12.0] * 9
    assert episodes.episode.tolist() == [*range(9), *range(9)]
    assert episodes.normalized_return == pytest.approx((episodes.returns + 10) / 20)
    assert episodes.normalized_cost == pytest.approx(episodes.costs / episodes.cost_limit)


@pytest.mark.parametrize("slots", [None, 7])
def test_rows_do_not_depend_on_the_number_of_workers(slots: int | None) -> None:
    results = []
    for workers in (0, 1, 2, 3):
        policy = NoisyPolicy()
        results.append(
            rows(evaluate(policy, walk_task(), episodes=10, cost_limits=(3, 9), workers=workers, slots=slots))
        )
        assert {n for n, _ in policy.calls} == {slots or 20}  # one batch of constant shape serves them all
        assert policy.calls[0][1] == (slots or 20)
    assert all(result == results[0] for result in results)


def test_seeds_pair_the_limits_and_part_the_evaluations() -> None:
    still = ConstantPolicy([0.1, 0.2])
    a = evaluate(still, walk_task(), episodes=6, cost_limits=(1, 2), seed=1, workers=0)
    assert a.returns[:6].tolist() == a.returns[6:].tolist()  # the same episodes at both limits
    assert len(set(a.returns[:6])) == 6
    b = evaluate(still, walk_task(), episodes=6, cost_limits=(1,), seed=2, workers=0)
    assert not set(a.returns) & set(b.returns)
    more = evaluate(still, walk_task(), episodes=8, cost_limits=(1,), seed=1, workers=0)
    assert more.returns[:6].tolist() == a.returns[:6].tolist()
    noise = evaluate(RandomPolicy(2), walk_task(), episodes=6, cost_limits=(1, 2), seed=1, workers=0)
    assert noise.returns[:6].tolist() != noise.returns[6:].tolist()


def test_two_batches_give_the_rows_of_one() -> None:
    slots = 9
    arguments: dict[str, Any] = {"episodes": 13, "cost_limits": (3, 9), "slots": slots}
    one = evaluate(NoisyPolicy(), walk_task(), workers=0, **arguments)
    results = []
    for workers in (0, 1, 2, 3):
        policy = ForkingPolicy()
        results.append(evaluate(policy, walk_task(), workers=workers, record=True, **arguments))
        assert {n for n, _ in policy.calls} == {slots // 2}  # of constant shape, too
        assert {n for n, _ in policy.other.calls} == {slots - slots // 2}
    assert one.provenance["batches"] == 1
    assert all(result.provenance["batches"] == 2 for result in results)
    assert all(rows(result) == rows(results[0]) for result in results)
    assert results[0].returns == pytest.approx(one.returns, rel=1e-4, abs=1e-4)
    assert results[0].lengths.tolist() == one.lengths.tolist()
    for result in results:
        assert result.trajectories is not None
        assert result.trajectories.returns == pytest.approx(result.returns, rel=1e-5, abs=1e-5)
        assert result.trajectories.lengths.tolist() == result.lengths.tolist()


def test_simulators_step_one_batch_while_the_policy_decides_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    send, receive = EnvPool.send, EnvPool.receive

    def noted(pool: EnvPool) -> Any:
        result = receive(pool)
        calls.append(f"receive {result[0]}")
        return result

    monkeypatch.setattr(EnvPool, "send", lambda pool, group: calls.append(f"send {group}") or send(pool, group))
    monkeypatch.setattr(EnvPool, "receive", noted)

    class Still(ConstantPolicy):
        def act(self, observations: Any, active: Any) -> Any:
            calls.append("act")
            return super().act(observations, active)

    evaluate(Still([0, 0]), walk_task(horizon=3), episodes=8, workers=2)
    assert calls[:2] == ["send 0", "send 1"]  # resets
    for i, call in enumerate(calls):
        if call == "act":
            other = str(1 - int(calls[i + 1][-1]))
            before, after = ([c for c in part if c[-1] == other] for part in (calls[:i], calls[i:]))
            assert before[-1].startswith("send") or not after  # it is under way, or done
    assert calls.count("act") == 2 * 3


def test_a_function_with_a_generator_of_its_own_is_asked_in_order() -> None:
    def noise(workers: int) -> list[float]:
        rng = np.random.default_rng(0)
        policy = CallablePolicy(lambda observations: rng.uniform(-1, 1, (len(observations), 2)))
        return evaluate(policy, walk_task(), episodes=30, workers=workers).returns.tolist()

    assert noise(0) == noise(2)


def test_a_wrapper_that_passes_attributes_on_is_not_forked_past() -> None:
    class Wrapper:
        def __init__(self, policy: Any) -> None:
            self.policy = policy

        def __getattr__(self, name: str) -> Any:
            return getattr(self.policy, name)

        def act(self, observations: Any, active: Any) -> Any:
            return 0 * self.policy.act(observations, active)

    wrapped = evaluate(Wrapper(ForkingPolicy()), walk_task(), episodes=9, workers=0)
    still = evaluate(ConstantPolicy([0, 0]), walk_task(), episodes=9, workers=0)
    assert wrapped.returns.tolist() == still.returns.tolist()


@pytest.mark.parametrize("kind", ["die", "hang", "raise"])
@pytest.mark.parametrize("Kind", [NoisyPolicy, ForkingPolicy])
def test_a_failing_worker_changes_no_row(
    Kind: type[NoisyPolicy], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"episodes": 12, "cost_limits": (3, 9), "workers": 2, "slots": 9}
    expected = evaluate(Kind(), walk_task(), **arguments)
    task = walk_task(partial(once, kind, str(tmp_path)))
    found = evaluate(Kind(), task, **arguments, step_timeout=1.0, record=True)
    assert rows(found) == rows(expected)
    (incident,) = found.provenance["incidents"]
    assert "Walk" in incident
    assert "step 2" in incident
    assert any(f"seed {seed}," in incident for seed in (episode_seeds(0, 0, i)[0] for i in range(12)))
    assert incident in caplog.text
    assert found.trajectories is not None
    assert found.trajectories.lengths.tolist() == expected.lengths.tolist()  # no lost step was recorded


@pytest.mark.parametrize("Kind", [NoisyPolicy, ForkingPolicy])
def test_workers_killed_from_outside_change_no_row(Kind: type[NoisyPolicy], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"episodes": 20, "cost_limits": (3,), "workers": 2, "slots": 8}
    expected = evaluate(Kind(), walk_task(), **arguments)
    send, ticks = EnvPool.send, []

    def with_blows(pool: EnvPool, group: int) -> None:
        ticks.append(1)
        if len(ticks) in (3, 20, 21):
            os.kill(pool.pids()[len(ticks) % 2], signal.SIGKILL)
        send(pool, group)

    monkeypatch.setattr(EnvPool, "send", with_blows)
    found = evaluate(Kind(), walk_task(), **arguments)
    assert rows(found) == rows(expected)
    # Two batches keep their own pace: a blow may meet a worker that has no episode, or is dead already.
    assert len(found.provenance["incidents"]) in ({3} if Kind is NoisyPolicy else {1, 2, 3})


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_always_fails_ends_the_evaluation_with_seed_and_step(workers: int) -> None:
    seed = episode_seeds(0, 0, 0)[0]
    with pytest.raises(QptError, match=f"(?s)the physics exploded.*Walk, environment seed {seed}, step 2"):
        evaluate(RandomPolicy(2), walk_task(raises), episodes=2, workers=workers)


def test_slots_that_share_one_environment_take_turns() -> None:
    shared = walk_task(suite="metadrive")  # one environment a process
    expected = rows(evaluate(NoisyPolicy(), walk_task(), episodes=9, cost_limits=(3, 9), workers=0, slots=8))
    for workers in (0, 2, 3):
        policy = NoisyPolicy()
        assert rows(evaluate(policy, shared, episodes=9, cost_limits=(3, 9), workers=workers)) == expected
        assert max(active for _, active in policy.calls) == max(workers, 1)


def test_recorded_trajectories_are_the_episodes() -> None:
    episodes = evaluate(NoisyPolicy(), walk_task(), episodes=11, cost_limits=(3, 9), workers=2, slots=5, record=True)
    data = episodes.trajectories
    assert data is not None
    assert data.returns == pytest.approx(episodes.returns, rel=1e-5, abs=1e-5)
    assert data.episode_costs.tolist() == episodes.costs.tolist()
    assert data.lengths.tolist() == episodes.lengths.tolist()
    assert data.terminals[data.offsets[1:] - 1].tolist() == (episodes.ended_by == "terminal").tolist()
    env = make_env(walk_task())
    for e in (0, 10, 15):
        first, _ = env.reset(seed=episode_seeds(0, e // 11, e % 11)[0])
        np.testing.assert_array_equal(data.observations[data.offsets[e]], first)
        for i in range(data.offsets[e], data.offsets[e + 1]):
            following = env.step(data.actions[i])[0]
        np.testing.assert_array_equal(data.final_observations[e], following)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("record", [False, True])
def test_an_observation_that_is_no_number_is_told_when_it_comes(workers: int, record: bool) -> None:
    with pytest.raises(QptError, match=r"Walk gave an observation .* after \d+ steps"):
        evaluate(RandomPolicy(2), replace(walk_task(), env_factory=Blind), episodes=4, workers=workers, record=record)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_come_back_as_they_were_saved(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="parquet tables need pyarrow")
    one = evaluate(RandomPolicy(2), walk_task(), episodes=4, cost_limits=(0, 2.5), workers=0)
    both = Episodes.concatenate([one, evaluate(ConstantPolicy([0, 0]), walk_task(), episodes=3, workers=0)])
    for name, table in (("one", one), ("both", both)):
        path = table.save(tmp_path / "deep" / f"{name}.{suffix}")
        back = Episodes.load(path)
        np.testing.assert_equal(rows(back), rows(table))
        assert json.loads(json.dumps(table.provenance, default=str)) == back.provenance
        assert {p.name for p in path.parent.iterdir() if p.name.startswith(".")} == set()
    assert one.provenance["versions"]["qpt"]
    if suffix == "csv":
        with (tmp_path / "deep" / "one.csv").open(newline="") as file:
            first = next(csv.DictReader(file))
        assert float(first["return"]) == one.returns[0]
        assert list(first) == list(_COLUMNS.values())


def test_an_episode_counts_once_however_often_its_row_is_there() -> None:
    one = evaluate(NoisyPolicy(), walk_task(), episodes=3, cost_limits=(2, 5), workers=0)
    more = evaluate(NoisyPolicy(), walk_task(), episodes=4, cost_limits=(2, 5), workers=0)
    other = evaluate(NoisyPolicy(), walk_task(), episodes=2, cost_limits=(2,), seed=1, workers=0)
    joined = Episodes.concatenate([Episodes.concatenate([one, more]), other]).once()
    assert len(joined) == 4 * 2 + 2
    assert sorted(joined.returns) == sorted([*more.returns, *other.returns])
    assert [origin["seed"] for origin in origins(joined.provenance)] == [0, 0, 1]


def test_tables_that_are_none_get_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(QptError, match="no table"):
        Episodes.load(tmp_path / "nothing.csv")
    good = evaluate(RandomPolicy(2), walk_task(), episodes=4, workers=0).save(tmp_path / "good.csv")
    text = good.read_text()
    for broken, words in (
        ("a,b\n1,2\n", "no column 'task'"),
        (text[:-30], "different lengths"),
        (text.replace("timeout", "timeout", 1).replace(",10.0,", ",ten,"), "cannot be read"),
        ("", "no column"),
    ):
        bad = tmp_path / "bad.csv"
        bad.write_text(broken)
        with pytest.raises(QptError, match=words):
            Episodes.load(bad)
    with pytest.raises(QptError, match="ending"):
        Episodes.load(good).save(tmp_path / "table.xlsx")


def test_summary_has_one_line_a_limit_with_intervals() -> None:
    toy = tradeoff(0)
    episodes = evaluate(OraclePolicy(toy), toy.task(), episodes=15, cost_limits=(6, 12), workers=0)
    low, high = episodes.summary()
    assert (low["cost_limit"], high["cost_limit"]) == (6, 12)
    assert low["return"] == pytest.approx(toy.optimal_return(6))
    assert low["cost"] == 6
    assert low["normalized_cost"] == 1
    assert low["within_limit_interval"][1] == 1
    assert low["within_limit_interval"][0] == pytest.approx(1 / (1 + 1.96**2 / 15), abs=1e-3)  # Wilson at 15 of 15
    mask = episodes.cost_limit == 12
    assert high["return"] == pytest.approx(episodes.select(mask).returns.mean())


def test_two_episodes_have_no_interval_and_no_verdict() -> None:
    toy = tradeoff(0)
    with pytest.raises(QptError, match="each cost limit is evaluated once"):
        evaluate(OraclePolicy(toy), toy.task(), episodes=2, cost_limits=(6, 6), workers=0)
    (line,) = evaluate(OraclePolicy(toy), toy.task(), episodes=2, cost_limits=(6,), workers=0).summary()
    assert all(np.isnan(line[f"{name}_interval"]).all() for name in ("return", "cost", "normalized_cost"))
    assert stats.verdict(line["cost_interval"], 6.0) == "unclear"


class Modeless(RandomPolicy):
    @property
    def limit_mode(self) -> str:  # type: ignore[override]
        raise AttributeError("not said")


def test_wrong_arguments_get_one_sentence() -> None:
    random = RandomPolicy(2)
    data_policy = NoisyPolicy()
    data_policy.observation_dim = 261
    for call, words in (
        (lambda: evaluate(data_policy, "easysparse"), "length 261, but the simulator of easysparse gives 259"),
        (lambda: evaluate(random, walk_task(), episodes=0), "at least one episode"),
        (lambda: evaluate(random, walk_task(), cost_limits=()), "one cost limit"),
        (lambda: evaluate(random, walk_task(), cost_limits=(-1,)), "not negative"),
        (lambda: evaluate(random, walk_task(), seed=-1), "from 0 to"),
        (lambda: evaluate(random, walk_task(raises), seed=2**63, workers=0), "from 0 to"),  # before any step
        (lambda: evaluate(random, walk_task(), workers=-1), "must not be negative"),
        (lambda: evaluate(uphill, walk_task(raises), workers=0), "a function has no limit_mode.* CallablePolicy"),
        (lambda: evaluate(Modeless(2), walk_task(raises), workers=0), "a Modeless has no limit_mode"),
        (lambda: evaluate(random, Task("Nowhere")), "no simulator"),
        (lambda: evaluate(RandomPolicy(3), walk_task(), workers=0), "actions of shape"),
        (lambda: evaluate(ConstantPolicy([np.nan, 0]), walk_task(), workers=0), "not finite"),
    ):
        with pytest.raises(QptError, match=words):
            call()


def test_slots_that_are_freed_are_taken_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send, ticks = EnvPool.send, []
    monkeypatch.setattr(EnvPool, "send", lambda *args: ticks.append(1) or send(*args))
    slots = 5
    lengths = evaluate(RandomPolicy(2), walk_task(), episodes=23, workers=0, slots=slots).lengths
    assert len(set(lengths)) > 5
    # A reset and the steps of each episode of a row, one after the other, and no row waits for another.
    assert len(ticks) == max(sum(length + 1 for length in lengths[row::slots]) for row in range(slots))


@pytest.fixture(scope="module")
def qpt_policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """QPT with candidates, a few steps into its training on made-up data of the Walk's shape."""
    config = QPTConfig(steps=3, batch_size=16, width=16, critic_width=16, layers=1, heads=2, context=4, candidates=5)
    out = tmp_path_factory.mktemp("run")
    train(TrainConfig(config=config, device="cpu", out=out, progress=False, threads=1), tiny_data(length=30))
    return load_policy(out)


def test_rows_of_a_trained_policy_depend_on_no_worker_and_touch_no_random_state(
    qpt_policy: Policy, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"episodes": 9, "cost_limits": (3, 9), "slots": 7}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    results = [rows(evaluate(qpt_policy, walk_task(), workers=workers, **arguments)) for workers in (0, 1, 2, 3)]
    failing = evaluate(qpt_policy, walk_task(partial(once, "die", str(tmp_path))), workers=2, **arguments)
    assert len(failing.provenance["incidents"]) == 1
    assert all(result == results[0] for result in [*results[1:], rows(failing)])
    assert not np.isnan(results[0]["fallback_share"]).any()
    assert results[0]["algorithm"][0] == "qpt"
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert after == states


def test_a_policy_is_not_run_past_the_horizon_it_knows(qpt_policy: Policy) -> None:
    with pytest.raises(QptError, match="trained for episodes of 30 steps, but Walk has 31"):
        evaluate(qpt_policy, walk_task(horizon=31), workers=0)


def test_provenance_names_the_commit_of_these_sources_not_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for words in ("init -q", "-c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    other = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    before = provenance()["commit"]
    monkeypatch.chdir(tmp_path)
    assert provenance()["commit"] == before
    assert before is None or (len(before.removesuffix("-dirty")) == 40 and before != other.strip())


def test_a_factory_that_cannot_travel_runs_in_this_process() -> None:
    task = Task("Local", env_factory=lambda: walk(None), horizon=30)
    episodes = evaluate(RandomPolicy(2), task, episodes=3)
    assert episodes.provenance["workers"] == 0
    assert np.isnan(episodes.normalized_return).all()


def test_an_exception_of_the_policy_ends_the_workers() -> None:
    pids: list[int] = []

    def act(_: Any) -> Any:
        raise ZeroDivisionError

    start = qpt.evaluation.EnvPool.__init__

    def noted(pool: EnvPool, *args: Any, **options: Any) -> None:
        start(pool, *args, **options)
        pids.extend(pool.pids())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvPool, "__init__", noted)
        with pytest.raises(ZeroDivisionError):
            evaluate(CallablePolicy(act), walk_task(slow), episodes=4, workers=2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_progress_names_episodes_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(RandomPolicy(2), walk_task(), episodes=5, workers=0, progress=True)
    text = capsys.readouterr().err
    assert "5/5" in text
    assert "steps/s" in text
    episodes = evaluate(RandomPolicy(2), walk_task(), episodes=5, workers=0)
    assert f"return {episodes.returns.mean():.1f}" in text
    assert f"cost {episodes.costs.mean():.1f}" in text


# -- the command -------------------------------------------------------------------------------------------------------


def uphill(observations: Any) -> Any:
    return np.clip(observations[:, :2], -1, 1)


@pytest.fixture
def tasks_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "tasks.toml"
    facts = "observation_dim = 3\naction_dim = 2\nhorizon = 20\ncost_limits = [4.0, 8.0]\n"
    file.write_text(f'[[task]]\nname = "FileWalk"\nenv = "faulty_envs:walk"\n{facts}')
    monkeypatch.setenv("QPT_TASKS", str(file))
    return file


@pytest.mark.usefixtures("tasks_file")
def test_the_command_prints_a_table_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["evaluate", "--task", "FileWalk", "--workers", "0", "--episodes", "6"]
    out, record = tmp_path / "t.csv", tmp_path / "t.hdf5"
    assert main([*common, "--policy", "random", "--out", str(out), "--record", str(record)]) == 0
    text = capsys.readouterr().out
    assert "FileWalk" in text
    assert "P(cost" in text
    table = Episodes.load(out)
    assert sorted(set(table.cost_limit)) == [4, 8]  # the task's own limits
    for line in table.summary():
        assert f"{line['return']:.1f}" in text
    from qpt.data import load_dataset

    assert load_dataset(record).returns == pytest.approx(table.returns, rel=1e-5, abs=1e-5)
    assert main([*common, "--policy", "test_evaluation:uphill", "--limits", "5"]) == 0
    capsys.readouterr()
    assert main([*common, "--policy", "zero", "--limits", "5", "6"]) == 0
    zero = capsys.readouterr().out
    assert main([*common, "--policy", "constant:0,0", "--limits", "5", "6"]) == 0
    assert capsys.readouterr().out == zero.replace("zero", "constant")
    # At each limit an interval of return, cost, normalised cost and P, each on one line; FileWalk has no return range.
    assert len(re.findall(r"\[-?\d+\.\d+, -?\d+\.\d+\]", zero)) == 2 * 4


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("tasks_file")
def test_a_full_disk_does_not_cost_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    common = ["evaluate", "--task", "FileWalk", "--policy", "random", "--workers", "0", "--episodes", "3"]
    for flag, name in (("--out", "t.csv"), ("--record", "t.hdf5")):
        assert main([*common, flag, str(tmp_path / name)]) == 1
        printed = capsys.readouterr()
        assert "FileWalk · random · 3 episodes a limit" in printed.out
        assert f"{name} cannot be written: No space left on device" in printed.err


def test_a_table_is_written_before_its_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = evaluate(RandomPolicy(2), walk_task(), episodes=2, workers=0)
    turns = iter([os.fsync, full_disk])  # room for one file
    monkeypatch.setattr(os, "fsync", lambda file: next(turns)(file))
    with pytest.raises(QptError, match="cannot be written"):
        episodes.save(tmp_path / "t.csv")
    np.testing.assert_equal(rows(Episodes.load(tmp_path / "t.csv")), rows(episodes))


@pytest.mark.usefixtures("tasks_file")
@pytest.mark.parametrize("folder", ["run[v1]", "run[/v1]", ":car:"])
def test_paths_are_printed_as_they_are(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, record = tmp_path / folder / "e.csv", tmp_path / folder / "e.npz"
    run = TrainConfig(algorithm="bc-safe", config=BCConfig(steps=1, batch_size=4, width=8, mode="all"), progress=False)
    checkpoint = train(replace(run, out=tmp_path / folder / "run"), tiny_data()).folder / "checkpoints"
    given = ["--checkpoint", str(checkpoint.parent), "--out", str(out), "--record", str(record)]
    assert main(["evaluate", "--task", "FileWalk", "--workers", "0", "--episodes", "1", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {f"Checkpoint: {checkpoint / 'step-000000001'}", f"wrote {out}", f"wrote {record}"} <= set(lines)


def test_pictures_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio")
    images = pytest.importorskip("PIL.Image")
    facts = "observation_dim = 3\naction_dim = 2\nhorizon = 20\ncost_limits = [4.0]\n"
    tasks = f'[[task]]\nname = "Drawn"\nenv = "faulty_envs:Drawn"\n{facts}'
    tasks += f'[[task]]\nname = "Bare"\nenv = "faulty_envs:walk"\n{facts}'
    (tmp_path / "tasks.toml").write_text(tasks)
    monkeypatch.setenv("QPT_TASKS", str(tmp_path / "tasks.toml"))
    folder, table = tmp_path / "gif[s]", tmp_path / "t.csv"
    common = ["evaluate", "--policy", "zero", "--workers", "0", "--episodes", "2"]
    common += ["--render", "1", "--render-dir", str(folder)]
    assert main([*common, "--task", "Drawn", "--out", str(table)]) == 0
    picture = folder / "Drawn-limit4-episode0.gif"
    assert f"wrote {picture}\n" in capsys.readouterr().out
    with images.open(picture) as film:
        assert (film.format, film.size, film.info["duration"], film.info["loop"]) == ("GIF", (24, 16), 40, 0)
        shades = []
        for number in range(film.n_frames):
            film.seek(number)
            shades.append(np.asarray(film.convert("RGB"))[0, 0, 0])
    assert shades == list(range(0, 5 * Episodes.load(table).lengths[0], 5))
    assert main([*common, "--task", "Bare"]) == 1
    assert "Bare gave no picture" in capsys.readouterr().err
    before = picture.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    assert main([*common, "--task", "Drawn"]) == 1
    assert f"{picture} cannot be written: No space left on device; the old file" in capsys.readouterr().err
    assert picture.read_bytes() == before
    assert list(folder.iterdir()) == [picture]


def test_the_command_changes_how_a_checkpoint_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pybullet")
    monkeypatch.chdir(tmp_path)
    tiny = ["--steps", "2", "--batch-size", "4", "--width", "8", "--heads", "2", "--layers", "1", "--critic-width", "8"]
    run = ["--no-progress", "--device", "cpu", "--threads", "1", "--out", "run"]
    assert main(["train", "--task", "BallCircle", "--data", "embedded:ballcircle", *tiny, *run]) == 0
    common = ["evaluate", "--checkpoint", "run", "--limits", "10", "--episodes", "1", "--workers", "0"]

    def returns(*more: str) -> tuple[float, Any]:
        assert main([*common, "--out", "t.csv", *more]) == 0
        table = Episodes.load("t.csv")
        manifest = json.loads((Path(str(table.checkpoint[0])) / "manifest.json").read_text())
        assert table.provenance["sha256"] == manifest["sha256"]  # whose episodes they are
        return float(table.returns[0]), table.provenance["settings"]

    alone = returns("--set", "candidates=1")
    assert alone[1] == {"candidates": 1}
    assert returns("--set", "inference_with_candidates=false")[0] == alone[0]  # the same by another name
    noisy = returns("--set", "candidates=4", "rtg_noise=9", 'selection="constrained"')
    assert noisy[1] == {"candidates": 4, "rtg_noise": 9, "selection": "constrained"}
    assert noisy[0] != alone[0]
    assert returns("--set", "frugality=None")[1] == {"frugality": None}
    assert returns()[1] == {}
    for more, words in (
        (["--set", "candidate=1"], "no field 'candidate'"),
        (["--set", "candidates=many"], "does not fit the type"),
        (["--set", "checkpoint_every=5"], "belongs to training"),
    ):
        assert main([*common, *more]) == 1
        assert words in capsys.readouterr().err
    assert main(["evaluate", "--policy", "zero", "--task", "BallCircle", "--set", "candidates=1"]) == 1
    assert "--checkpoint" in capsys.readouterr().err


@pytest.mark.usefixtures("tasks_file")
def test_the_command_takes_the_last_or_the_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = BCConfig(steps=2, batch_size=4, width=8, cost_limit=8.0)
    run = TrainConfig(algorithm="bc-safe", config=method, out=tmp_path / "run", checkpoint_every=1, progress=False)
    folder = train(run, tiny_data()).folder / "checkpoints"
    common = ["evaluate", "--task", "FileWalk", "--workers", "0", "--episodes", "1", "--out", str(tmp_path / "t.csv")]
    given = [*common, "--checkpoint", str(tmp_path / "run")]
    assert main([*given, "--which", "best"]) == 1
    assert "no best checkpoint" in capsys.readouterr().err
    shutil.copytree(folder / "step-000000001", folder / "best-000000001")
    for more, name in (((), "step-000000002"), (("--which", "last"), "step-000000002"), (("--which", "best"), "best-")):
        assert main([*given, *more]) == 0
        assert Path(Episodes.load(tmp_path / "t.csv").checkpoint[0]).name.startswith(name)
        assert f"Checkpoint: {folder / name}" in capsys.readouterr().out
    assert main([*common, "--policy", "zero", "--which", "best"]) == 1
    assert "--checkpoint" in capsys.readouterr().err


def test_no_number_of_the_table_is_cut_off_on_a_narrow_screen() -> None:
    scale = {"reward_min": 0.0, "reward_max": 10.0}
    episodes = evaluate(RandomPolicy(2), walk_task(**scale), episodes=7, cost_limits=(3, 9), workers=0)
    (first, _), intervals = episodes.summary(), r"\[-?\d+\.\d+, -?\d+\.\d+\]"
    for width, columns in ((120, 5), (80, 3)):
        screen = Console(width=width, file=io.StringIO())
        screen.print(printed_table(episodes, width))
        text = screen.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
        assert len(re.findall(intervals, text)) == 2 * columns
        assert f"{first['return']:.1f}" in text


OWN_ENV = """
import gymnasium
import numpy as np

class Six(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Box(0, 4, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 2), float(action[0]), float(action[0] > 2), False, False, {}
"""


def test_an_environment_of_a_task_file_runs_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_six.py").write_text(OWN_ENV)
    (tmp_path / "own.toml").write_text('[[task]]\nname = "Six"\nenv = "own_six:Six"\nhorizon = 12\n')
    monkeypatch.setenv("QPT_TASKS", str(tmp_path / "own.toml"))
    monkeypatch.syspath_prepend(tmp_path)  # known to this process alone: workers are told
    tables = []
    for workers in (0, 2):
        out = tmp_path / f"{workers}.csv"
        common = ["evaluate", "--task", "Six", "--policy", "random", "--limits", "3", "--episodes", "5"]
        assert main([*common, "--workers", str(workers), "--out", str(out)]) == 0
        tables.append(Episodes.load(out))
    assert [table.provenance["workers"] for table in tables] == [0, 2]
    np.testing.assert_equal(rows(tables[0]), rows(tables[1]))
    assert tables[0].lengths.tolist() == [12] * 5
    assert 0 < tables[0].costs.mean() < 12
    by_default = evaluate(RandomPolicy(1), "Six", episodes=5, cost_limits=(3,))
    assert by_default.provenance["workers"] > 0  # it can travel, so workers are the default
    assert by_default.costs.tolist() == tables[0].costs.tolist()


@pytest.mark.parametrize(
    ("program", "known"), [("/venv/lib/qpt/__main__.py", "qpt"), ("/venv/bin/qpt", "/venv/bin/qpt"), ("my.py", "my.py")]
)
def test_a_command_that_was_started_by_python_can_be_typed_again(
    program: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [program, "evaluate", "--limits", "10"])
    assert command() == provenance()["command"] == [known, "evaluate", "--limits", "10"]


@pytest.mark.usefixtures("tasks_file")
def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--task", "FileWalk"], "either --checkpoint or --policy"),
        (["--policy", "random"], "--task"),
        (["--task", "FileWalk", "--policy", "nonsense"], "no policy 'nonsense'"),
        (["--task", "FileWalk", "--policy", "no_such_module:f"], "cannot be imported"),
        (["--task", "FileWalk", "--policy", "math:pi"], "the policy 'math:pi' is a float; give a function"),
        (["--task", "FileWalk", "--policy", "constant:1"], "2 numbers from -1 to 1 is needed, as in constant:0.5,0.5"),
        (["--task", "FileWalk", "--policy", "constant:nan,0"], "2 numbers"),
        (["--task", "FileWalk", "--policy", "zero", "--out", "t.txt"], ".csv or .parquet"),
        (["--task", "FileWalk", "--policy", "zero", "--record", "t.foo"], ".hdf5 or .npz"),
        (["--task", "FileWalk", "--policy", "zero", "--picture", "t.foo", "--data", "x"], ".png, .svg or .pdf"),
        (["--task", "FileWalk", "--policy", "zero", "--out", "/dev/null/t.csv"], "cannot be made"),
    ):
        assert main(["evaluate", *arguments]) == 1
        assert words in capsys.readouterr().err


# -- the real thing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 10, 20.0, 37.5])
def test_scores_are_those_of_dsrl(limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSRL_DATASET_DIR", str(tmp_path))
    infos = pytest.importorskip("dsrl.infos", reason="dsrl is not installed (pip install --no-deps dsrl==0.1.0)")
    offline_env = pytest.importorskip("dsrl.offline_env", reason="dsrl's environments cannot be imported here")
    for name, task in dsrl_tasks().items():
        env = offline_env.OfflineEnv(infos.MAX_EPISODE_REWARD[name], infos.MIN_EPISODE_REWARD[name])
        env.set_target_cost(limit)
        for gained, spent in ((0.0, 0.0), (123.4, 5.0), (-7.0, 81.5)):
            ours = task.normalized_return(gained), task.normalized_cost(spent, limit)
            assert ours == pytest.approx(env.get_normalized_score(gained, spent), rel=1e-9)
    assert len(dsrl_tasks()) == 38


def kill_one_worker_after(seconds: float, pools: list[EnvPool]) -> None:
    time.sleep(seconds)
    os.kill(pools[0].pids()[0], signal.SIGKILL)


@pytest.mark.slow
def test_200_episodes_of_ball_circle_with_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bullet_safety_gym", reason="needs Bullet-Safety-Gym")
    arguments: dict[str, Any] = {"episodes": 100, "cost_limits": (10, 40), "workers": 2, "slots": 50}
    began = time.perf_counter()
    expected = evaluate(RandomPolicy(2), "BallCircle", **arguments)
    took = time.perf_counter() - began
    pools: list[EnvPool] = []
    start = EnvPool.__init__

    def noted(pool: EnvPool, *args: Any, **options: Any) -> None:
        start(pool, *args, **options)
        pools.append(pool)
        threading.Thread(target=kill_one_worker_after, args=(took / 2, pools), daemon=True).start()

    monkeypatch.setattr(EnvPool, "__init__", noted)
    found = evaluate(RandomPolicy(2), "BallCircle", **arguments)
    assert len(found) == 200
    assert len(found.provenance["incidents"]) == 1
    assert rows(found)["returns"] == rows(expected)["returns"]
    assert rows(found)["costs"] == rows(expected)["costs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("HopperVelocity", "safety_gymnasium"), ("CarCircle", "bullet_safety_gym"), ("easysparse", "metadrive")],
)
def test_simulators_give_the_same_rows_with_any_number_of_workers(name: str, module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    results = [
        evaluate(RandomPolicy(dsrl_tasks()[name].action_dim or 0), name, episodes=6, workers=workers, slots=4)
        for workers in (1, 2)
    ]
    assert results[0].returns.tolist() == results[1].returns.tolist()
    assert results[0].costs.tolist() == results[1].costs.tolist()
