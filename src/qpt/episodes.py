"""Episodes: the results of evaluations, one row an episode, as a table with provenance."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import io
import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import __version__, stats
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError, require
from qpt.writing import write_csv, write_whole

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Strings = npt.NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class Episodes:
    """The results of evaluations, as columns with one entry an episode. `seed` is the evaluation's."""

    task: Strings
    algorithm: Strings
    checkpoint: Strings
    seed: Ints
    cost_limit: Floats
    episode: Ints  # episodes of the same number and seed start alike at every limit
    returns: Floats
    costs: Floats
    lengths: Ints
    ended_by: Strings  # "terminal" or "timeout"
    fallback_share: Floats  # NaN where the policy has no fallback
    normalized_return: Floats
    normalized_cost: Floats
    provenance: Mapping[str, Any] = field(default_factory=dict)
    trajectories: Trajectories | None = None  # in the order of the rows; not saved with the table

    def __len__(self) -> int:
        return len(self.returns)

    def select(self, mask: npt.ArrayLike) -> Episodes:
        """The rows of a mask or of indices."""
        index = np.flatnonzero(mask) if np.asarray(mask).dtype == bool else np.asarray(mask, np.int64)
        parts: dict[str, Any] = {name: getattr(self, name)[index] for name in _COLUMNS}
        trajectories = self.trajectories.select(index) if self.trajectories is not None else None
        return Episodes(**parts, provenance=self.provenance, trajectories=trajectories)

    @classmethod
    def concatenate(cls, parts: Sequence[Episodes]) -> Episodes:
        """The rows of all parts, with the provenance of each."""
        if not parts:
            raise QptError("there are no episodes to put together")
        columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
        return cls(**columns, provenance={"parts": [dict(p.provenance) for p in parts]})

    def once(self) -> Episodes:
        """Without repetitions: of one policy, rows of one task, limit, seed and number are the same episode."""
        names = (self.task, self.cost_limit, self.seed, self.episode)
        first: dict[Any, int] = {}
        for row, key in enumerate(zip(*(column.tolist() for column in names), strict=True)):
            first.setdefault(key, row)
        return self.select(list(first.values()))

    def summary(self, confidence: float = 0.95) -> list[dict[str, Any]]:
        """One line for each task, algorithm, checkpoint and limit: means with intervals, and P(safe)."""

        def interval(values: Any) -> stats.Interval:
            if len(values) < stats.FEWEST:
                return math.nan, math.nan
            return stats.bootstrap_mean_interval(values, confidence)

        keys = list(zip(self.task, self.algorithm, self.checkpoint, self.cost_limit, strict=True))
        lines = []
        for key in dict.fromkeys(keys):
            part = self.select(np.array([k == key for k in keys]))
            limit = float(key[3])
            within = int((part.costs <= limit).sum())
            lines.append(
                {
                    "task": str(key[0]),
                    "algorithm": str(key[1]),
                    "checkpoint": str(key[2]),
                    "cost_limit": limit,
                    "episodes": len(part),
                    "return": float(part.returns.mean()),
                    "return_interval": interval(part.returns),
                    "cost": float(part.costs.mean()),
                    "cost_interval": interval(part.costs),
                    "normalized_return": float(part.normalized_return.mean()),
                    "normalized_return_interval": interval(part.normalized_return),
                    "normalized_cost": float(part.normalized_cost.mean()),
                    "normalized_cost_interval": interval(part.normalized_cost),
                    "within_limit": within / len(part),
                    "within_limit_interval": stats.wilson_interval(within, len(part), confidence),
                    "cost_cvar": stats.cvar(part.costs, 0.1),
                    "fallback_share": float(part.fallback_share.mean()),
                    "length": float(part.lengths.mean()),
                }
            )
        return lines

    def columns(self) -> dict[str, list[Any]]:
        """The table by column, as it is saved."""
        return {_COLUMNS[name]: getattr(self, name).tolist() for name in _COLUMNS}

    def save(self, path: str | Path, more: Mapping[str, list[Any]] | None = None) -> Path:
        """Write a table: .csv (provenance beside it, in `<name>.csv.json`) or .parquet (provenance in its metadata).

        `more` are further columns, which `load` passes over.
        """
        path = Path(path)
        if path.suffix not in (".csv", ".parquet"):
            raise QptError(f"a table is saved as .csv or .parquet, not as {path.name!r}; change the ending")
        columns = self.columns() | dict(more or {})
        provenance = json.dumps(self.provenance, indent=1, default=str)
        if path.suffix == ".parquet":
            arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
            content = io.BytesIO()
            parquet.write_table(arrow.table(columns).replace_schema_metadata({"qpt": provenance}), content)
            return write_whole(path, content.getvalue())
        write_csv(path, columns, zip(*columns.values(), strict=True))  # first: it matters more
        write_whole(path.with_name(f"{path.name}.json"), provenance + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Episodes:
        """Read a table that `save` wrote."""
        path = Path(path)
        if not path.is_file():
            raise QptError(f"there is no table {path}; `qpt evaluate --out` writes one")
        try:
            columns, provenance = _read(path)
        except (ValueError, csv.Error) as error:  # no text, no JSON, no parquet
            raise QptError(f"{path} or what lies beside it is no table of episodes, or cut off: {error}") from error
        missing = [name for name in _COLUMNS.values() if name not in columns]
        if missing:
            raise QptError(f"the table {path} has no column {missing[0]!r}; it was not written by `qpt evaluate`")
        kinds: dict[str, Any] = {"Strings": np.str_, "Ints": np.int64, "Floats": np.float64}
        types = {f.name: kinds[str(f.type)] for f in fields(cls) if f.name in _COLUMNS}
        try:
            arrays: dict[str, Any] = {k: np.array(columns[v], types[k]) for k, v in _COLUMNS.items()}
        except ValueError as error:
            raise QptError(f"the table {path} cannot be read: {error}") from error
        return cls(**arrays, provenance=provenance)


def _read(path: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The columns of a table, and its provenance."""
    if path.suffix == ".parquet":
        table = require("pyarrow.parquet", "parquet").read_table(path)
        return table.to_pydict(), json.loads((table.schema.metadata or {}).get(b"qpt", b"{}"))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    header = rows[0] if rows else []
    if any(len(row) != len(header) for row in rows):
        raise QptError(f"the table {path} has rows of different lengths; it may be cut off: write it again")
    side = path.with_name(f"{path.name}.json")
    provenance = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else {}
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}, provenance


# attribute: name in the table ("return" cannot be an attribute)
_COLUMNS = {
    f.name: {"returns": "return", "costs": "cost", "lengths": "length"}.get(f.name, f.name)
    for f in fields(Episodes)
    if f.name not in ("provenance", "trajectories")
}


def origins(provenance: Any) -> list[Mapping[str, Any]]:
    """The provenance of each part of a table that was put together, maybe more than once."""
    if not isinstance(provenance, Mapping):
        return []
    parts = provenance.get("parts")
    return [origin for part in parts for origin in origins(part)] if isinstance(parts, list) else [provenance]


def settings_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What `qpt evaluate --set` changed; nothing where it is not said."""
    found = origin.get("settings")
    return dict(found) if isinstance(found, Mapping) else {}


def provenance() -> dict[str, Any]:
    """Where results come from: versions, command, commit, machine, time."""
    versions = {"qpt": __version__, "python": platform.python_version()}
    for name in (
        "numpy",
        "torch",
        "gymnasium",
        "mujoco",
        "pybullet",
        "bullet-safety-gym",
        "safety-gymnasium",
        "metadrive-simulator",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "command": command(),
        "commit": _commit(),
        "machine": platform.platform(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command() -> list[str]:
    """What was typed; `python -m qpt` is `qpt`."""
    program, *words = sys.argv or [""]
    path = Path(program)
    return ["qpt" if (path.parent.name, path.name) == ("qpt", "__main__.py") else program, *words]


def _commit() -> str | None:
    """The commit of these sources, where they lie in a checkout, with "-dirty" where files were changed since."""
    here = Path(__file__)
    tracked, described = ["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--exclude=*"]
    try:
        for words in (tracked, [*described, "--abbrev=40"]):
            done = subprocess.run(
                ["git", "-C", str(here.parent), *words],
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
                stdin=subprocess.DEVNULL,
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
