"""EnvPool: slots of environments in worker processes, stepped together through shared memory.

To step a group, the parent fills in one command a slot (idle, reset or step), wakes the workers that own slots of it
with one byte each, and reads the arrays when every one has answered with one byte. A worker owns one stretch of all
slots, so that two groups have hardly a worker in common: no worker waits for one on a slower core, and the parent
serves whichever group is ready first. A worker without a command looks for it a while before it sleeps. Pipes are as
fast as semaphores here, and their end-of-file tells at once when the other side has died, so a dead worker is noticed
without polling and a dead parent leaves no orphan. Nothing is pickled but the task, once, when a worker starts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np

from qpt.envs import make_env, one_per_process
from qpt.envs.block import NAMES, Block, last_lines
from qpt.envs.shared import IDLE, share, size_of
from qpt.errors import QptError
from qpt.tasks import Task

START_SECONDS = 180.0  # what a worker may take to start, import its simulator and make its first environment


@dataclass(frozen=True)
class Failure:
    """A worker that was replaced: its slots, of every group, are empty and must be reset."""

    slots: list[int]
    culprit: int | None  # the slot that was being stepped or reset; None: the worker died between commands
    reason: str


class EnvPool:
    """`slots` environments of one task, in `groups` that keep their own pace, in `workers` processes (0: this one).

    Use it as a context manager. Simulators that allow one environment per process (`one_env`) share it between the
    slots of a worker, so that only one of them may be in an episode at a time.
    """

    def __init__(self, task: Task, slots: int, workers: int, *, groups: int = 1, step_timeout: float = 120.0) -> None:
        self.task = task
        self.one_env = one_per_process(task)
        workers = min(workers, slots)
        count = max(workers, 1)
        bounds = [g * slots // groups for g in range(groups + 1)]
        self.groups = [slice(a, b) for a, b in pairwise(bounds)]
        self.parts = _deal(self.groups, count)  # of each worker: its slots of each group
        self.sizes = (slots, count, *dimensions(task))
        self._timeout = step_timeout
        self._payload = _payload(task, self.sizes, self.one_env) if workers else b""  # before there is a file to close
        self._fd = os.memfd_create("qpt-envs") if hasattr(os, "memfd_create") else _unlinked_file()
        os.ftruncate(self._fd, size_of(self.sizes))
        self.arrays = share(self._fd, self.sizes)
        self.arrays.current[:] = -1
        self._local = None if workers else Block(task, self.parts[0], self.arrays, 0, self.one_env)
        self._workers: list[_Worker] = []
        self._sent: list[int] = []  # groups that were sent and not received
        self._missing = [0] * groups  # answers that each group waits for
        self._poller, self._replies = select.poll(), dict[int, _Worker]()  # the pipes of all answers
        self._watch = 0.0  # when to look for workers that hang
        self._shares = [  # of each group: who has slots of it, and their commands
            [(w, self.arrays.commands[p[g].start : p[g].stop]) for w, p in enumerate(self.parts) if p[g] and workers]
            for g in range(groups)
        ]
        self._starts_failed = 0
        if workers:
            try:
                for w in range(workers):
                    self._workers.append(self._start(w))
            except BaseException:
                self.close()
                raise

    def _start(self, w: int) -> _Worker:
        worker = _Worker(w, self.parts[w], self._payload, self._fd)
        self._poller.register(worker.reply, select.POLLIN)
        self._replies[worker.reply] = worker
        return worker

    def send(self, group: int = 0) -> None:
        """Let the workers carry out the commands of the group's slots, which stand in `arrays`."""
        self._sent.append(group)
        for w, commands in self._shares[group]:  # there are none for workers=0
            if np.count_nonzero(commands):
                worker = self._workers[w]
                worker.asked.append(group)
                self._missing[group] += 1
                worker.wake(group)

    def receive(self) -> tuple[int, list[Failure]]:
        """Wait until a group's commands are carried out, whichever is first: the group, and the replaced workers.

        What came of the commands is in `arrays`.
        """
        if self._local is not None:
            group = self._sent.pop(0)
            return group, self._run_here(self._local, group)
        failures: list[Failure] = []
        while True:
            for group in self._sent:
                if not self._missing[group]:
                    self._sent.remove(group)
                    return group, failures
            now = time.monotonic()
            if now > self._watch:
                failures += [self._replace(worker, hung=True) for worker in self._hung(now)]
                continue  # that may have been the last answer of a group
            for reply, _ in self._poller.poll(1000 * (self._watch - now)):
                worker = self._replies[reply]
                answer = os.read(reply, 1)
                if answer == b"k":
                    self._missing[worker.asked.pop(0)] -= 1
                    worker.seen = -1
                elif answer == b"q":
                    raise QptError(self._error_text(worker.index))
                else:
                    failures.append(self._replace(worker, raised=answer == b"e"))

    def _hung(self, now: float) -> list[_Worker]:
        """Workers that have had something to do for too long and have done nothing."""
        hung = []
        for worker in self._workers:
            beats = int(self.arrays.beats[worker.index])
            starting = beats == 0 and now - worker.started < START_SECONDS
            if not worker.asked or beats != worker.seen or starting:
                worker.seen, worker.since = beats, now
            elif now - worker.since > self._timeout:
                hung.append(worker)
        self._watch = now + self._timeout / 4
        return hung

    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers at once; they keep nothing that would be lost."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._local is not None:
            self._local.close()
            self._local = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_here(self, block: Block, group: int) -> list[Failure]:
        try:
            block.run(group)
        except QptError:
            raise
        except Exception:
            block.close()
            return [self._failure(0, f"raised\n{last_lines(traceback.format_exc())}")]
        return []

    def _replace(self, worker: _Worker, *, raised: bool = False, hung: bool = False) -> Failure:
        w = worker.index
        started = bool(self.arrays.beats[w])
        self._poller.unregister(worker.reply)
        del self._replies[worker.reply]
        for group in worker.asked:
            self._missing[group] -= 1
        worker.end(grace=0.0 if hung or raised else 5.0)  # one that closed its pipe is about to have an exit code
        if raised:
            reason = f"raised\n{self._error_text(w)}"
        elif hung:
            reason = f"gave no answer for {self._timeout:g} s"
        else:
            reason = f"died ({_exit_text(worker.process.returncode)})"
        self._starts_failed = 0 if started else self._starts_failed + 1
        if self._starts_failed >= 3:
            raise QptError(
                f"the simulator processes of {self.task.name} do not start (the last one {reason}); "
                "run `qpt doctor`, or evaluate with workers=0 to see the error in this process"
            )
        failure = self._failure(w, reason)
        self.arrays.beats[w] = 0
        self._workers[w] = self._start(w)
        return failure

    def _failure(self, w: int, reason: str) -> Failure:
        """What a worker was asked to do is void, in every group."""
        slots = [slot for part in self.parts[w] for slot in part]
        self.arrays.commands[slots] = IDLE
        culprit = int(self.arrays.current[w])
        self.arrays.current[w] = -1
        return Failure(slots, culprit if culprit >= 0 else None, reason)

    def _error_text(self, w: int) -> str:
        return bytes(self.arrays.errors[w]).rstrip(b"\0").decode(errors="replace")


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, index: int, parts: Sequence[range], payload: bytes, fd: int) -> None:
        self.index = index
        self.asked: list[int] = []  # groups that it has yet to answer for
        self.seen = -1  # its beats when it was looked at; -1: it has answered since
        self.since = 0.0  # when it was first seen with them
        self.reply, theirs = os.pipe()
        line, self.lifeline = os.pipe()  # held open, never written to
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # with -P: modules are found as here
        bounds = [bound for part in parts for bound in (part.start, part.stop)]
        arguments = [str(v) for v in (fd, theirs, line, index, *bounds)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from qpt.envs.block import main; main()", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # simulators greet; the replies go through a pipe of their own
                pass_fds=(fd, theirs, line),
                process_group=0,  # Ctrl-C is for the parent, which ends its workers
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            os.close(self.reply)
            os.close(self.lifeline)
            raise
        finally:
            os.close(theirs)
            os.close(line)
        assert self.process.stdin is not None
        self.stdin = self.process.stdin.fileno()
        self.started = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # a worker that died is noticed when it is waited for
            os.write(self.stdin, len(payload).to_bytes(8, "little"))
            sent = 0
            while sent < len(payload):
                sent += os.write(self.stdin, payload[sent:])

    def wake(self, group: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # one that died is noticed by its answers
            os.write(self.stdin, NAMES[group])

    def end(self, grace: float = 0.0) -> None:
        """Wait for the process to leave by itself, else kill it, and close the pipes."""
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if (
            self.process.stdin is not None and not self.process.stdin.closed
        ):  # once: a number may soon be another file's
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            os.close(self.reply)
            os.close(self.lifeline)


def portable(task: Task) -> bool:
    """Whether the task can be sent to a worker process: a factory must be importable there by its name."""
    if os.name != "posix":
        return False
    try:
        return b"__main__" not in pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _payload(task: Task, sizes: Sequence[int], one_env: bool) -> bytes:
    if not portable(task):
        raise QptError(
            f"the environment factory of {task.name} cannot be sent to worker processes; make it a function of a "
            "module (not of the script itself, no lambda), or evaluate with workers=0"
        )
    return pickle.dumps((task, tuple(sizes), one_env))


def dimensions(task: Task) -> tuple[int, int]:
    """Sizes of observations and actions; a task that does not say has its environment made once to look."""
    if task.env_observation_dim is not None and task.action_dim is not None:
        return task.env_observation_dim, task.action_dim
    env = make_env(task)
    try:
        observation, action = env.observation_space.shape, env.action_space.shape
    finally:
        env.close()
    if observation is None or action is None or len(observation) != 1 or len(action) != 1:
        raise QptError(f"the observations and actions of {task.name} must be vectors, not {observation} and {action}")
    return int(observation[0]), int(action[0])


def _deal(groups: Sequence[slice], count: int) -> list[list[range]]:
    """Each worker's slots of each group: one stretch of all slots, so that few workers wait for one another."""
    bounds = [w * groups[-1].stop // count for w in range(count + 1)]
    return [[range(max(a, g.start), min(b, g.stop)) for g in groups] for a, b in pairwise(bounds)]


def _unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
