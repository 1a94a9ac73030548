"""Benches on a real Ray cluster of this machine, with a worker killed in the middle."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qpt.cli import main
from qpt.data import write
from qpt.envs.toy import tradeoff
from qpt.errors import QptError
from qpt.experiments.bench import run_jobs
from qpt.experiments.executors import TOKEN, elsewhere, local_executor, payload, ray_executor, work
from qpt.experiments.jobs import Job, events, grid
from qpt.tasks import register_task

TINY = {"steps": 3000, "batch_size": 8, "width": 8, "checkpoint_every": 100, "log_every": 50, "device": "cpu"}


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    monkeypatch.setattr("qpt.tasks._registered", {})
    task = register_task(tradeoff(0).task("BenchToy"))
    data = {task.name: str(write(tradeoff(0).dataset(40), tmp_path / "toy.hdf5"))}
    return grid(["BenchToy"], ["bc-safe"], seeds=(0, 1, 2), limits=(6.0,), data=data, overrides=TINY, episodes=4)


def names(folder: Path) -> list[str]:
    return [row["event"] for row in events(folder)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_of_the_cluster_loses_nothing(jobs: list[Job], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'qpt[ray]'")
    root, victims = tmp_path / "root", list[Path]()

    def kill_one() -> None:
        while not victims:
            time.sleep(0.005)
            for job in jobs:
                folder = root / job.key
                saved = [p for p in folder.glob("checkpoints/step-*") if not p.name.startswith(".")]
                if saved and "trained" not in names(folder):
                    os.kill(events(folder)[-1]["pid"], signal.SIGKILL)
                    victims.append(folder)
                    return

    watcher = threading.Thread(target=kill_one, daemon=True)
    watcher.start()
    bench = run_jobs(jobs, root, ray_executor(cpus_per_job=0.5), show="none")
    assert not ray.is_initialized()  # what was started is ended
    watcher.join(timeout=1)
    assert not bench.failures
    assert len(victims) == len(bench.incidents) == 1
    for job in jobs:
        again = ["start", "start", "trained", "done"]
        assert names(root / job.key) == (again if root / job.key == victims[0] else again[1:])
    steps = [row["step"] for row in events(victims[0]) if row["event"] == "start"]
    assert steps[0] == 0 < steps[1] < 3000  # it went on from a checkpoint
    whole = run_jobs(jobs, tmp_path / "reference", local_executor(0), show="none")
    np.testing.assert_array_equal(bench.results.episodes.returns, whole.results.episodes.returns)
    assert run_jobs(jobs, root, ray_executor(), show="none").skipped == 3


def test_a_worker_that_does_not_see_the_folder_says_so(jobs: list[Job], tmp_path: Path) -> None:
    outcome = work(payload(jobs[0], tmp_path, 0), token="of the driver")
    assert outcome["state"] == "failed"
    assert "does not see" in outcome["text"]
    (tmp_path / TOKEN).write_text("of another")
    assert work(payload(jobs[0], tmp_path, 0), token="of the driver")["state"] == "failed"


def test_without_ray_the_command_says_what_to_install(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    flags = ["--tasks", "BenchToy", "--data", f"BenchToy={jobs[0].data}", "--out", str(tmp_path / "out")]
    assert main(["bench", *flags, "--algorithms", "bc-safe", "--executor", "ray"]) == 1
    assert "pip install 'qpt[ray]'" in capsys.readouterr().err


def test_workers_in_another_folder_find_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.hdf5").touch()
    monkeypatch.chdir(tmp_path)
    job = Job(task="BallRun", algorithm="qpt", data="x.hdf5")
    told = elsewhere(job)
    assert told.data == str(tmp_path / "x.hdf5")
    assert told.key == job.key  # the run is the same
    embedded = replace(job, data="embedded:ballcircle")
    assert elsewhere(embedded) == embedded


def test_a_cluster_that_is_not_there_is_one_sentence(jobs: list[Job], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'qpt[ray]'")
    with socket.socket() as unused:  # bound and not listening: nothing answers here
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(QptError, match=f"cluster at {address} cannot be reached.*check --address"):
            run_jobs(jobs, tmp_path / "root", ray_executor(address), show="none")
