"""Minari data sets, made by Minari itself from a toy environment and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest

from qpt.cli import main
from qpt.data import load_dataset, read
from qpt.errors import QptError

minari = pytest.importorskip("minari")
EpisodeBuffer = pytest.importorskip("minari.data_collector.episode_buffer").EpisodeBuffer
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Walk(gym.Env[Any, Any]):
    """A random walk that ends at |x| > 1; the cost is 1 where x > 0.5."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, key: str = "cost") -> None:
        self.key = key

    def draw(self, rng: np.random.Generator) -> Any:
        return rng.uniform(-1, 1, 1).astype(np.float32)

    def info(self, cost: float) -> dict[str, float]:
        return {self.key: cost, "other": 1.0}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.x, self.t = 0.0, 0
        return np.array([self.x, self.t], np.float64), self.info(99.0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x, self.t = self.x + 0.3 * float(action[0]), self.t + 1
        cost = float(self.x > 0.5)
        return np.array([self.x, self.t], np.float64), self.x, abs(self.x) > 1, self.t >= 15, self.info(cost)


class Choices(Walk):
    """The same with steps to the left or to the right."""

    action_space = gym.spaces.Discrete(2)

    def draw(self, rng: np.random.Generator) -> Any:
        return int(rng.integers(2))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step([2 * action - 1])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def collect(name: str, env: Walk, reset_info: bool = True, data_format: str = "hdf5") -> list[dict[str, Any]]:
    """A data set of six episodes, and the same steps one by one."""
    rng = np.random.default_rng(0)
    steps, buffers = [], []
    for number in range(6):
        observation, info = env.reset(seed=number)
        episode: list[dict[str, Any]] = []
        observations, infos = [observation], [info] if reset_info else []
        while not episode or not (episode[-1]["terminal"] or episode[-1]["timeout"]):
            action = env.draw(rng)
            following, reward, terminal, timeout, info = env.step(action)
            episode.append({"observation": observation, "next": following, "action": action, "reward": reward,
                            "terminal": terminal, "timeout": timeout, "cost": info[env.key]})  # fmt: skip
            observation = following
            observations.append(observation)
            infos.append(info)
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.array(observations),
                actions=np.array([step["action"] for step in episode]),
                rewards=[step["reward"] for step in episode],
                terminations=[step["terminal"] for step in episode],
                truncations=[step["timeout"] for step in episode],
                # Minari's arrow files cannot give back infos that are single numbers.
                infos={
                    key: np.array([[info[key]] if data_format == "arrow" else info[key] for info in infos])
                    for key in infos[0]
                },
            )
        )
        steps += episode
    minari.create_dataset_from_buffers(
        name,
        buffers,
        env=env,
        observation_space=env.observation_space,
        action_space=env.action_space,
        data_format=data_format,
    )
    return steps


def equal(data: Any, steps: list[dict[str, Any]]) -> None:
    assert data.steps == len(steps)
    following = data.next_observations()
    for i, step in enumerate(steps):
        assert np.array_equal(data.observations[i], step["observation"].astype(np.float32))
        assert np.array_equal(following[i], step["next"].astype(np.float32))
        assert np.array_equal(data.actions[i], step["action"])
        assert data.rewards[i] == np.float32(step["reward"])
        assert data.costs[i] == step["cost"]
        assert data.terminals[i] == step["terminal"]
        assert data.timeouts[i] == step["timeout"]


def test_by_id_and_by_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = collect("toy/walk-v0", Walk())
    assert any(step["terminal"] for step in steps)
    assert any(step["timeout"] for step in steps)
    assert sum(step["cost"] for step in steps) > 0
    data = load_dataset("minari:toy/walk-v0")
    assert len(data) == 6
    assert data.info["minari_id"] == "toy/walk-v0"
    equal(data, steps)
    equal(read(root / "toy" / "walk-v0"), steps)
    equal(load_dataset(root / "toy" / "walk-v0" / "data"), steps)
    assert main(["data", "convert", "minari:toy/walk-v0", str(root / "walk.hdf5")]) == 0
    assert "6 episodes" in capsys.readouterr().out
    equal(load_dataset(root / "walk.hdf5"), steps)
    assert main(["data", "validate", "minari:toy/walk-v0", str(root / "toy" / "walk-v0"), "minari:toy/no-v0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(": good") for line in lines] == [True, True, False]
    assert "minari download toy/no-v0" in lines[2]


def test_infos_without_the_reset(root: Path) -> None:
    steps = collect("toy/short-v0", Walk(), reset_info=False)
    equal(load_dataset(root / "toy" / "short-v0"), steps)


@pytest.mark.usefixtures("root")
def test_arrow() -> None:
    pytest.importorskip("pyarrow")
    steps = collect("toy/arrow-v0", Walk(), data_format="arrow")
    equal(load_dataset("minari:toy/arrow-v0"), steps)


def test_named_costs(root: Path) -> None:
    steps = collect("toy/damage-v0", Walk(key="damage"))
    with pytest.raises(QptError, match=r"no infos\['cost'\]; its infos hold damage, other"):
        load_dataset("minari:toy/damage-v0")
    equal(load_dataset(root / "toy" / "damage-v0", cost_key="damage"), steps)


def test_discrete_actions_are_told(root: Path) -> None:
    collect("toy/choices-v0", Choices())
    for source in ("minari:toy/choices-v0", root / "toy" / "choices-v0"):
        with pytest.raises(QptError, match="actions are stored as int64 and look like discrete ones"):
            load_dataset(source)


def test_its_file_is_checked_as_every_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari itself would follow a link to another file, and read what is larger than the memory."""
    collect("toy/linked-v0", Walk())
    folder, elsewhere = root / "toy" / "linked-v0", root / "elsewhere.hdf5"
    with monkeypatch.context() as patch:
        patch.setenv("QPT_MAX_BYTES", "500")
        for source in ("minari:toy/linked-v0", folder):
            with pytest.raises(QptError, match="the limit is 500 bytes"):
                load_dataset(source)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file, h5py.File(elsewhere, "w") as other:
        other["rewards"] = file["episode_1/rewards"][...]
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = h5py.ExternalLink(str(elsewhere), "rewards")
    for read_it in (load_dataset, read):
        with pytest.raises(QptError, match="episode_1/rewards is a link to another place"):
            read_it(folder)
    with pytest.raises(QptError, match="episode_1/rewards is a link to another place"):
        load_dataset("minari:toy/linked-v0")
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
        file["episode_1/again"] = file["episode_1"]
    with pytest.raises(QptError, match="lies in more than 32 groups"):
        load_dataset(folder)


def test_a_missing_data_set_names_the_command(root: Path) -> None:
    with pytest.raises(QptError, match="minari download toy/none-v0"):
        load_dataset("minari:toy/none-v0")
    (root / "data").mkdir()
    with pytest.raises(QptError, match="not a Minari data set"):
        load_dataset(root)
    (root / "data" / "main_data.hdf5").write_bytes(b"nonsense")
    with pytest.raises(QptError, match="cannot be read"):
        load_dataset(root)
