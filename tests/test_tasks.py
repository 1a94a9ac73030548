"""The registry: 38 rows that hold together, tasks of one's own in Python and TOML, and the table."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qpt.cli.tasks import main as command
from qpt.errors import QptError
from qpt.tasks import Augmentation, Task, all_tasks, dsrl_tasks, factory_from, get_task, load_tasks, register_task


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A registry and caches of the test's own."""
    monkeypatch.setattr("qpt.tasks._registered", {})
    for name in ("QPT_TASKS", "DSRL_DATASET_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path / "cache"))


# -- the 38 rows -------------------------------------------------------------------------------------------------------

# Sizes as DSRL's data sheet and the simulators give them: name -> (observations, actions, horizon).
SIZES = {
    **{f"Point{kind}{n}": (size, 2, steps) for kind, size, steps in
       (("Button", 76, 1000), ("Circle", 28, 500), ("Goal", 60, 1000), ("Push", 76, 1000)) for n in (1, 2)},
    **{f"Car{kind}{n}": (size, 2, steps) for kind, size, steps in
       (("Button", 88, 1000), ("Circle", 40, 500), ("Goal", 72, 1000), ("Push", 88, 1000)) for n in (1, 2)},
    "SwimmerVelocity": (8, 2, 1000), "HopperVelocity": (11, 3, 1000), "HalfCheetahVelocity": (17, 6, 1000),
    "Walker2dVelocity": (17, 6, 1000), "AntVelocity": (27, 8, 1000),
    "BallRun": (7, 2, 100), "CarRun": (7, 2, 200), "DroneRun": (17, 4, 200), "AntRun": (33, 8, 200),
    "BallCircle": (8, 2, 200), "CarCircle": (8, 2, 300), "DroneCircle": (18, 4, 300), "AntCircle": (34, 8, 500),
    **{level + traffic: (261, 2, 1000)
       for level in ("easy", "medium", "hard") for traffic in ("sparse", "mean", "dense")},
}  # fmt: skip


def test_the_38_tasks_have_their_published_sizes() -> None:
    tasks = dsrl_tasks()
    assert {name: (t.observation_dim, t.action_dim, t.horizon) for name, t in tasks.items()} == SIZES
    assert Counter(t.suite for t in tasks.values()) == {"safety-gymnasium": 21, "bullet": 8, "metadrive": 9}
    assert len(tasks) == len({t.env_id for t in tasks.values()}) == len({t.data_file for t in tasks.values()}) == 38


@pytest.mark.parametrize("name", SIZES)
def test_each_row_holds_together(name: str) -> None:
    task = get_task(name)
    assert task.name == name
    assert task.has_simulator
    assert task.reward_min is not None
    assert task.reward_max is not None
    assert task.reward_min < task.reward_max
    # DSRL's files are called ID-COST-EPISODES.hdf5, where COST is the cap of the published data
    match = re.fullmatch(r"(.+?-v\d)-(\d+)-(\d+)\.hdf5", task.data_file or "")
    assert match
    simulator, cap, episodes = match[1].replace("Gymnasium-", "-"), int(match[2]), int(match[3])
    assert simulator == task.env_id
    assert episodes == task.trajectories
    assert task.cost_max is not None
    assert 0 < task.cost_max < cap + 1
    assert len(task.data_urls) == 2
    assert all(url.startswith(("https://", "http://")) and url.endswith(f"/{task.data_file}") for url in task.data_urls)
    assert task.data_urls[0].startswith("https://")
    # the three published thresholds double, and CDT has a target for each
    assert task.cost_limits in ((10, 20, 40), (20, 40, 80))
    assert task.cost_limits == ((20, 40, 80) if task.suite == "safety-gymnasium" else (10, 20, 40))
    third = 50 if name in ("CarCircle", "mediumdense") else task.cost_limits[2]  # OSRL's defaults, used for these two
    assert tuple(cost for _, cost in task.targets) == (*task.cost_limits[:2], third)
    assert min(target for target, _ in task.targets) > 0
    assert task.paper_cost_limit == 10
    assert task.paper_steps == (200_000 if task.suite == "metadrive" else 100_000)
    constants = task.augmentation
    assert constants.degree in range(5)
    assert constants.max_reward is not None
    assert constants.max_reward_decrease is not None
    assert 0 < constants.max_reward_decrease < constants.max_reward
    assert (task.simulator_observation_dim is None) == (task.suite != "metadrive")
    assert task.env_observation_dim == (259 if task.suite == "metadrive" else task.observation_dim)
    assert task.binary_costs == (task.suite != "metadrive")


def test_rows_are_frozen_and_the_registry_is_a_copy() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_task("BallCircle").horizon = 3  # type: ignore[misc]
    all_tasks().clear()
    assert len(all_tasks()) == 38


def test_scores_are_normalised_as_in_dsrl() -> None:
    task = Task("x", reward_min=10.0, reward_max=30.0)
    assert task.normalized_return(20.0) == 0.5
    assert task.normalized_return(40.0) == 1.5
    assert task.normalized_cost(5.0, 10.0) == 0.5
    assert task.normalized_cost(0.0, 0.0) == 1.0
    assert task.normalized_cost(3.0, 0.0) == 4.0
    assert math.isnan(Task("y").normalized_return(1.0))


# -- tasks of one's own ------------------------------------------------------------------------------------------------


def test_a_task_is_registered_in_python() -> None:
    task = register_task(Task("Mine", env_factory=dict, horizon=50))
    assert get_task("Mine") is task
    assert "Mine" in all_tasks()
    assert task.has_simulator
    assert register_task(Task("Mine", horizon=60)) is get_task("Mine")  # the last one holds
    with pytest.raises(QptError, match="belongs to a DSRL task"):
        register_task(Task("BallCircle"))
    with pytest.raises(QptError, match="name"):
        register_task(Task(""))


FULL = """
[[task]]
name = "Warehouse"
env = "collections:OrderedDict"
observation_dim = 12
action_dim = 3
horizon = 400
reward_min = -5
reward_max = 120.5
cost_max = 60
binary_costs = true
data_file = "warehouse.hdf5"
data_urls = ["https://data.example/warehouse.hdf5"]
cost_limits = [5, 15]
targets = [[100, 5], [110, 15]]
augmentation = { degree = 1, max_reward = 130 }

[[task]]
name = "Small"
"""


def test_tasks_are_read_from_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.toml").write_text(FULL)
    full, small = load_tasks(tmp_path / "tasks.toml")
    assert full == Task(
        "Warehouse",
        observation_dim=12,
        action_dim=3,
        horizon=400,
        reward_min=-5,
        reward_max=120.5,
        cost_max=60,
        binary_costs=True,
        data_file="warehouse.hdf5",
        data_urls=("https://data.example/warehouse.hdf5",),
        cost_limits=(5, 15),
        targets=((100, 5), (110, 15)),
        augmentation=Augmentation(degree=1, max_reward=130),
    )
    assert full.env_factory is not None
    assert full.env_factory() == {}
    assert small == Task("Small")
    assert not small.has_simulator
    assert get_task("Warehouse") is full

    monkeypatch.setattr("qpt.tasks._registered", {})
    copy = tmp_path / "copy.toml"
    copy.write_text(FULL)
    monkeypatch.setenv("QPT_TASKS", str(copy))
    assert get_task("Warehouse") == full
    assert len(all_tasks()) == 40


@pytest.mark.parametrize("second", ["name = 'BallCircle'", "name = 'First'", "name = ''", "name = 'B'\nhorizon = 0"])
def test_a_task_file_with_one_defect_registers_nothing(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qpt.tasks._registered", {})
    (tmp_path / "tasks.toml").write_text(f"[[task]]\nname = 'First'\n[[task]]\n{second}\n[[task]]\nname = 'Third'\n")
    with pytest.raises(QptError):
        load_tasks(tmp_path / "tasks.toml")
    assert all_tasks() == dsrl_tasks()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no \\[\\[task\\]\\] table"),
        ("task = 3", "no \\[\\[task\\]\\] table"),
        ("[task]\nname = 'A'", "no \\[\\[task\\]\\] table"),
        ("[[task]\n", "not valid TOML"),
        ("[[task]]\nhorizon = 3", "has no name"),
        ("[[task]]\nname = ''", "has no name"),
        ("[[task]]\nname = 3", "has no name"),
        ("[[task]]\nname = 'A'\nhorizn = 3", "unknown keys: horizn"),
        ("[[task]]\nname = 'A'\nenv_factory = 'a:b'", "unknown keys: env_factory"),
        ("[[task]]\nname = 'BallCircle'", "'BallCircle' in .* belongs to a DSRL task"),
        ("[[task]]\nname = 'A'\n[[task]]\nname = 'A'", "has two tasks 'A'; give each"),
        ("[[task]]\nname = 'A'\nhorizon = 0", "horizon must be a positive whole number, not 0"),
        ("[[task]]\nname = 'A'\nhorizon = true", "horizon must be"),
        ("[[task]]\nname = 'A'\naction_dim = 1.5", "action_dim must be"),
        ("[[task]]\nname = 'A'\nsuite = 'mujoco'", "suite must be one of bullet, safety-gymnasium"),
        ("[[task]]\nname = 'A'\nreward_min = 'low'", "reward_min must be a number"),
        ("[[task]]\nname = 'A'\nreward_max = nan", "reward_max must be a number"),
        ("[[task]]\nname = 'A'\nreward_min = 2\nreward_max = 1", "reward_min \\(2\\) must lie below reward_max"),
        ("[[task]]\nname = 'A'\ndata_urls = 'https://x/y.hdf5'", "data_urls must be a list"),
        ("[[task]]\nname = 'A'\ndata_file = 3", "data_file must be a text"),
        ("[[task]]\nname = 'A'\ncost_limits = 10", "cost_limits must be a list"),
        ("[[task]]\nname = 'A'\ncost_limits = [-1]", "cost_limits must be a list"),
        ("[[task]]\nname = 'A'\ntargets = [[1, 2, 3]]", "targets must be a list"),
        ("[[task]]\nname = 'A'\nbinary_costs = 1", "binary_costs must be true or false"),
        ("[[task]]\nname = 'A'\naugmentation = { degre = 1 }", "cannot be read"),
        ("[[task]]\nname = 'A'\naugmentation = { degree = 1.5 }", "augmentation must be"),
        ("[[task]]\nname = 'A'\naugmentation = 3", "augmentation must be"),
        ("[[task]]\nname = 'A'\nenv = 3", "env must be a text"),
        ("[[task]]\nname = 'A'\nenv = 'module'", "does not name a factory"),
    ],
)
def test_a_wrong_toml_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "tasks.toml"
    file.write_text("[[task]]\nname = 'Good'\n\n" + text if text.startswith("[[task]]") else text)
    with pytest.raises(QptError, match=sentence) as caught:
        load_tasks(file)
    assert "\n" not in str(caught.value).rstrip()
    if "belongs" not in sentence:
        assert "Good" not in all_tasks()  # nothing of a wrong file is registered


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QptError, match="cannot be read: No such file"):
        load_tasks(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QptError, match="not valid TOML"):
        load_tasks(tmp_path / "binary.toml")
    monkeypatch.setenv("QPT_TASKS", str(tmp_path / "none.toml"))
    with pytest.raises(QptError, match=r"none\.toml"):
        get_task("BallCircle")


def test_unknown_names_get_the_nearest() -> None:
    for wrong, right in (("ballcircle", "BallCircle"), ("BalCircle", "BallCircle"), ("CARRUN", "CarRun")):
        with pytest.raises(QptError, match=f"did you mean '{right}'"):
            get_task(wrong)
    with pytest.raises(QptError, match="`qpt tasks` lists them"):
        get_task("zzz")


def test_factories_are_imported_when_called() -> None:
    assert factory_from("collections:Counter")() == {}
    missing = factory_from("no_such_module:make")  # training never needs it
    with pytest.raises(QptError, match="cannot be imported"):
        missing()
    with pytest.raises(QptError, match="cannot be imported"):
        factory_from("collections:NoSuchName")()


# -- the table ---------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert command(list(args)) == 0
    return capsys.readouterr().out


def test_the_table_has_every_task_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert set(lines) == set(SIZES)
    assert lines["HopperVelocity"][1:8] == ["11", "3", "1000", "37–1911", "250", "2240", "no"]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "38 tasks" in text


def test_the_table_knows_whose_data_is_at_hand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSRL_DATASET_DIR", str(tmp_path))
    (tmp_path / "SafetyCarRun-v0-40-651.hdf5").write_bytes(b"")
    rows = {row["name"]: row for row in json.loads(printed(capsys, "--suite", "bullet", "--json"))}
    assert list(rows) == [
        "BallRun",
        "CarRun",
        "DroneRun",
        "AntRun",
        "BallCircle",
        "CarCircle",
        "DroneCircle",
        "AntCircle",
    ]
    assert {name for name, row in rows.items() if row["cached"]} == {"CarRun"}
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path))
    (tmp_path / "collected").mkdir()
    for name in ("CarRun", "AntRun"):
        (tmp_path / "collected" / f"{name}.hdf5").write_bytes(b"")
    text = printed(capsys)
    shown = {line.split()[0]: line.split()[7] for line in text.splitlines() if line.startswith("  ")}
    assert {name: kind for name, kind in shown.items() if kind != "no"} == {"CarRun": "both", "AntRun": "coll."}
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "published data at hand for 1, collected data for 2," in text
    assert rows["CarRun"]["cached"] == str(tmp_path / "SafetyCarRun-v0-40-651.hdf5")
    assert rows["CarRun"]["observation_dim"] == 7


def test_a_simulator_is_looked_for_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"bullet_safety_gym", "pybullet", "safety_gymnasium"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in present else None)
    installed = {t.suite for t in dsrl_tasks().values() if t.simulator_installed}
    assert installed == {"bullet"}  # mujoco is missing for the second
    assert Task("Own", env_factory=dict).simulator_installed
    assert not Task("Own").simulator_installed


def test_own_tasks_stand_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QptError, match="no tasks of your own"):
        command(["--suite", "custom"])
    register_task(Task("Mine[red]", horizon=7))
    text = printed(capsys, "--suite", "custom")
    assert "Mine[red]" in text
    assert re.search(r"Mine\[red\] +- +- +7 +- +- +- +no +no", text)
    assert "sims install" not in text  # neither would help a task of one's own
    assert "data download" not in text
    assert "data download" in printed(capsys)


def test_the_table_needs_no_torch() -> None:
    code = "import sys; from qpt.cli import main; main(['tasks']); print('torch' in sys.modules, 'h5py' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False False"


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(["--suite", "nowhere"])
    assert caught.value.code == 2
    capsys.readouterr()
