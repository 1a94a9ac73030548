"""Schedules: which runs make up the collection of a task, read from schedules.toml or from a file of one's own."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.collect.ppo import Settings
from qpt.errors import QptError

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Penalty:
    """What learning takes off a step's reward: weight · max(0, size of info[of] - above); recorded ones stay whole."""

    of: tuple[str, ...]  # keys of the environment's info, such as x_velocity; of several, their Euclidean norm
    weight: float
    above: Points  # (share of the run, value)

    def at(self, share: float, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The penalties of steps with these sizes, after this share of the run."""
        shares, values = zip(*self.above, strict=True)
        result: npt.NDArray[np.float64] = self.weight * np.maximum(0.0, sizes - np.interp(share, shares, values))
        return result


@dataclass(frozen=True)
class Plan:
    """One run: a learner of its own, whose cost limit moves as the run goes on."""

    number: int
    seed: int  # of the collection; the run's randomness comes from (seed, number)
    steps: int
    limits: Points  # (share of the run, cost limit)
    settings: Settings
    penalty: Penalty | None = None

    def limit_at(self, share: float) -> float:
        """The cost limit after this share of the run."""
        shares, limits = zip(*self.limits, strict=True)
        return float(np.interp(share, shares, limits))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "limits": [list(point) for point in self.limits]}


def plans(
    task: str, cap: float, *, seed: int = 0, runs: int | None = None, steps: int | None = None, file: Path | None = None
) -> list[Plan]:
    """The runs of a task's collection; more runs than the schedule has repeat it with other seeds."""
    tables = _tables(file)
    where = str(file or "schedules.toml")
    name = task if task in tables else "velocity" if task.endswith("Velocity") and "velocity" in tables else "default"
    if name not in tables:
        raise QptError(f"{where} has neither a table {_header(task)} nor a table [default]; add one of them")
    here = f"{_header(name)} in {where}"
    if not isinstance(tables[name], dict):
        raise QptError(f"{here} must be a table, not {tables[name]!r}")
    table = dict(tables[name])
    rows = table.pop("runs", None)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and "limits" in row for row in rows):
        raise QptError(f"{here} needs runs = [{{ limits = [[share, limit], ...] }}, ...]")
    if runs is not None and runs < 1:
        raise QptError(f"a collection needs at least one run, not {runs}")
    if steps is not None and steps < 1:
        raise QptError(f"a run needs at least one step, not {steps}")
    result = []
    for number in range(runs or len(rows)):
        row = {**table, **rows[number % len(rows)]}
        limits = _points(row.pop("limits"), cap, f"limits of {here}")
        penalty = _penalty(row.pop("penalty", None), here)
        count = row.pop("steps", 300_000)
        if not isinstance(count, int) or count < 1:
            raise QptError(f"steps of {here} must be a positive whole number, not {count!r}")
        result.append(Plan(number, seed, steps or count, limits, _settings(row, here), penalty))
    return result


def _header(name: str) -> str:
    """How TOML writes a table's name: a dot outside quotes would nest it."""
    return f"[{name}]" if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f"[{json.dumps(name, ensure_ascii=False)}]"


def _tables(file: Path | None) -> dict[str, Any]:
    try:
        source = resources.files("qpt.collect").joinpath("schedules.toml") if file is None else file
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise QptError(f"the schedule {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QptError(f"the schedule {file} is not valid TOML: {error}") from error


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _points(rows: Any, cap: float, where: str) -> Points:
    good = (
        isinstance(rows, list)
        and rows
        and all(isinstance(r, list) and len(r) == 2 and all(map(_number, r)) for r in rows)
    )
    if not good or any(r[0] < 0 or r[1] < 0 for r in rows) or [r[0] for r in rows] != sorted({r[0] for r in rows}):
        raise QptError(f"{where} must be [share, value] pairs with rising shares, such as [[0, 0.1], [1, 1]]")
    return tuple((float(share), float(limit) * cap) for share, limit in rows)


def _penalty(row: Any, where: str) -> Penalty | None:
    if row is None:
        return None
    good = isinstance(row, dict) and set(row) == {"of", "weight", "above"} and isinstance(row["of"], list) and row["of"]
    if not good or not all(isinstance(key, str) for key in row["of"]):
        raise QptError(f'penalty of {where} must look like {{ of = ["x_velocity"], weight = 1.0, above = [[0, 2.0]] }}')
    if not _number(row["weight"]) or row["weight"] < 0:
        raise QptError(f"weight, of the penalty of {where}, must be a number of at least 0, not {row['weight']!r}")
    return Penalty(
        tuple(row["of"]), float(row["weight"]), _points(row["above"], 1.0, f"above, of the penalty of {where},")
    )


def _settings(row: dict[str, Any], where: str) -> Settings:
    known: dict[str, Any] = {f.name: type(f.default) for f in fields(Settings)}
    unknown = set(row) - set(known)
    if unknown:
        raise QptError(f"{where} has unknown keys: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    for key, value in row.items():
        wanted = (int, float) if known[key] is float else known[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and known[key] is not bool):
            raise QptError(f"{key} of {where} must be of type {known[key].__name__}, not {value!r}")
    try:
        return replace(Settings(), **{k: known[k](v) for k, v in row.items()})
    except QptError as error:
        raise QptError(f"{where}: {error}") from None
