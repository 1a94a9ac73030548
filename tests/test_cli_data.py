"""`qpt data info`, `convert`, `validate`: what they print, write and return."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from qpt import plotting
from qpt.cli import main
from qpt.cli.run import run_group
from qpt.data import Trajectories, load_dataset, read, write
from qpt.errors import QptError
from qpt.tasks import get_task


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Four episodes of two steps with (cost, return) = (0, 1), (2, 5), (4, 3), (9, 8)."""
    costs, rewards = np.array([0, 0, 1, 1, 4, 0, 9, 0.0]), np.array([1, 0, 2, 3, 3, 0, 0, 8.0])
    timeouts = np.arange(8) % 2 == 1
    data = Trajectories.from_arrays(np.eye(8), np.zeros((8, 2)), rewards, costs, np.zeros(8), timeouts)
    return write(data, tmp_path / "small.hdf5")


def test_info_prints_the_numbers(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(small), "--limits", "5", "0", "2"]) == 0
    text = capsys.readouterr().out
    assert "4 episodes, 8 steps" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["episode return", "1.0", "4.2", "8.0"] in rows
    assert ["episode cost", "0.0", "3.8", "9.0"] in rows
    assert [row for row in rows if len(row) == 3] == [
        ["0", "25.0%", "1.0"],
        ["2", "50.0%", "5.0"],
        ["5", "75.0%", "5.0"],
    ]
    assert "surrogate" not in text


def test_info_as_json(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(small), "--json", "--limits", "2", "--out", str(tmp_path / "new" / "a.svg")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["episodes"] == 4
    assert facts["limits"] == [{"cost_limit": 2.0, "share_within": 0.5, "best_safe_return": 5.0}]
    assert (tmp_path / "new" / "a.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_info_says_surrogate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    assert main(["data", "info", "embedded:ballcircle", "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "surrogate data" in text
    note = load_dataset("embedded:ballcircle").info["note"]
    assert note in " ".join(text.replace("│", " ").split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["data", "info", "embedded:ballcircle", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["surrogate"] is True
    assert facts["note"] == note


def test_info_says_what_was_dropped(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(small, "a") as file:
        file["timeouts"][-1] = False
    assert main(["data", "info", str(small)]) == 0
    assert "dropped: 2" in capsys.readouterr().out


def test_what_reading_noticed_is_told_by_every_command(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = [str(tmp_path / name) for name in ("a.hdf5", "b.hdf5")]
    with h5py.File(small, "a") as file:
        file["timeouts"][-1] = False
    for command, targets in (("validate", []), ("convert", new[:1]), ("split", new), ("augment", [])):
        assert main(["data", command, str(small), *targets]) == 0
        captured = capsys.readouterr()
        assert f"warning: {small}: steps after the last complete episode were dropped: 2\n" in captured.err
        assert "warning" not in captured.out


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["info", "nowhere.hdf5"], 1, "there is no file nowhere.hdf5"),
        (["info", "BalCircle"], 1, "did you mean 'BallCircle'"),
        (["info", "embedded:ballcircle", "--limits", "-1"], 1, "a cost limit is a number from 0 up"),
        (["info", "embedded:ballcircle", "--out", "a.doc"], 1, "end its name in .png"),
        (["augment", "embedded:ballcircle", "--seed", "-1"], 1, "a seed is a whole number of at least 0, not -1"),
        (["augment", "embedded:ballcircle", "--fraction", "1e12"], 1, "do not fit into memory; ask for fewer"),
        (["augment", "embedded:ballcircle", "--fraction", "1e300"], 1, "do not fit into memory; ask for fewer"),
        (["augment", "embedded:ballcircle", "--max-reward-decrease", "nan"], 1, "must be 0 or more, not nan"),
        (["convert", "embedded:ballcircle", "a.csv"], 1, "ends in .hdf5 or .npz"),
        (["validate"], 2, "no file is given"),
        (["nonsense"], 2, "there is no command 'data nonsense'"),
    ],
)
def test_errors_are_one_sentence(args: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *args]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_convert(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "convert", str(small), str(tmp_path / "b.hdf5"), "--compact"]) == 0
    assert main(["data", "convert", str(tmp_path / "b.hdf5"), str(tmp_path / "c.npz")]) == 0
    assert "4 episodes, 8 steps" in capsys.readouterr().out
    with h5py.File(tmp_path / "b.hdf5") as file:
        assert "final_observations" in file
        assert "next_observations" not in file
    assert read(tmp_path / "c.npz").fingerprint == read(small).fingerprint


def test_split(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, rest = tmp_path / "train.hdf5", tmp_path / "rest.npz"
    assert main(["data", "split", str(small), str(train), str(rest), "--share", "0.25"]) == 0
    assert "1 episodes, 2 steps" in capsys.readouterr().out
    whole, parts = read(small), (read(train), read(rest))
    assert [len(part) for part in parts] == [3, 1]
    assert sorted(r for part in parts for r in part.returns) == sorted(whole.returns)
    assert main(["data", "split", str(small), str(train), str(train)]) == 1
    assert "name two" in capsys.readouterr().err
    assert main(["data", "split", str(small), str(train), str(rest), "--share", "1.5"]) == 1
    before = small.read_bytes()
    for wrong, told in (
        ([small, small, rest], "by a part of itself"),
        ([small, train, small], "by a part of itself"),
        ([small, tmp_path / "new.hdf5", tmp_path / "new.txt"], "does not say what to write"),
        ([small, train, rest, "--seed", "-1"], "at least 0"),
        ([small, train, rest, "--cost-key", "hazard"], "hazard"),
    ):
        capsys.readouterr()
        assert main(["data", "split", *map(str, wrong)]) == 1
        assert told in capsys.readouterr().err
    assert small.read_bytes() == before
    assert not (tmp_path / "new.hdf5").exists()


def test_a_split_that_fails_leaves_the_old_parts(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Were only the first replaced, episodes would lie in both."""
    train, rest = tmp_path / "train.hdf5", tmp_path / "rest.hdf5"
    train.write_bytes(b"old")
    rest.mkdir()
    assert main(["data", "split", str(small), str(train), str(rest)]) == 1
    assert "rest.hdf5 cannot be written: Is a directory" in capsys.readouterr().err
    assert train.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rest.hdf5", "small.hdf5", "train.hdf5"]


def test_split_leaves_the_file_that_a_task_stands_for(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DSRL_DATASET_DIR", raising=False)
    cached = tmp_path / "cache" / str(get_task("BallCircle").data_file)
    cached.parent.mkdir()
    before = small.read_bytes()
    cached.write_bytes(before)
    for parts in ((cached, tmp_path / "rest.hdf5"), (tmp_path / "train.hdf5", cached)):
        assert main(["data", "split", "BallCircle", *map(str, parts)]) == 1
        assert "BallCircle would be replaced by a part of itself" in capsys.readouterr().err
    assert cached.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "small.hdf5"]


def test_validate(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.hdf5"
    bad.write_bytes(small.read_bytes()[:-500])
    assert main(["data", "validate", str(small)]) == 0
    assert capsys.readouterr().out == f"{small}: good\n"
    assert main(["data", "validate", str(small), str(bad), "nowhere.hdf5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0] == f"{small}: good"
    assert lines[1].startswith(f"bad: {bad}: the file is cut short")
    assert "there is no file" in lines[2]


def test_the_bound_of_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Trajectories.from_arrays(np.eye(2), np.full((2, 1), 2.0), [0, 0], [0, 0], [0, 1], action_bound=None)
    path = write(data, tmp_path / "wide.hdf5")
    assert main(["data", "validate", str(path)]) == 1
    assert "largest magnitude is 2" in capsys.readouterr().out
    assert main(["data", "validate", str(path), "--action-bound", "2"]) == 0


@pytest.mark.parametrize("command", ["info", "convert", "validate"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", command, "--help"])
    assert stop.value.code == 0
    assert f"Example: qpt data {command} " in capsys.readouterr().out


def test_help_speaks_of_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and not types for what stands without a flag; no None to type, no --no-x beside --x."""
    for command, usage in (("info", "SOURCE"), ("convert", "SOURCE TARGET"), ("validate", "FILE ...")):
        with pytest.raises(SystemExit):
            main(["data", command, "--help"])
        text = capsys.readouterr().out
        assert usage in text.splitlines()[0]
        assert "{None}" not in text
        assert "--no-" not in text


def test_augment_reads_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of another name and wide actions, as `info` takes them."""
    names = ("observations", "actions", "rewards", "terminals")
    data = Trajectories.from_arrays(
        np.eye(9), np.full((9, 1), 2.0), np.arange(9.0), np.arange(9.0), np.ones(9), action_bound=None
    )
    np.savez(tmp_path / "a.npz", penalty=data.costs, **{name: getattr(data, name) for name in names})
    options = ["--cost-key", "penalty", "--action-bound", "2"]
    assert main(["data", "info", str(tmp_path / "a.npz"), *options]) == 0
    assert main(["data", "augment", str(tmp_path / "a.npz"), *options]) == 0
    assert "relabelled episodes" in capsys.readouterr().out


def test_augment_says_whose_constants_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        (["--task", "BallCircle"], "constants of BallCircle"),
        (["--task", "BallCircle", "--max-reward", "900"], "constants of BallCircle, but for --max-reward"),
        (["--max-reward", "900"], "constants chosen from the data, but for --max-reward"),
    ):
        assert main(["data", "augment", "embedded:ballcircle", *flags]) == 0
        assert " ".join(capsys.readouterr().out.split()).endswith(told)


def test_wrong_usage_exits_with_2() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "info"])
    assert stop.value.code == 2


def test_groups_import_only_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def here() -> int:
        """Does nothing much."""
        return 7

    assert run_group({"here": here, "there": "no.such.module:function"}, ["here"], "x") == 7
    assert run_group({"here": here}, ["--help"], "x") == 0
    assert "here  Does nothing much." in capsys.readouterr().out
    assert run_group({"here": here}, [], "x") == 2


def test_the_picture(small: Path) -> None:
    """Its frontier and its points are the data's."""
    data = load_dataset(small)
    axes = plotting.cost_return_plane(data, [2.0, 5.0], "$title_{").axes[0]
    points = axes.collections[0].get_offsets()
    assert points.tolist() == [[0, 1], [2, 5], [4, 3], [9, 8]]
    frontier = axes.lines[0]
    assert frontier.get_drawstyle() == "steps-post"
    for cost, best in zip(*frontier.get_data(), strict=True):
        assert best == max(r for c, r in points if c <= cost)
    assert [line.get_xdata()[0] for line in axes.lines[1:]] == [2.0, 5.0]


def test_a_picture_of_one_free_episode(tmp_path: Path) -> None:
    data = Trajectories.from_arrays([[0.0]], [[0.0]], [0.0], [0.0], [1])
    plotting.save(plotting.cost_return_plane(data), tmp_path / "a.png")


def test_a_full_disk_leaves_no_half_picture(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "pictures" / "a.png"
    plotting.save(plotting.cost_return_plane(load_dataset(small)), picture)
    before = picture.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name, kept in (("a.png", "the old file is unchanged"), ("b.png", "nothing was written")):
        with pytest.raises(QptError, match=f"cannot be written: No space left on device; {kept}, choose another"):
            plotting.save(plotting.cost_return_plane(load_dataset(small)), picture.with_name(name))
    assert picture.read_bytes() == before
    assert [p.name for p in picture.parent.iterdir()] == ["a.png"]


def test_a_surrogate_is_never_unlabelled() -> None:
    data = Trajectories.from_arrays([[0.0]], [[0.0]], [0.0], [0.0], [1], info={"surrogate": True})
    assert "surrogate" in plotting.cost_return_plane(data).axes[0].get_title(loc="left")


def test_pictures_leave_pyplot_alone(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom qpt.cli import main\nmain(['data', 'info', 'embedded:ballcircle', '--out', sys.argv[1]])\n"
        "print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.png")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"
    assert (tmp_path / "a.png").is_file()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(QptError, match=r"pip install 'qpt\[plot\]'"):
        plotting.new_figure()
