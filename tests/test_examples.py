"""The examples run, in miniature, and show what they say; the walk from a CSV to a certified graph can be walked."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny_data
from qpt.algorithms.base import Spec, algorithm_names
from qpt.cli import main
from qpt.data import load_dataset
from qpt.data.sampling import WindowSampler
from qpt.policy import load_policy
from qpt.training import TrainConfig, train

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and registries of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("qpt.tasks._registered", {})
    monkeypatch.setattr("qpt.algorithms.base._registered", {})
    monkeypatch.delenv("QPT_TASKS", raising=False)


def example(name: str) -> ModuleType:
    """The module, imported anew: what it registers is gone after the test."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_every_example_is_short_and_on_the_page_of_examples() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for name in EXAMPLES:
        assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 100, name
        assert f"examples/{name}.py" in page, name


def test_from_logs_to_a_policy_and_a_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    room = example("logs_to_policy")
    small = ["--out", "x", "--episodes", "50", "--steps", "40", "--judge-steps", "20", "--limits", "5", "20"]
    chosen, cost = room.main([*small, "--budget", "70"])
    told = capsys.readouterr().out
    assert re.findall(r"^limit (\d+): expected return", told, re.M) == ["5", "20"]
    assert chosen in (5, 20)
    assert 0 <= cost <= 60
    log = np.genfromtxt(tmp_path / "x" / "log.csv", delimiter=",", names=True)
    data = room.read(tmp_path / "x" / "log.csv")
    assert (len(data), data.steps) == (50, len(log))
    np.testing.assert_allclose(data.episode_costs, [log["hot"][log["episode"] == i].sum() for i in range(50)])
    assert np.abs(data.actions).max() <= 1
    judged = json.loads((tmp_path / "x" / "run" / "judge.json").read_text(encoding="utf-8"))
    assert judged["episodes"] == 15  # held out
    # The highest expected return of those whose interval is within the budget; none is within a negative one.
    assert chosen == max(judged["limits"], key=lambda x: x["expected_return"])["cost_limit"]
    assert room.main([*small, "--budget", "-1"]) is None
    assert "no limit is sure to keep -1" in capsys.readouterr().out


def test_a_limit_that_changes_half_way(capsys: pytest.CaptureFixture[str]) -> None:
    room = example("changing_limit")
    means = room.main(["--steps", "100", "--episodes", "3", "--out", "x", "--limits", "40", "4"])
    told = capsys.readouterr().out
    assert "limit 40, then 4" in told
    kept, changed, low = means  # each: cost early, cost late, cost, return
    assert kept[0] == changed[0]  # the two groups start alike and decide alike until the limit changes
    assert changed[1] < kept[1]
    assert low[0] < kept[0]
    np.testing.assert_allclose(means[:, 2], means[:, 0] + means[:, 1])
    again = room.main(["--checkpoint", "x", "--episodes", "3", "--limits", "40", "4"])  # the toy is known by now
    np.testing.assert_allclose(again, means)


def test_methods_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ["--steps", "20", "--episodes", "2", "--seeds", "0", "--workers", "0", "--out", "x"]
    bench = example("compare_methods").main(few)
    assert not bench.failures
    told = capsys.readouterr().out
    rows = re.findall(r"^(\S+) +limit (\d+) +return .* cost .*(?:safe|unsafe|unclear)$", told, re.M)
    assert rows == [(method, limit) for method in ("qpt", "cdt", "bc-safe") for limit in ("10", "30")]
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    assert "Methods on Tradeoff-0" in page
    assert all(method in page for method in ("qpt", "cdt", "bc-safe"))


# -- a method of one's own ---------------------------------------------------------------------------------------------


def test_a_method_of_ones_own_is_compared_like_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    room = example("own_algorithm")
    assert algorithm_names()[-1] == "rvs"
    bench = room.main("x", steps=200, episodes=4)
    assert not bench.failures
    told = capsys.readouterr().out
    costs = [float(x) for x in re.findall(r"^rvs +limit \d+ +return .* cost ([\d.]+)", told, re.M)]
    assert len(costs) == 3
    assert costs[0] < costs[2]  # the limit is heard
    assert "bc-safe" in told


def test_a_method_of_ones_own_keeps_the_contract(tmp_path: Path) -> None:
    room = example("own_algorithm")
    config = room.RvSConfig(steps=6, batch_size=8, width=16)
    assert {"steps", "batch_size"} <= {f.name for f in fields(config)}
    settings: dict[str, Any] = {"device": "cpu", "progress": False, "checkpoint_every": 3}
    whole = train(TrainConfig(algorithm="rvs", config=config, out=tmp_path / "whole", **settings), tiny_data())
    half = TrainConfig(algorithm="rvs", config=room.RvSConfig(steps=3, batch_size=8, width=16), **settings)
    train(TrainConfig(**vars(half) | {"out": tmp_path / "parts"}), tiny_data())
    rest = TrainConfig(algorithm="rvs", config=config, out=tmp_path / "parts", resume=True, **settings)
    train(rest, tiny_data())
    a, b = (load_policy(tmp_path / name).method.state_dict() for name in ("whole", "parts"))
    for name, values in a.items():  # resumed bit for bit
        assert torch.equal(values, b[name]), name
    assert np.isfinite(whole.metrics["loss"])
    policy, actions = load_policy(whole.folder), []
    for limit in (0.0, 0.0, 8.0):
        policy.reset(1, cost_limits=limit, return_targets=20.0)
        actions.append(policy.act(np.zeros((1, 3))))
    assert (actions[0] == actions[1]).all()
    assert (actions[0] != actions[2]).any()


def test_a_method_of_ones_own_learns_what_it_is_told() -> None:
    room = example("own_algorithm")
    data = tiny_data(40)
    torch.manual_seed(0)
    method = room.RvS(room.RvSConfig(batch_size=64, width=32), Spec.from_data(data))
    sampler = method.make_sampler(data, torch.device("cpu"), 0)
    assert isinstance(sampler, WindowSampler)
    losses = [float(method.update(sampler.sample())["loss"]) for _ in range(200)]
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:5])


def test_a_method_of_ones_own_has_the_whole_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("own_algorithm")
    example("compare_methods").toy_data(tmp_path)
    few = ["--steps", "5", "--batch-size", "8", "--width", "8", "--device", "cpu", "--no-progress", "--out", "run"]
    assert main(["train", "--algorithm", "rvs", "--task", "Tradeoff-0", "--data", "toy.hdf5", *few]) == 0
    assert main(["evaluate", "--checkpoint", "run", "--limits", "9", "--episodes", "2", "--workers", "0"]) == 0
    assert "Tradeoff-0 · rvs" in capsys.readouterr().out


def test_the_smallest_method_of_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "your-own-algorithm.md").read_text(encoding="utf-8")
    (tmp_path / "page_code.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)
    page = example("page_code")
    told = capsys.readouterr().out
    data = load_dataset("embedded:ballcircle")
    learned = page.policy.method.action.detach().numpy()
    assert np.abs(learned - data.actions.mean(0)).max() < 0.1
    assert str(np.stack([learned, learned])) in told


@pytest.mark.slow
def test_worker_processes_know_a_method_of_ones_own(tmp_path: Path) -> None:
    example("compare_methods").toy_data(tmp_path)
    (tmp_path / "tasks.toml").write_text('[[task]]\nname = "Toy"\nenv = "toys:make"\nhorizon = 24\ncost_limits = [9]\n')
    (tmp_path / "toys.py").write_text(
        "from qpt.envs.toy import tradeoff\n\ndef make():\n    return tradeoff(0).env()\n"
    )
    words = "bench --tasks Toy --data Toy=toy.hdf5 --algorithms rvs --seeds 0 --limits 9 --steps 5 --episodes 2"
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "own_algorithm.py",
            *words.split(),
            "--eval-every",
            "0",
            "--workers",
            "1",
            "--out",
            "x",
        ],
        env={**os.environ, "QPT_TASKS": "tasks.toml", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "x").rglob("done.json"))


# -- the walk ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_walk_from_a_csv_to_a_certified_graph(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "from-csv-to-onnx.md").read_text(encoding="utf-8")
    for language, code in re.findall(r"```(python|toml)\n(.*?)```", text, re.DOTALL):
        name = code.split("\n")[0].removeprefix("# ")
        assert name.endswith((".py", ".toml")), f"a block of {language} on this page says which file it is"
        (tmp_path / name).write_text(code)
    commands = [
        command
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for command in re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M)
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ACCEPTED: P(episode cost > 15) <= 0.05" in done.stdout
    card = (tmp_path / "charger.md").read_text(encoding="utf-8")
    for part in ("**Measured**", "**Certified**", "**Judged**"):
        assert part in card
    shown, found = (
        np.array([line.split() for line in re.findall(r"^\| (\d+ \| 50 \| [\d.]+ \[.*?\] \| [\d.]+) \[", page, re.M)])
        for page in (text, card)
    )
    columns = [0, 4, 8]  # limit, return, cost
    np.testing.assert_allclose(found[:, columns].astype(float), shown[:, columns].astype(float), atol=2.5)
    costs = [int(cost) for cost in re.findall(r"^cost of the hour: (\d+)", done.stdout, re.M)]
    assert len(costs) == 4
    assert max(costs) <= 15
