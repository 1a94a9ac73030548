"""Where the runs of a report lie, and what their methods are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qpt.errors import QptError
from qpt.experiments.jobs import DONE, JOB


@dataclass(frozen=True)
class Place:
    """The folder of a run, and the method's name where the caller gave one."""

    folder: Path
    label: str = ""

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        return _json(self.folder / "run.json")

    @cached_property
    def name(self) -> str:
        """The method as the caller, the benchmark's job or the run calls it."""
        job = self.folder / JOB
        own = str(_json(job).get("label") or "") if job.is_file() else ""
        return self.label or own or str(self.facts.get("algorithm") or "unknown")

    @cached_property
    def done(self) -> Mapping[str, Any]:
        """What a job of a benchmark says when it is finished."""
        path = self.folder / DONE
        return _json(path) if path.is_file() else {}

    @property
    def key(self) -> str:
        return str(self.done.get("key") or self.folder)

    @property
    def time(self) -> float:
        return float(self.done.get("time") or 0.0)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What sets runs of one method apart: its settings and its data."""
        config, data = (self.facts.get(name) or {} for name in ("config", "data"))
        source = Path(str(data.get("source") or "")).name  # the folder is another on every machine
        return {k: v for k, v in config.items() if k != "cost_limit"} | {"data": source}


def named(text: str | Path) -> tuple[Path, str]:
    label, equals, rest = str(text).partition("=")
    if equals and not Path(text).exists():
        return Path(rest), label
    return Path(text), ""


def walk(root: Path, label: str) -> list[Place]:
    """The runs at or below a folder, by task and method."""
    places: list[Place] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop(0)
        if (folder / "run.json").is_file():
            places.append(Place(folder, label))
        else:
            waiting[:0] = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    places.sort(key=lambda place: (*(str(place.facts.get(k)) for k in ("task", "algorithm")), place.name))
    if not places:
        raise QptError(f"there is no run in {root}; name a folder of `qpt train` or `qpt bench`, or tables of episodes")
    return places


def newest(places: Sequence[Place]) -> list[Place]:
    """Each run once: of one that was copied to two places, the newer, unless the copies have names of their own."""
    found = {(place.label, place.key): place for place in sorted(places, key=lambda place: place.time)}
    return [place for place in places if found[place.label, place.key] is place]


def tables_of(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(p for p in folder.glob("episodes*") if p.suffix in (".csv", ".parquet")))


def method_names(places: Sequence[Place]) -> list[str]:
    """The method of each run, with the settings by which runs of one name on one task differ."""
    names = []
    for place in places:
        alike = [p.config for p in places if p.name == place.name and p.facts.get("task") == place.facts.get("task")]
        keys = [k for k, v in place.config.items() if any(other.get(k) != v for other in alike)]
        if place.label or not keys:
            names.append(place.name)
        elif len(keys) <= 3:
            names.append(" · ".join([place.name, *(f"{k}={place.config[k]}" for k in keys)]))
        else:  # too much to say: the folder's name says it better
            names.append(f"{place.name} · {place.folder.name}")
    return names


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QptError(f"{path} cannot be read ({error}); leave this run out, or train it again") from error
    if not isinstance(found, dict):
        raise QptError(f"{path} does not describe a run; leave it out, or train it again")
    return found
