"""A run's folder on disk: chunks of finished episodes and the learner's last state, each written whole or not at all.

A chunk holds the episodes of one rollout and is named after the rollout and its content: one that is played again after
an interruption lands on the same name if it came out the same, and beside the old one if not. Nothing is ever lost.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from qpt.collect.recorder import Rollout
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.writing import write_whole

STEPS = ("observations", "actions", "rewards", "costs", "terminals", "timeouts")  # one row a step
EPISODES = ("final_observations", "lengths", "env_seed", "mean_action")  # one row an episode
STATE = "state.safetensors"
ADVICE = "make room, and run the same command again"

Arrays = dict[str, npt.NDArray[Any]]


# -- chunks ------------------------------------------------------------------------------------------------------------


def append(folder: Path, iteration: int, rollout: Rollout, cap: float) -> npt.NDArray[np.bool_]:
    """Write the episodes within the cap; returns which ones."""
    kept = rollout.episode_costs <= cap
    if kept.any():
        rows = np.repeat(kept, rollout.lengths)
        append_arrays(
            folder,
            iteration,
            {
                **{name: getattr(rollout, name)[rows] for name in STEPS},
                "final_observations": rollout.final_observations[kept],
                "lengths": rollout.lengths[kept],
                "env_seed": rollout.seeds[kept],
                "mean_action": rollout.mean_action[kept],
            },
        )
    return kept


def append_arrays(folder: Path, iteration: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    arrays = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in arrays.items()}
    digest = hashlib.sha256()
    for name in (*STEPS, *EPISODES):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    path = folder / f"{iteration:06d}-{digest.hexdigest()[:12]}.npz"
    if not path.exists():
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(path, buffer.getvalue(), ADVICE)


def chunks(folder: Path) -> list[Path]:
    """The chunks of a run, in order."""
    return sorted(folder.glob("[0-9]*.npz"))


def read_chunk(path: Path, names: tuple[str, ...] = (*STEPS, *EPISODES)) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except Exception as error:  # zipfile and numpy raise nearly every kind on damaged files
        raise QptError(
            f"the recorded episodes in {path} cannot be read ({error}); delete that file to go on"
        ) from error


def summary(folder: Path) -> list[tuple[float, float, int]]:
    """(return, cost, length) of every episode recorded so far."""
    rows: list[tuple[float, float, int]] = []
    for path in chunks(folder):
        a = read_chunk(path, ("rewards", "costs", "lengths"))
        starts = np.concatenate([[0], np.cumsum(a["lengths"])[:-1]]).astype(np.int64)
        returns, costs = (np.add.reduceat(a[name].astype(np.float64), starts).tolist() for name in ("rewards", "costs"))
        rows += zip(returns, costs, a["lengths"].tolist(), strict=True)
    return rows


def gather(folders: list[Path], chosen: npt.NDArray[np.int64] | None = None) -> Trajectories:
    """All episodes of all runs, or the chosen ones in rising order; `info` says for each where it came from.

    The numbers of the chosen count through `summary` of one folder after the other; no more than them is in memory.
    """
    parts, run, iteration, seen = [], [], [], 0
    for number, folder in enumerate(folders):
        for path in chunks(folder):
            lengths = read_chunk(path, ("lengths",))["lengths"]
            here = np.ones(len(lengths), bool) if chosen is None else np.isin(seen + np.arange(len(lengths)), chosen)
            seen += len(lengths)
            if here.any():
                part = read_chunk(path)
                rows = np.repeat(here, lengths)
                parts.append({name: values[rows if name in STEPS else here] for name, values in part.items()})
                run += [number] * int(here.sum())
                iteration += [int(path.name.split("-")[0])] * int(here.sum())
    if not parts:
        raise QptError("no episode within the cost cap was recorded; raise the cap, or collect for longer")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in (*STEPS, *EPISODES)}
    info = {
        "env_seed": columns["env_seed"].tolist(),
        "mean_action": columns["mean_action"].astype(int).tolist(),
        "run": run,
        "iteration": iteration,
    }
    steps: dict[str, Any] = {name: columns[name] for name in STEPS}
    return Trajectories.from_arrays(**steps, final_observations=columns["final_observations"], info=info)


# -- state -------------------------------------------------------------------------------------------------------------


def save_state(folder: Path, tensors: Arrays, facts: Mapping[str, Any]) -> None:
    write_whole(folder / STATE, save(tensors, {"facts": json.dumps(facts)}), ADVICE)


def load_state(folder: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """The learner's last state, or None where there is none yet."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            facts = json.loads((file.metadata() or {})["facts"])
        return load_file(path), facts
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise QptError(
            f"the state {path} cannot be read ({error}); delete its folder to play that run again"
        ) from error
