"""Learning: the learner against slow references, the filter's promises, and snapshots that one seed makes again."""

from __future__ import annotations

import fcntl
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

from qpt.behaviour import Actor, Snapshots, read_snapshots
from qpt.cli import main
from qpt.collect import harvest, learn, spool
from qpt.collect.behaviours import Snapshot
from qpt.collect.filter import BINS, SHARE, TOP, careful_cost, cells, grid_filter
from qpt.collect.learn import own_task
from qpt.collect.ppo import Batch, Learner, Multiplier, Settings, gae, loss_gradient, shapes, views
from qpt.collect.recorder import play, play_episodes
from qpt.collect.runner import run
from qpt.collect.schedules import Penalty, plans
from qpt.collect.workers import Pool
from qpt.envs import make_env
from qpt.envs.toy import stitching, tradeoff
from qpt.errors import QptError
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
        run(task, plan, 20.0, tmp_path / str(share), "", told.append)
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


def test_penalty_changes_what_is_learned_and_not_what_is_reported(tmp_path: Path) -> None:
    task = Task(name="Sped", env_factory=Sped, horizon=20, cost_max=20.0)
    seen = np.linspace(-1, 1, 200, dtype=np.float32)[:, None]
    ends: dict[float, float] = {}
    for weight in (0.0, 20.0):
        table = tmp_path / "s.toml"
        table.write_text(
            "[Sped]\nsteps = 15000\nbatch = 1000\nhidden = 32\ngamma = 0.9\nruns = [{ limits = [[0, 1]], "
            f'penalty = {{ of = ["along", "across"], weight = {weight}, above = [[0, 0.3]] }} }}]\n'
        )
        (plan,) = plans("Sped", 20.0, file=table)
        folder = tmp_path / str(weight)
        run(task, plan, 20.0, folder, "", lambda _: None)
        arrays, facts = spool.load(snapshots_in(folder)[-1])
        assert -20 < facts["noisy"]["return"] < 0  # the environment's own rewards
        ends[weight] = float((np.abs(Actor.from_arrays(arrays)(seen).clip(-1, 1)) > 0.4).mean())
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
    if wanted >= TOP * (BINS + 1):
        assert set(np.concatenate(tops)) <= set(kept)
    np.testing.assert_array_equal(kept, grid_filter(returns, costs, lengths, cap, wanted, seed=3))
    if wanted == 400:  # quotas: as the square root of the steps of a cell, where there are enough episodes
        careful = costs[within] <= careful_cost(cap)  # a bin that both kinds share counts as two
        groups = [within[(column == b) & (careful == kind)] for b in range(BINS) for kind in (False, True)]
        tops = [group[np.argsort(-returns[group])[:TOP]] for group in groups]
        cell, drawn = (column + BINS * ~careful) * BINS + row, np.isin(within, np.setdiff1d(kept, np.concatenate(tops)))
        open_ = ~np.isin(within, np.concatenate(tops))
        steps = np.bincount(cell, weights=lengths[within], minlength=2 * BINS**2)
        have, took = (np.bincount(cell[rows], minlength=2 * BINS**2) for rows in (open_, drawn))
        free = took < have
        factor = took[free].sum() / np.sqrt(steps[free]).sum()
        np.testing.assert_allclose(took[free], factor * np.sqrt(steps[free]), atol=1.0)
        full = ~free & (have > 0)
        assert (have[full] <= factor * np.sqrt(steps[full]) + 1.0).all()


@pytest.mark.parametrize("there", [30, 300])
def test_filter_keeps_a_share_of_careful_episodes(there: int) -> None:
    rng = np.random.default_rng(there)
    costs = np.concatenate([rng.uniform(20, 200, 3000), rng.uniform(0, 10, there)])
    returns, lengths, wanted = rng.normal(costs, 50), np.full(len(costs), 100), 500
    kept = grid_filter(returns, costs, lengths, 200.0, wanted)
    assert len(kept) == wanted
    careful = int((costs[kept] <= 10).sum())
    assert careful == (there if there < SHARE * wanted else int(np.ceil(SHARE * wanted)))


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


def snapshots_in(folder: Path) -> list[Path]:
    return sorted((folder / "snapshots").glob("*.npz"))


def same_snapshots(a: Path, b: Path) -> None:
    names = [path.relative_to(a) for path in sorted(a.rglob("snapshots/*.npz"))]
    assert len(names) > 2
    assert names == [path.relative_to(b) for path in sorted(b.rglob("snapshots/*.npz"))]
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes()


@pytest.mark.parametrize("task", [TOY, Task(name="Falls", env_factory=Falls, horizon=20)], ids=["toy", "falls"])
def test_an_episode_depends_on_its_behaviour_and_its_seed_alone(task: Task) -> None:
    env = make_env(task)
    learner = Learner(Settings(hidden=8), env.observation_dim, env.action_dim, 1.0)
    learner.initialise(np.random.default_rng(3))
    behaviours = [Snapshot(str(noise), learner.actor(), noise) for noise in (0.0, 2.0)]
    todo = [(behaviours[k % 2], 5 + k // 2) for k in range(8)]
    together = play_episodes(env, todo)
    assert (together.seeds == [seed for _, seed in todo]).all()
    for k in reversed(range(len(todo))):
        alone, rows = play_episodes(env, [todo[k]]), slice(together.offsets[k], together.offsets[k + 1])
        for name in ("observations", "drawn", "actions", "rewards", "costs", "terminals", "timeouts"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together, name)[rows])
        np.testing.assert_array_equal(alone.final_observations[0], together.final_observations[k])
        mean = todo[k][0].actor(alone.observations)
        assert np.allclose(alone.drawn, mean, rtol=1e-5, atol=1e-6) == (todo[k][0].noise == 0)
    assert np.abs(together.drawn).max() > 1.0 >= np.abs(together.actions).max()


# -- learning ----------------------------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_snapshots_with_any_number_of_workers(tmp_path: Path, schedule: Path) -> None:
    found: dict[str, Snapshots] = {}
    for name, workers in (("here", 0), ("one", 1), ("two", 2)):
        wish: dict[str, Any] = {"seed": 4, "steps": 5000, "runs": 2, "cost_cap": CAP, "schedule": schedule}
        (file,) = learn.learn([TOY], tmp_path / name, workers=workers, **wish)
        found[name] = read_snapshots(file)
    for name in ("one", "two"):
        same_snapshots(tmp_path / "here", tmp_path / name)
        assert found[name].table == found["here"].table
        for one, other in zip(found[name].actors, found["here"].actors, strict=True):
            for key, values in one.arrays().items():
                np.testing.assert_array_equal(values, other.arrays()[key])
    (file,) = learn.learn([TOY], tmp_path / "other", workers=0, **{**wish, "seed": 5})
    assert read_snapshots(file).table != found["here"].table


def test_interrupted_anywhere_the_result_is_the_same(tmp_path: Path, schedule: Path) -> None:
    (plan,) = plans(TOY.name, CAP, steps=12_000, runs=1, file=schedule)
    whole = tmp_path / "whole"
    run(TOY, plan, CAP, whole, "", lambda _: None)

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
        if attempt == 2:  # a snapshot is there that the state does not know of: it is one rollout behind
            shutil.copy(broken / "state.npz", tmp_path / "old")
        if attempt == 3:
            shutil.copy(tmp_path / "old", broken / "state.npz")
        try:
            run(TOY, plan, CAP, broken, "", stop)
            break
        except Stopped:
            pass
    assert attempt > 2
    same_snapshots(broken, whole)
    state = spool.load(broken / "state.npz")[0]
    for name, values in spool.load(whole / "state.npz")[0].items():
        np.testing.assert_array_equal(values, state[name])


def test_killed_worker_is_replaced_and_the_result_is_the_same(tmp_path: Path, schedule: Path) -> None:
    todo = plans(TOY.name, CAP, steps=9000, runs=2, file=schedule)
    for plan in todo:
        run(TOY, plan, CAP, tmp_path / "quiet" / str(plan.number), "", lambda _: None)
    killed: list[int] = []
    incidents: list[str] = []

    def kill_once(number: int, message: dict[str, Any]) -> None:
        incidents.extend([message["incident"]] if "incident" in message else [])
        if number == 1 and message.get("return") is not None and not killed:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            killed.append(next(int(pid) for pid in reversed(children) if "qpt.collect" in _command(pid)))
            os.kill(killed[-1], signal.SIGKILL)

    with Pool(2) as pool:
        pool.run([partial(run, TOY, plan, CAP, tmp_path / "b" / str(plan.number), "") for plan in todo], kill_once)
    assert len(incidents) == 1
    assert "SIGKILL" in incidents[0]
    same_snapshots(tmp_path / "quiet", tmp_path / "b")


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _fail(text: str, report: Any) -> None:
    if text:
        raise QptError(text)
    report({"progress": True})


def _die(report: Any) -> None:
    del report
    os._exit(3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_that_fails_holds_up_no_other(workers: int) -> None:
    heard: list[Any] = []
    with Pool(workers) as pool:
        jobs = [partial(_fail, "it is broken" if k == 1 else "") for k in range(5)]
        with pytest.raises(QptError, match=r"^it is broken$"):
            pool.run(jobs, lambda number, _: heard.append(number))
        assert sorted(heard) == [0, 2, 3, 4]
        pool.run(jobs[2:], lambda number, _: heard.append(10 + number))  # the same processes
        assert sorted(heard) == [0, 2, 3, 4, 10, 11, 12]
        if workers:
            with pytest.raises(QptError, match=r"job 0 failed 3 times in a row .*exit code 3"):
                pool.run([_die], lambda _, message: heard.append(message["incident"]))
            assert [text for text in heard if isinstance(text, str)] == 2 * [
                "the process of job 0 ended with exit code 3; it goes on in another"
            ]


def test_a_task_that_fails_holds_up_no_other(tmp_path: Path, schedule: Path) -> None:
    bad = Task(name="Bad", env_factory=Costless, horizon=20)
    wish: dict[str, Any] = {"steps": 2000, "runs": 1, "cost_cap": CAP, "schedule": schedule, "workers": 0}
    with pytest.raises(QptError, match="Bad gives no cost"):
        learn.learn([bad, TOY], tmp_path, **wish)
    assert read_snapshots(tmp_path / f"{TOY.name}.safetensors").task == TOY.name
    assert not (tmp_path / "Bad.safetensors").exists()


def test_a_run_stops_when_the_time_is_over_and_goes_on_later(tmp_path: Path, schedule: Path) -> None:
    told: list[str] = []
    wish: dict[str, Any] = {"steps": 6000, "runs": 2, "cost_cap": CAP, "schedule": schedule, "workers": 0}
    assert learn.learn([TOY], tmp_path / "a", hours=1e-9, tell=told.append, **wish) == []
    assert told == ["0 of 1 tasks are learned; run the same command again to go on"]
    calls = 0
    while not learn.learn([TOY], tmp_path / "a", hours=0.3 / 3600, **wish):
        calls += 1
        assert calls < 100
    learn.learn([TOY], tmp_path / "b", **wish)
    assert calls > 0
    same_snapshots(tmp_path / "a", tmp_path / "b")
    (plan,) = plans(TOY.name, CAP, steps=10**9, runs=1, file=schedule)
    steps: list[int] = []
    run(TOY, plan, CAP, tmp_path / "c", "", lambda message: steps.append(message["steps"]), time.time() + 0.5)
    assert len(steps) > 1


def test_an_unfinished_learning_can_be_harvested(tmp_path: Path, schedule: Path) -> None:
    wish: dict[str, Any] = {"runs": 2, "cost_cap": CAP, "schedule": schedule, "workers": 0}
    with pytest.raises(QptError, match="nothing was learned yet"):
        learn.learn([TOY], tmp_path, finish=True, **wish)
    assert learn.learn([TOY], tmp_path, steps=200_000, hours=0.5 / 3600, **wish) == []
    (file,) = learn.learn([TOY], tmp_path, steps=200_000, finish=True, **wish)
    found = read_snapshots(file)
    assert found.provenance["complete"] is False
    learned = sum(row["learned_steps"] for row in found.provenance["schedules"])
    assert 0 < learned == found.provenance["simulator_steps"] < 200_000
    assert found.provenance["core_hours"] >= 0
    assert "numpy" in found.provenance["versions"][0]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / TOY.name / "played").iterdir()}
    learn.learn([TOY], tmp_path, steps=200_000, finish=True, **wish)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / TOY.name / "played").iterdir()}  # not played again


def test_command_killed_and_run_again_gives_the_same_snapshots(tmp_path: Path, schedule: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from qpt.envs.toy import tradeoff\n\n\ndef make():\n    return tradeoff(0).env()\n"
    )
    bare = tmp_path / "bare"  # of the packages, the machine has numpy and Gymnasium alone
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'h5py', 'tyro', 'rich', 'safetensors', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
    )
    command = [sys.executable, "-m", "qpt.collect.learn", "--env", "mine:make", "--cost-cap", "40", "--steps", "9000"]
    command += ["--workers", "1", "--schedule", str(schedule), "--out"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(bare), *sys.path])}

    def start(out: str, env: dict[str, str] = env) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, out], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)

    process = start("killed")
    deadline = time.monotonic() + 60
    while len(snapshots_in(tmp_path / "killed" / "mine.make" / "run-0")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    said = start("killed").communicate()[1]
    assert "safetensors is not installed here: run this with --finish where it is" in said
    assert not (tmp_path / "killed" / "mine.make.safetensors").exists()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    assert "wrote killed/mine.make.safetensors" in start("killed").communicate()[1]
    assert "wrote whole/mine.make.safetensors" in start("whole").communicate()[1]
    same_snapshots(tmp_path / "killed", tmp_path / "whole")
    one, other = (read_snapshots(tmp_path / name / "mine.make.safetensors") for name in ("killed", "whole"))
    assert one.table == other.table
    assert one.provenance["command"].startswith("qpt collect learn --env mine:make")
    assert one.provenance["schedules"][0]["steps"] == 9000


# -- choosing snapshots ------------------------------------------------------------------------------------------------


def made_up(n: int, seed: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    rng = np.random.default_rng(seed)
    costs = rng.gamma(1.0, 60.0, n)
    returns = 10 * np.sqrt(costs) * rng.uniform(0, 1, n)
    return [
        ({"cost": c, "return": r}, {"cost": 0.8 * c, "return": 1.1 * r}) for c, r in zip(costs, returns, strict=True)
    ]


@pytest.mark.parametrize("count", [5, 10, 24])
def test_chosen_snapshots_cover_the_plane(count: int) -> None:
    cap, rows = 100.0, made_up(400, count)
    chosen = harvest.cover(rows, cap, 0.0, 100.0, count)
    assert len(chosen) == len(set(chosen)) == count
    costs, returns = (np.array([[part[key] for part in row] for row in rows]) for key in ("cost", "return"))

    def best(bound: float, among: Any = slice(None)) -> float:
        return float(returns[among][costs[among] <= bound].max())

    for bound in (10.0, 100.0, 50.0)[: count // 2]:  # the best of all that keep these costs
        assert best(bound, chosen) == best(bound)
    assert (costs[chosen].min(1) <= harvest.BEYOND * cap).all()  # those beyond the cap are of no use
    if count == 24:  # and poor and middling ones: nowhere in the plane is one far away
        points = np.stack([costs / cap, returns / 100.0], -1)
        inside = costs <= cap
        away = [np.linalg.norm(points[chosen][inside[chosen]] - p, axis=1).min() for p in points[inside]]
        assert max(away) < 0.25
    assert len(harvest.cover(rows[:3], cap, 0.0, 100.0, count)) == 3  # as many as there are


def test_the_file_keeps_its_size_and_says_what_its_policies_do(
    tmp_path: Path, schedule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish: dict[str, Any] = {"steps": 8000, "runs": 2, "cost_cap": CAP, "schedule": schedule, "workers": 0}
    (file,) = learn.learn([TOY], tmp_path, **wish)
    whole = read_snapshots(file)
    one = sum(values.nbytes for values in whole.actors[0].arrays().values())
    monkeypatch.setattr(harvest, "BYTES", 5 * one)
    (file,) = learn.learn([TOY], tmp_path, finish=True, **wish)
    found = read_snapshots(file)
    assert len(found.actors) == 5 < len(whole.actors)
    assert file.stat().st_size < 5 * one + 1200 * 5 + 2000
    assert [row["noisy"]["cost"] for row in found.table] == sorted(row["noisy"]["cost"] for row in found.table)
    env = make_env(TOY)
    for number, row in enumerate(found.table):  # what is said of them is what the stored weights do
        seeds = np.random.default_rng([row["run"], row["iteration"], 1]).integers(2**31 - 1, size=30).tolist()
        for name, noise, own in (("noisy", 1.0, seeds[:20]), ("mean_action", 0.0, seeds[20:])):
            behaviour = Snapshot("", found.actors[number], noise)
            rollout = play_episodes(env, [(behaviour, seed) for seed in own])
            assert row[name]["episodes"] == len(own)
            assert row[name]["return"] == pytest.approx(rollout.returns.mean())
            assert row[name]["cost"] == pytest.approx(rollout.episode_costs.mean())
        assert row["learned"]["noisy"]["episodes"] > 20  # and what they did when they were learned
    for task in ("PointButton1", "CarCircle", "AntVelocity", "easysparse"):  # at real sizes, too
        facts = learn.get_task(task)
        learner = Learner(Settings(), facts.env_observation_dim or 0, facts.action_dim or 0, 1.0)
        size = sum(values.nbytes for values in learner.actor().arrays().values())
        assert size * min(harvest.MOST, 400_000 // size) + 1200 * harvest.MOST < 500_000


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
        learn.learn([task], tmp_path, steps=100, runs=1, workers=1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "give either tasks"),
        (["BallRun", "--env", "a:b"], "give either tasks"),
        (["BallRum"], "did you mean 'BallRun'"),
        (["BallRun", "--horizon", "5"], "--horizon is for --env"),
        (["BallRun", "--workers", "-1"], "there cannot be -1 workers"),
        (["BallRun", "--seed", "-1"], "a seed is a whole number from 0 to 2**63 - 1"),
        (["BallRun", "--seed", str(2**64)], "a seed is a whole number from 0 to 2**63 - 1"),
        (["BallRun", "--hours", "0"], "must be above 0"),
        (["--env", "a:b", "--horizon", "0"], "at least one step"),
        (["BallRun", "--runs", "0"], "at least one run"),
        (["BallRun", "--steps", "0"], "at least one step"),
        (["BallRun", "--cost-cap", "0"], "positive number"),
        (["BallRun", "--schedule", "missing.toml"], "cannot be read"),
        (["BallRun", "--finish"], "nothing was learned yet"),
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
    assert main(["collect", "learn", *arguments]) == 1
    told = capsys.readouterr().err
    assert match in told
    assert len(told.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.npz"))


def test_other_settings_or_another_process_are_refused(tmp_path: Path, schedule: Path) -> None:
    wish: dict[str, Any] = {"runs": 1, "cost_cap": CAP, "workers": 0, "schedule": schedule, "hours": 1e-9}
    learn.learn([TOY], tmp_path, steps=100, **{**wish, "hours": None})
    with pytest.raises(QptError, match="other settings"):
        learn.learn([TOY], tmp_path, steps=200, **wish)
    run_folder = tmp_path / TOY.name / "run-0"
    with (run_folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(QptError, match="another process"):
            learn.learn([TOY], tmp_path, steps=100, **wish)
    (tmp_path / "full" / TOY.name / "run-0").mkdir(parents=True)
    (tmp_path / "full" / TOY.name / "run-0" / "thesis.tex").write_text("")
    with pytest.raises(QptError, match="no collection of ours"):
        learn.learn([TOY], tmp_path / "full", steps=100, **wish)


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
    (file,) = learn.learn([task], tmp_path / "x", steps=2000, runs=1, workers=1, schedule=schedule)
    found = read_snapshots(file)
    assert found.task == "six_values.make"
    assert len(found.actors[0].mean) == stitching(0).features.shape[2]
    assert max(row["noisy"]["cost"] for row in found.table) > 0


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
    (plan,) = plans("Hangs", 20.0, steps=2000, runs=1, file=schedule)
    with Pool(1, stall=10.0) as pool:
        pool.run([partial(run, task, plan, 20.0, tmp_path / "run", "")], lambda _, message: told.append(message))
    incidents = [m["incident"] for m in told if "incident" in m]
    assert incidents == ["the process of job 0 was ended by SIGKILL; it goes on in another"]
    assert told[-1]["steps"] >= 2000
