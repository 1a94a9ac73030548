"""`qpt doctor`: does every task make, reset and step here, and what mends it if not?"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qpt.cli.run import run
from qpt.errors import QptError
from qpt.tasks import all_tasks, dsrl_tasks, get_task

VERSIONS = {
    "bullet": ("bullet-safety-gym", "pybullet"),
    "safety-gymnasium": ("safety-gymnasium", "mujoco"),
    "metadrive": ("metadrive-simulator", "panda3d"),
    "custom": (),
}
SHARED = ("gymnasium", "numpy")
PHYSICS = {"mujoco": "3.4.0", "pybullet": "3.2.7", "metadrive-simulator": "0.2.6.0"}  # what the published data had


@dataclass(frozen=True)
class Finding:
    """What one task did."""

    task: str
    suite: str
    ok: bool
    detail: str  # steps per second, or what went wrong


def doctor(tasks: tuple[str, ...] = (), steps: int = 20, json: bool = False, timeout: float = 120.0) -> int:
    """Check that every task makes, resets and steps; exit with 1 if one does not.

    Example: qpt doctor --tasks BallRun harddense

    Args:
        tasks: Only these tasks, for instance BallRun harddense; all 38 if none is named.
        steps: Steps with random actions in each.
        json: Print JSON instead of tables.
        timeout: Seconds after which a suite counts as hanging.
    """
    if steps < 1:
        raise QptError(f"--steps must be 1 or more, not {steps}")
    chosen = [get_task(name) for name in tasks] if tasks else list(dsrl_tasks().values())
    suites: dict[str, list[str]] = {}
    for task in chosen:
        suites.setdefault(task.suite, []).append(task.name)
    begin = time.monotonic()
    findings = [finding for suite, names in suites.items() for finding in examine(suite, names, steps, timeout)]
    report = {
        "ok": all(finding.ok for finding in findings),
        "seconds": round(time.monotonic() - begin, 1),
        "versions": {name: version(name) for suite in suites for name in (*SHARED, *VERSIONS[suite])},
        "tasks": [asdict(finding) for finding in findings],
        "mend": mend(findings),
    }
    show(report, as_json=json)
    return 0 if report["ok"] else 1


def examine(suite: str, names: list[str], steps: int, timeout: float) -> list[Finding]:
    """Run a suite's tasks in a child process; if it dies or hangs, that is a finding, and another child goes on."""
    findings: list[Finding] = []
    while len(findings) < len(names):
        rest = names[len(findings) :]
        command = [sys.executable, "-m", "qpt.cli.doctor", str(steps), *rest]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
            output, fate = done.stdout, _fate(done.returncode, done.stderr)
        except subprocess.TimeoutExpired as error:
            output, fate = (error.stdout or b"").decode(), f"hung for {timeout:.0f} s"
        lines = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("doctor ")]
        findings += [Finding(name, suite, ok, detail) for name, ok, detail in lines]
        if len(lines) < len(rest):  # the child ended in the middle of a task
            findings.append(Finding(rest[len(lines)], suite, False, fate))
    return findings


def _fate(code: int, stderr: str) -> str:
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return f"killed by signal {-code}: {last}" if code < 0 else f"ended with code {code}: {last}"


def child(steps: int, names: Sequence[str]) -> None:
    """In the child process: one line for each task."""
    import numpy as np

    from qpt.envs import make_env

    for name in names:
        try:
            env = make_env(name)
            env.reset(seed=0)
            rng, begin = np.random.default_rng(0), time.perf_counter()
            for _ in range(steps):
                action = rng.uniform(-1, 1, env.action_dim).astype(np.float32)
                observation, reward, terminated, truncated, info = env.step(action)
                if not np.isfinite([*observation, reward, info["cost"]]).all():
                    raise QptError("a value is not finite")
                if terminated or truncated:
                    env.reset()
            speed = steps / (time.perf_counter() - begin)
            env.close()
            row = (name, True, f"{speed:.0f} steps/s")
        except Exception as error:  # whatever a simulator raises is the finding
            row = (name, False, str(error) if isinstance(error, QptError) else f"{type(error).__name__}: {error}")
        print("\ndoctor " + json.dumps(row), flush=True)  # on a line of its own, whatever the simulator has printed


def mend(findings: Sequence[Finding]) -> list[str]:
    """The commands that mend what was found."""
    broken = list(dict.fromkeys(finding.suite for finding in findings if not finding.ok))
    advice = [f"qpt sims install {suite}" for suite in broken if suite != "custom"]
    for package, expected in PHYSICS.items():
        found = version(package)
        if found is not None and found != expected:
            advice.append(f"pip install {package}=={expected}   # {found} has other physics than the published data")
    return advice


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    for suite, names in {"all": SHARED, **VERSIONS}.items():
        found = [
            f"{name} {report['versions'][name] or '[red]missing[/]'}" for name in names if name in report["versions"]
        ]
        if found:
            console.print(f"{suite}: {', '.join(found)}", highlight=False)
    table = Table("task", "suite", "", "", box=None, pad_edge=False)
    for row in report["tasks"]:
        fate = "[green]ok[/]" if row["ok"] else "[red]FAILS[/]"
        table.add_row(Text(row["task"]), row["suite"], fate, Text(row["detail"]))  # names may hold [brackets]
    console.print(table)
    good = sum(row["ok"] for row in report["tasks"])
    console.print(f"{good} of {len(report['tasks'])} tasks run ({report['seconds']} s)")
    for command in report["mend"]:
        console.print(f"to mend: [bold]{command}[/]")


def main(args: Sequence[str]) -> int:
    all_tasks()  # reads the task file that QPT_TASKS names
    return run(doctor, args, prog="doctor")


if __name__ == "__main__":
    child(int(sys.argv[1]), sys.argv[2:])
