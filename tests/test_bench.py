"""Benches: what a job is called, what its folder holds, and that no death of a worker loses or repeats anything."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import qpt.tasks
from faulty_envs import once, walk_task
from helpers import tiny_data
from qpt import stats
from qpt.algorithms.base import register_algorithm
from qpt.algorithms.bc import BC, BCConfig
from qpt.cli import main
from qpt.cli.grid import read_settings
from qpt.data import write
from qpt.envs.toy import ToyEnv, tradeoff
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.experiments import executors
from qpt.experiments.bench import data_files, run_jobs
from qpt.experiments.executors import local_executor
from qpt.experiments.jobs import LAST, ORACLE, SELECTED, Job, events, grid, is_done, limit_mode, run_job
from qpt.experiments.live import board
from qpt.experiments.results import collect_results, summarize
from qpt.experiments.scores import score
from qpt.policy import load_policy
from qpt.tasks import register_task
from qpt.training import TrainConfig, train

TINY = {"steps": 20, "batch_size": 8, "width": 8, "checkpoint_every": 5, "log_every": 5, "device": "cpu"}
IN_PROCESS = local_executor(0)


@dataclass(frozen=True)
class MortalConfig(BCConfig):
    grave: str = ""
    """The process is killed at step 12, unless this file tells that it was before; "always": every time."""


class Mortal(BC):
    """A method that takes its process down."""

    def update(self, batch: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        grave = self.config.grave  # type: ignore[attr-defined]
        if grave == "always" or (grave and self.seen == 12 and not Path(grave).exists()):
            Path(grave).touch() if grave != "always" else None
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(batch)


def toy_env() -> ToyEnv:
    """For the task file of the command-line tests."""
    return tradeoff(0).env()


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks and methods of the test's own."""
    monkeypatch.setattr("qpt.tasks._registered", {})
    monkeypatch.setattr("qpt.algorithms.base._registered", {})
    register_algorithm("mortal", Mortal, MortalConfig)


@pytest.fixture
def toy(tmp_path: Path) -> dict[str, str]:
    """A registered toy task, and its data file."""
    task = register_task(tradeoff(0).task("BenchToy"))
    return {task.name: str(write(tradeoff(0).dataset(40), tmp_path / "toy.hdf5"))}


def jobs_of(toy: dict[str, str], *algorithms: str, **changes: Any) -> list[Job]:
    settings: dict[str, Any] = {"limits": (6.0,), "overrides": TINY, "episodes": 4, "data": toy} | changes
    return grid(list(toy), algorithms, **settings)


def names(folder: Path) -> list[str]:
    return [row["event"] for row in events(folder)]


# -- what a job is called ----------------------------------------------------------------------------------------------


def test_keys_are_readable_and_stable() -> None:
    job = Job(task="BallCircle", algorithm="qpt", seed=3)
    assert job.key == "BallCircle/qpt/default/seed3"
    trained = Job(task="BallCircle", algorithm="bc-safe", preset="paper", train_limit=10, eval_limits=(10,))
    assert trained.key == "BallCircle/bc-safe/paper/limit10/seed0"
    changed = replace(job, overrides={"steps": 5, "lr": 1e-3})
    assert changed.key == "BallCircle/qpt/default-e34cfb97/seed3"  # pinned: finished folders must be found again
    assert replace(job, overrides={"lr": 1e-3, "steps": 5}).key == changed.key
    assert Job.from_json(json.loads(json.dumps(changed.to_json()))) == changed


def test_the_key_holds_what_changes_the_run_and_nothing_else() -> None:
    job = Job(task="BallCircle", algorithm="qpt", overrides={"steps": 5}, eval_every=2)
    same = [
        replace(job, label="another name"),
        replace(job, overrides={"steps": 5, "device": "cuda", "workers": 3, "checkpoint_every": 7}),
        replace(job, data="/elsewhere/SafetyBallCircle-v0-80-886.hdf5"),  # the task's own file, wherever it lies
    ]
    other = [
        replace(job, seed=1),
        replace(job, overrides={"steps": 6}),
        replace(job, preset="paper"),
        replace(job, data="embedded:ballcircle"),
        replace(job, eval_every=1),
        replace(job, episodes=3),  # these choose the checkpoint, so they change the run
        replace(job, eval_limits=(1.0,)),
    ]
    assert {j.key for j in same} == {job.key}
    assert len({j.key for j in [job, *other]}) == len(other) + 1
    last_only = replace(job, eval_every=0)
    assert replace(last_only, episodes=3).key == last_only.key  # here they are only how it is looked at


def test_a_method_trained_for_a_limit_gets_a_job_for_each() -> None:
    jobs = grid(["BallCircle", "CarRun"], ["qpt", "bc-safe", "fisor"], seeds=(0, 1), limits=(10, 20))
    by_method = {a: [j for j in jobs if j.algorithm == a] for a in ("qpt", "bc-safe", "fisor")}
    assert [len(v) for v in by_method.values()] == [4, 8, 4]
    assert {j.eval_limits for j in by_method["qpt"]} == {(10.0, 20.0)}
    assert {(j.train_limit, j.eval_limits) for j in by_method["bc-safe"]} == {(10.0, (10.0,)), (20.0, (20.0,))}
    assert len({j.key for j in jobs}) == len(jobs)
    assert limit_mode("bc-safe", overrides={"mode": "all"}) == "ignored"  # without its filter it knows no limit
    assert [j.eval_limits for j in grid(["PointButton1"], ["cdt"])] == [(20.0, 40.0, 80.0)]  # the task's own
    steps = {"steps": 500, "cdt.steps": 90}
    assert [j.eval_every for j in grid(["CarRun"], ["qpt", "cdt"], overrides=steps, eval_every=None)] == [50, 9]


def test_settings_are_read_by_the_types_of_the_fields() -> None:
    given = read_settings(
        ["batch_size=64", "qpt.candidates=7", "lr=1e-3", "mode=all", "checkpoint_every=9"], ["qpt", "bc-safe"]
    )
    assert given == {
        "qpt.batch_size": 64,
        "bc-safe.batch_size": 64,
        "qpt.candidates": 7,
        "qpt.lr": 1e-3,
        "bc-safe.lr": 1e-3,
        "bc-safe.mode": "all",  # only the method that has it
        "checkpoint_every": 9,
    }
    one, same = (read_settings([f"qpt.eta_cost={text}"], ["qpt"]) for text in ("1", "1.0"))
    assert repr(one) == repr(same) == "{'qpt.eta_cost': 1.0}"  # one setting, and one run
    for wrong in ("nonsense=1", "cdt.lr=1", "batch_size=many", "batch_size", "seed=3", "bc-safe.mode=other"):
        with pytest.raises(QptError, match=wrong.replace(".", r"\.")):
            read_settings([wrong], ["qpt", "bc-safe"])
    with pytest.raises(QptError, match=r"--set cost_limit=20: .* give it with --limits"):  # which would win
        read_settings(["cost_limit=20"], ["bc-safe"])
    with pytest.raises(QptError, match="it is 'min', 'max' or 'mean'"):
        read_settings(["cost_reduction=median"], ["qpt"])


# -- folders -----------------------------------------------------------------------------------------------------------


def test_the_three_rules_say_what_they_mean(toy: dict[str, str], tmp_path: Path) -> None:
    (job,) = jobs_of(toy, "bc-safe", eval_every=4, overrides={**TINY, "steps": 22})
    bench = run_jobs([job], tmp_path / "root", IN_PROCESS, show="none")
    assert not bench.failures
    folder, rows = tmp_path / "root" / job.key, bench.results.episodes
    looks = [json.loads(line)["limits"][0] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert len(looks) == 6
    safe = [x["return"] for x in looks if x["cost"] <= 6.0]
    best = max(safe) if safe else min(looks, key=lambda x: x["cost"])["return"]
    oracle, last, selected = (rows.select(rows.checkpoint == rule) for rule in (ORACLE, LAST, SELECTED))
    assert oracle.returns.mean() == pytest.approx(best, abs=1e-9)  # the very episodes it was chosen by
    for part, which in ((last, "last"), (selected, "best")):
        again = evaluate(load_policy(folder, which=which), "BenchToy", episodes=4, cost_limits=(6.0,), seed=1_000_000)
        np.testing.assert_array_equal(part.returns, again.returns)
        np.testing.assert_array_equal(part.costs, again.costs)
    assert set(oracle.seed.tolist()).isdisjoint(selected.seed.tolist())


def test_what_is_done_is_not_done_again(toy: dict[str, str], tmp_path: Path) -> None:
    jobs, root = jobs_of(toy, "bc-safe", seeds=(0, 1)), tmp_path / "root"
    first = run_jobs(jobs, root, IN_PROCESS, show="none")
    second = run_jobs(jobs, root, IN_PROCESS, show="none")
    assert (first.skipped, second.skipped) == (0, 2)
    assert all(names(root / job.key) == ["start", "trained", "done"] for job in jobs)
    assert repr(first.results.columns()) == repr(second.results.columns())  # repr: NaN is NaN

    weights = {p: p.read_bytes() for p in root.rglob("model.safetensors")}
    more = [replace(job, episodes=6) for job in jobs]  # only the evaluation is new
    for path in toy.values():
        Path(path).unlink()  # which needs no data
    (tmp_path / "toy.hdf5").write_bytes(b"")
    third = run_jobs(more, root, IN_PROCESS, show="none")
    assert not third.failures
    assert len(third.results) == 12
    assert [row["step"] for row in events(root / jobs[0].key) if row["event"] == "start"] == [0, 20]
    assert weights == {p: p.read_bytes() for p in root.rglob("model.safetensors")}


def test_other_data_under_the_same_name_are_noticed(toy: dict[str, str], tmp_path: Path) -> None:
    jobs, root = jobs_of(toy, "bc-safe"), tmp_path / "root"
    run_jobs(jobs, root, IN_PROCESS, show="none")
    write(tradeoff(0).dataset(30, 5), Path(next(iter(toy.values()))))
    with pytest.raises(QptError, match="was trained on other data"):
        run_jobs(jobs, root, IN_PROCESS, show="none")
    Path(next(iter(toy.values()))).write_bytes(b"")  # what is done needs no data
    assert run_jobs(jobs, root, IN_PROCESS, show="none").skipped == 1


def test_what_is_named_twice_counts_once(toy: dict[str, str], tmp_path: Path) -> None:
    once = jobs_of(toy, "bc-safe", "cdt", seeds=(0, 1), limits=(6.0, 12.0))
    assert jobs_of(toy, "bc-safe", "cdt", "cdt", seeds=(0, 1, 1, 0), limits=(6.0, 12.0, 6.0)) == once
    jobs = jobs_of(toy, "bc-safe")
    found = run_jobs(jobs + jobs, tmp_path / "root", IN_PROCESS, show="none")
    assert len(found.results) == 4


def test_data_of_one_name_are_not_taken_for_each_other(toy: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tradeoff(0).dataset(30, 5), tmp_path / "other" / "toy.hdf5")
    same, other = ({"BenchToy": str(tmp_path / path)} for path in ("other/../toy.hdf5", "other/toy.hdf5"))
    with pytest.raises(QptError, match=r"called alike, and one of them would not be run .*; rename one"):
        run_jobs(jobs_of(toy, "bc-safe") + jobs_of(other, "bc-safe"), tmp_path / "root", IN_PROCESS, show="none")
    found = run_jobs(jobs_of(toy, "bc-safe") + jobs_of(same, "bc-safe"), tmp_path / "root", IN_PROCESS, show="none")
    assert len(found.results) == 4


def test_a_task_that_cannot_travel_runs_in_this_process(toy: dict[str, str], tmp_path: Path) -> None:
    register_task(replace(tradeoff(0).task("Mine"), env_factory=lambda: tradeoff(0).env()))
    jobs = jobs_of({"Mine": next(iter(toy.values()))}, "bc-safe")
    assert not run_jobs(jobs, tmp_path / "root", IN_PROCESS, show="none").failures


def test_results_of_two_machines_merge_by_copying(toy: dict[str, str], tmp_path: Path) -> None:
    jobs = jobs_of(toy, "bc-safe", seeds=(0, 1))
    for machine, job in zip("ab", jobs, strict=True):
        assert len(run_jobs([job], tmp_path / machine, IN_PROCESS, show="none").results) == 4
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "b", tmp_path / "a" / "again")  # by mistake: the same run is not counted twice
    results = collect_results(tmp_path / "a")
    assert sorted(set(results.train_seed.tolist())) == [0, 1]
    assert len(results) == 8
    assert run_jobs(jobs, tmp_path / "a", IN_PROCESS, show="none").skipped == 2
    for name in ("table.csv", "table.parquet"):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        loaded = Episodes.load(results.save(tmp_path / name))
        np.testing.assert_array_equal(loaded.returns, results.episodes.returns)
        assert len(loaded.provenance["parts"]) == 2  # whose episodes they are is not lost
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["job"], row["label"], row["train_seed"]) for row in rows} == {
        (job.key, "bc-safe", str(job.seed)) for job in jobs
    }


def test_results_are_read_where_the_task_is_not_known(toy: dict[str, str], tmp_path: Path) -> None:
    (job,) = jobs_of(toy, "bc-safe")
    run_jobs([job], tmp_path, IN_PROCESS, show="none")
    key = job.key
    qpt.tasks._registered.clear()
    results = collect_results(tmp_path)
    assert set(results.job.tolist()) == {key}
    assert len(summarize(results)) == 1


def test_the_live_board_tells_state_and_progress(toy: dict[str, str], tmp_path: Path) -> None:
    going, waiting, broken = jobs_of(toy, "bc-safe", seeds=(0, 1, 2))
    folder = tmp_path / going.key
    folder.mkdir(parents=True)
    rows = [{"step": 5, "steps_per_second": 1.0}, {"step": 10, "steps_per_second": 0.125}]
    cut_off = '{"step": 15, "steps_per_s'  # a row that is being written
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + cut_off)
    looked = {"step": 10, "limits": [{"cost_limit": 6.0, "return": 1.25, "cost": 3.5}]}
    (folder / "evaluations.jsonl").write_text(json.dumps(looked) + "\n")
    with board([going, waiting, broken], tmp_path, skipped=4, show="none") as (state, report):
        report(going, "running", "")
        report(broken, "running", "")
        report(broken, "failed", "a reason")
        console = Console(width=160)
        with console.capture() as seen:
            console.print(state.table())
    split = (line.split(maxsplit=1) for line in seen.get().splitlines() if "/" in line)
    lines = {key: " ".join(rest.split()) for key, rest in split}
    assert lines[going.key] == "running 10 / 20 0.1 1.2 3.5 / 6 1:20"  # 10 steps at 0.125 a second are left
    assert lines[waiting.key] == "waiting"
    assert lines[broken.key].startswith("failed")
    assert "1 running · 1 waiting · 1 failed · 4 done before" in seen.get()
    assert state.failures == {broken.key: "a reason"}
    assert state.line(broken, "failed", "a reason") == f"[1/3] {broken.key} FAILED: a reason"


def test_two_labels_of_one_run_train_once(toy: dict[str, str], tmp_path: Path) -> None:
    (job,) = jobs_of(toy, "bc-safe")
    bench = run_jobs([replace(job, label="A"), replace(job, label="B")], tmp_path, IN_PROCESS, show="none")
    assert names(tmp_path / job.key).count("start") == 1
    assert sorted(set(bench.results.label.tolist())) == ["A", "B"]
    with pytest.raises(QptError, match="two kinds of evaluation"):
        run_jobs([job, replace(job, episodes=9)], tmp_path, IN_PROCESS, show="none")


def test_a_folder_in_use_is_left_alone(toy: dict[str, str], tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (job,) = jobs_of(toy, "bc-safe")
    (tmp_path / job.key).mkdir(parents=True)
    with (tmp_path / job.key / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(QptError, match="another process is working"):
            run_job(job, tmp_path)
    assert not is_done(job, tmp_path)


def test_missing_data_are_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("QPT_DATA_DIR", "DSRL_DATASET_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    flags = ["--tasks", "BallCircle", "CarRun", "--algorithms", "bc-safe", "--out", str(tmp_path / "out")]
    assert main(["bench", *flags]) == 1
    said = capsys.readouterr().err
    assert "qpt data download BallCircle CarRun" in said
    assert "`qpt collect record BallCircle CarRun` and use --data-source collected" in said
    assert main(["bench", *flags, "--data-source", "collected"]) == 1
    assert "no data of BallCircle were collected" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_say_whose_data_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: dict[str, str]
) -> None:
    (name,) = toy
    task = register_task(replace(qpt.tasks.get_task(name), data_file="BenchToy-v0-80-40.hdf5"))
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path))
    write(tradeoff(0).dataset(40), tmp_path / str(task.data_file))

    def collect(seed: int) -> None:
        data = tradeoff(0).dataset(40, seed=seed)
        write(replace(data, info={"surrogate": True}), tmp_path / "collected" / f"{name}.hdf5")

    collect(1)
    published = jobs_of(toy, "bc-safe", data=data_files([name], {}, None))
    collected = jobs_of(toy, "bc-safe", data=data_files([name], {}, None, "collected"))
    assert not {job.key for job in published} & {job.key for job in collected}
    found = run_jobs([*published, *collected], tmp_path / "root", IN_PROCESS, show="none")
    assert found.results.notes == (
        "The runs of BenchToy were trained on different data.",
        "Trained on surrogate data, not on the published ones: BenchToy.",
        "Trained on the published data: BenchToy.",
    )
    collect(2)  # recorded anew meanwhile
    with pytest.raises(QptError, match="was trained on other data than collected:BenchToy"):
        run_jobs([*published, *collected], tmp_path / "root", IN_PROCESS, show="none")
    config = TrainConfig(
        task=name, data_source="collected", out=tmp_path / "run", config=BCConfig(), algorithm="bc-safe"
    )
    run = train(replace(config, config=replace(BCConfig(), steps=2, width=8), device="cpu", progress=False))
    facts = json.loads((run.folder / "run.json").read_text())["data"]
    assert facts["source"].endswith(f"collected/{name}.hdf5")
    assert facts["surrogate"]
    with pytest.raises(QptError, match="leave out --data-source, or --data"):
        train(replace(config, data=Path(toy[name])))
    with pytest.raises(QptError, match="leave it or --data-source collected out"):
        data_files([name], {}, tmp_path, "collected")


# -- the summary -------------------------------------------------------------------------------------------------------


def test_the_summary_against_plain_counting(toy: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"seeds": (0, 1), "limits": (6.0, 12.0)}
    everything = {**TINY, "steps": 3, "mode": "all"}
    jobs = jobs_of(toy, "bc-safe", **settings) + jobs_of(toy, "bc-safe", overrides=everything, label="all", **settings)
    assert len(jobs) == 4 + 2
    results = run_jobs(jobs, tmp_path, IN_PROCESS, show="none").results
    lines = summarize(results)
    assert [(x["label"], x["cost_limit"], x["rule"], x["seeds"], x["episodes"]) for x in lines] == [
        (label, limit, LAST, 2, 8) for label in ("bc-safe", "all") for limit in (6.0, 12.0)
    ]
    assert results.save(tmp_path / "table.csv").is_file()
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for line in lines:
        mine = [r for r in rows if r["label"] == line["label"] and float(r["cost_limit"]) == line["cost_limit"]]
        costs = [float(r["cost"]) for r in mine]
        within = sum(c <= line["cost_limit"] for c in costs)
        assert line["within_limit"] == within / 8
        assert line["within_limit_interval"] == stats.wilson_interval(within, 8)
        by_seed = [[float(r["normalized_return"]) for r in mine if r["train_seed"] == s] for s in "01"]
        assert line["normalized_return"] == pytest.approx(np.mean([np.mean(x) for x in by_seed]))
        low, high = line["cost_interval"]
        assert low <= np.mean(costs) <= high
        expected = "safe" if high <= line["cost_limit"] else "unsafe" if low > line["cost_limit"] else "unclear"
        assert line["verdict"] == expected


@pytest.mark.parametrize("limit", [0.0, 8.0])
def test_normalised_scores_are_those_of_a_bootstrap_of_their_own(limit: float) -> None:
    rng = np.random.default_rng(0)
    returns, costs = rng.normal(50, 20, 12), rng.integers(0, 12, 12).astype(float)
    seeds, task = np.repeat([0, 1, 2], 4), replace(tradeoff(0).task("X"), reward_min=-10.0, reward_max=90.0)
    scaled = np.array([task.normalized_return(x) for x in returns])
    cost = np.array([(c + 1) / 1 if limit == 0 else c / limit for c in costs])
    found = score(returns, costs, scaled, seeds, limit)
    for name, values in (("normalized_return", scaled), ("normalized_cost", cost)):
        means = [values[seeds == s].mean() for s in range(3)]
        assert found[name] == pytest.approx(np.mean(means))
        assert found[f"{name}_std"] == pytest.approx(np.std(means, ddof=1))
        own = stats.bootstrap_mean_interval(values, groups=seeds, samples=2_000)
        assert found[f"{name}_interval"] == pytest.approx(own)


def test_other_settings_are_another_method_and_half_a_copy_is_told(toy: dict[str, str], tmp_path: Path) -> None:
    jobs = jobs_of(toy, "bc-safe") + jobs_of(toy, "bc-safe", overrides={**TINY, "steps": 7})
    run_jobs(jobs, tmp_path, IN_PROCESS, show="none")
    results = collect_results(tmp_path)
    variants = {job.key.split("/")[2] for job in jobs}
    assert set(results.label.tolist()) == {f"bc-safe · {variant}" for variant in variants}
    assert [line["seeds"] for line in summarize(results)] == [1, 1]  # not one method with two seeds

    (tmp_path / jobs[0].key / "job.json").write_text('{"task": "Ben')  # a copy that was cut short
    results = collect_results(tmp_path)
    assert set(results.label.tolist()) == {"bc-safe"}
    assert f"{tmp_path / jobs[0].key} is left out" in results.notes[0]


def test_the_command_writes_a_summary_that_any_reader_takes(
    toy: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_jobs(jobs_of(toy, "bc-safe", episodes=2), tmp_path / "out", IN_PROCESS, show="none")
    assert main(["bench", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "unclear" in told  # two episodes have no interval
    assert "1 training seed say nothing about the next" in told
    text = (tmp_path / "out" / "summary.json").read_text()
    (line,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (line["fallback_share"], line["cost_interval"]) == (None, [None, None])
    assert main(["bench", "--out", str(tmp_path / "nothing")]) == 1
    assert main(["bench", "--out", str(tmp_path), "--tasks", "BenchToy", "--seeds"]) == 1
    assert "at least one of --seeds" in capsys.readouterr().err


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_dead_worker_is_replaced_and_one_failure_stops_nothing(toy: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    (killed,) = jobs_of(toy, "mortal", overrides={**TINY, "grave": str(tmp_path / "grave")})
    (fails,) = jobs_of(toy, "bc-safe", overrides={**TINY, "lr": 1e30})
    bench = run_jobs([killed, fails], root, local_executor(2), show="none")
    assert list(bench.failures) == [fails.key]
    assert len(bench.incidents) == 1
    assert "SIGKILL" in bench.incidents[0]
    assert names(root / killed.key) == ["start", "start", "trained", "done"]
    assert [r["step"] for r in events(root / killed.key)[:2]] == [0, 10]  # it went on from its last checkpoint
    assert names(root / fails.key) == ["start", "failed"]  # what cannot be mended by trying is not tried again

    whole = replace(killed, overrides={**TINY, "grave": ""})  # the same run without a death
    reference = run_jobs([whole], root, IN_PROCESS, show="none").results
    np.testing.assert_array_equal(bench.results.episodes.returns, reference.episodes.returns)


def test_an_interruption_during_an_evaluation_keeps_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_task(walk_task(partial(once, "hang", str(tmp_path))))
    data = {"Walk": str(write(tiny_data(), tmp_path / "walk.hdf5"))}
    settings = {**TINY, "checkpoint_every": 1000, "workers": 0, "mode": "all"}
    (job,) = jobs_of(data, "bc-safe", eval_every=4, overrides=settings)

    def sleep(seconds: float) -> None:
        if (tmp_path / "done").exists():  # the evaluation has begun, and hangs
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(executors, "GRACE", 6.0)
    monkeypatch.setattr(executors, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], tmp_path / "root", local_executor(1), show="none")
    folder = tmp_path / "root" / job.key
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000004"]
    assert names(folder) == ["start", "interrupted"]


def test_a_worker_whose_parent_is_gone_asks_itself_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    line, lifeline = os.pipe()
    os.close(lifeline)
    done: list[Any] = []
    monkeypatch.setattr(executors.os, "kill", lambda _, number: done.append(number))
    monkeypatch.setattr(executors, "time", SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(executors.os, "_exit", lambda _: done.append("exit"))
    executors._leave_with_parent(line)
    os.close(line)
    half = executors.GRACE / 2
    assert done == [signal.SIGTERM, half, signal.SIGTERM, half, "exit"]


@pytest.mark.slow
def test_a_job_that_always_kills_its_worker_is_given_up(toy: dict[str, str], tmp_path: Path) -> None:
    (job,) = jobs_of(toy, "mortal", overrides={**TINY, "grave": "always"})
    bench = run_jobs([job], tmp_path, local_executor(1, attempts=2), show="none")
    assert "died 2 times (SIGKILL)" in bench.failures[job.key]
    assert names(tmp_path / job.key) == ["start", "start"]


# -- the whole command -------------------------------------------------------------------------------------------------

TASK_FILE = """
[[task]]
name = "CliToy"
env = "test_bench:toy_env"
observation_dim = 4
action_dim = 1
horizon = 24
reward_min = 0.0
reward_max = 30.0
"""


def command(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    (tmp_path / "tasks.toml").write_text(TASK_FILE, encoding="utf-8")
    data = tmp_path / "toy.hdf5"
    if not data.exists():
        write(tradeoff(0).dataset(40), data)
    words = [sys.executable, "-c", "import sys; from qpt.cli import main; sys.exit(main())", "bench"]
    files = [f"CliToy={data}", *(["BallCircle=embedded:ballcircle"] if "BallCircle" in flags else [])]
    return subprocess.Popen(
        [*words, "--data", *files, "--out", str(tmp_path / "root"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "QPT_TASKS": str(tmp_path / "tasks.toml"),
            "PYTHONPATH": str(Path(__file__).parent),
        },
    )


def first_progress(root: Path, process: subprocess.Popen[str]) -> Path:
    """Waits for a run that has a checkpoint and is not done; returns its folder."""
    while process.poll() is None:
        for path in root.rglob("step-*"):
            if not path.name.startswith(".") and not (path.parents[1] / "done.json").exists():
                return path.parents[1]
        time.sleep(0.01)
    raise AssertionError("".join(process.communicate()))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_tasks_three_methods_two_seeds_and_a_killed_worker(tmp_path: Path) -> None:
    flags = "--tasks CliToy BallCircle --algorithms qpt cdt bc-safe --seeds 0 1 --limits 10 40 --episodes 3 --steps 60"
    small = "--set batch_size=8 candidates=4 qpt.width=16 cdt.width=16 layers=1 heads=2 context=3"
    looks = (
        "checkpoint_every=10 log_every=5 --eval-every 30 --workers 2 --device cpu"  # (the first two belong to --set)
    )
    process = command(tmp_path, *flags.split(), *small.split(), *looks.split())
    root = tmp_path / "root"
    folder = first_progress(root, process)
    os.kill(events(folder)[-1]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, out + err
    assert "its worker died (SIGKILL)" in err
    found = sorted(p.parent for p in root.rglob("done.json"))
    assert len(found) == 2 * 2 * (2 + 2)  # two limits of bc-safe are two runs
    for run in found:
        expected = ["start", "start", "trained", "done"] if run == folder else ["start", "trained", "done"]
        assert names(run) == expected, run
    second = [row["step"] for row in events(folder) if row["event"] == "start"][1]
    assert second > 0  # nothing that was saved is trained again
    table = collect_results(root)
    assert len(table) == 2 * 2 * 3 * 2 * 3 * 3  # tasks, seeds, methods, limits, episodes, rules
    before = (root / "table.csv").read_bytes()
    again = command(tmp_path, *flags.split(), *small.split(), *looks.split())
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, out + err
    assert "began" not in err
    assert (root / "table.csv").read_bytes() == before
    for word in ("CliToy", "BallCircle", "oracle", "selected", "surrogate data"):
        assert word in out


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_no_orphans_and_can_be_continued(tmp_path: Path, how: signal.Signals) -> None:
    flags = "--tasks CliToy --algorithms bc-safe --seeds 0 --limits 10 --episodes 2 --eval-every 0 --workers 1"
    small = "--set checkpoint_every=50 log_every=50 --device cpu --steps"
    process = command(tmp_path, *flags.split(), *small.split(), "100000")
    folder = first_progress(tmp_path / "root", process)
    process.send_signal(how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), out + err
    worker = events(folder)[0]["pid"]
    for _ in range(1000):
        if not alive(worker):
            break
        time.sleep(0.05)
    assert not alive(worker)
    assert names(folder) == ["start", "interrupted"]  # it had the time to save
    saved = events(folder)[1]["step"]
    assert saved > 0

    job = Job.from_json(json.loads((folder / "job.json").read_text()))
    register_task(replace(tradeoff(0).task("CliToy"), reward_max=30.0))
    assert job.key == str(folder.relative_to(tmp_path / "root"))
    shorter = replace(job, overrides={**job.overrides, "steps": saved})
    shutil.copytree(folder, tmp_path / "other" / shorter.key)
    assert not run_jobs([shorter], tmp_path / "other", IN_PROCESS, show="none").failures
    assert names(tmp_path / "other" / shorter.key)[-3:] == ["start", "trained", "done"]
