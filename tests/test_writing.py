"""Files that are written whole or not at all."""

from __future__ import annotations

import csv
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from qpt.errors import QptError
from qpt.writing import check_file, check_folder, write_csv, write_json, write_together, write_whole


def test_texts_tables_and_facts_read_back(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "new" / "a.txt", "κ ≤ 10\n").read_bytes() == "κ ≤ 10\n".encode()
    write_json(tmp_path / "a.json", {"limit": 10, "at": Path("x")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"limit": 10, "at": "x"}
    write_csv(tmp_path / "a.csv", ("a", "b"), [(1, "two, and\nmore"), (0.1, "")])
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "two, and\nmore"], ["0.1", ""]]


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_whole(tmp_path / "old.txt", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QptError, match="No space left on device; the old file is unchanged, make room"):
        write_whole(old, "new", "make room")
    with pytest.raises(QptError, match="No space left on device; nothing was written, choose another place"):
        write_whole(tmp_path / "new.txt", "new")
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_files_that_belong_together_are_replaced_together(tmp_path: Path) -> None:
    old, folder = write_whole(tmp_path / "old.txt", "old"), tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(QptError, match="folder cannot be written: Is a directory"):
        write_together([(old, "new"), (folder, "new")])
    with pytest.raises(QptError, match=r"in cannot be written: .*; nothing was written"):
        write_together([(old, "new"), (old / "in", "new")])
    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [folder, old]
    assert write_together([(old, "new"), (folder / "b.txt", "b")]) == [old, folder / "b.txt"]
    assert [path.read_text() for path in (old, folder / "b.txt")] == ["new", "b"]


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "through")
    reader.join()
    assert read == [b"through"]
    assert pipe.is_fifo()


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    check_file(tmp_path / "a" / "b" / "c.csv")
    assert not any((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(QptError, match="cannot be made: Not a directory"):
        check_folder(tmp_path / "file" / "in")
    with pytest.raises(QptError, match="is a folder"):
        check_file(tmp_path / "a")
