"""What a collection keeps on disk while it runs: npz files, written whole or not at all, in folders with one user.

Episodes lie in chunks, a file each; chunks that are there are never made again, so that a killed collection goes on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError
from qpt.writing import alone, check_folder, write_whole

ADVICE = "make room, and run the same command again"
LOCK = ".lock"

Arrays = dict[str, npt.NDArray[Any]]


def save(path: Path, arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any] | None = None) -> None:
    """Write arrays, and facts that JSON can hold, as one npz file; the same content gives the same bytes."""
    buffer = io.BytesIO()
    text: dict[str, Any] = {} if facts is None else {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    np.savez(buffer, **arrays, **text)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue(), ADVICE)


def load(path: Path, names: Sequence[str] | None = None) -> tuple[Arrays, dict[str, Any]]:
    """The arrays (or those named) and the facts of a file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            wanted = [name for name in archive.files if name != "facts"] if names is None else names
            arrays = {name: archive[name] for name in wanted}
            facts = json.loads(archive["facts"].tobytes()) if "facts" in archive.files else {}
    except Exception as error:  # zipfile and numpy raise nearly every kind on damaged files
        raise QptError(f"{path} cannot be read ({error}); delete that file and run the same command again") from error
    return arrays, facts


@contextmanager
def claimed(folder: Path, plan: Mapping[str, Any]) -> Iterator[None]:
    """Take a new folder, or one that was begun with the same plan; nobody else may work in it meanwhile."""
    file, text = folder / "plan.json", json.dumps(plan, indent=1)
    ours = not folder.exists() or file.exists() or (folder.is_dir() and {p.name for p in folder.iterdir()} <= {LOCK})
    if not ours:
        raise QptError(f"{folder} exists and is no collection of ours; choose another --out or move it away")
    check_folder(folder)
    with alone(folder / LOCK, f"collecting into {folder}"):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            if not _empty(folder):
                raise QptError(
                    f"{folder} holds a collection that was begun with other settings; finish it with the command it "
                    "was begun with, or delete that folder to begin anew"
                )
            write_whole(file, text)
        yield


def _empty(folder: Path) -> bool:
    """Whether nothing was made yet: a command that was refused must not stand in the way of the corrected one."""
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    return names <= {"plan.json", LOCK}


def numbered(folder: Path) -> Iterable[Path]:
    """The files of a folder that are named by numbers, in order."""
    return sorted(folder.glob("[0-9]*.npz"))
