"""Recording: datasets that one set of behaviours and one seed make again, on any number of cores; given policies."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qpt
from qpt.behaviour import read_snapshots
from qpt.cli import main
from qpt.cli.evaluate import named_policy
from qpt.collect import learn, manifest, spool
from qpt.collect.behaviours import NOISES, behaviours
from qpt.collect.filter import BINS, cells
from qpt.collect.given import record_policy
from qpt.collect.record import allocate, record
from qpt.data import find, read
from qpt.data.trajectories import Trajectories
from qpt.envs import make_env
from qpt.errors import QptError
from qpt.evaluation import CallablePolicy, evaluate
from qpt.tasks import Task, get_task
from test_collect import CAP, SCHEDULE, TOY, Costless, Target

TARGET = Task(name="Target", env_factory=Target, horizon=20)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    (folder / "small.toml").write_text(SCHEDULE)
    wish: dict[str, Any] = {"cost_cap": CAP, "workers": 0, "schedule": folder / "small.toml"}
    (file,) = learn.learn([TOY], folder, steps=8000, runs=2, **wish)
    return file


def same(a: Trajectories, b: Trajectories) -> None:
    assert a.fingerprint == b.fingerprint
    assert {k: v for k, v in a.info.items() if k != "source"} == {k: v for k, v in b.info.items() if k != "source"}


# -- what is played ----------------------------------------------------------------------------------------------------


def test_one_seed_gives_one_dataset_with_any_number_of_workers(tmp_path: Path, snapshots: Path) -> None:
    wish: dict[str, Any] = {"trajectories": 120, "snapshots": snapshots}
    here = record(TOY, tmp_path / "here", seed=4, workers=0, **wish)
    one = record(TOY, tmp_path / "one", seed=4, workers=1, **wish)
    two = record(TOY, tmp_path / "two", seed=4, workers=2, **wish)
    same(here.trajectories, one.trajectories)
    same(one.trajectories, two.trajectories)
    data = here.trajectories
    assert len(data) == 120
    assert data.episode_costs.max() <= CAP
    assert len(set(data.info["env_seed"])) == 120
    assert here.played == data.info["recorded_episodes"] >= 240
    assert here.steps == data.info["simulator_steps"] > data.steps
    other = record(TOY, tmp_path / "other", seed=5, workers=0, **wish)
    assert other.trajectories.fingerprint != data.fingerprint


def test_recorded_episodes_play_again_from_their_seeds(tmp_path: Path, snapshots: Path) -> None:
    data = record(TOY, tmp_path / "x", snapshots=snapshots, trajectories=60, workers=0).trajectories
    env, found = make_env(TOY), read_snapshots(snapshots)
    noises = set()
    for e in range(0, len(data), 3):
        number, noise = data.info["behaviour"][e].split(", noise ")
        noises.add(float(noise))
        observation, _ = env.reset(seed=data.info["env_seed"][e])
        for t in range(data.offsets[e], data.offsets[e + 1]):
            np.testing.assert_array_equal(observation, data.observations[t])
            mean = np.clip(found.actors[int(number)](observation[None])[0], -1, 1)
            assert np.allclose(mean, data.actions[t], atol=1e-6) or float(noise) > 0
            observation, reward, terminal, timeout, info = env.step(data.actions[t])
            assert np.float32(reward) == data.rewards[t]
            assert np.float32(info["cost"]) == data.costs[t]
            assert (terminal, timeout) == (data.terminals[t], data.timeouts[t])
        np.testing.assert_array_equal(observation, data.final_observations[e])
    assert len(noises) > 1


def test_every_behaviour_is_played_and_then_what_fills_the_plane(
    tmp_path: Path, snapshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = len(read_snapshots(snapshots).actors) * len(NOISES)
    first = int(0.3 * 800 / arms)
    covered = {}
    for name in ("chosen", "evenly"):
        if name == "evenly":
            monkeypatch.setattr(
                "qpt.collect.record.allocate",
                lambda log, n, *rest: np.bincount(
                    np.arange(len(log.costs), len(log.costs) + max(rest[-1], 0)) % n, minlength=n
                ),
            )
        record(TOY, tmp_path / name, snapshots=snapshots, trajectories=400, workers=0)
        log = spool.log(tmp_path / name, 10**6)
        assert len(log.costs) == 800
        played = np.bincount(log.behaviour, minlength=arms)
        assert played.min() >= first >= 2
        assert (np.bincount(log.behaviour[: first * arms]) == first).all()
        column, row = cells(log.returns, log.costs, CAP, 0.0, 30.0)
        shares = np.bincount(column * BINS + row)[:, None] / len(row)
        covered[name] = 1.0 / float((shares**2).sum())  # as many cells, if all were equally full
    assert covered["chosen"] > 1.2 * covered["evenly"]


def test_allocation_prefers_thin_cells_low_costs_and_the_best() -> None:
    def share(costs: Any, returns: Any, behaviour: Any, **change: Any) -> Any:
        log = spool.Log(
            np.array(returns, float), np.array(costs, float), np.full(len(costs), 9), np.array(behaviour, np.int64)
        )
        wish: dict[str, Any] = {"arms": 2, "cap": 100.0, "low": 0.0, "high": 100.0, "least": None, "count": 10}
        return allocate(log, **{**wish, **change})

    crowd, lone = [50.0] * 30, [70.0] * 2
    thin = share(crowd + lone, [20.0] * 30 + [20.0] * 2, [0] * 30 + [1] * 2)
    assert thin[1] == thin.sum() == 10
    assert share(crowd + lone, [20.0] * 32, [0] * 30 + [1] * 2, count=60)[0] > 0  # until it is no longer thin
    careful = share([50.0] * 9 + [5.0, 95.0], [20.0] * 11, [0] * 4 + [0] * 5 + [0, 1], count=1)
    assert careful.sum() == 1
    low = share([50.0] * 8 + [7.0, 52.0], [20.0] * 8 + [50.0, 50.0], [0] * 4 + [1] * 4 + [0, 1])
    assert low[0] > low[1]  # of two cells alike, that of low cost
    best = share([52.0] * 8, [90.0] * 4 + [40.0] * 4, [0] * 4 + [1] * 4)
    assert best[0] > best[1]  # of two cells alike, that of the best return
    assert share([150.0] * 4 + [50.0] * 20, [50.0] * 24, [0] * 4 + [1] * 20)[0] == 0  # nothing beyond the cap
    assert share([50.0] * 4 + [50.0] * 20, [5.0] * 4 + [50.0] * 20, [0] * 4 + [1] * 20, least=10.0)[0] == 0


def test_more_is_played_where_too_few_stay_within_the_cap(tmp_path: Path, snapshots: Path) -> None:
    record(TOY, tmp_path / "all", snapshots=snapshots, trajectories=100, workers=0)
    costs = np.sort(spool.log(tmp_path / "all", 10**6).costs)
    tight = float(costs[len(costs) // 8]) or 1.0
    found = record(TOY, tmp_path / "few", snapshots=snapshots, trajectories=200, cost_cap=tight, workers=0)
    assert found.trajectories.episode_costs.max() <= tight
    assert found.played > 400
    for path in spool.numbered(tmp_path / "few"):  # of the others only what they brought is kept
        arrays, _ = spool.load(path)
        assert (arrays["kept"] == (arrays["cost_sums"] <= tight)).all()
        assert len(arrays["rewards"]) == arrays["lengths"][arrays["kept"]].sum()


def test_behaviours_that_are_not_there_are_refused(tmp_path: Path, snapshots: Path) -> None:
    with pytest.raises(QptError, match=r"no behaviour policies of mine yet; .*`qpt collect learn mine`.*--snapshots"):
        record(Task(name="mine", env_factory=Target), tmp_path / "a")
    with pytest.raises(QptError, match=rf"holds the behaviour policies of {TOY.name}, not of Target"):
        record(TARGET, tmp_path / "a", snapshots=snapshots)
    damaged = tmp_path / "x.safetensors"
    for content in (b"", b"not at all", snapshots.read_bytes()[:-1000]):
        damaged.write_bytes(content)
        with pytest.raises(QptError, match=r"x.safetensors holds no behaviour policies that can be read"):
            record(TOY, tmp_path / "a", snapshots=damaged)
    assert not (tmp_path / "a").exists()


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_an_interrupted_recording_goes_on_to_the_same_result(tmp_path: Path, snapshots: Path) -> None:
    wish: dict[str, Any] = {"snapshots": snapshots, "trajectories": 100, "workers": 0}
    whole = record(TOY, tmp_path / "whole", **wish)

    class Stopped(Exception):
        pass

    kept = 0
    for goal in (20, 90, 110, 180):  # in the first round, and in later ones

        def stop(done: int, _: int, goal: int = goal) -> None:
            if done > goal:
                raise Stopped

        with pytest.raises(Stopped):
            record(TOY, tmp_path / "broken", report=stop, **wish)
        files = len(list(spool.numbered(tmp_path / "broken")))
        assert files > kept
        kept = files
    list(spool.numbered(tmp_path / "broken"))[1].unlink()  # a worker that was killed leaves a gap
    same(record(TOY, tmp_path / "broken", **wish).trajectories, whole.trajectories)
    with pytest.raises(QptError, match="other settings"):
        record(TOY, tmp_path / "broken", **{**wish, "trajectories": 90})


def test_command_killed_and_run_again_gives_the_same_bytes(tmp_path: Path, snapshots: Path) -> None:
    (tmp_path / "tasks.toml").write_text(
        f'[[task]]\nname = "{TOY.name}"\nenv = "mine:make"\nhorizon = 24\ncost_max = {CAP}\n'
    )
    (tmp_path / "mine.py").write_text(
        "import time\nfrom qpt.envs.toy import tradeoff\n\n\n"
        "class Slow(type(tradeoff(0).env())):\n    def reset(self, **kw):\n        time.sleep(0.01)\n"
        "        return super().reset(**kw)\n\n\ndef make():\n    return Slow(tradeoff(0))\n"
    )
    command = [sys.executable, "-m", "qpt", "collect", "record", TOY.name, "--snapshots", str(snapshots)]
    command += ["--trajectories", "100", "--no-picture"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "QPT_TASKS": "tasks.toml"}

    def start(out: str, workers: int) -> subprocess.Popen[bytes]:
        words = [*command, "--out", out, "--workers", str(workers)]
        return subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)

    assert start("whole.hdf5", 2).wait() == 0
    process, parts = start("killed.hdf5", 1), tmp_path / "killed.hdf5.parts"
    deadline = time.monotonic() + 60
    while not parts.exists() or len(list(spool.numbered(parts))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed.hdf5").exists()
    assert start("killed.hdf5", 1).wait() == 0
    assert (tmp_path / "whole.hdf5").read_bytes() == (tmp_path / "killed.hdf5").read_bytes()
    assert not parts.exists()
    info = read(tmp_path / "whole.hdf5").info
    assert info["note"] == "collected with qpt"
    assert "surrogate" not in info
    assert info["command"] == f"qpt collect record {TOY.name} --trajectories 100 --seed 0"
    assert json.loads(info["learning"])["schedules"][0]["steps"] == 8000
    assert info["snapshots_sha256"] == read_snapshots(snapshots).sha256


# -- given policies ----------------------------------------------------------------------------------------------------


def hasty(observations: np.ndarray) -> np.ndarray:
    return np.full((len(observations), 1), 3.0)  # beyond the bounds: recorded as executed, at 1


def test_a_policy_of_ones_own_is_recorded(tmp_path: Path) -> None:
    wish: dict[str, Any] = {"trajectories": 25, "cost_limits": (5.0, 9.0), "workers": 0, "chunk": 10}
    name, told = f"{__name__}:hasty", list[tuple[int, int]]()
    recorded = record_policy(name, TARGET, tmp_path / "p", report=lambda *at: told.append(at), **wish)
    whole = recorded.trajectories
    assert len(whole) == recorded.played == 25
    assert (whole.actions == 1.0).all()
    # it knows no limit: at each of them it would give the same episodes again
    assert [len(spool.load(path)[0]["lengths"]) for path in spool.numbered(tmp_path / "p")] == [10, 10, 5]
    assert len(np.unique(whole.observations[whole.offsets[:-1]], axis=0)) == 25
    assert "cost_limits" not in whole.info
    assert told == [(10, 25), (20, 25), (25, 25)]
    files = list(spool.numbered(tmp_path / "p"))
    times = [path.stat().st_mtime_ns for path in files]
    files[1].unlink()  # as if it had been interrupted
    same(record_policy(name, TARGET, tmp_path / "p", **wish).trajectories, whole)
    assert [path.stat().st_mtime_ns == then for path, then in zip(files, times, strict=True)] == [True, False, True]
    few = record_policy(name, TARGET, tmp_path / "q", trajectories=25, workers=0, cost_cap=20.0).trajectories
    assert len(few) == 25
    with pytest.raises(QptError, match="no recorded episode stays within the cost cap of 19"):
        record_policy(name, TARGET, tmp_path / "r", trajectories=5, workers=0, cost_cap=19.0)


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
    monkeypatch.setattr("qpt.collect.given._policy", lambda _: Obeys())
    wish: dict[str, Any] = {"trajectories": 14, "cost_limits": (5.0, 9.0, 70.0), "workers": 0, "chunk": 4}
    whole = record_policy("x", TARGET, tmp_path / "p", **wish).trajectories
    limits, counts = np.unique((100 * whole.actions[whole.offsets[:-1], 0]).round(), return_counts=True)
    assert dict(zip(limits, counts, strict=True)) == {5: 5, 9: 5, 70: 4}
    assert len(np.unique(whole.observations[whole.offsets[:-1]], axis=0)) == 14
    assert whole.info["cost_limits"] == [5.0, 9.0, 70.0]
    for path in list(spool.numbered(tmp_path / "p"))[1:3]:
        path.unlink()
    same(record_policy("x", TARGET, tmp_path / "p", **wish).trajectories, whole)
    monkeypatch.setattr("qpt.collect.given._policy", lambda _: Obeys(weights="b"))
    list(spool.numbered(tmp_path / "p"))[-1].unlink()
    with pytest.raises(QptError, match="other settings"):  # the checkpoint was trained on meanwhile
        record_policy("x", TARGET, tmp_path / "p", **wish)


def test_a_refused_recording_leaves_nothing_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.collect.given._policy", lambda _: Obeys("trained", 30.0))
    wish: dict[str, Any] = {"trajectories": 4, "workers": 0}
    for wrong, match in (
        ({"cost_limits": (-1.0,)}, "cost limits are finite and not negative"),
        ({"cost_limits": (5.0,)}, "trained for another limit"),
        ({"cost_cap": float("nan")}, "the cost cap must be a number of at least 0, not nan"),
    ):
        with pytest.raises(QptError, match=match):
            record_policy("x", TARGET, tmp_path / "p", **wish, **wrong)
        assert not (tmp_path / "p").exists()
    data = record_policy("x", TARGET, tmp_path / "p", **wish).trajectories
    assert data.info["cost_limits"] == [30.0]  # its own, where none is given
    np.testing.assert_allclose(data.actions, 0.3, atol=1e-6)


def test_a_recording_that_failed_at_once_gives_way(tmp_path: Path, snapshots: Path) -> None:
    broken = Task(name=TOY.name, env_factory=Costless, horizon=20, observation_dim=1, action_dim=1)
    with pytest.raises((QptError, ValueError)):
        record(broken, tmp_path / "p", snapshots=snapshots, trajectories=5, workers=0, cost_cap=CAP)
    assert (tmp_path / "p" / "plan.json").exists()
    assert len(record(TOY, tmp_path / "p", snapshots=snapshots, trajectories=5, workers=0).trajectories) == 5


# -- behaviour policies ------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(snapshots: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package has the toy's behaviour policies, and no other."""
    monkeypatch.setattr("qpt.tasks._registered", {TOY.name: TOY})
    for module in ("qpt.behaviour", "qpt.collect.behaviours", "qpt.cli.collect"):
        monkeypatch.setattr(f"{module}.snapshots_of", lambda task: snapshots if task == TOY.name else None)
    return snapshots


def test_behaviour_policies_do_what_is_known_of_them(installed: Path) -> None:
    table = read_snapshots(installed).table
    for number in (0, len(table) // 2, len(table) - 1):
        for noise, kind in ((1.0, "noisy"), (0.0, "mean_action")):
            policy = qpt.load_policy(f"behaviour:{TOY.name}/{number}", noise=noise)
            known = policy.known[kind]
            found = evaluate(policy, TOY, episodes=100, cost_limits=(10.0,), workers=0)
            for key, values in (("return", found.returns), ("cost", found.costs)):
                error = np.hypot(values.std() / 10, known[f"{key}_std"] / np.sqrt(known["episodes"]))
                assert abs(values.mean() - known[key]) < 4 * error + 1e-9
            assert found.provenance["limit_mode"] == "ignored"
            assert not found.provenance["surrogate_data"]  # it was learned from no data
            assert list(found.checkpoint[:1]) == [f"behaviour:{TOY.name}/{number}"]
    assert named_policy(f"behaviour:{TOY.name}/3", TOY).known == table[3]  # type: ignore[attr-defined]
    policy = qpt.load_policy(f"behaviour:{TOY.name}/3")
    few, many = (evaluate(policy, TOY, episodes=30, cost_limits=(10.0,), workers=0, slots=s) for s in (8, 30))
    np.testing.assert_array_equal(few.returns, many.returns)  # noise of its own for each episode
    assert len(np.unique(few.returns)) > 5


def test_the_package_s_behaviour_policies_are_small_and_whole() -> None:
    files = sorted((Path(qpt.__file__).parent / "collect" / "snapshots").glob("*.safetensors"))
    assert len(files) >= 2
    assert sum(file.stat().st_size for file in files) <= 12_000_000
    for file in files:
        assert file.stat().st_size <= 500_000
        found, task = read_snapshots(file), get_task(file.stem)
        assert found.task == task.name
        assert found.provenance["core_hours"] > 0
        assert found.provenance["versions"]
        policy = qpt.load_policy(f"behaviour:{task.name}/{len(found.table) - 1}")
        assert (policy.observation_dim, policy.action_dim) == (task.env_observation_dim, task.action_dim)
        careful = [part["cost"] <= 10 for row in found.table for part in (row["noisy"], row["mean_action"])]
        assert any(careful)
    rows = manifest.package_manifest()
    assert {file.stem for file in files} <= set(rows)
    assert all(row["trajectories"] == 500 and behaviours(get_task(name)).all for name, row in rows.items())


def test_a_behaviour_policy_that_is_not_there_is_told(installed: Path) -> None:
    last = len(read_snapshots(installed).table) - 1
    for name, match in (
        (f"behaviour:{TOY.name}/{last + 1}", rf"behaviour:{TOY.name}/0 to behaviour:{TOY.name}/{last}; .* is none"),
        (f"behaviour:{TOY.name}", "is none of them"),
        (f"behaviour:{TOY.name}/-1", "is none of them"),
        ("behaviour:BallRun/0", "there are no behaviour policies of BallRun"),
        ("behaviour:BallRum/0", "did you mean 'BallRun'"),
    ):
        with pytest.raises(QptError, match=match):
            qpt.load_policy(name)
    with pytest.raises(QptError, match="noise is a number of at least 0"):
        qpt.load_policy(f"behaviour:{TOY.name}/0", noise=-1.0)
    with pytest.raises(QptError, match="no setting 'candidates'"):
        qpt.load_policy(f"behaviour:{TOY.name}/0", candidates=4)


# -- command -----------------------------------------------------------------------------------------------------------


def test_datasets_of_tasks_go_where_they_are_looked_for(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installed.exists()
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path))
    with pytest.raises(QptError, match=rf"no data of {TOY.name} were collected .*`qpt collect record {TOY.name}`"):
        find(f"collected:{TOY.name}")
    command = ["collect", "record", TOY.name, "--trajectories", "40", "--workers", "0"]
    assert main(command) == 0
    file = tmp_path / "collected" / f"{TOY.name}.hdf5"
    assert find(f"collected:{TOY.name}") == file
    assert file.with_suffix(".png").exists()
    assert "wrote" in capsys.readouterr().out
    (row,) = manifest.read_manifest(file.parent).values()
    data = qpt.load_dataset(f"collected:{TOY.name}")
    assert row["fingerprint"] == data.fingerprint
    assert row["command"] == f"qpt collect record {TOY.name} --trajectories 40 --seed 0"
    assert row["trajectories"] == len(data) == 40
    assert row["return"] == [round(float(x), 3) for x in (data.returns.min(), data.returns.mean(), data.returns.max())]
    careful = data.episode_costs <= 10
    assert row["careful_share"] == pytest.approx(careful.mean(), abs=1e-4)
    assert row["careful_return"] == (round(data.returns[careful].max(), 3) if careful.any() else None)
    assert 0 < row["coverage"] <= 1
    assert row["core_hours"] >= 0 < row["seconds"]
    assert row["learning_core_hours"] >= 0
    written = file.stat().st_mtime_ns
    assert main(command) == 0  # it is there already
    assert "is there already" in capsys.readouterr().err
    assert main([*command, "--seed", "1"]) == 1  # but not that of another command
    assert "--overwrite" in capsys.readouterr().err
    assert file.stat().st_mtime_ns == written
    for known, said in ((row, "are those of the manifest"), ({**row, "fingerprint": "0"}, "are not those of the mani")):
        monkeypatch.setattr(manifest, "package_manifest", lambda known=known: {TOY.name: known})
        assert main([*command, "--overwrite"]) == 0
        assert said in capsys.readouterr().out
    assert main([*command, "--seed", "1", "--overwrite"]) == 0
    assert "of the manifest" not in capsys.readouterr().out  # another command
    assert qpt.load_dataset(f"collected:{TOY.name}").fingerprint != data.fingerprint


def test_all_tasks_with_behaviours_are_recorded_by_one_command(
    snapshots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {name: Task(name=name, env_factory=TOY.env_factory, horizon=24) for name in ("A", "B", "C", "D")}
    known["D"] = Task(name="D")  # has no simulator
    files: dict[str, Path] = {}
    for name in ("A", "C", "D"):  # as if it were that task's
        raw = snapshots.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header["__metadata__"]["task"] = name
        text = json.dumps(header).encode()
        files[name] = tmp_path / f"{name}.safetensors"
        files[name].write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    monkeypatch.setattr("qpt.cli.collect.dsrl_tasks", lambda: known)
    for module in ("qpt.collect.behaviours", "qpt.cli.collect"):
        monkeypatch.setattr(f"{module}.snapshots_of", files.get)
    words = ["collect", "record", "--all", "--trajectories", "20", "--workers", "0", "--no-picture", "--npz"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "A.npz").write_text("mine")
    assert main([*words, "--out", str(tmp_path / "out")]) == 1  # one that fails holds up no other
    said = capsys.readouterr().err
    assert "left out, no behaviour policies yet: B" in said
    assert "left out, no simulator installed: D" in said
    assert "task 2 of 2" in said
    assert "1 of 2 tasks failed: A" in said
    (tmp_path / "out" / "A.npz").unlink()
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "C.npz is there already" in capsys.readouterr().err
    assert set(manifest.read_manifest(tmp_path / "out")) == {"A", "C"}
    assert len(read(tmp_path / "out" / "A.npz")) == 20


def test_full_means_as_many_as_were_published(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del installed
    task = Task(name=TOY.name, env_factory=TOY.env_factory, horizon=24, trajectories=33)
    monkeypatch.setattr("qpt.tasks._registered", {TOY.name: task})
    out = tmp_path / "x.hdf5"
    assert main(["collect", "record", TOY.name, "--full", "--out", str(out), "--workers", "0", "--no-picture"]) == 0
    assert len(read(out)) == 33
    compact = tmp_path / "y.hdf5"
    words = ["collect", "record", TOY.name, "--policy", f"behaviour:{TOY.name}/1", "--trajectories", "9", "--compact"]
    assert main([*words, "--out", str(compact), "--workers", "0", "--no-picture", "--keep-episodes"]) == 0
    capsys.readouterr()
    info = read(compact).info
    assert info["layout"].startswith("compact")
    assert info["policy"] == f"behaviour:{TOY.name}/1"
    assert info["command"].endswith(f"--policy behaviour:{TOY.name}/1 --trajectories 9 --seed 0")
    assert (tmp_path / "y.hdf5.parts").exists()
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "give either tasks"),
        (["BallRun", "--all"], "give either tasks"),
        (["--env", "a:b", "BallRun"], "give either tasks"),
        (["BallRum"], "did you mean 'BallRun'"),
        (["BallRun", "--horizon", "5"], "--horizon is for --env"),
        (["BallRun", "--limits", "5"], "--limits are those of --policy"),
        (["BallRun", "--full", "--trajectories", "5"], "exclude each other"),
        (["BallRun", "CarRun", "--out", "x.hdf5"], "is one file, but there are several tasks"),
        (["BallRun", "CarRun", "--policy", "a:b"], "are those of one task"),
        (["BallRun", "--policy", "a:b"], "say with --out which file"),
        (["BallRun", "--policy", "a:b", "--snapshots", "x"], "leave --snapshots out"),
        (["BallRun", "--out", "x.txt"], ".hdf5 or .npz"),
        (["BallRun", "--out", "x.hdf5", "--workers", "-1"], "there cannot be -1 workers"),
        (["BallRun", "--out", "x.hdf5", "--seed", "-1"], "a seed is a whole number from 0 to 2**63 - 1"),
        (["BallRun", "--out", "x.hdf5", "--trajectories", "0"], "at least one trajectory"),
        (["BallRun", "--out", "x.hdf5", "--cost-cap", "-1", "--policy", "math:cos"], "a number of at least 0"),
        (["BallRun", "--out", "x.hdf5", "--policy", "nowhere"], "folder of a checkpoint or module:function"),
        (["BallRun", "--out", "x.hdf5", "--policy", "math:pi"], "the policy 'math:pi' is a float; give a function"),
        (["BallRun", "--out", "x.hdf5", "--snapshots", "missing"], "holds no behaviour policies"),
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
    assert main(["collect", "record", *arguments]) == 1
    told = capsys.readouterr().err
    assert match in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "x.hdf5").exists()


def test_what_exists_is_not_overwritten(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collect", "record", TOY.name, "--trajectories", "5", "--workers", "0", "--out"]
    (tmp_path / "old.hdf5").write_text("mine")
    assert main([*words, str(tmp_path / "old.hdf5")]) == 1
    assert "--overwrite" in capsys.readouterr().err
    (tmp_path / "new.png").write_text("mine")
    assert main([*words, str(tmp_path / "new.hdf5")]) == 1
    assert "new.png exists; give another --out, --no-picture, or --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "new.hdf5.parts").exists()
    with pytest.raises(QptError, match="no collection of ours"):
        record(TOY, tmp_path, snapshots=installed, workers=0)
    record(TOY, tmp_path / "parts", snapshots=installed, trajectories=5, workers=0)
    with (tmp_path / "parts" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(QptError, match="another process"):
            record(TOY, tmp_path / "parts", snapshots=installed, trajectories=5, workers=0)
    assert (tmp_path / "old.hdf5").read_text() == "mine"
