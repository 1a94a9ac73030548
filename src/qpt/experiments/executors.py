"""Who carries out the jobs: processes of this machine, or a Ray cluster. Either way a dead worker loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qpt.algorithms.base import ALGORITHMS, algorithm_classes, algorithm_names, register_algorithm
from qpt.envs.vector import portable
from qpt.errors import QptError, require
from qpt.experiments.jobs import Interrupted, Job, events, run_job
from qpt.tasks import Task, all_tasks, get_task, register_task

ATTEMPTS = 3  # how often a job may take its worker down before it counts as failed
GRACE = 20.0  # seconds to save in, when asked to stop
ASKED = 2  # times within these seconds: the second request ends an evaluation, which does not notice the first
TOKEN = ".shared"  # tells whether a worker elsewhere sees the same folder

Report = Callable[[Job, str, str], None]  # (job, state: running, again, done or failed; what there is to say)
Executor = Callable[[Sequence[Job], Path, Report], None]  # carries out jobs below a root; failures are reported


# -- this machine ------------------------------------------------------------------------------------------------------


def local_executor(workers: int = 1, attempts: int = ATTEMPTS) -> Executor:
    """Up to `workers` processes at a time, one a job; 0 does everything in this process.

    Each gets its share of the cores for simulators. Ctrl-C lets them save and waits for it; should this process be
    killed, they save and leave too.
    """

    def execute(jobs: Sequence[Job], root: Path, report: Report) -> None:
        if workers == 0:
            return _in_this_process(jobs, root, report)
        simulators = _simulators(_cores() // workers)
        waiting, running, deaths = deque(jobs), list[_Worker](), _Deaths(attempts, report)
        line, lifeline = os.pipe()  # held open, never written to: it closes however this process ends
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.popleft()
                    running.append(_Worker(job, root, simulators, line))
                    report(job, "running", f"process {running[-1].process.pid}")
                time.sleep(0.1)
                for worker in [w for w in running if w.process.poll() is not None]:
                    running.remove(worker)
                    if deaths.settle(worker.job, worker.outcome(), worker.how()):
                        waiting.appendleft(worker.job)
        finally:
            _stop(running)
            os.close(line)
            os.close(lifeline)
        return None

    return execute


class _Deaths:
    """Counts the deaths of each job's workers, and passes outcomes on."""

    def __init__(self, attempts: int, report: Report) -> None:
        self.attempts, self.report = attempts, report
        self.counts: dict[str, int] = {}

    def settle(self, job: Job, outcome: dict[str, str] | None, how: str) -> bool:
        """Report what came of an attempt; says whether the job must be tried again."""
        if outcome is not None and outcome["state"] in ("done", "failed"):
            self.report(job, outcome["state"], outcome["text"])
            return False
        count = self.counts[job.key] = self.counts.get(job.key, 0) + 1
        if count >= self.attempts:
            text = f"its worker died {count} times ({how}); output.txt in its folder may say why"
            self.report(job, "failed", text)
            return False
        self.report(job, "again", f"its worker died ({how}); it goes on from its last checkpoint")
        return True


class _Worker:
    """The parent's side of one process."""

    def __init__(self, job: Job, root: Path, simulators: int, line: int) -> None:
        self.job, told = job, payload(job, root, simulators)
        (root / job.key).mkdir(parents=True, exist_ok=True)
        self.reply, theirs = os.pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # with -P: modules are found as here
        try:
            with (root / job.key / "output.txt").open("ab") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"from {__name__} import _main; _main()", str(theirs), str(line)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs, line),
                    process_group=0,  # Ctrl-C is for the parent, which asks its workers to stop
                    env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
                )
        except BaseException:
            os.close(self.reply)
            raise
        finally:
            os.close(theirs)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # one that died at once is noticed when it is looked at
            self.process.stdin.write(told)
            self.process.stdin.close()

    def outcome(self) -> dict[str, str] | None:
        """What the ended process had to say; None where it was not given the time."""
        data = b""
        while part := os.read(self.reply, 1 << 16):
            data += part
        os.close(self.reply)
        with contextlib.suppress(ValueError):
            said: dict[str, str] = json.loads(data)
            return said
        return None

    def how(self) -> str:
        code = self.process.returncode
        if code == 0:
            return "asked to stop"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _stop(running: list[_Worker]) -> None:
    """Ask all to save and leave, wait for a while, and leave no orphans."""
    try:
        for _ in range(ASKED):
            for worker in running:
                worker.process.terminate()
            until = time.monotonic() + GRACE / ASKED
            for worker in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(until - time.monotonic(), 0.01))
    finally:  # also after a second Ctrl-C
        for worker in running:
            worker.process.kill()
            worker.process.wait()
            os.close(worker.reply)


def _in_this_process(jobs: Sequence[Job], root: Path, report: Report) -> None:
    for job in jobs:
        report(job, "running", "this process")
        outcome = _carry_out(job, root, 0)
        if outcome["state"] == "interrupted":
            raise KeyboardInterrupt
        report(job, outcome["state"], outcome["text"])


# -- a Ray cluster -----------------------------------------------------------------------------------------------------


def ray_executor(
    address: str | None = None, cpus_per_job: float = 1.0, gpus_per_job: float = 0.0, attempts: int = ATTEMPTS
) -> Executor:
    """Tasks of a Ray cluster, each with its share of CPUs and GPUs; without an address, of one on this machine.

    The root must be a folder that all machines of the cluster share.
    """
    ray: Any = require("ray", "ray")

    def execute(jobs: Sequence[Job], root: Path, report: Report) -> None:
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address)
        token = uuid.uuid4().hex
        (root / TOKEN).write_text(token, encoding="utf-8")
        # Ray itself must not run a task again: deaths are counted here. One process a job: nothing is left behind.
        remote = ray.remote(num_cpus=cpus_per_job, num_gpus=gpus_per_job, max_retries=0, max_calls=1)(work)
        deaths, simulators = _Deaths(attempts, report), _simulators(int(cpus_per_job))
        running: dict[Any, Job] = {}
        begun: dict[str, int] = {}  # events there were before; more of them mean that a worker has begun

        def submit(job: Job) -> None:
            begun[job.key] = len(events(root / job.key))
            running[remote.remote(payload(elsewhere(job), root.resolve(), simulators), token)] = job

        try:
            for job in jobs:
                submit(job)
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
                for job in running.values():
                    if job.key in begun and len(log := events(root / job.key)) > begun[job.key]:
                        del begun[job.key]
                        report(job, "running", f"process {log[-1]['pid']} on {log[-1]['host']}")
                for ref in ready:
                    job, outcome, how = running.pop(ref), None, "asked to stop"
                    try:
                        outcome = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        how = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                    if deaths.settle(job, outcome, how):
                        submit(job)
        finally:
            for force in (False, True):  # first so that they save
                for ref in running:
                    with contextlib.suppress(Exception):
                        ray.cancel(ref, force=force)
                if running and not force:
                    ray.wait(list(running), num_returns=len(running), timeout=GRACE)
            if ours:
                ray.shutdown()

    return execute


def elsewhere(job: Job) -> Job:
    """The job as another machine must be told it: its processes start in some other folder."""
    here = job.data is not None and Path(job.data).is_file()
    return replace(job, data=str(Path(str(job.data)).resolve())) if here else job


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        place = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address or "")
        if place:  # Ray itself would try for minutes
            socket.create_connection((place[1], int(place[2])), timeout=10).close()
        if address is None and "RAY_ADDRESS" not in os.environ:
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise QptError(
            f"the Ray cluster at {address or 'this machine'} cannot be reached ({reason}); check --address"
        ) from error


# -- the worker's side -------------------------------------------------------------------------------------------------


def payload(job: Job, root: Path, simulators: int) -> bytes:
    """A job for another process, with the task and the method where these are known in this process only."""
    task = get_task(job.task) if job.task is not None else None
    if task is not None and task.suite == "custom" and not portable(task):
        raise QptError(
            f"the environment factory of {task.name} cannot be sent to worker processes; make it a function of a "
            "module (not of the script itself, no lambda), or run with workers=0"
        )
    method = None if job.algorithm in ALGORITHMS else algorithm_classes(job.algorithm)
    return pickle.dumps((job, root, simulators, task, method))


def work(data: bytes, token: str | None = None) -> dict[str, str]:
    """Carry out a job; says what came of it. Only a death leaves nothing said."""
    job, root, simulators, task, method = pickle.loads(data)  # from our own parent, or through the user's cluster
    _know(job, task, method)
    return _carry_out(job, root, simulators, token)


def _carry_out(job: Job, root: Path, simulators: int, token: str | None = None) -> dict[str, str]:
    try:
        if token is not None and (not (root / TOKEN).exists() or (root / TOKEN).read_text(encoding="utf-8") != token):
            raise QptError(
                f"a worker of the cluster does not see {root}; choose an --out that all machines share, "
                "or run on each machine and copy the folders together"
            )
        run_job(job, root, simulators)
    except (Interrupted, KeyboardInterrupt):
        return {"state": "interrupted", "text": ""}
    except Exception as error:
        if isinstance(error, QptError):
            return {"state": "failed", "text": str(error)}
        traceback.print_exc()
        return {"state": "failed", "text": f"unexpected {type(error).__name__}: {str(error)[:2000]}"}
    return {"state": "done", "text": ""}


def _know(job: Job, task: Task | None, method: tuple[type, type] | None) -> None:
    if task is not None and task.name not in all_tasks():
        register_task(task)
    if method is not None and job.algorithm not in algorithm_names():
        register_algorithm(job.algorithm, *method)


def _main() -> None:
    """A worker process: one job, told through stdin; what came of it goes back through a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reply, line = map(int, sys.argv[1:3])
    threading.Thread(target=_leave_with_parent, args=(line,), daemon=True).start()
    outcome = work(sys.stdin.buffer.read())
    os.write(reply, json.dumps(outcome).encode())


def _leave_with_parent(line: int) -> None:
    """However the parent ends, its end of the line is closed: save and leave."""
    os.read(line, 1)
    for _ in range(ASKED):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE / ASKED)
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _simulators(cores: int) -> int:
    """Simulator processes of a job; on a single core they would only be in its way."""
    return cores if cores > 1 else 0
