"""EnvPool: the arrays hold what the environments do, and workers that die, hang or raise are replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from faulty_envs import once, raises, slow_when_odd, walk_task
from qpt.envs import make_env
from qpt.envs.shared import IDLE, RESET, RUNNING, STEP, TERMINATED, TRUNCATED
from qpt.envs.vector import EnvPool, Failure, portable
from qpt.errors import QptError
from qpt.tasks import Task


def commands(pool: EnvPool, value: int) -> np.ndarray:
    return np.full(pool.sizes[0], value, np.uint8)


def exchange(pool: EnvPool, commands: np.ndarray, seeds: np.ndarray, actions: np.ndarray) -> list[Failure]:
    """Send all groups, then receive all: workers are asked for the second while they are busy with the first."""
    pool.arrays.commands[:], pool.arrays.seeds[:], pool.arrays.actions[:] = commands, seeds, actions
    groups = range(len(pool.groups))
    for group in groups:
        pool.send(group)
    received = [pool.receive() for _ in groups]
    assert sorted(group for group, _ in received) == list(groups)
    return [failure for _, failures in received for failure in failures]


@pytest.mark.parametrize(("workers", "groups"), [(0, 1), (2, 1), (0, 2), (2, 2), (5, 2)])
def test_slots_behave_like_environments_of_their_own(workers: int, groups: int) -> None:
    task, n = walk_task(), 5
    rng = np.random.default_rng(0)
    seeds = np.arange(10, 10 + n)
    envs = [make_env(task) for _ in range(n)]
    with EnvPool(task, n, workers, groups=groups) as pool:
        assert sorted(slot for parts in pool.parts for part in parts for slot in part) == list(range(n))
        assert all(sum(map(len, parts)) for parts in pool.parts)  # no worker is without slots
        assert exchange(pool, commands(pool, RESET), seeds, np.zeros((n, 2), np.float32)) == []
        first = [env.reset(seed=int(s))[0] for env, s in zip(envs, seeds, strict=True)]
        np.testing.assert_array_equal(pool.arrays.observations, first)
        running = np.ones(n, bool)
        while running.any():
            actions = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
            assert exchange(pool, np.where(running, STEP, IDLE).astype(np.uint8), seeds, actions) == []
            for i in np.flatnonzero(running):
                observation, reward, terminated, truncated, info = envs[i].step(actions[i])
                np.testing.assert_array_equal(pool.arrays.observations[i], observation)
                assert (pool.arrays.rewards[i], pool.arrays.costs[i]) == (reward, info["cost"])
                assert pool.arrays.ended[i] == (TERMINATED if terminated else TRUNCATED if truncated else RUNNING)
                running[i] = not (terminated or truncated)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kind", "words"), [("die", "SIGKILL"), ("hang", "no answer"), ("raise", "a glitch")])
def test_a_worker_that_fails_is_named_and_replaced(kind: str, words: str, groups: int, tmp_path: Path) -> None:
    task = walk_task(partial(once, kind, str(tmp_path)), horizon=None)
    seeds, actions = np.arange(4), np.zeros((4, 2), np.float32)
    with EnvPool(task, 4, 2, groups=groups, step_timeout=1.0) as pool:
        before = pool.pids()
        exchange(pool, commands(pool, RESET), seeds, actions)
        failures = []
        for _ in range(3):
            failures += exchange(pool, commands(pool, STEP), seeds, actions)
            if failures:
                break
        (failure,) = failures
        assert words in failure.reason
        assert failure.culprit in failure.slots
        assert len(failure.slots) == 2  # those of both groups
        after = pool.pids()
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        assert exchange(pool, commands(pool, RESET), seeds, actions) == []  # the new worker serves the same slots
    assert not any(alive(pid) for pid in (*before, *after))


def test_a_group_does_not_wait_for_another() -> None:
    with EnvPool(walk_task(slow_when_odd), 2, 2, groups=2) as pool:
        exchange(pool, commands(pool, RESET), np.arange(2), np.zeros((2, 2), np.float32))
        pool.arrays.commands[:] = STEP
        for group in (1, 0, 0, 0):
            pool.send(group)
            assert group == 1 or pool.receive() == (0, [])


def test_a_worker_that_dies_with_nothing_to_do_is_replaced_without_ado() -> None:
    with EnvPool(walk_task(), 2, 2, groups=2) as pool:
        exchange(pool, commands(pool, RESET), np.arange(2), np.zeros((2, 2), np.float32))
        idle = pool.pids()[1]
        os.kill(idle, signal.SIGKILL)
        failures: list[Failure] = []
        while not failures:
            pool.send(0)
            failures = pool.receive()[1]
        assert [(failure.slots, failure.culprit) for failure in failures] == [([1], None)]
        assert idle not in pool.pids()


def test_an_environment_that_raises_in_this_process_is_reported_too() -> None:
    with EnvPool(walk_task(raises), 2, 0) as pool:
        seeds, actions = np.arange(2), np.zeros((2, 2), np.float32)
        exchange(pool, commands(pool, RESET), seeds, actions)
        failures = [f for _ in range(3) for f in exchange(pool, commands(pool, STEP), seeds, actions)]
        assert failures[0].culprit == 0
        assert "the physics exploded" in failures[0].reason


def test_what_the_user_can_mend_is_raised_as_it_is() -> None:
    wrong = walk_task(observation_dim=4)
    for workers in (0, 1):
        with EnvPool(wrong, 1, workers) as pool, pytest.raises(QptError, match="length 3"):
            exchange(pool, commands(pool, RESET), np.zeros(1, np.int64), np.zeros((1, 2), np.float32))


def test_factories_that_cannot_travel_get_a_clear_error() -> None:
    here = Task("Here", env_factory=lambda: None, observation_dim=1, action_dim=1)
    assert not portable(here)
    before = next_file()
    with pytest.raises(QptError, match="workers=0"):
        EnvPool(here, 2, 2)
    assert next_file() == before  # none is left open


def test_dimensions_are_looked_up_where_the_task_does_not_say() -> None:
    with EnvPool(walk_task(observation_dim=None, action_dim=None), 3, 0) as pool:
        assert pool.sizes == (3, 1, 3, 2)


SCRIPT = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from faulty_envs import walk_task, slow
from qpt.evaluation import RandomPolicy, evaluate
import qpt.envs.vector as vector
start = vector._Worker.__init__
def noted(self, *arguments):
    start(self, *arguments)
    print(self.process.pid, flush=True)
vector._Worker.__init__ = noted
evaluate(RandomPolicy(2), walk_task(slow), episodes=400, workers=2)
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(blow: signal.Signals) -> None:
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent))
    shared_before = in_shared_memory()
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    time.sleep(1.0)  # well into the evaluation
    assert all(alive(pid) for pid in pids)
    parent.send_signal(blow)
    parent.wait(timeout=30)
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.05)
    assert in_shared_memory() <= shared_before


def next_file() -> int:
    """The number that the next file opened would have."""
    number = os.dup(1)
    os.close(number)
    return number


def in_shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "qpt" in path.name} if folder.is_dir() else set()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
