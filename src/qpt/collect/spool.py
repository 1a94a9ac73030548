"""What a collection keeps on disk while it runs: npz files, written whole or not at all, in folders with one user.

Episodes lie in chunks, a file each; chunks that are there are never made again, so that a killed collection goes on.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.collect.recorder import Rollout
from qpt.data.trajectories import Trajectories
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


def remove(folder: Path) -> None:
    """Delete what was kept on the way, once its dataset is written."""
    shutil.rmtree(folder, ignore_errors=True)


def numbered(folder: Path) -> Iterable[Path]:
    """The files of a folder that are named by numbers, in order."""
    return sorted(folder.glob("[0-9]*.npz"))


# -- episodes ----------------------------------------------------------------------------------------------------------

STEPS = ("observations", "actions", "rewards", "costs", "terminals", "timeouts")  # one row a step


@dataclass(frozen=True)
class Log:
    """What every episode brought that was played, in order; those above the cap are not kept themselves."""

    returns: npt.NDArray[np.float64]
    costs: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.int64]

    @classmethod
    def empty(cls) -> Log:
        return cls(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def chunk(folder: Path, start: int) -> Path:
    """The file of the episodes from number `start` on."""
    return folder / f"{start:06d}.npz"


def append(
    folder: Path, start: int, rollout: Rollout, behaviour: npt.NDArray[np.int64], cap: float, core_seconds: float
) -> None:
    """Write a chunk: all about the episodes within the cap, and of the others what they brought."""
    steps = {name: getattr(rollout, name) for name in STEPS}
    steps = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in steps.items()}
    returns, costs = (np.add.reduceat(steps[k].astype(np.float64), rollout.offsets[:-1]) for k in ("rewards", "costs"))
    kept = costs <= cap
    rows = np.repeat(kept, rollout.lengths)
    save(
        chunk(folder, start),
        {
            **{name: values[rows] for name, values in steps.items()},
            "final_observations": rollout.final_observations[kept],
            "kept": kept,
            "return_sums": returns,
            "cost_sums": costs,
            "lengths": rollout.lengths,
            "env_seed": rollout.seeds,
            "behaviour": behaviour,
        },
        {"core_seconds": core_seconds},
    )


def append_trajectories(folder: Path, start: int, data: Trajectories) -> None:
    """The same for episodes from elsewhere, all of which are kept."""
    save(
        chunk(folder, start),
        {
            **{name: getattr(data, name) for name in STEPS},
            "final_observations": data.final_observations,
            "kept": np.ones(len(data), bool),
            "return_sums": data.returns,
            "cost_sums": data.episode_costs,
            "lengths": data.lengths,
            "env_seed": np.full(len(data), -1),
            "behaviour": np.zeros(len(data), np.int64),
        },
    )


def log(folder: Path, count: int) -> Log:
    """What the first `count` episodes brought."""
    names = ("return_sums", "cost_sums", "lengths", "behaviour")
    parts = [load(path, names)[0] for path in numbered(folder) if int(path.stem) < count]
    return Log(*(np.concatenate([part[name] for part in parts]) for name in names))


def core_seconds(folder: Path) -> float:
    """Processor time that the recorded episodes took."""
    return sum(float(load(path, ())[1]["core_seconds"]) for path in numbered(folder))


def gather(folder: Path, chosen: npt.NDArray[np.int64]) -> Trajectories:
    """The chosen episodes, by their numbers in rising order; no more than them is in memory."""
    parts, seen = [], 0
    for path in numbered(folder):
        kept = load(path, ("kept",))[0]["kept"]
        here = np.isin(seen + np.arange(len(kept)), chosen)
        seen += len(kept)
        if here.any():
            part, _ = load(path)
            among = here[kept]  # of those that were kept
            rows = np.repeat(among, part["lengths"][kept])
            taken = {name: part[name][rows] for name in STEPS}
            taken |= {"final_observations": part["final_observations"][among], "env_seed": part["env_seed"][here]}
            parts.append(taken)
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    info = {"env_seed": columns.pop("env_seed").tolist()}
    return Trajectories.from_arrays(**columns, info=info)
