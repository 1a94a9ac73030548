"""Checking a file in a process of its own, with limits on time and memory: a crash of libhdf5 becomes a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from qpt.data.paths import file_at
from qpt.errors import QptError

_ANSWER = "qpt-validation:"
_Answer = tuple[str | None, list[str]]  # the defect, if there is one, and what else was noticed
_OVERHEAD = 2 * 2**30  # what Python and the libraries map before the first byte is read


def validate(
    path: str | Path,
    *,
    cost_key: str | None = None,
    action_bound: float | None = 1.0,
    timeout: float | None = None,
    max_bytes: int | None = None,
) -> str | None:
    """None if the file can be read, or one sentence that says why not; whatever the file holds, the caller goes on.

    `timeout` in seconds is by default a minute and one second for each 2 MB; `max_bytes` bounds the data as in `read`.
    """
    return examine(path, cost_key=cost_key, action_bound=action_bound, timeout=timeout, max_bytes=max_bytes)[0]


def examine(
    path: str | Path,
    *,
    cost_key: str | None = None,
    action_bound: float | None = 1.0,
    timeout: float | None = None,
    max_bytes: int | None = None,
) -> _Answer:
    """The answer of `validate`, and what reading noticed that is no defect."""
    timeout = _patience(Path(path)) if timeout is None else timeout
    return _ask("read", path, timeout, max_bytes, {"cost_key": cost_key, "action_bound": action_bound})


def look_first(path: str | Path, *, cost_key: str | None = None, timeout: float | None = None) -> None:
    """Raise the sentence if the structure of the file is bad; a fifth of a second, whatever the size of the file.

    Of a Minari data set, all arrays of all episodes are looked at, which takes as long as reading them.
    """
    if timeout is None:
        timeout = 30.0 if file_at(path) else _patience(Path(path))
    defect, _ = _ask("look", path, timeout, None, {"cost_key": cost_key})
    if defect is not None:
        raise QptError(defect)


def _patience(path: Path) -> float:
    """Seconds to allow: a minute, and one for each 2 MB of the file, which of a Minari data set lies in its folder."""
    files = (path, path / "main_data.hdf5", path / "data" / "main_data.hdf5")
    return 60 + sum(found.stat().st_size for file in files if (found := file_at(file))) / 2e6


def _ask(what: str, path: str | Path, timeout: float, max_bytes: int | None, options: dict[str, Any]) -> _Answer:
    from qpt.data.checks import default_max_bytes

    limit = default_max_bytes() if max_bytes is None else max_bytes
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), *(entry or str(Path.cwd()) for entry in sys.path)]
    order = {"what": what, "path": str(path), "max_bytes": limit, **options}
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "qpt.data.validation", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            # Modules are found as here, and threads would map memory too.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
    except subprocess.TimeoutExpired:
        return f"{path}: reading it takes more than {timeout:.0f} seconds; the file is damaged or too large", []
    except OSError as error:
        return f"{path}: it cannot be checked, because no process can be started ({error.strerror})", []
    for line in child.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(_ANSWER):
            defect, found = json.loads(line.removeprefix(_ANSWER))
            return defect, found
    if child.returncode < 0:
        how = f"signal {-child.returncode}"
        return (
            f"{path}: reading it crashes the HDF5 library ({how}); the file is damaged, copy or download it again",
            [],
        )
    said = child.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {child.returncode}"]
    return f"{path}: it cannot be checked, because the process that should read it failed ({said[-1]})", []


def _child(what: str, path: str, max_bytes: int, **options: Any) -> _Answer:
    # Conversions need some room beside the data; a look needs nearly none.
    room = _OVERHEAD + (2 * max_bytes if what == "read" else 0)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    except (ImportError, ValueError, OSError):  # not on this system: the other checks stand
        pass
    from qpt.data import files
    from qpt.data.checks import noticed

    try:
        if what == "look":
            files.look(path, max_bytes=max_bytes, **options)
            return None, []
        return None, noticed(files.read(path, max_bytes=max_bytes, **options).info)
    except QptError as error:
        return str(error), []
    except MemoryError:
        return f"{path}: the data do not fit into memory", []


if __name__ == "__main__":
    print(_ANSWER + json.dumps(_child(**json.loads(sys.argv[1]))), flush=True)
