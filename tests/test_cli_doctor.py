"""`qpt doctor` and `qpt sims`: what they find, print and return."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from qpt.cli import main
from qpt.cli.doctor import Finding, examine, mend
from qpt.cli.sims import PACKAGES, commands, essence

BULLET = pytest.mark.skipif(importlib.util.find_spec("bullet_safety_gym") is None, reason="simulator not installed")


@BULLET
def test_healthy_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tasks", "BallRun", "AntCircle", "--steps", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [row["task"] for row in report["tasks"]] == ["BallRun", "AntCircle"]
    assert report["versions"]["pybullet"] == "3.2.7"
    assert main(["doctor", "--tasks", "BallRun"]) == 0
    assert "1 of 1 tasks run" in capsys.readouterr().out


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("bullet_safety_gym", "safety_gymnasium", "metadrive"))),
    reason="needs all simulators",
)
def test_all_38_tasks_make_reset_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "38 of 38 tasks run" in text
    for suite, package in (("bullet", "pybullet 3.2.7"), ("safety-gymnasium", "mujoco"), ("metadrive", "panda3d")):
        assert any(line.startswith(f"{suite}: ") and package in line for line in text.splitlines())


def test_sick_tasks_are_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sick.py").write_text(
        textwrap.dedent(
            """
            import os, time, gymnasium, numpy as np
            class Well(gymnasium.Env):
                observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
                def reset(self, seed=None, options=None): return np.zeros(1), {}
                def step(self, action): return np.zeros(1), 0.0, False, False, {"cost": 0}
            class Dies(Well):
                def step(self, action): os.abort()
            class Raises(Well):
                def reset(self, seed=None, options=None): raise ValueError("no wheels")
            class Hangs(Well):
                def step(self, action): time.sleep(60)
            """
        )
    )
    names = ["Dies", "Raises", "Hangs", "Well"]
    rows = "".join(f'[[task]]\nname = "{name}"\nenv = "sick:{name}"\n' for name in names)
    (tmp_path / "tasks.toml").write_text(rows)
    monkeypatch.setenv("QPT_TASKS", str(tmp_path / "tasks.toml"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["doctor", "--tasks", *names, "--json", "--timeout", "5"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {row["task"]: row for row in report["tasks"]}
    assert [row["ok"] for row in report["tasks"]] == [False, False, False, True]
    assert "signal 6" in found["Dies"]["detail"]
    assert "no wheels" in found["Raises"]["detail"]
    assert "hung" in found["Hangs"]["detail"]


def test_what_an_environment_prints_and_brackets_in_its_name_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty.py").write_text(
        textwrap.dedent(
            """
            import os, gymnasium, numpy as np
            class Chats(gymnasium.Env):
                observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
                def reset(self, seed=None, options=None): return np.zeros(1), {}
                def step(self, action): print(".", end=""); return np.zeros(1), 0.0, False, False, {"cost": 0}
            class Dies(Chats):
                def step(self, action): os.abort()
            """
        )
    )
    rows = "".join(f'[[task]]\nname = "My[v{i}]"\nenv = "chatty:{n}"\n' for i, n in enumerate(["Chats", "Dies"]))
    (tmp_path / "tasks.toml").write_text(rows)
    monkeypatch.setenv("QPT_TASKS", str(tmp_path / "tasks.toml"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert main(["doctor", "--tasks", "My[v0]", "My[v1]"]) == 1
    first, second = (line.split() for line in capsys.readouterr().out.splitlines() if "My[" in line)
    assert first[:3] == ["My[v0]", "custom", "ok"]
    assert second[:3] == ["My[v1]", "custom", "FAILS"]


def test_missing_simulator_names_the_command(tmp_path: Path) -> None:
    """In a Python that finds no metadrive: the finding and what mends it."""
    code = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'metadrive' else real(name, *a)\n"
        "from qpt.cli.doctor import child; child(2, ['easymean'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "qpt sims install metadrive" in done.stdout
    findings = [
        Finding("easymean", "metadrive", False, "x"),
        Finding("Mine", "custom", False, "x"),
        Finding("BallRun", "bullet", True, ""),
    ]
    assert mend(findings)[0] == "qpt sims install metadrive"
    assert not any("bullet" in line or "custom" in line for line in mend(findings))


def test_other_physics_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.cli.doctor.version", lambda name: "3.6.0" if name == "mujoco" else None)
    assert any("mujoco==3.4.0" in line for line in mend([]))


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tasks", "BallRum"]) == 1
    assert "did you mean 'BallRun'" in capsys.readouterr().err
    assert main(["doctor", "--steps", "0"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["sims", "install", "quake"])


def test_install_dry_run_prints_two_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sims", "install", "--dry-run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "mujoco==3.4.0" in first
    assert "pybullet==3.2.7" in first
    assert "--no-deps" not in first
    assert second.endswith("--no-deps bullet-safety-gym==1.4.0 safety-gymnasium==0.4.0 metadrive-simulator==0.2.6.0")
    for suite, (_, simulator) in PACKAGES.items():
        assert commands(suite)[1][-1] == simulator


def test_install_runs_pip_and_reports_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        failed = "--no-deps" in command and "fail" in failing
        return subprocess.CompletedProcess(
            command, int(failed), "", "Collecting x\nERROR: No matching distribution found for x\n"
        )

    monkeypatch.setattr(subprocess, "run", pip)
    failing: set[str] = set()
    assert main(["sims", "install", "bullet"]) == 0
    assert [command[:4] for command in ran] == [[sys.executable, "-m", "pip", "install"]] * 2
    failing.add("fail")
    assert main(["sims", "install", "bullet"]) == 1
    assert "No matching distribution found for x" in capsys.readouterr().err
    assert "uv pip install pip" in essence("/usr/bin/python: No module named pip")


def test_examine_survives_a_child_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -11, "", "boom\n"))
    assert [f.detail for f in examine("bullet", ["BallRun", "CarRun"], 1, 1)] == ["killed by signal 11: boom"] * 2
