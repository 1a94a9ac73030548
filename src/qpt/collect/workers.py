"""Jobs in processes of their own, as many at a time as there are cores; one whose process dies is done again.

A job needs nothing from the others, so no process ever waits for another, and what comes of a job depends neither on
the number of workers nor on timing. Jobs leave their results on disk; through a pipe they only say how far they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qpt.envs.vector import portable
from qpt.errors import QptError
from qpt.tasks import Task, get_task

Report = Callable[[dict[str, Any]], None]
Job = Callable[[Report], None]  # must be picklable: a partial of a module's function
Listen = Callable[[int, dict[str, Any]], None]  # (number of the job, what it has to say)
Payload = bytes | Task  # a task on its way to a worker
ATTEMPTS = 3  # deaths of a job in a row, without progress between them


class Pool:
    """`workers` processes that do jobs, kept between one `run` and the next; 0: this process does them in turn.

    A worker that says nothing for `stall` seconds counts as hung and is replaced. A job that fails holds up no other:
    its error is raised when all others are done. Messages with a key "progress" make earlier deaths of a job forgotten.
    """

    def __init__(self, workers: int, stall: float = 1800.0) -> None:
        self.workers, self.stall = workers, stall
        self._running: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def run(self, jobs: Sequence[Job], listen: Listen) -> None:
        """Do all jobs."""
        errors: list[str] = []
        if self.workers:
            self._share_out(jobs, listen, errors)
        else:
            for number, job in enumerate(jobs):
                try:
                    job(lambda message, number=number: listen(number, message))  # type: ignore[misc]
                except QptError as error:
                    errors.append(str(error))
        if errors:
            raise QptError("; ".join(dict.fromkeys(errors)))

    def _share_out(self, jobs: Sequence[Job], listen: Listen, errors: list[str]) -> None:
        waiting = list(range(len(jobs)))[::-1]
        failures = [0] * len(jobs)
        while True:
            for worker in self._running:
                if worker.number is None and waiting:
                    worker.give(waiting[-1], jobs[waiting.pop()])
            while waiting and len(self._running) < self.workers:
                self._running.append(_Worker())
                self._selector.register(self._running[-1].pipe, selectors.EVENT_READ, self._running[-1])
                self._running[-1].give(waiting[-1], jobs[waiting.pop()])
            busy = [worker for worker in self._running if worker.number is not None]
            if not busy:
                return
            for key, _ in self._selector.select(timeout=1.0):
                worker = key.data
                for message in worker.read():
                    if "error" in message:
                        errors.append(message["error"])
                    elif "done" in message:
                        worker.number = None
                    else:
                        if "progress" in message:
                            failures[worker.number] = 0
                        listen(worker.number, message)
                if worker.closed:
                    self._selector.unregister(worker.pipe)
                    self._running.remove(worker)
                    reason = worker.end()
                    if worker.number is not None:
                        _again(worker.number, reason, failures, waiting, errors, listen)
            for worker in busy:
                if time.monotonic() - worker.heard > self.stall:
                    worker.process.kill()  # its pipe closes, and it is replaced above
                    worker.heard = time.monotonic()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running:
            worker.process.kill()
            worker.end()
        self._running.clear()
        self._selector.close()


def _again(
    number: int, reason: str, failures: list[int], waiting: list[int], errors: list[str], listen: Listen
) -> None:
    failures[number] += 1
    if failures[number] >= ATTEMPTS:
        errors.append(
            f"job {number} failed {ATTEMPTS} times in a row without progress (its process {reason}); what is done is "
            "kept: fix the cause and run the same command again"
        )
        return
    listen(number, {"incident": f"the process of job {number} {reason.splitlines()[0]}; it goes on in another"})
    waiting.append(number)


class _Worker:
    """The parent's side of one process."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the job that it is doing
        self.pipe, theirs = os.pipe()
        self.closed, self.heard, self._rest = False, time.monotonic(), b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process has ended)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from qpt.collect.workers import _main; _main()", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # simulators greet
                stderr=self._errors,
                pass_fds=(theirs,),
                process_group=0,  # Ctrl-C is for the parent, which ends its workers
                env={**os.environ, **threads, "PYTHONPATH": path},
            )
        finally:
            os.close(theirs)

    def give(self, number: int, job: Job) -> None:
        self.number, self.heard, content = number, time.monotonic(), pickle.dumps(job)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # one that died is noticed when its pipe closes
            self.process.stdin.write(len(content).to_bytes(8, "little") + content)
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        data = os.read(self.pipe, 1 << 20)
        self.closed, self.heard = not data, time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Wait for the process; says how it ended."""
        code = self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.pipe)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}\n{chr(10).join(text.splitlines()[-8:])}".strip()


def sendable(task: Task, workers: int) -> Payload:
    """The task for another process: as it is, or by its name where the file that QPT_TASKS names has it."""
    if workers == 0:
        return task
    if portable(task):
        return pickle.dumps(task)
    if os.environ.get("QPT_TASKS"):
        return pickle.dumps(task.name)
    raise QptError(
        f"the environment factory of {task.name} cannot be sent to worker processes; make it a function of a module "
        "(not of the script itself, no lambda), or collect with workers=0"
    )


def received(payload: Payload) -> Task:
    """The task that `sendable` made ready, from our own parent process."""
    task = pickle.loads(payload) if isinstance(payload, bytes) else payload
    return get_task(task) if isinstance(task, str) else task


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _main() -> None:
    """A worker process: jobs come through stdin, one at a time; what they say goes out as JSON lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(int(sys.argv[1]), data) :]

    try:
        while size := sys.stdin.buffer.read(8):
            job = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "little")))
            try:
                job(report)
            except QptError as error:
                report({"error": str(error)})
            report({"done": True})
    except BrokenPipeError:  # the parent is gone: so are we; all that is finished is on disk
        os._exit(1)
