"""Files: what DSRL's loader accepts is read, what is written is read back equal, and each defect gets its sentence."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qpt
from helpers import tiny_data
from qpt.data import load_dataset
from qpt.data.checks import default_max_bytes
from qpt.data.download import cache_dir, find_cached
from qpt.data.files import read, write
from qpt.data.trajectories import Trajectories
from qpt.data.validation import validate
from qpt.errors import QptError
from qpt.tasks import Task, get_task

NAMES = ("observations", "actions", "rewards", "costs", "terminals", "timeouts", "offsets", "final_observations")


def arrays(lengths: tuple[int, ...] = (5, 3, 4), tail: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    n = sum(lengths) + tail
    ends = np.cumsum(lengths) - 1
    observations = rng.normal(size=(n, 4)).astype(np.float32)
    following = np.concatenate([observations[1:], rng.normal(size=(1, 4)).astype(np.float32)])
    following[ends] = rng.normal(size=(len(ends), 4))
    terminals, timeouts = np.zeros(n, bool), np.zeros(n, bool)
    terminals[ends[::2]] = True
    timeouts[ends[1::2]] = True
    return {
        "observations": observations,
        "next_observations": following,
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "costs": rng.integers(0, 2, n).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def save(path: Path, columns: dict[str, Any], **storage: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, **storage)
    return path


def same(a: Trajectories, b: Trajectories) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in NAMES)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "storage",
    [
        {},
        {"compression": "gzip"},
        {"compression": "gzip", "shuffle": True, "chunks": True},
        {"compression": "lzf", "fletcher32": True},
    ],
)
@pytest.mark.parametrize("kind", [bool, np.uint8, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("column", [False, True])
def test_all_that_dsrl_accepts(storage: dict[str, Any], kind: type, column: bool, tmp_path: Path) -> None:
    columns = arrays(tail=2)
    expected = Trajectories.from_arrays(**columns)
    for name in ("terminals", "timeouts"):
        columns[name] = columns[name].astype(kind)
    if column:
        columns = {name: values[:, None] if values.ndim == 1 else values for name, values in columns.items()}
    path = save(tmp_path / "a.hdf5", columns, **storage)
    with h5py.File(path, "a") as file:  # what else is in the file does not matter
        file.create_group("infos")["speed"] = np.zeros(3)
        file["names"] = ["x", "y"]
    found = read(path)
    assert same(found, expected)
    assert found.info["dropped_steps"] == 2
    assert found.info["source"] == str(path)
    assert not found.is_surrogate


def test_doubles_and_other_orders(tmp_path: Path) -> None:
    columns = arrays()
    expected = Trajectories.from_arrays(**columns)
    assert same(read(save(tmp_path / "a.hdf5", {k: v.astype(np.float64) for k, v in columns.items()})), expected)
    big = {k: v.astype(">f4") if v.dtype == np.float32 else v for k, v in columns.items()}
    assert same(read(save(tmp_path / "b.hdf5", big)), expected)
    np.savez(tmp_path / "c.npz", **{k: np.asfortranarray(v.astype(">f8")) for k, v in columns.items()})
    assert same(read(tmp_path / "c.npz"), expected)


def test_final_observations_instead_of_next(tmp_path: Path) -> None:
    columns = arrays()
    expected = Trajectories.from_arrays(**columns)
    del columns["next_observations"]
    found = read(save(tmp_path / "a.hdf5", {**columns, "final_observations": expected.final_observations}))
    assert same(found, expected)
    assert "final_observations" not in found.info


def test_neither_is_said(tmp_path: Path) -> None:
    columns = arrays()
    del columns["next_observations"]
    assert "stands in" in read(save(tmp_path / "a.hdf5", columns)).info["final_observations"]


def test_costs_by_another_name(tmp_path: Path) -> None:
    columns = arrays()
    expected = Trajectories.from_arrays(**columns)
    columns["damage"] = columns.pop("costs")
    for path in (save(tmp_path / "a.hdf5", columns), tmp_path / "a.npz"):
        if path.suffix == ".npz":
            np.savez(path, **columns)
        with pytest.raises(QptError, match=r"costs is missing; it has .*--cost-key"):
            read(path)
        assert same(read(path, cost_key="damage"), expected)
        with pytest.raises(QptError, match=r"harm is missing; it has .*damage"):
            read(path, cost_key="harm")


def test_costs_in_a_group(tmp_path: Path) -> None:
    columns = arrays()
    expected = Trajectories.from_arrays(**columns)
    columns["infos/cost"] = columns.pop("costs")
    path = save(tmp_path / "a.hdf5", columns)
    for key in ("infos/cost", "/infos/cost", "infos//cost"):
        assert same(read(path, cost_key=key), expected)
    for key in ("info/cost", "infos/costs", "rewards/cost", "infos/cost/0"):  # no such group, no group at all
        with pytest.raises(QptError, match=f"{key} is missing; it has actions, infos, "):
            read(path, cost_key=key)
    with pytest.raises(QptError, match="costs is a group"):
        read(path, cost_key="infos")


def test_missing_timeouts(tmp_path: Path) -> None:
    """Allowed where every episode ends by a terminal, as the data themselves show."""
    columns = arrays()
    columns["terminals"] |= columns.pop("timeouts")
    assert len(read(save(tmp_path / "good.hdf5", columns))) == 3
    hidden = arrays()
    del hidden["timeouts"]  # the second episode is cut off, and its next observation shows it
    with pytest.raises(QptError, match="timeouts is missing"):
        read(save(tmp_path / "hidden.hdf5", hidden))
    open_end = arrays((5, 3, 4, 2))
    del open_end["timeouts"], open_end["next_observations"]
    with pytest.raises(QptError, match="timeouts is missing"):
        read(save(tmp_path / "open.hdf5", open_end))


@pytest.mark.parametrize("given", [(), ("next_observations",), ("final_observations",), ("timeouts",)])
def test_episodes_that_may_be_one_with_the_next_are_told(given: tuple[str, ...], tmp_path: Path) -> None:
    """Without timeouts an episode that was cut off can only be seen by what was observed after it."""
    columns = arrays()
    columns["terminals"] |= columns["timeouts"]
    columns["final_observations"] = Trajectories.from_arrays(**columns).final_observations
    for name in {"timeouts", "next_observations", "final_observations"} - set(given):
        del columns[name]
    for path in (save(tmp_path / "a.hdf5", columns), tmp_path / "a.npz"):
        np.savez(tmp_path / "a.npz", **columns)
        found = read(path)
        assert len(found) == 3
        assert ("cannot be seen" in found.info.get("timeouts", "")) is not bool(given)


def test_surrogates_are_labelled(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", arrays())
    for note, expected in (("SURROGATE of DSRL", True), ("logged at home", False), (np.bytes_(b"a surrogate"), True)):
        with h5py.File(path, "a") as file:
            file.attrs["note"] = note
        found = read(path)
        assert found.is_surrogate is expected
        assert found.info["note"] == (note.decode() if isinstance(note, bytes) else note)
        for name in ("b.hdf5", "b.npz"):
            assert read(write(found, tmp_path / name)).is_surrogate is expected


@pytest.mark.parametrize("mark", [True, 1, np.int8(1), 1.0, np.bool_(True)])
def test_the_mark_of_a_surrogate_may_be_a_number(mark: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", arrays())
    for value, expected in ((mark, True), (type(mark)(0), False)):
        with h5py.File(path, "a") as file:
            file.attrs["surrogate"] = value
        assert read(path).is_surrogate is expected
        assert read(write(read(path), tmp_path / "b.npz")).is_surrogate is expected


@pytest.mark.parametrize("ending", ["hdf5", "npz"])
def test_notes_that_hdf5_cannot_hold(ending: str, tmp_path: Path) -> None:
    notes = {"seed": 2**70, "seeds": [2**70, -1], "half \ud800": "x", "zero\0": "y", "most": [2**64 - 1] * 2}
    found = read(write(replace(tiny_data(), info=notes), tmp_path / f"a.{ending}")).info
    assert str(found["seed"]) == str(2**70)
    assert [str(seed) for seed in found["seeds"]] == [str(2**70), "-1"]
    assert (found["half \ufffd"], found["zero\ufffd"], found["most"]) == ("x", "y", [2**64 - 1] * 2)
    for key in ("", 1, None):
        with pytest.raises(QptError, match=r"the note .* cannot be written; the name of a note is a text"):
            write(replace(tiny_data(), info={key: 2}), tmp_path / f"a.{ending}")


@pytest.mark.parametrize("ending", ["hdf5", "npz"])
def test_notes_of_many_episodes_are_kept(ending: str, tmp_path: Path) -> None:
    data, many = tiny_data(), list(range(100_000))  # far more than 64 KiB, and than a MiB of text
    notes = {"note": "a surrogate", "surrogate": True, "env_seed": many, "mean_action": [True] * len(many)}
    found = read(write(replace(data, info=notes), tmp_path / f"a.{ending}"))
    assert found.is_surrogate
    assert {name: found.info[name] for name in notes} == notes


def test_notes_as_npz_had_them_before_are_read(tmp_path: Path) -> None:
    path = write(tiny_data(), tmp_path / "a.npz")
    with np.load(path) as file:
        columns = dict(file)
    columns["info"] = np.array(json.dumps({"note": "a surrogate"}))
    np.savez(path, **columns)
    assert read(path).is_surrogate


def test_one_large_chunk_is_unpacked_and_a_false_one_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qpt.data.hdf5.max", lambda *_: 1000, raising=False)  # every chunk could unpack to more
    columns = arrays((500, 300, 400))
    path = save(tmp_path / "a.hdf5", columns, chunks=True, compression="gzip", shuffle=True)
    assert len(read(path)) == 3
    with h5py.File(path, "a") as file:
        del file["costs"]
        costs = file.create_dataset("costs", (1200,), "f4", chunks=(1200,), compression="gzip")
        costs.id.write_direct_chunk((0,), zlib.compress(bytes(10**7)))
    with pytest.raises(QptError, match="unpacks to more than it may hold"):
        read(path)


# -- defects -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"costs": None}, "costs is missing; it has actions"),
        ({"costs": None, "rewards": None}, "rewards and costs are missing"),
        ({"observations": np.zeros(12)}, r"observations has shape \[12\]; it must be \[steps, columns\]"),
        ({"rewards": np.zeros((12, 2))}, r"rewards has shape \[12, 2\]"),
        ({"rewards": np.zeros(11)}, "rewards has 11 rows but observations has 12"),
        ({"next_observations": np.zeros((11, 4))}, r"next_observations has shape \[11, 4\]"),
        ({"rewards": np.array([0.0] * 7 + [np.nan] * 5)}, "rewards holds 5 NaN or infinite values, the first in row 7"),
        ({"rewards": np.full(12, 1e300)}, "rewards holds 12 NaN or infinite"),
        ({"actions": np.full((12, 2), -3.0)}, "actions must lie in .* largest magnitude is 3"),
        ({"actions": np.arange(12) % 3}, "actions are stored as int64 and look like discrete ones"),
        ({"actions": np.ones((12, 1), np.int8)}, "actions are stored as int8 and look like discrete ones"),
        ({"actions": np.ones((12, 2), bool)}, "actions are stored as bool and look like discrete ones"),
        ({"costs": np.array([0.0] * 11 + [-0.5])}, "row 11 holds -0.5"),
        ({"terminals": np.zeros(12), "timeouts": np.zeros(12)}, "no episode is complete"),
        ({"timeouts": np.full(12, 0.5)}, "other than 0 and 1"),
        ({name: values[:0] for name, values in arrays().items()}, "no steps"),
        ({"rewards": np.array([b"1"] * 12)}, "rewards holds"),
    ],
)
@pytest.mark.parametrize("ending", ["hdf5", "npz"])
def test_defects(change: dict[str, Any], sentence: str, ending: str, tmp_path: Path) -> None:
    columns = {name: values for name, values in {**arrays(), **change}.items() if values is not None}
    path = tmp_path / f"bad.{ending}"
    if ending == "npz":
        np.savez(path, **columns)
    else:
        save(path, columns)
    with pytest.raises(QptError, match=sentence) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"hello, this is text", "neither an HDF5 nor an npz"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n", "cannot be read"),
        (b"PK\x03\x04", "cannot be read"),
    ],
)
def test_not_a_data_file(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    path.write_bytes(content)
    with pytest.raises(QptError, match=sentence):
        read(path)


@pytest.mark.parametrize("ending", ["hdf5", "npz"])
def test_every_truncation_is_noticed(ending: str, tmp_path: Path) -> None:
    whole = write(Trajectories.from_arrays(**arrays()), tmp_path / f"a.{ending}").read_bytes()
    path = tmp_path / f"cut.{ending}"
    for size in range(1, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:size])
        with pytest.raises(QptError):
            read(path)


def test_empty_hdf5_and_inner_file_of_minari(tmp_path: Path) -> None:
    h5py.File(tmp_path / "a.hdf5", "w").close()
    with pytest.raises(QptError, match="are missing; it is empty"):
        read(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        file.create_group("episode_0")
    with pytest.raises(QptError, match="give the folder"):
        read(tmp_path / "main_data.hdf5")


def test_a_file_that_is_being_written_is_not_called_damaged(tmp_path: Path) -> None:
    path = save(tmp_path / "a.hdf5", arrays())
    with h5py.File(path, "a") as file:
        file.flush()
        found = validate(path)
    assert found == f"{path}: another process has it open for writing; read it when that is done"


def test_the_limit_of_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.hdf5", arrays())
    with pytest.raises(QptError, match="limit is 500 bytes"):
        read(path, max_bytes=500)
    monkeypatch.setenv("QPT_MAX_BYTES", "600")
    with pytest.raises(QptError, match="limit is 600 bytes"):
        read(path)
    assert "limit is 600 bytes" in (validate(path) or "")
    for wrong in ("much", "²"):
        monkeypatch.setenv("QPT_MAX_BYTES", wrong)
        with pytest.raises(QptError, match="whole number of bytes"):
            default_max_bytes()


# -- writing -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from(["hdf5", "npz"]),
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=5),
        st.one_of(
            st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1),
            st.integers(-(2**40), 2**40),
            st.floats(allow_nan=False),
        ),
        max_size=3,
    ),
)
def test_round_trip(
    tmp_path: Path, lengths: list[int], seed: int, compact: bool, ending: str, info: dict[str, Any]
) -> None:
    data = Trajectories.from_arrays(**arrays(tuple(lengths), seed=seed), info=info)
    found = read(write(data, tmp_path / f"a.{ending}", compact=compact))
    assert same(found, data)
    assert {key: found.info[key] for key in info} == info
    assert found.info["num_trajectories"] == len(data)


def test_written_in_dsrl_layout(tmp_path: Path) -> None:
    columns = arrays()
    path = write(
        Trajectories.from_arrays(**columns, info={"seeds": [1, 2, 3], "ends": ["a", "b", "c"]}), tmp_path / "a.hdf5"
    )
    with h5py.File(path) as file:
        assert set(file) == set(columns)
        for name, values in columns.items():
            assert np.array_equal(file[name], values)
            assert file[name].dtype == values.dtype
            assert (file[name].compression, file[name].shuffle) == ("gzip", True)
    assert read(path).info["seeds"] == [1, 2, 3]
    assert read(path).info["ends"] == ["a", "b", "c"]
    full = path.stat().st_size
    assert write(read(path), tmp_path / "b.hdf5", compact=True).stat().st_size < full
    with h5py.File(write(read(tmp_path / "b.hdf5"), tmp_path / "c.hdf5")) as again, h5py.File(path) as file:
        assert all(np.array_equal(again[name], file[name]) for name in columns)
        assert all(np.array_equal(again.attrs[name], file.attrs[name]) for name in file.attrs)


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    data = Trajectories.from_arrays(**arrays())
    with pytest.raises(QptError, match=r"ends in .hdf5 or .npz"):
        write(data, tmp_path / "a.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(QptError, match=r"cannot be written: .*; nothing was written, choose another place"):
        write(data, tmp_path / "file" / "a.hdf5")
    (tmp_path / "file").unlink()
    (tmp_path / "folder.hdf5").mkdir()
    with pytest.raises(QptError, match="cannot be written"):
        write(data, tmp_path / "folder.hdf5")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.hdf5"]


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    data = Trajectories.from_arrays(**arrays())
    assert same(read(write(data, tmp_path / "new" / "er" / "a.npz")), data)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target = write(Trajectories.from_arrays(**arrays()), tmp_path / "target.hdf5")
    link = tmp_path / "link.hdf5"
    link.symlink_to(target)
    write(Trajectories.from_arrays(**arrays((2, 2))), link)
    assert link.is_symlink()
    assert len(read(target)) == 2


@pytest.mark.parametrize("ending", ["hdf5", "npz"])
def test_full_disk_keeps_the_old_file(ending: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk; it is for a whole process, hence another one."""
    path = write(Trajectories.from_arrays(**arrays()), tmp_path / f"a.{ending}")
    before = path.read_bytes()
    code = (
        "import sys, numpy as np\n"
        "from qpt.data import Trajectories, write\n"
        "n = 20000\n"
        "o = np.random.default_rng(0).normal(size=(n, 5))\n"
        "t = Trajectories.from_arrays(o, np.zeros((n, 1)), np.zeros(n), np.zeros(n), np.arange(n) == n - 1)\n"
        "try:\n    write(t, sys.argv[1])\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, preexec_fn=small_disk, check=True
    )
    assert done.stdout.startswith("QptError")
    assert "the old file is unchanged" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_no_permission(tmp_path: Path) -> None:
    path = write(Trajectories.from_arrays(**arrays()), tmp_path / "a.hdf5")
    tmp_path.chmod(0o500)
    path.chmod(0)
    try:
        if os.access(path, os.R_OK):
            pytest.skip("permissions do not bind this user")
        with pytest.raises(QptError, match="no permission"):
            read(path)
        with pytest.raises(QptError, match="cannot be written: Permission denied; the old file is unchanged"):
            write(Trajectories.from_arrays(**arrays()), path)
    finally:
        tmp_path.chmod(0o700)


# -- load_dataset ------------------------------------------------------------------------------------------------------


def test_embedded() -> None:
    data = qpt.load_dataset("embedded:ballcircle")
    task = get_task("BallCircle")
    assert (data.observation_dim, data.action_dim) == (task.observation_dim, task.action_dim)
    assert len(data) == 500
    assert set(data.lengths) == {task.horizon}
    assert data.is_surrogate
    assert "surrogate" in data.info["note"]
    assert data.info["command"].startswith("qpt collect --task BallCircle")
    # It covers the plane: episodes in nearly every cell that can have any.
    cells = set(zip((data.episode_costs // 10).astype(int), (data.returns // 100).astype(int), strict=True))
    assert len(cells) > 55
    with pytest.raises(QptError, match="there is: ballcircle"):
        load_dataset("embedded:nothing")
    with pytest.raises(QptError, match="hazard is missing"):
        load_dataset("embedded:ballcircle", cost_key="hazard")
    with pytest.raises(QptError, match=r"actions must lie in \[-0.1, 0.1\]"):
        load_dataset("embedded:ballcircle", action_bound=0.1)


def test_tasks_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path / "ours"))
    monkeypatch.delenv("DSRL_DATASET_DIR", raising=False)
    with pytest.raises(QptError, match=r"`qpt data download BallCircle`.*`qpt collect record BallCircle` and"):
        load_dataset("BallCircle")
    with pytest.raises(QptError, match=r"no data of BallCircle were collected .*`qpt collect record BallCircle`"):
        load_dataset("collected:BallCircle")
    with pytest.raises(QptError, match="did you mean 'BallCircle'"):
        load_dataset("collected:BallCircel")
    collected = Trajectories.from_arrays(**arrays(), info={"surrogate": True})
    (tmp_path / "ours" / "collected").mkdir(parents=True)
    write(collected, tmp_path / "ours" / "collected" / "BallCircle.hdf5")
    assert load_dataset("collected:BallCircle").is_surrogate
    with pytest.raises(QptError, match="not in the cache"):  # one never stands in for the other
        load_dataset("BallCircle")
    name = get_task("BallCircle").data_file
    assert name is not None
    write(Trajectories.from_arrays(**arrays()), tmp_path / "ours" / name)
    assert len(load_dataset("BallCircle")) == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BallCircle").mkdir()  # a folder of that name does not hide the task
    assert len(load_dataset("BallCircle")) == 3


def test_sources_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QptError, match="there is no file"):
        load_dataset(tmp_path / "a.hdf5")
    with pytest.raises(QptError, match=r"there is no file nowhere\.hdf5"):
        load_dataset("nowhere.hdf5")
    with pytest.raises(QptError, match="there is no file and no task 'BalCircle'; did you mean 'BallCircle'"):
        load_dataset("BalCircle")
    with pytest.raises(QptError, match="not a Minari data set"):
        load_dataset(tmp_path)
    monkeypatch.setattr("qpt.tasks._registered", {"Mine": Task("Mine")})
    with pytest.raises(QptError, match="task 'Mine' names no data file"):
        load_dataset("Mine")


def test_places_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence where they are asked for, and nothing where they are not."""
    with pytest.raises(QptError, match=r"~nobodyx/a\.hdf5 begins with a home that is not known"):
        load_dataset("~nobodyx/a.hdf5")
    with pytest.raises(QptError, match="there is no file and no task 'aaa"):
        load_dataset("a" * 300)
    with pytest.raises(QptError, match=r"there is no file aaa\S*\.hdf5; check the path"):
        load_dataset("a" * 300 + ".hdf5")
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if "locked" in str(self):  # as for users that are not root
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(QptError, match=r"no permission to look at .*locked/a\.hdf5; change that"):
        load_dataset(tmp_path / "locked" / "a.hdf5")
    monkeypatch.setenv("HOME", str(tmp_path))
    name = str(get_task("BallCircle").data_file)
    here = write(tiny_data(), tmp_path / "here" / name)
    monkeypatch.setenv("DSRL_DATASET_DIR", str(here.parent))
    for hidden in (str(tmp_path / "locked"), "~nobodyx/data", str(tmp_path / ("a" * 300))):
        monkeypatch.setenv("QPT_DATA_DIR", hidden)
        assert find_cached(get_task("BallCircle")) == here
    monkeypatch.setenv("QPT_DATA_DIR", "~nobodyx/data")
    with pytest.raises(QptError, match="~nobodyx/data begins with a home"):
        cache_dir()


def test_a_home_is_meant_in_writing_as_in_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    data = tiny_data()
    assert write(data, "~/a.npz") == tmp_path / "home" / "a.npz"
    assert same(read("~/a.npz"), data)
    assert not (tmp_path / "~").exists()


def test_load_dataset_looks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file is found out in another process: nothing of it is read in this one."""
    path = save(tmp_path / "a.hdf5", {**arrays(), "costs": np.array([b"1"] * 12)})

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("read in this process")

    monkeypatch.setattr("qpt.data.files.read", never)
    with pytest.raises(QptError, match="costs holds"):
        load_dataset(path)


def test_the_room_is_cheap() -> None:
    code = "import sys, qpt.data; print(sorted({'torch', 'h5py', 'matplotlib'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    code = "import sys, qpt; qpt.load_dataset('embedded:ballcircle'); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_npz_needs_no_h5py(tmp_path: Path) -> None:
    """Where h5py is not installed, in our process and in the one that looks first, npz serves from file to policy."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "h5py.py").write_text("raise ImportError('not here')")
    write(tiny_data(), tmp_path / "a.npz")
    write(tiny_data(), tmp_path / "a.hdf5")
    code = """
import sys
from pathlib import Path
import qpt
from qpt.algorithms.bc import BCConfig
from qpt.errors import QptError
from qpt.training import TrainConfig
try:
    import h5py
except ImportError:
    data = qpt.load_dataset("a.npz")
    qpt.data.write(data, "b.npz")
    small = BCConfig(steps=2, batch_size=4, width=8)
    run = qpt.train(TrainConfig(algorithm="bc-safe", config=small, out=Path("run"), device="cpu"), data)
    qpt.load_policy(run.folder)
    for attempt in (lambda: qpt.load_dataset("a.hdf5"), lambda: qpt.data.write(data, "b.hdf5")):
        try:
            attempt()
        except QptError as error:
            print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "without")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sentences = done.stdout.strip().splitlines()[-2:]
    assert all("h5py is needed for this" in line and "pip install h5py" in line for line in sentences), done.stdout
    assert sentences[0].startswith("a.hdf5: ")
    assert same(read(tmp_path / "b.npz"), tiny_data())


# -- files of one's own ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif("QPT_EXTRA_DATA" not in os.environ, reason="QPT_EXTRA_DATA names no folder")
def test_every_extra_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qpt.cli import main

    files = sorted(Path(os.environ["QPT_EXTRA_DATA"]).glob("*.hdf5"))
    assert files
    for path in files:
        assert validate(path) is None
        data = load_dataset(path)
        assert "next_observations" not in data.info
        assert main(["data", "info", str(path), "--json", "--out", str(tmp_path / "picture.png")]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["episodes"] == len(data)
        assert facts["steps"] == data.steps
        for compact in (False, True):
            copy = write(data, tmp_path / "copy.hdf5", compact=compact)
            assert same(read(copy), data)
            with h5py.File(path) as one, h5py.File(copy) as other:
                shared = set(one) & set(other)
                assert shared >= {"observations", "actions", "rewards", "costs", "terminals", "timeouts"}
                for name in shared:
                    assert np.array_equal(one[name], other[name])
                    assert one[name].dtype == other[name].dtype
                for name in set(one.attrs) - {"layout"}:
                    assert np.array_equal(one.attrs[name], other.attrs[name]), name
