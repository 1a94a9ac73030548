"""Files that are written whole or not at all, and folders that one process at a time writes into."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qpt.errors import QptError


def write_whole(path: str | Path, content: bytes | str, advice: str = "choose another place") -> Path:
    """Write under another name first: a reader sees the old file, the new one, or none, never a part."""
    return write_together([(path, content)], advice)[0]


def write_together(files: Iterable[tuple[str | Path, bytes | str]], advice: str = "choose another place") -> list[Path]:
    """The same for files that belong together: none is replaced before all are written under other names."""
    written: list[tuple[Path, Path | None]] = []
    path = Path()
    try:
        for name, content in files:
            path, raw = Path(name), content.encode() if isinstance(content, str) else content
            if path.is_char_device() or path.is_fifo():  # /dev/stdout and the like are not replaced
                path.write_bytes(raw)
                written.append((path, None))
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():  # the rename would notice it, too late for the files before
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            written.append((path, temporary))
            with temporary.open("xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        for path, whole in written:
            if whole is not None:
                whole.replace(path)
    except OSError as error:
        kept = "the old file is unchanged" if os.access(path, os.F_OK) else "nothing was written"
        raise QptError(f"{path} cannot be written: {error.strerror or error}; {kept}, {advice}") from error
    finally:
        for _, left in written:
            with suppress(OSError):  # no permission: nothing to clean up
                if left is not None:
                    left.unlink(missing_ok=True)
    return [path for path, _ in written]


def check_folder(folder: Path) -> None:
    """What cannot be written is said before the long part."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QptError(f"the folder {folder} cannot be made: {error.strerror}; choose another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise QptError(f"nothing can be written into {folder}; choose another folder, or change its permissions")


def check_file(path: Path) -> None:
    """The same for a file."""
    check_folder(path.parent)
    if path.is_dir():
        raise QptError(f"{path} is a folder and cannot be written as a file; choose another name")


@contextmanager
def alone(lock: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process however that ends; two must never write the same files."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    try:
        opened = lock.open("a")  # whatever it leads to stays as it is
    except OSError as error:
        raise QptError(f"{lock} cannot be written: {error.strerror}; make room, or choose another --out") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise QptError(f"another process is {doing}; wait for it, or choose another --out") from error
        except OSError:  # a file system without locks
            pass
        yield


def write_json(path: str | Path, content: Any) -> Path:
    return write_whole(path, json.dumps(content, indent=1, default=str) + "\n")


def write_csv(path: str | Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> Path:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    return write_whole(path, text.getvalue())
