"""The pages about data do what they say: their code runs and their commands work, in the order of the page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qpt.cli import main
from qpt.data import load_dataset
from qpt.tasks import get_task, load_tasks

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, page
    return found


def commands(page: str) -> list[str]:
    return [
        c.replace("\\\n", " ") for b in blocks(page, "console") for c in re.findall(r"^\$ ((?:.*\\\n)*.*)", b, re.M)
    ]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a registry and caches of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qpt.tasks._registered", {})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("QPT_TASKS", "QPT_DATA_DIR", "DSRL_DATASET_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", ["data.md", "augmentation.md"])
def test_the_python_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for code in blocks(page, "python"):
        exec(code, names)
    assert names["data"].fingerprint == load_dataset("embedded:ballcircle").fingerprint


def test_the_commands_of_the_pages_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (info, _) = commands("data.md")
    (augment,) = re.findall(r"^qpt (data augment .*)", (ROOT / "docs/augmentation.md").read_text("utf-8"), re.M)
    assert main(shlex.split(info)[1:]) == 0
    assert main(shlex.split(augment)) == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {"ballcircle.png", "augmentation.png"}
    assert "surrogate" in capsys.readouterr().out


def test_the_example_of_a_bad_file_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    (example,) = [b for b in blocks("data.md", "console") if "validate" in b]
    command, *expected = example.splitlines()
    ends, costs = np.arange(20) == 19, np.zeros(20)
    for name in ("mine.npz", "other.npz"):
        columns = {"observations": np.zeros((20, 2)), "actions": np.zeros((20, 1)), "rewards": costs, "terminals": ends}
        np.savez(tmp_path / name, costs=costs, **columns)
        (tmp_path / name).rename(tmp_path / f"{Path(name).stem}.hdf5")  # what a file is decides, not its name
        costs = np.where(np.arange(20) == 17, -1.0, 0.0)
    assert main(shlex.split(command)[2:]) == 1
    assert capsys.readouterr().out.splitlines() == expected


WAREHOUSE = """
import gymnasium, numpy as np

class Warehouse(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {"cost": 0.0}

make_warehouse = Warehouse
"""


def test_the_page_on_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warehouse.py").write_text(WAREHOUSE)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks("tasks.md", "python"):
        exec(code, names)
    assert names["task"].name == "BallCircle"
    assert names["env"].reset(seed=0)[0].shape == (3,)
    in_python = get_task("Warehouse")
    (toml,) = blocks("tasks.md", "toml")
    (tmp_path / "tasks.toml").write_text(toml)
    (in_toml,) = load_tasks("tasks.toml")
    assert (in_toml.horizon, in_toml.cost_limits, in_toml.data_file) == (
        in_python.horizon,
        in_python.cost_limits,
        in_python.data_file,
    )
    assert in_toml.env_factory is not None
    assert in_toml.env_factory().reset()[0].shape == (3,)


def follow(page: str, folder: Path, **environment: str) -> str:
    """Write the page's files and type its commands, one after the other; what they printed."""
    for code in blocks(page, "python"):
        name = code.split("\n")[0].removeprefix("# ")
        assert name.endswith(".py"), "a block of this page says which file it is"
        (folder / name).write_text(code)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands(page))],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_bring_your_own_data_from_start_to_end(tmp_path: Path) -> None:
    printed = follow("bring-your-own-data.md", tmp_path)
    assert "my.hdf5: good" in printed
    assert "100 episodes" in printed
    assert (tmp_path / "my.png").is_file()
    costs = [float(cost) for cost in re.findall(r"^limit \d+: cost (\d+)", printed, re.M)]
    assert len(costs) == 3
    assert costs[0] < costs[2]  # the limit is heard


def test_results_of_surrogate_data_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the file over the checkpoint to the table and what is saved."""
    pytest.importorskip("pybullet")
    tiny = ["--steps", "2", "--batch-size", "4", "--width", "8", "--no-progress", "--device", "cpu", "--threads", "1"]
    source = ["--task", "BallCircle", "--data", "embedded:ballcircle"]
    assert main(["train", "--algorithm", "bc-safe", *source, *tiny, "--out", "run"]) == 0
    rest = ["--limits", "10", "--episodes", "1", "--workers", "0", "--out", "episodes.csv"]
    assert main(["evaluate", "--checkpoint", "run", *rest]) == 0
    assert "trained on surrogate data, not on the published data" in capsys.readouterr().out
    assert json.loads((tmp_path / "episodes.csv.json").read_text())["surrogate_data"] is True
    assert main(["evaluate", "--policy", "zero", "--task", "BallCircle", *rest]) == 0
    assert "surrogate" not in capsys.readouterr().out
    assert json.loads((tmp_path / "episodes.csv.json").read_text())["surrogate_data"] is False
