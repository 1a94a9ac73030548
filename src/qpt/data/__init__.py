"""The data room: files, trajectories, augmentation and samplers."""

from __future__ import annotations

import importlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from qpt.data.files import read, write
    from qpt.data.trajectories import Trajectories
    from qpt.data.validation import validate

__all__ = ["Trajectories", "load_dataset", "read", "validate", "write"]

DataSource = Literal["dsrl", "collected"]  # whose data the name of a task stands for
COLLECTED = "collected:"

# Resolved on first use: `import qpt.data` stays cheap, and never imports torch.
_ROOMS = {
    "Trajectories": "qpt.data.trajectories",
    "read": "qpt.data.files",
    "write": "qpt.data.files",
    "validate": "qpt.data.validation",
}


def load_dataset(source: str | Path, *, cost_key: str | None = None, action_bound: float | None = 1.0) -> Trajectories:
    """Logged episodes from a file, a task's downloaded file, Minari, or the package itself.

    `source` is a path (HDF5, npz, the folder of a Minari data set), the name of a task whose published file is in the
    cache ("BallCircle"), "collected:BallCircle" for what `qpt collect record` made for it, "minari:ID", or
    "embedded:ballcircle", a small data set that comes with the package.
    """
    from qpt.data.files import read
    from qpt.data.validation import look_first  # in a process of its own, where a damaged file does no harm

    text = str(source)
    if text.startswith("minari:"):
        from qpt.data.minari import folder_of, read_id

        look_first(folder_of(text.removeprefix("minari:")))
        return read_id(text.removeprefix("minari:"), cost_key=cost_key, action_bound=action_bound)
    if text.startswith("embedded:"):
        with resources.as_file(_embedded(text.removeprefix("embedded:"))) as path:
            return read(path, cost_key=cost_key, action_bound=action_bound)
    path = find(source)
    look_first(path, cost_key=cost_key)
    return read(path, cost_key=cost_key, action_bound=action_bound)


def find(source: str | Path) -> Path:
    """The file, or the folder of a Minari data set, that a source stands for."""
    from qpt.data.paths import expanded
    from qpt.errors import QptError
    from qpt.tasks import all_tasks, get_task

    text, path = str(source), expanded(source)
    if text.startswith("embedded:"):
        with resources.as_file(_embedded(text.removeprefix("embedded:"))) as embedded:
            return embedded
    if text.startswith("minari:"):
        from qpt.data.minari import folder_of

        return folder_of(text.removeprefix("minari:"))
    if text.startswith(COLLECTED):
        return _collected(text.removeprefix(COLLECTED))
    try:
        if path.is_file() or (path.exists() and text not in all_tasks()):
            return path
    except PermissionError as error:
        raise QptError(f"there is no permission to look at {text}; change that of the folders above it") from error
    except OSError:  # a name that no file can have may still be meant for a task
        pass
    if isinstance(source, Path) or path.suffix in (".hdf5", ".h5", ".npz") or "/" in text:
        raise QptError(f"there is no file {text}; check the path")
    try:
        task = get_task(text)
    except QptError as error:
        raise QptError(str(error).replace("there is no task", "there is no file and no task", 1)) from error
    from qpt.data.download import find_cached

    found = find_cached(task)
    if found is None and task.data_file is None:
        raise QptError(f"task {task.name!r} names no data file (data_file); give the file itself")
    if found is None:
        raise QptError(
            f"the data of {task.name} are not in the cache; run `qpt data download {task.name}`, "
            f"or make data of the same kind with `qpt collect record {task.name}` and use --data-source collected"
        )
    return found


def of_task(task: str, source: DataSource) -> str:
    """What to load for a task: its published data, or those that were collected for it; never one for the other."""
    return task if source == "dsrl" else f"{COLLECTED}{task}"


def _collected(name: str) -> Path:
    from qpt.data.download import collected_dir, find_collected
    from qpt.errors import QptError
    from qpt.tasks import get_task

    task = get_task(name)
    found = find_collected(task)
    if found is None:
        raise QptError(f"no data of {name} were collected in {collected_dir()}; run `qpt collect record {name}`")
    return found


def _embedded(name: str) -> Any:
    from qpt.errors import QptError

    folder = resources.files("qpt.data").joinpath("embedded")
    names = sorted(Path(item.name).stem for item in folder.iterdir() if item.name.endswith(".hdf5"))
    if name not in names:
        raise QptError(f"there is no embedded data set {name!r}; there is: {', '.join(names)}")
    return folder.joinpath(f"{name}.hdf5")


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'qpt.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)
