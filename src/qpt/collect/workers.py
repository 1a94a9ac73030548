"""Runs in processes of their own, as many at a time as there are cores; one that dies is replaced and goes on.

A run needs nothing from the others: it owns its environments, its policy and its learner, so no process ever waits for
another, and the outcome of a run depends neither on the number of workers nor on timing.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qpt.collect.runner import run
from qpt.collect.schedules import Plan
from qpt.envs.vector import portable
from qpt.errors import QptError
from qpt.tasks import Task, get_task

Report = Callable[[int, dict[str, Any]], None]  # (run, what there is to say)
ATTEMPTS = 3  # deaths of a run in a row, without progress between them


def run_all(
    task: Task, plans: list[Plan], cap: float, folders: list[Path], workers: int, report: Report, stall: float = 600.0
) -> None:
    """Carry out all plans; `workers=0` does it in this process, one after the other.

    A worker that says nothing for `stall` seconds counts as hung and is replaced.
    """
    if workers == 0:
        for plan, folder in zip(plans, folders, strict=True):
            run(task, plan, cap, folder, lambda message, number=plan.number: report(number, message))  # type: ignore[misc]
        return
    payload = _sendable(task)
    waiting = list(zip(plans, folders, strict=True))[::-1]
    failures = dict.fromkeys((plan.number for plan in plans), 0)
    running: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(_Worker(payload, *waiting.pop(), cap))
                    selector.register(running[-1].pipe, selectors.EVENT_READ, running[-1])
                for key, _ in selector.select(timeout=1.0):
                    worker = key.data
                    for message in worker.read():
                        if "error" in message:
                            raise QptError(message["error"])
                        if message.get("return") is not None:
                            failures[worker.plan.number] = 0
                        report(worker.plan.number, message)
                    if worker.closed:
                        selector.unregister(worker.pipe)
                        running.remove(worker)
                        reason = worker.end()
                        if reason:
                            _again(worker, reason, failures, waiting, report)
                for worker in running:
                    if time.monotonic() - worker.heard > stall:
                        worker.process.kill()  # its pipe closes, and it is replaced above
                        worker.heard = time.monotonic()
        finally:
            for worker in running:
                worker.process.kill()
                worker.end()


def _again(worker: _Worker, reason: str, failures: dict[int, int], waiting: list[Any], report: Report) -> None:
    number = worker.plan.number
    failures[number] += 1
    if failures[number] >= ATTEMPTS:
        raise QptError(
            f"run {number} failed {ATTEMPTS} times in a row without progress (it {reason}); what was recorded is kept: "
            "mend the cause and run the same command again"
        )
    report(number, {"incident": f"run {number} {reason.splitlines()[0]}; continued from its last state"})
    waiting.append((worker.plan, worker.folder))


class _Worker:
    """The parent's side of one process."""

    def __init__(self, payload: bytes, plan: Plan, folder: Path, cap: float) -> None:
        self.plan, self.folder = plan, folder
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
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # one that died at once is noticed when its pipe closes
            self.process.stdin.write(pickle.dumps((payload, plan, cap, folder)))
            self.process.stdin.close()

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        data = os.read(self.pipe, 1 << 20)
        self.closed, self.heard = not data, time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Wait for the process; says why it ended too early, or nothing."""
        code = self.process.wait()
        os.close(self.pipe)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        if code == 0:
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}\n{chr(10).join(text.splitlines()[-8:])}".strip()


def _sendable(task: Task) -> bytes:
    """The task for another process: as it is, or by its name where the file that QPT_TASKS names has it."""
    if portable(task):
        return pickle.dumps(task)
    if os.environ.get("QPT_TASKS"):
        return pickle.dumps(task.name)
    raise QptError(
        f"the environment factory of {task.name} cannot be sent to worker processes; make it a function of a module "
        "(not of the script itself, no lambda), or collect with workers=0"
    )


def _main() -> None:
    """A worker process: one run, told through stdin, that reports one JSON line an iteration."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payload, plan, cap, folder = pickle.load(sys.stdin.buffer)  # from our own parent, through a private pipe
    task = pickle.loads(payload)

    def report(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(int(sys.argv[1]), data) :]

    try:
        run(get_task(task) if isinstance(task, str) else task, plan, cap, folder, report)
    except BrokenPipeError:  # the parent is gone: so are we; all that is finished is on disk
        os._exit(1)
    except QptError as error:
        report({"error": str(error)})
