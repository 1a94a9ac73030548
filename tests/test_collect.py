"""Collect: the learner against slow references, the filter's promises, and files that one seed makes again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from qpt.cli import main
from qpt.collect import collect, grid_filter, plans, record_policy
from qpt.collect.collection import own_task
from qpt.collect.filter import BINS, TOP, cells
from qpt.collect.ppo import Batch, Learner, Multiplier, Settings, gae, loss_gradient, shapes, views
from qpt.collect.recorder import play
from qpt.collect.runner import run
from qpt.collect.schedules import Penalty
from qpt.collect.spool import chunks, gather, read_chunk, summary
from qpt.collect.workers import run_all
from qpt.data import read
from qpt.data.trajectories import Trajectories
from qpt.envs import make_env
from qpt.envs.toy import stitching, tradeoff
from qpt.errors import QptError
from qpt.evaluation import CallablePolicy
from qpt.tasks import Task

TOY = tradeoff(0).task()
CAP = 40.0
SCHEDULE = """
[default]
hidden = 16
epochs = 4
batch = 1200
runs = [{ limits = [[0, 0.1], [1, 1]] }, { limits = [[0, 1], [1, 0.1]] }]
"""  # small networks, so that linear algebra stays on one thread in this process too


@pytest.fixture
def schedule(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCHEDULE)
    return path


# -- the learner -------------------------------------------------------------------------------------------------------


def test_gae_is_the_discounted_sum_of_temporal_differences() -> None:
    rng = np.random.default_rng(0)
    lengths, gamma, decay = [1, 7, 4, 9], 0.97, 0.9
    n = sum(lengths)
    rewards, values, following = rng.normal(size=(3, n))
    ends = np.zeros(n, bool)
    ends[np.cumsum(lengths) - 1] = True
    terminals = ends & (np.cumsum(ends) % 2 == 0)  # every second episode ends by a terminal, the others by a timeout
    found = gae(rewards, values, following, terminals, ends, gamma, decay)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            expected = 0.0
            for k in range(t, start + length):
                future = 0.0 if terminals[k] else following[k]
                expected += (gamma * decay) ** (k - t) * (rewards[k] + gamma * future - values[k])
            assert found[t] == pytest.approx(expected, rel=1e-12, abs=1e-12)
        start += length


def test_multiplier_follows_the_cost() -> None:
    s = Settings(kp=0.5, ki=0.2, kd=0.1, multiplier_max=2.0)
    m = Multiplier(integral=0.3)
    # cap 80, limit 20: the unit is 0.25 * 80 + 0.5 * 20 = 30
    assert m.update(35.0, 20.0, 80.0, s) == pytest.approx((0.3 + 0.2 * 0.5) + 0.5 * 0.5 + 0.1 * 0.5)
    assert m.update(5.0, 20.0, 80.0, s) == pytest.approx(max(0.4 - 0.2 * 0.5 - 0.5 * 0.5 + 0.1 * (-0.5 - 0.5), 0.0))
    for _ in range(50):  # errors are cut at one, and the multiplier at its largest value
        m.update(1e6, 20.0, 80.0, s)
    assert m.value == 2.0
    assert m.integral == 2.0
    for _ in range(60):  # it can go all the way down again
        m.update(0.0, 20.0, 80.0, s)
    assert m.value == 0.0


def test_gradient_is_that_of_autograd() -> None:
    import torch  # here: worker processes import this file for its environments

    rng = np.random.default_rng(1)
    n, s, a, settings = 32, 5, 3, Settings(hidden=8, entropy=0.01)
    sizes = shapes(s, a, 8)
    flat = rng.normal(size=sum(int(np.prod(x)) for x in sizes.values())) * 0.2
    gradient = np.zeros_like(flat)
    x, actions, advantage = rng.normal(size=(n, s)), rng.normal(size=(n, a)), rng.normal(size=n)
    old, targets = 0.5 * rng.normal(size=n) - 4.0, rng.normal(size=(2, n))
    loss, kl = loss_gradient(views(flat, sizes), views(gradient, sizes), x, actions, old, advantage, targets, settings)

    leaf = torch.tensor(flat, requires_grad=True)
    p, start = {}, 0
    for name, shape in sizes.items():
        p[name] = leaf[start : start + int(np.prod(shape))].reshape(shape)
        start += int(np.prod(shape))
    tx = torch.tensor(x).expand(3, n, s)
    out = torch.tanh(torch.tanh(tx @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]
    normal = torch.distributions.Normal(out[0], p["log_std"].exp())
    ratio = (normal.log_prob(torch.tensor(actions)).sum(1) - torch.tensor(old)).exp()
    adv = torch.tensor(advantage)
    policy = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    critics = 0.5 * ((out[1:, :, 0] - torch.tensor(targets)) ** 2).mean(1).sum()
    expected = policy - 0.01 * p["log_std"].sum() + critics
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert kl == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-9)
    assert leaf.grad is not None
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-7, atol=1e-10)


class Target(gymnasium.Env):  # type: ignore[type-arg]
    """The best action is the observation; actions above 0.5 cost 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, cost = -abs(float(action[0] - self.place[0])), float(action[0] > 0.5)
        self.t, self.place = self.t + 1, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.place, reward, False, self.t >= 20, {"cost": cost}


def test_ppo_learns_a_trivial_task_and_keeps_a_limit(tmp_path: Path) -> None:
    task = Task(name="Target", env_factory=Target, horizon=20, cost_max=20.0)
    ends: dict[float, dict[str, Any]] = {}
    for share in (0.02, 1.0):  # of the cap; the best unlimited policy costs 5 of 20
        table = tmp_path / f"{share}.toml"
        table.write_text(
            f"[Target]\nsteps = 22000\nbatch = 1000\nhidden = 32\ngamma = 0.9\nruns = [{{ limits = [[0, {share}]] }}]\n"
        )
        told: list[dict[str, Any]] = []
        (plan,) = plans("Target", 20.0, file=table)
        run(task, plan, 20.0, tmp_path / str(share), told.append)
        assert told[1]["return"] < -9  # nothing is known at first
        ends[share] = told[-1]
    assert ends[1.0]["return"] > -4.5
    assert 3 < ends[1.0]["cost"] < 7
    assert ends[0.02]["cost"] < 2.0
    assert ends[0.02]["return"] > -7.5


class Sped(Target):
    """Reports how hard it was pushed, as two components of a speed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        push = float(action[0])
        return (*rest, {**info, "along": 0.6 * push, "across": 0.8 * push})  # type: ignore[return-value]


def test_penalty_grows_above_a_value_that_moves_with_the_run() -> None:
    penalty = Penalty(("v",), 2.0, ((0.0, 3.0), (0.5, 1.0)))
    for share, above in ((0.0, 3.0), (0.25, 2.0), (0.5, 1.0), (1.0, 1.0)):
        sizes = np.array([0.0, 0.9, 1.5, 2.5, 4.0])
        expected = [2.0 * (x - above) if x > above else 0.0 for x in sizes]
        np.testing.assert_allclose(penalty.at(share, sizes), expected)


def test_penalty_changes_what_is_learned_and_not_what_is_recorded(tmp_path: Path) -> None:
    task = Task(name="Sped", env_factory=Sped, horizon=20, cost_max=20.0)
    ends: dict[float, float] = {}
    for weight in (0.0, 20.0):
        table = tmp_path / "s.toml"
        table.write_text(
            "[Sped]\nsteps = 15000\nbatch = 1000\nhidden = 32\ngamma = 0.9\nruns = [{ limits = [[0, 1]], "
            f'penalty = {{ of = ["along", "across"], weight = {weight}, above = [[0, 0.3]] }} }}]\n'
        )
        (plan,) = plans("Sped", 20.0, file=table)
        folder = tmp_path / str(weight)
        run(task, plan, 20.0, folder, lambda _: None)
        data = gather([folder])
        late = data.select(np.flatnonzero(np.array(data.info["iteration"]) > 10))
        np.testing.assert_allclose(  # the environment's own rewards
            late.rewards, -np.abs(late.actions - late.observations)[:, 0], atol=1e-6
        )
        calm = late.select(np.array(late.info["mean_action"], bool))
        ends[weight] = float((np.abs(calm.actions) > 0.4).mean())
    assert ends[0.0] > 0.45  # 0.6 of the best actions
    assert ends[20.0] < 0.15


def test_penalty_on_what_is_not_reported_is_told() -> None:
    env = make_env(Task(name="Sped", env_factory=Sped, horizon=20))
    size = play([env], 1, 20, lambda o: 0 * o + 0.5, np.ones(1, np.float32), np.random.default_rng(0), {}, ("along",))
    np.testing.assert_allclose(size.watched, 0.3)
    with pytest.raises(QptError, match="penalty is on spin, but the info of Sped has the numbers across, along, cost"):
        play([env], 1, 20, lambda o: o, np.ones(1, np.float32), np.random.default_rng(0), {}, ("spin",))


def test_learning_rate_falls_to_its_last_share() -> None:
    moved = {}
    for share in (0.0, 0.5, 1.0):
        learner = Learner(Settings(hidden=8, last_rate=0.2, minibatch=40, epochs=1), 3, 2, 1.0)
        learner.initialise(np.random.default_rng(1))
        before = learner.flat.copy()
        draw = np.random.default_rng(2).standard_normal
        ends = np.arange(40) % 10 == 9
        batch = Batch(
            draw((40, 3)).astype(np.float32), draw((40, 2)).astype(np.float32), draw(40), np.abs(draw(40)),
            np.zeros(40, bool), ends, draw((4, 3)).astype(np.float32),
        )  # fmt: skip
        learner.update(batch, 0.0, 1.0, 1.0, np.random.default_rng(3), share)
        moved[share] = np.abs(learner.flat - before).max()
    assert moved[0.5] == pytest.approx(0.6 * moved[0.0], rel=0.02)
    assert moved[1.0] == pytest.approx(0.2 * moved[0.0], rel=0.02)


# -- the filter --------------------------------------------------------------------------------------------------------


def plane(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    costs = np.concatenate([rng.gamma(1.0, 8.0, n), rng.uniform(0, 130, n // 4)])
    returns = 100 * np.sqrt(costs + 1) * rng.beta(5, 1, len(costs))
    return returns, costs, rng.integers(50, 200, len(costs))


@pytest.mark.parametrize("wanted", [1, 30, 60, 61, 400, 1500])
def test_filter_keeps_its_promises(wanted: int) -> None:
    returns, costs, lengths = plane(2000, wanted)
    cap = 80.0
    kept = grid_filter(returns, costs, lengths, cap, wanted, seed=3)
    assert len(kept) == wanted == len(np.unique(kept))
    assert (costs[kept] <= cap).all()
    assert (np.diff(kept) > 0).all()
    within = np.flatnonzero(costs <= cap)
    column, row = cells(returns[within], costs[within], cap, returns[within].min(), returns[within].max())
    tops = [within[column == b][np.argsort(-returns[within][column == b])[:TOP]] for b in range(BINS)]
    if wanted >= TOP * BINS:
        assert set(np.concatenate(tops)) <= set(kept)
    np.testing.assert_array_equal(kept, grid_filter(returns, costs, lengths, cap, wanted, seed=3))
    if wanted == 400:  # quotas: as the square root of the steps of a cell, where there are enough episodes
        cell, drawn = column * BINS + row, np.isin(within, np.setdiff1d(kept, np.concatenate(tops)))
        open_ = ~np.isin(within, np.concatenate(tops))
        steps = np.bincount(cell, weights=lengths[within], minlength=BINS**2)
        have, took = np.bincount(cell[open_], minlength=BINS**2), np.bincount(cell[drawn], minlength=BINS**2)
        free = took < have
        factor = took[free].sum() / np.sqrt(steps[free]).sum()
        np.testing.assert_allclose(took[free], factor * np.sqrt(steps[free]), atol=1.0)
        full = ~free & (have > 0)
        assert (have[full] <= factor * np.sqrt(steps[full]) + 1.0).all()


def test_filter_of_few_keeps_all_within_the_cap() -> None:
    returns, costs, lengths = plane(200, 0)
    kept = grid_filter(returns, costs, lengths, 80.0, 10_000)
    np.testing.assert_array_equal(kept, np.flatnonzero(costs <= 80.0))
    with pytest.raises(QptError, match="cost cap of 5"):
        grid_filter(returns, costs + 10, lengths, 5.0, 10)


# -- recording ---------------------------------------------------------------------------------------------------------


class Falls(Target):
    """Ends early by a terminal when a drawn number says so."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, bool(self.np_random.random() < 0.05), truncated, info


@pytest.mark.parametrize("task", [TOY, Task(name="Falls", env_factory=Falls, horizon=20)], ids=["toy", "falls"])
@pytest.mark.parametrize("envs", [1, 3])
def test_episodes_are_recorded_as_executed(task: Task, envs: int) -> None:
    made = [make_env(task) for _ in range(envs)]
    dim = made[0].observation_dim
    weights = np.random.default_rng(5).normal(size=(dim, 1)).astype(np.float32) * 3
    rollout = play(made, 3, 50, lambda o: o @ weights, np.ones(1, np.float32), np.random.default_rng(6))
    assert (np.add.reduceat(rollout.lengths, np.flatnonzero(np.diff(rollout.mean_action, prepend=True))) >= 50).all()
    assert rollout.mean_action.any()
    assert not rollout.mean_action.all()
    assert np.abs(rollout.drawn).max() > 1.0 == np.abs(rollout.actions).max()
    env = make_env(task)
    kinds = set()
    for e, (start, stop) in enumerate(zip(rollout.offsets, rollout.offsets[1:], strict=False)):
        observation, _ = env.reset(seed=int(rollout.seeds[e]))
        for t in range(start, stop):
            np.testing.assert_array_equal(observation, rollout.observations[t])
            if rollout.mean_action[e]:
                np.testing.assert_allclose(
                    rollout.actions[t], np.clip(observation @ weights, -1, 1), rtol=1e-5, atol=1e-6
                )
            observation, reward, terminal, timeout, info = env.step(rollout.actions[t])
            assert (reward, info["cost"]) == (rollout.rewards[t], rollout.costs[t])
            assert (terminal, timeout) == (rollout.terminals[t], rollout.timeouts[t])
        assert terminal or timeout
        kinds.add("terminal" if terminal else "timeout")
        np.testing.assert_array_equal(observation, rollout.final_observations[e])
    assert kinds == ({"terminal", "timeout"} if task.name == "Falls" else kinds)


def same(a: Trajectories, b: Trajectories) -> None:
    assert a.fingerprint == b.fingerprint
    assert {k: v for k, v in a.info.items() if k != "source"} == {k: v for k, v in b.info.items() if k != "source"}


def test_one_seed_gives_one_data_set_with_any_number_of_workers(tmp_path: Path, schedule: Path) -> None:
    wish: dict[str, Any] = {"trajectories": 120, "steps": 7000, "runs": 2, "cost_cap": CAP, "schedule": schedule}
    here = collect(TOY, tmp_path / "here", seed=4, workers=0, **wish)
    one = collect(TOY, tmp_path / "one", seed=4, workers=1, **wish)
    two = collect(TOY, tmp_path / "two", seed=4, workers=2, **wish)
    same(here.trajectories, one.trajectories)
    same(one.trajectories, two.trajectories)
    assert len(here.trajectories) == 120
    assert here.trajectories.episode_costs.max() <= CAP
    assert len(here.trajectories.info["env_seed"]) == 120
    other = collect(TOY, tmp_path / "other", seed=5, workers=0, **wish)
    assert other.trajectories.fingerprint != here.trajectories.fingerprint


def test_recorded_episodes_play_again_from_their_seeds(tmp_path: Path, schedule: Path) -> None:
    wish: dict[str, Any] = {"steps": 4000, "runs": 1, "trajectories": 40, "cost_cap": CAP, "schedule": schedule}
    data = collect(TOY, tmp_path / "x", workers=0, **wish).trajectories
    env = make_env(TOY)
    for e in range(0, len(data), 5):
        env.reset(seed=data.info["env_seed"][e])
        for t in range(data.offsets[e], data.offsets[e + 1]):
            _, reward, _, _, info = env.step(data.actions[t])
            assert np.float32(reward) == data.rewards[t]
            assert np.float32(info["cost"]) == data.costs[t]


def test_the_chosen_are_gathered_as_from_all(tmp_path: Path, schedule: Path) -> None:
    todo = plans(TOY.name, CAP, steps=4000, runs=2, file=schedule)
    folders = [tmp_path / "0", tmp_path / "1"]
    run_all(TOY, todo, CAP, folders, 0, lambda *_: None)
    everything = gather(folders)
    assert [row[0] for folder in folders for row in summary(folder)] == everything.returns.tolist()
    index = np.sort(np.random.default_rng(0).choice(len(everything), 25, replace=False))
    chosen = gather(folders, index)
    assert chosen.fingerprint == everything.select(index).fingerprint
    for key in ("env_seed", "mean_action", "run", "iteration"):
        assert chosen.info[key] == [everything.info[key][i] for i in index]


def test_interrupted_anywhere_nothing_is_lost_and_the_result_is_the_same(tmp_path: Path, schedule: Path) -> None:
    (plan,) = plans(TOY.name, CAP, steps=12_000, runs=1, file=schedule)
    whole = tmp_path / "whole"
    run(TOY, plan, CAP, whole, lambda _: None)

    class Stopped(Exception):
        pass

    count = 0

    def stop(_: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count % 2 == 0:
            raise Stopped

    broken = tmp_path / "broken"
    for attempt in range(50):
        held = {p.name for p in chunks(broken)}
        if attempt == 2:  # recorded, but not yet learned from: the state is one rollout behind
            shutil.copy(broken / "state.safetensors", tmp_path / "old")
        if attempt == 3:
            shutil.copy(tmp_path / "old", broken / "state.safetensors")
        try:
            run(TOY, plan, CAP, broken, stop)
            break
        except Stopped:
            assert held <= {p.name for p in chunks(broken)}
    assert attempt > 2
    assert [p.name for p in chunks(broken)] == [p.name for p in chunks(whole)]
    same(gather([broken]), gather([whole]))


def test_killed_worker_is_replaced_and_the_result_is_the_same(tmp_path: Path, schedule: Path) -> None:
    todo = plans(TOY.name, CAP, steps=9000, runs=2, file=schedule)
    quiet = [tmp_path / "a0", tmp_path / "a1"]
    run_all(TOY, todo, CAP, quiet, 0, lambda *_: None)
    killed: list[int] = []
    incidents: list[str] = []

    def kill_once(number: int, message: dict[str, Any]) -> None:
        incidents.extend([message["incident"]] if "incident" in message else [])
        if number == 1 and message.get("return") is not None and not killed:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            killed.append(next(int(pid) for pid in reversed(children) if "qpt.collect" in _command(pid)))
            os.kill(killed[-1], signal.SIGKILL)

    folders = [tmp_path / "b0", tmp_path / "b1"]
    run_all(TOY, todo, CAP, folders, 2, kill_once)
    assert len(incidents) == 1
    assert "SIGKILL" in incidents[0]
    same(gather(folders), gather(quiet))


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_command_killed_and_run_again_gives_the_same_bytes(tmp_path: Path, schedule: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from qpt.envs.toy import tradeoff\n\n\ndef make():\n    return tradeoff(0).env()\n"
    )
    command = [sys.executable, "-c", "import sys; from qpt.cli import main; sys.exit(main())"]
    command += ["collect", "--env", "mine:make", "--cost-cap", "40", "--steps", "12000", "--trajectories", "100"]
    command += ["--workers", "1", "--no-picture", "--schedule", str(schedule), "--out"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def start(out: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, out], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)

    assert start("whole.hdf5").wait() == 0
    process = start("killed.hdf5")
    parts = tmp_path / "killed.hdf5.parts"
    deadline = time.monotonic() + 60
    while not chunks(parts / "run-0"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    episodes = summary(parts / "run-0")
    assert episodes
    assert start("killed.hdf5").wait() == 0
    assert (tmp_path / "whole.hdf5").read_bytes() == (tmp_path / "killed.hdf5").read_bytes()
    assert not parts.exists()
    info = read(tmp_path / "whole.hdf5").info
    assert info["note"] == "collected with qpt"
    assert "surrogate" not in info
    assert json.loads(info["schedules"])[0]["steps"] == 12_000


def hasty(observations: np.ndarray) -> np.ndarray:
    return np.full((len(observations), 1), 3.0)  # beyond the bounds: recorded as executed, at 1


def test_a_policy_of_ones_own_is_recorded(tmp_path: Path) -> None:
    wish: dict[str, Any] = {"trajectories": 25, "cost_limits": (5.0, 9.0), "workers": 0, "chunk": 10}
    name, told = f"{__name__}:hasty", list[tuple[int, int]]()
    task = Task(name="Target", env_factory=Target, horizon=20)
    recorded = record_policy(name, task, tmp_path / "p", report=lambda *at: told.append(at), **wish)
    whole = recorded.trajectories
    assert len(whole) == recorded.recorded == 25
    assert (whole.actions == 1.0).all()
    # it knows no limit: at each of them it would give the same episodes again
    assert [len(read_chunk(path)["lengths"]) for path in chunks(tmp_path / "p")] == [10, 10, 5]
    assert len(np.unique(whole.observations[whole.offsets[:-1]], axis=0)) == 25
    assert "cost_limits" not in whole.info
    assert told == [(10, 25), (20, 25), (25, 25)]
    chunks(tmp_path / "p")[1].unlink()  # as if it had been interrupted
    same(record_policy(name, task, tmp_path / "p", **wish).trajectories, whole)


class Obeys(CallablePolicy):
    """Its action is a hundredth of its limit."""

    limit_mode = "live"

    def __init__(self, mode: str = "live", trained: float | None = None, weights: str = "a") -> None:
        super().__init__(lambda o: np.tile(self.limits[:, None] / 100, (1, o.shape[1])))
        self.limit_mode, self.trained_limit, self.sha256 = mode, trained, {"policy": weights}

    def reset(self, n: int, *, cost_limits: Any, seeds: Any) -> None:  # noqa: ARG002
        if self.trained_limit is not None and (cost_limits != self.trained_limit).any():
            raise QptError("trained for another limit")
        self.limits = np.array(cost_limits)

    def restart(self, indices: Any, *, cost_limits: Any, seeds: Any) -> None:  # noqa: ARG002
        self.limits[indices] = cost_limits


def test_a_policy_that_obeys_limits_begins_anew_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.collect.collection._policy", lambda _: Obeys())
    wish: dict[str, Any] = {"trajectories": 14, "cost_limits": (5.0, 9.0, 70.0), "workers": 0, "chunk": 4}
    task = Task(name="Target", env_factory=Target, horizon=20)
    whole = record_policy("x", task, tmp_path / "p", **wish).trajectories
    limits, counts = np.unique((100 * whole.actions[whole.offsets[:-1], 0]).round(), return_counts=True)
    assert dict(zip(limits, counts, strict=True)) == {5: 5, 9: 5, 70: 4}
    assert len(np.unique(whole.observations[whole.offsets[:-1]], axis=0)) == 14
    assert whole.info["cost_limits"] == [5.0, 9.0, 70.0]
    for path in chunks(tmp_path / "p")[1:3]:
        path.unlink()
    same(record_policy("x", task, tmp_path / "p", **wish).trajectories, whole)
    monkeypatch.setattr("qpt.collect.collection._policy", lambda _: Obeys(weights="b"))
    chunks(tmp_path / "p")[-1].unlink()
    with pytest.raises(QptError, match="other settings"):  # the checkpoint was trained on meanwhile
        record_policy("x", task, tmp_path / "p", **wish)


def test_a_refused_recording_leaves_nothing_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.collect.collection._policy", lambda _: Obeys("trained", 30.0))
    task = Task(name="Target", env_factory=Target, horizon=20)
    wish: dict[str, Any] = {"trajectories": 4, "workers": 0}
    for wrong, match in (
        ({"cost_limits": (-1.0,)}, "cost limits are finite and not negative"),
        ({"cost_limits": (5.0,)}, "trained for another limit"),
        ({"cost_cap": float("nan")}, "the cost cap must be a number of at least 0, not nan"),
    ):
        with pytest.raises(QptError, match=match):
            record_policy("x", task, tmp_path / "p", **wish, **wrong)
        assert not (tmp_path / "p").exists()
    data = record_policy("x", task, tmp_path / "p", **wish).trajectories
    assert data.info["cost_limits"] == [30.0]  # its own, where none is given
    np.testing.assert_allclose(data.actions, 0.3, atol=1e-6)


def test_a_collection_that_recorded_nothing_gives_way(tmp_path: Path, schedule: Path) -> None:
    wish: dict[str, Any] = {"cost_cap": 5.0, "runs": 1, "workers": 0, "schedule": schedule}
    with pytest.raises(QptError, match="gives no cost"):
        collect(Task(name="Bad", env_factory=Costless, horizon=20), tmp_path / "p", steps=100, **wish)
    (tmp_path / "p" / "run-0").mkdir()  # a worker may leave an empty one
    assert (tmp_path / "p" / "plan.json").exists()
    mended = Task(name="Good", env_factory=Target, horizon=20)
    assert len(collect(mended, tmp_path / "p", steps=200, **wish, trajectories=3).trajectories) == 3
    with pytest.raises(QptError, match="other settings"):
        collect(mended, tmp_path / "p", steps=300, **wish)


# -- bad input ---------------------------------------------------------------------------------------------------------


class Negative(Target):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        return (*rest, {"cost": -1.0})  # type: ignore[return-value]


class Unclear(Target):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        return (*rest, {"cost": float("nan")})  # type: ignore[return-value]


class Costless(Target):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        return (*rest, {})  # type: ignore[return-value]


class Broken(Target):
    def step(self, _: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("the valve is stuck")


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (Negative, "costs must not be negative"),
        (Unclear, "a cost of nan"),
        (Costless, "gives no cost"),
        (Broken, "valve is stuck"),
    ],
)
def test_a_broken_environment_is_told_in_a_sentence(env: Any, match: str, tmp_path: Path) -> None:
    task = Task(name="Bad", env_factory=partial(env), horizon=20, cost_max=5.0)
    with pytest.raises(QptError, match=match):
        run_all(task, plans("Bad", 5.0, steps=100, runs=1), 5.0, [tmp_path], 1, lambda *_: None)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "--task"),
        (["--task", "BallRun", "--env", "a:b"], "either --task"),
        (["--task", "BallRum"], "did you mean 'BallRun'"),
        (["--task", "BallRun", "--horizon", "5"], "--horizon is for --env"),
        (["--task", "BallRun", "--workers", "-1"], "there cannot be -1 workers"),
        (["--task", "BallRun", "--seed", "-1"], "a seed is a whole number from 0 to 2**63 - 1"),
        (["--task", "BallRun", "--seed", str(2**64)], "a seed is a whole number from 0 to 2**63 - 1"),
        (["--task", "BallRun", "--limits", "5"], "--limits are those of --policy"),
        (["--task", "BallRun", "--policy", "a:b", "--runs", "2"], "--policy trains nothing"),
        (["--env", "a:b", "--horizon", "0"], "at least one step"),
        (["--task", "BallRun", "--runs", "0"], "at least one run"),
        (["--task", "BallRun", "--steps", "0"], "at least one step"),
        (["--task", "BallRun", "--trajectories", "0"], "at least one trajectory"),
        (["--task", "BallRun", "--cost-cap", "0"], "positive number"),
        (["--task", "BallRun", "--policy", "nowhere"], "folder of a checkpoint or module:function"),
        (["--task", "BallRun", "--policy", "math:pi"], "the policy 'math:pi' is a float; give a function"),
        (["--task", "BallRun", "--schedule", "missing.toml"], "cannot be read"),
        (["--env", "nonsense"], "module:function"),
        (["--env", "no_such_module:make"], "cannot be imported"),
        (["--env", "qpt.envs.toy:tradeoff"], "not a flat Box"),
    ],
)
def test_bad_arguments_get_one_sentence(
    arguments: list[str],
    match: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["collect", *arguments, "--out", "x.hdf5"]) == 1
    told = capsys.readouterr().err
    assert match in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "x.hdf5").exists()


def test_what_exists_is_not_overwritten(tmp_path: Path, schedule: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.hdf5").write_text("mine")
    assert main(["collect", "--task", "BallRun", "--out", str(tmp_path / "old.hdf5")]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["collect", "--task", "BallRun", "--out", str(tmp_path / "old.txt")]) == 1
    assert ".hdf5 or .npz" in capsys.readouterr().err
    (tmp_path / "new.png").write_text("mine")
    assert main(["collect", "--task", "BallRun", "--out", str(tmp_path / "new.hdf5")]) == 1
    assert "new.png exists; give another --out, --no-picture, or --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "new.hdf5.parts").exists()
    collect(TOY, tmp_path / "parts", steps=100, runs=1, cost_cap=CAP, workers=0, schedule=schedule)
    with pytest.raises(QptError, match="other settings"):
        collect(TOY, tmp_path / "parts", steps=200, runs=1, cost_cap=CAP, workers=0, schedule=schedule)
    with (tmp_path / "parts" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(QptError, match="another process"):
            collect(TOY, tmp_path / "parts", steps=100, runs=1, cost_cap=CAP, workers=0, schedule=schedule)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(QptError, match="no collection of ours"):
        collect(TOY, tmp_path / "full", steps=100, runs=1, cost_cap=CAP, workers=0, schedule=schedule)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[Other]\n", "neither a table"),
        ("[default]\nsteps = 5\n", "needs runs"),
        ("[default]\nruns = [{ limits = [[0.5, 1], [0.2, 1]] }]\n", "rising shares"),
        ("[default]\nruns = [{ limits = [[0, -1]] }]\n", "rising shares"),
        ("[default]\nspeed = 1\nruns = [{ limits = [[0, 1]] }]\n", "unknown keys: speed"),
        ("[default]\ngamma = 'x'\nruns = [{ limits = [[0, 1]] }]\n", "gamma of"),
        ("[default]\npenalty = 1\nruns = [{ limits = [[0, 1]] }]\n", "must look like"),
        (
            "[default]\nruns = [{ limits = [[0, 1]], penalty = { of = ['v'], weight = 1, above = 2 } }]\n",
            "above, of the penalty of .* rising shares",
        ),
        ("[default\n", "not valid TOML"),
        ("default = 5\n", r"\[default\] in .* must be a table, not 5"),
    ],
)
def test_bad_schedules_get_one_sentence(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(QptError, match=match):
        plans("BallRun", 80.0, file=tmp_path / "s.toml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 1.0), ("gae", 1.5), ("minibatch", 0), ("epochs", 0), ("hidden", 0), ("batch", -5), ("kp", -1.0),
        ("learning_rate", "nan"), ("learning_rate", 0.0), ("clip", "nan"), ("kl_stop", "inf"), ("log_std", "nan"),
        ("multiplier", -0.5), ("multiplier_max", -1.0), ("last_rate", -1.0), ("weight", "nan"), ("weight", -1),
    ],
)  # fmt: skip
def test_settings_of_a_schedule_have_bounds(key: str, value: Any, tmp_path: Path) -> None:
    setting = f"{key} = {value}"
    if key == "weight":
        setting = f"penalty = {{ of = ['v'], {setting}, above = [[0, 1]] }}"
    (tmp_path / "s.toml").write_text(f"[default]\n{setting}\nruns = [{{ limits = [[0, 1]] }}]\n")
    with pytest.raises(QptError, match=rf"{key}.* not {value}$") as told:
        plans("BallRun", 80.0, file=tmp_path / "s.toml")
    assert "[default] in" in str(told.value)


def test_the_table_that_is_missing_can_be_copied_from_the_message(tmp_path: Path) -> None:
    file, rest = tmp_path / "s.toml", "runs = [{ limits = [[0, 1]] }]\n"
    for name, header in (("heater.Heater", '["heater.Heater"]'), ("My_Task-1", "[My_Task-1]")):
        file.write_text(f"[Other]\n{rest}")
        with pytest.raises(QptError) as told:
            plans(name, 80.0, file=file)
        assert f"neither a table {header} nor" in str(told.value)
        file.write_text(f"{header}\n{rest}")
        assert plans(name, 80.0, file=file)[0].limits == ((0.0, 80.0),)


def test_every_schedule_can_be_read_and_interpolates() -> None:
    for task in ("BallRun", "HopperVelocity", "SwimmerVelocity", "PointGoal1", "easysparse", "My.Own"):
        for plan in plans(task, 50.0, runs=5, seed=3):
            assert plan.limits[0][0] == 0.0
            assert plan.limit_at(0.0) == plan.limits[0][1]
            assert plan.limit_at(1.0) == plan.limits[-1][1]
    first = plans("My.Own", 50.0)[0]
    (a, low), (b, high) = first.limits[1:3]
    assert first.limit_at((a + b) / 2) == pytest.approx((low + high) / 2)


def test_learner_state_comes_back_from_a_checkpoint() -> None:
    rng = np.random.default_rng(0)
    a, b = (Learner(Settings(hidden=8), 3, 2, 1.0) for _ in range(2))
    a.initialise(rng)
    a.seen.add(rng.normal(size=(50, 3)))
    a.multiplier.update(9.0, 1.0, 10.0, a.settings)
    b.load({name: np.array(values) for name, values in a.tensors().items()})
    observations = rng.normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_array_equal(a.actor()(observations), b.actor()(observations))
    assert a.multiplier == b.multiplier


def test_observations_are_normalised_by_all_that_was_seen() -> None:
    rng = np.random.default_rng(0)
    learner = Learner(Settings(hidden=8), 3, 2, 1.0)
    parts = [rng.normal(k, 1 + k, size=(400 * (k + 1), 3)).astype(np.float32) for k in range(3)]
    for part in parts:
        learner.seen.add(part)
    whole = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(learner.seen.mean, whole.mean(0), rtol=1e-5)
    np.testing.assert_allclose(learner.seen.std, whole.std(0), rtol=1e-5)
    scaled = learner.normalised(whole.astype(np.float32))
    np.testing.assert_allclose([scaled.mean(), scaled.std()], [0, 1], atol=2e-3)


def test_own_environments_may_give_six_values(tmp_path: Path, schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "six_values.py").write_text(
        "from qpt.envs.toy import stitching\n\n\n"
        "class Six(type(stitching(0).env())):\n"
        "    def step(self, action):\n"
        "        o, r, te, tr, info = super().step(action)\n"
        "        return o, r, info.pop('cost'), te, tr, info\n\n\n"
        "def make():\n    return Six(stitching(0))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = own_task("six_values:make", None, 30.0)
    wish: dict[str, Any] = {"steps": 2000, "runs": 1, "trajectories": 20, "schedule": schedule}
    data = collect(task, tmp_path / "x", workers=1, **wish).trajectories
    assert len(data) == 20
    assert data.observation_dim == stitching(0).features.shape[2]
    assert data.episode_costs.max() > 0


class Hangs(Target):
    """Hangs until someone has noticed: the first process that comes here never returns."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        marker = Path(os.environ["QPT_TEST_MARKER"])
        if not marker.exists():
            marker.touch()
            time.sleep(600)
        return super().step(action)


@pytest.mark.slow
def test_hung_worker_is_replaced(tmp_path: Path, schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QPT_TEST_MARKER", str(tmp_path / "marker"))
    task = Task(name="Hangs", env_factory=Hangs, horizon=20, cost_max=20.0)
    told: list[dict[str, Any]] = []
    todo = plans("Hangs", 20.0, steps=2000, runs=1, file=schedule)
    run_all(task, todo, 20.0, [tmp_path / "run"], 1, lambda _, message: told.append(message), stall=10.0)
    assert [m["incident"] for m in told if "incident" in m] == [
        "run 0 was ended by SIGKILL; continued from its last state"
    ]
    assert told[-1]["steps"] >= 2000
