"""Minari data sets as Trajectories, by Minari's own library (the extra `qpt[minari]`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.data.checks import check_continuous, default_max_bytes
from qpt.data.hdf5 import check_tree
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError, require


def read_folder(
    path: Path, *, cost_key: str | None = None, action_bound: float | None = 1.0, max_bytes: int | None = None
) -> Trajectories:
    """The data set in a folder, the one that holds `data/` (a file or link elsewhere is not looked for)."""
    look_folder(path, default_max_bytes() if max_bytes is None else max_bytes)
    minari = require("minari", "minari")
    return _convert(minari.MinariDataset(_inner(path)), str(path), cost_key, action_bound)


def look_folder(path: Path, limit: int) -> None:
    """Check the HDF5 file of a data set as any other is checked: Minari itself follows every link."""
    main = _inner(path) / "main_data.hdf5"
    if main.is_file():
        with require("h5py").File(main, "r", locking="best-effort") as file:
            check_tree(file, main.stat().st_size, limit)
    elif not (_inner(path) / "metadata.json").is_file():
        raise QptError(
            "this folder is not a Minari data set (it has no data/main_data.hdf5); give a file or such a folder"
        )


def _inner(path: Path) -> Path:
    return path if path.name == "data" else path / "data"


def read_id(name: str, *, cost_key: str | None = None, action_bound: float | None = 1.0) -> Trajectories:
    """The data set that Minari knows by this id; it must have been downloaded (`minari download ID`)."""
    minari = require("minari", "minari")
    folder = folder_of(name)
    try:
        dataset = minari.load_dataset(name)
    except Exception as error:  # Minari raises several kinds for an unreadable data set
        reason = str(error).split("\n")[0]
        raise QptError(f"Minari cannot read {folder} ({reason}); run: minari download {name} --force") from error
    return _convert(dataset, f"minari:{name}", cost_key, action_bound)


def folder_of(name: str) -> Path:
    """Where Minari keeps the data set of this id."""
    root = require("minari.storage.datasets_root_dir", "minari")
    try:
        folder = Path(root.get_dataset_path(name))
        there = bool(name) and folder.is_dir()
    except Exception as error:  # an id that is none, or no permission to look
        raise QptError(
            f"Minari cannot use the id {name!r} ({error}); `minari list local` shows those there are"
        ) from error
    if not there:
        raise QptError(f"Minari has no data set {name!r} in {folder.parent}; run: minari download {name}")
    return folder


def _convert(dataset: Any, source: str, cost_key: str | None, action_bound: float | None) -> Trajectories:
    key = cost_key or "cost"
    parts: dict[str, list[npt.NDArray[Any]]] = {
        name: []
        for name in ("observations", "actions", "rewards", "costs", "terminals", "timeouts", "final_observations")
    }
    for episode in _episodes(dataset):
        steps = len(episode.rewards)
        where = f"episode {episode.id}"
        if steps == 0:
            continue
        observations = _table(episode.observations, "observations", where)
        if len(observations) != steps + 1:
            raise QptError(f"{where} has {len(observations)} observations for {steps} steps; there must be one more")
        if isinstance(episode.actions, np.ndarray):
            check_continuous(episode.actions.dtype)
        costs = _costs(episode.infos, key, steps, where)
        timeouts = np.array(episode.truncations, bool)
        terminals = np.array(episode.terminations, bool)
        timeouts[-1] |= not terminals[-1]  # an episode of Minari ends where it ends, flag or no flag
        values = observations[:-1], _table(episode.actions, "actions", where), np.asarray(episode.rewards), costs
        for name, value in zip(parts, (*values, terminals, timeouts, observations[-1:]), strict=True):
            parts[name].append(value)
    if not parts["rewards"]:
        raise QptError("the data set holds no steps")
    info = {"source": source, "minari_id": str(getattr(dataset.spec, "dataset_id", ""))}
    return Trajectories.from_arrays(
        **{name: np.concatenate(values) for name, values in parts.items()}, action_bound=action_bound, info=info
    )


def _episodes(dataset: Any) -> Iterator[Any]:
    try:
        yield from dataset.iterate_episodes()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise QptError(
            f"Minari cannot read its episodes ({type(error).__name__}: {error}); download the data set again"
        ) from error


def _table(values: Any, name: str, where: str) -> npt.NDArray[Any]:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub" or values.ndim < 2:
        raise QptError(
            f"{name} of {where} are not vectors of numbers; flatten them first (gymnasium's FlattenObservation)"
        )
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _costs(infos: Any, key: str, steps: int, where: str) -> npt.NDArray[Any]:
    if not isinstance(infos, dict) or key not in infos:
        names = ", ".join(sorted(infos)) if infos else "nothing"
        raise QptError(f"{where} has no infos[{key!r}]; its infos hold {names}; name the costs with the cost key")
    costs = np.asarray(infos[key])
    # With the info of the reset there is one more entry than steps, and the first belongs to no step.
    if costs.ndim == 0 or len(costs) not in (steps, steps + 1):
        raise QptError(f"infos[{key!r}] of {where} has shape {list(costs.shape)} for {steps} steps")
    return costs[len(costs) - steps :].reshape(steps, -1)
