"""EnvPool: slots of environments in worker processes, stepped together through shared memory.

A worker owns a block of slots. Once per tick the parent fills in one command a slot (idle, reset or step), wakes the
workers with one byte each, and reads the arrays when every worker has answered with one byte. Pipes carry the bytes:
as fast as semaphores here (about 40 µs a tick for two workers), and their end-of-file tells at once when the other
side has died, so a dead worker is noticed without polling and a dead parent leaves no orphan. Nothing is pickled but
the task, once, when a worker starts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.envs import make_env, one_per_process
from qpt.errors import QptError
from qpt.tasks import Task

IDLE, RESET, STEP = 0, 1, 2
START_SECONDS = 180.0  # what a worker may take to start, import its simulator and make its first environment
_ERROR_BYTES = 4096


@dataclass(frozen=True)
class Arrays:
    """What parent and workers share; every field is a view into one anonymous file."""

    commands: npt.NDArray[np.uint8]  # [n] IDLE, RESET or STEP
    seeds: npt.NDArray[np.int64]  # [n] for RESET
    actions: npt.NDArray[np.float32]  # [n, A] for STEP
    observations: npt.NDArray[np.float32]  # [n, S]
    rewards: npt.NDArray[np.float64]  # [n]
    costs: npt.NDArray[np.float64]  # [n]
    terminated: npt.NDArray[np.bool_]  # [n]
    truncated: npt.NDArray[np.bool_]  # [n]
    current: npt.NDArray[np.int64]  # [w] the slot that a worker is busy with, or -1
    beats: npt.NDArray[np.int64]  # [w] operations done since the worker started
    errors: npt.NDArray[np.uint8]  # [w, _ERROR_BYTES] what a worker raised


def _layout(sizes: Sequence[int]) -> tuple[list[tuple[Any, tuple[int, ...], int]], int]:
    """(dtype, shape, offset) of each of the Arrays, and the bytes they need in all."""
    n, w, s, a = sizes  # slots, workers, observation_dim, action_dim
    rows: list[tuple[Any, tuple[int, ...], int]] = []
    offset = 0
    for dtype, shape in (
        (np.uint8, (n,)),
        (np.int64, (n,)),
        (np.float32, (n, a)),
        (np.float32, (n, s)),
        *((np.float64, (n,)),) * 2,
        *((np.bool_, (n,)),) * 2,
        *((np.int64, (w,)),) * 2,
        (np.uint8, (w, _ERROR_BYTES)),
    ):
        rows.append((dtype, shape, offset))
        offset += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64  # whole cache lines
    return rows, offset


def _share(fd: int, sizes: Sequence[int]) -> Arrays:
    layout, size = _layout(sizes)
    buffer = mmap.mmap(fd, size)
    return Arrays(*(np.ndarray(shape, dtype, buffer, offset) for dtype, shape, offset in layout))


@dataclass(frozen=True)
class Failure:
    """A worker that was replaced: its slots are empty and must be reset."""

    slots: range
    culprit: int | None  # the slot that was being stepped or reset; None: the worker died between ticks
    reason: str


class EnvPool:
    """`slots` environments of one task over `workers` processes (0: all in this process).

    Use it as a context manager. Simulators that allow one environment per process (`one_env`) share it between the
    slots of a block, so that only one slot of a block may be in an episode at a time.
    """

    def __init__(self, task: Task, slots: int, workers: int, *, step_timeout: float = 120.0) -> None:
        self.task = task
        self.one_env = one_per_process(task)
        workers = min(workers, slots)
        count = max(workers, 1)
        bounds = np.linspace(0, slots, count + 1).round().astype(int).tolist()
        self.blocks = [range(a, b) for a, b in pairwise(bounds)]
        self.sizes = (slots, count, *dimensions(task))
        self._timeout = step_timeout
        self._fd = os.memfd_create("qpt-envs") if hasattr(os, "memfd_create") else _unlinked_file()
        os.ftruncate(self._fd, _layout(self.sizes)[1])
        self.arrays = _share(self._fd, self.sizes)
        self.arrays.current[:] = -1
        self._local = None if workers else _Block(task, self.blocks[0], self.arrays, 0, self.one_env)
        self._workers: list[_Worker] = []
        self._starts_failed = 0
        if workers:
            payload = _payload(task, self.sizes, self.one_env)
            try:
                for w in range(workers):
                    self._workers.append(_Worker(w, self.blocks[w], payload, self._fd))
            except BaseException:
                self.close()
                raise

    def exchange(
        self, commands: npt.NDArray[np.uint8], seeds: npt.NDArray[np.int64], actions: npt.NDArray[np.float32]
    ) -> list[Failure]:
        """Carry out one command a slot and wait for all; results are in `arrays`. Returns the replaced workers."""
        self.arrays.commands[:] = commands
        self.arrays.seeds[:] = seeds
        self.arrays.actions[:] = actions
        if self._local is not None:
            return self._exchange_here(self._local)
        waiting: dict[int, _Worker] = {}
        failures: list[Failure] = []
        poller = select.poll()
        for worker in self._workers:
            if not self.arrays.commands[worker.block.start : worker.block.stop].any():
                continue
            worker.wake(int(self.arrays.beats[worker.index]))
            waiting[worker.reply] = worker
            poller.register(worker.reply, select.POLLIN)
        while waiting:
            events = poller.poll(1000 * self._timeout)
            for fd, _ in events:
                worker = waiting.pop(fd)
                poller.unregister(fd)
                answer = os.read(fd, 1)
                if answer == b"q":
                    raise QptError(self._error_text(worker.index))
                if answer != b"k":
                    failures.append(self._replace(worker, raised=answer == b"e"))
            if not events:
                now = time.monotonic()
                for worker in [
                    w for w in waiting.values() if w.hangs(int(self.arrays.beats[w.index]), now, self._timeout)
                ]:
                    poller.unregister(worker.reply)
                    del waiting[worker.reply]
                    failures.append(self._replace(worker, hung=True))
        return failures

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

    def _exchange_here(self, block: _Block) -> list[Failure]:
        try:
            block.run()
        except QptError:
            raise
        except Exception:
            culprit = int(self.arrays.current[0])
            block.close()
            return [
                Failure(
                    self.blocks[0], culprit if culprit >= 0 else None, f"raised\n{_last_lines(traceback.format_exc())}"
                )
            ]
        return []

    def _replace(self, worker: _Worker, *, raised: bool = False, hung: bool = False) -> Failure:
        w = worker.index
        started = bool(self.arrays.beats[w])
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
        culprit = int(self.arrays.current[w])
        self.arrays.current[w] = -1
        self.arrays.beats[w] = 0
        self._workers[w] = _Worker(w, worker.block, worker.payload, self._fd)
        return Failure(worker.block, culprit if culprit >= 0 else None, reason)

    def _error_text(self, w: int) -> str:
        return bytes(self.arrays.errors[w]).rstrip(b"\0").decode(errors="replace")


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, index: int, block: range, payload: bytes, fd: int) -> None:
        self.index, self.block, self.payload = index, block, payload
        self.reply, theirs = os.pipe()
        line, self.lifeline = os.pipe()  # held open, never written to
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # with -P: modules are found as here
        arguments = [str(v) for v in (fd, theirs, line, index, block.start, block.stop)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from qpt.envs.vector import _main; _main()", *arguments],
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
        self.seen_beats = 0
        with contextlib.suppress(BrokenPipeError):  # a worker that died is noticed when it is waited for
            os.write(self.stdin, len(payload).to_bytes(8, "little"))
            sent = 0
            while sent < len(payload):
                sent += os.write(self.stdin, payload[sent:])

    def wake(self, beats: int) -> None:
        self.seen_beats = beats
        with contextlib.suppress(BrokenPipeError):
            os.write(self.stdin, b"g")

    def hangs(self, beats: int, now: float, timeout: float) -> bool:
        """Whether nothing was done since the last look; one that has done nothing yet may still be starting."""
        if beats == 0:
            return now - self.started > max(timeout, START_SECONDS)
        moved, self.seen_beats = beats != self.seen_beats, beats
        return not moved

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


class _Block:
    """The environments of one block of slots, on the worker's side."""

    def __init__(self, task: Task, slots: range, arrays: Arrays, index: int, one_env: bool) -> None:
        self.task, self.slots, self.arrays, self.index, self.one_env = task, slots, arrays, index, one_env
        self.envs: dict[int, Any] = {}

    def run(self) -> None:
        """Carry out the commands of the block's slots, one after the other."""
        shared, w, envs, one_env = self.arrays, self.index, self.envs, self.one_env
        actions, observations, rewards, costs = shared.actions, shared.observations, shared.rewards, shared.costs
        ended, cut_off, current, beats = shared.terminated, shared.truncated, shared.current, shared.beats
        for slot, command in zip(self.slots, shared.commands[self.slots.start : self.slots.stop].tolist(), strict=True):
            if command == IDLE:
                continue
            current[w] = slot
            key = 0 if one_env else slot
            if command == RESET:
                observations[slot] = self._reset(key, int(shared.seeds[slot]))
                ended[slot] = cut_off[slot] = False
            else:  # the surface gives the simulator a copy of the action, which it may keep
                observations[slot], rewards[slot], ended[slot], cut_off[slot], info = envs[key].step(actions[slot])
                costs[slot] = info["cost"]
            beats[w] += 1
        current[w] = -1

    def _reset(self, key: int, seed: int) -> npt.NDArray[np.float32]:
        if key not in self.envs:
            self.envs[key] = make_env(self.task)
        observation: npt.NDArray[np.float32] = self.envs[key].reset(seed=seed)[0]
        return observation

    def close(self) -> None:
        for env in self.envs.values():
            with contextlib.suppress(Exception):
                env.close()
        self.envs.clear()


def _main() -> None:
    """A worker process: read the task, then carry out the block's commands for every byte until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd, reply, line, index, start, stop = map(int, sys.argv[1:7])
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    size = int.from_bytes(_read(0, 8), "little")
    task, sizes, one_env = pickle.loads(_read(0, size))  # from our own parent, through a private pipe
    arrays = _share(fd, sizes)
    block = _Block(task, range(start, stop), arrays, index, one_env)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: so are we
        while os.read(0, 1):
            try:
                block.run()
                answer = b"k"
            except Exception as error:
                ours = isinstance(error, QptError)
                text = (str(error) if ours else _last_lines(traceback.format_exc())).encode()[-_ERROR_BYTES:]
                arrays.errors[index] = 0
                arrays.errors[index, : len(text)] = np.frombuffer(text, np.uint8)
                answer = b"q" if ours else b"e"
            os.write(reply, answer)
    block.close()


def _leave_with_parent(line: int) -> None:
    """However the parent ends, the end of its line is closed; leave then, even in the middle of a step."""
    os.read(line, 1)
    os._exit(0)


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            sys.exit(0)  # the parent left before it said what to do
        data += part
    return data


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


def _unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
