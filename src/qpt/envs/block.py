"""The side of a worker process: the environments of its slots, and the loop that carries out what the parent asks."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qpt.envs import SafeEnv, make_env
from qpt.envs.shared import ERROR_BYTES, IDLE, RESET, RUNNING, TERMINATED, TRUNCATED, Arrays, share
from qpt.errors import QptError
from qpt.tasks import Task

NAMES = (b"a", b"b")  # of the groups, in the pipe
LOOK_SECONDS = 0.002  # how long a worker looks for its next command before it sleeps: to be woken costs a step's time


class Block:
    """The environments of one worker's slots."""

    def __init__(self, task: Task, parts: Sequence[range], arrays: Arrays, index: int, one_env: bool) -> None:
        self.task, self.parts, self.arrays, self.index, self.one_env = task, parts, arrays, index, one_env
        self.envs: dict[int, SafeEnv] = {}
        self.beats = 0

    def run(self, group: int) -> None:
        """Carry out the commands of the group's slots, one after the other."""
        shared, w, part = self.arrays, self.index, self.parts[group]
        observations, rewards, costs, ended = shared.observations, shared.rewards, shared.costs, shared.ended
        mine = slice(part.start, part.stop)
        actions = shared.actions[mine].copy()  # simulators may keep them
        for slot, command, action in zip(part, shared.commands[mine].tolist(), actions, strict=True):
            if command == IDLE:
                continue
            shared.current[w] = slot
            key = 0 if self.one_env else slot
            if command == RESET:
                observations[slot] = self._reset(key, int(shared.seeds[slot]))
                ended[slot] = RUNNING
            else:
                rewards[slot], terminated, truncated, info = self.envs[key].advance(action, observations[slot])
                costs[slot] = info["cost"]
                ended[slot] = TERMINATED if terminated else TRUNCATED if truncated else RUNNING
            self.beats += 1
            shared.beats[w] = self.beats
        shared.current[w] = -1

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


def main() -> None:
    """A worker process: read the task, then carry out a group's commands for every byte until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd, reply, line, index, *bounds = map(int, sys.argv[1:])
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    size = int.from_bytes(_read(0, 8), "little")
    task, sizes, one_env = pickle.loads(_read(0, size))  # from our own parent, through a private pipe
    arrays = share(fd, sizes)
    block = Block(task, [range(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True)], arrays, index, one_env)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: so are we
        answer = b"k"
        while answer == b"k" and (name := _next(poller)):
            try:
                block.run(NAMES.index(name))
            except Exception as error:
                ours = isinstance(error, QptError)
                text = (str(error) if ours else last_lines(traceback.format_exc())).encode()[-ERROR_BYTES:]
                arrays.errors[index] = 0
                arrays.errors[index, : len(text)] = np.frombuffer(text, np.uint8)
                answer = b"q" if ours else b"e"
            os.write(reply, answer)
    block.close()


def _next(poller: select.poll) -> bytes:
    """The next command; whoever else wants this core while we look for it gets it."""
    until = time.perf_counter() + LOOK_SECONDS
    while not poller.poll(0) and time.perf_counter() < until:
        os.sched_yield()
    return os.read(0, 1)


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


def last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
