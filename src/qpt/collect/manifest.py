"""The manifest: one row for each recorded dataset, with what it takes to make it again and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qpt.collect.filter import careful_cost, coverage
from qpt.collect.record import Recorded
from qpt.tasks import Task
from qpt.writing import write_whole

NAME = "manifest.json"


def row(task: Task, recorded: Recorded, file: Path, seconds: float, workers: int) -> dict[str, Any]:
    """All there is to say about a dataset; the fingerprint is that of its arrays, whatever file they lie in."""
    data = recorded.trajectories
    returns, costs, cap = data.returns, data.episode_costs, float(data.info["cost_cap"])
    careful = costs <= careful_cost(cap)
    low = float(returns.min()) if task.reward_min is None else task.reward_min
    high = float(returns.max()) if task.reward_max is None else task.reward_max
    learning = json.loads(data.info.get("learning", "{}"))
    return {
        "task": task.name,
        "command": data.info["command"],
        "versions": data.info["versions"],
        "fingerprint": data.fingerprint,
        "trajectories": len(data),
        "steps": data.steps,
        "megabytes": round(file.stat().st_size / 1e6, 1),
        "recorded_episodes": recorded.played,
        "simulator_steps": recorded.steps,
        "core_hours": round(recorded.core_seconds / 3600, 4),
        "seconds": round(seconds, 1),  # of the clock, with
        "workers": workers,
        "return": [round(float(x), 3) for x in (returns.min(), returns.mean(), returns.max())],
        "published_return": [task.reward_min, task.reward_max],
        "cost_cap": cap,
        "cost_mean": round(float(costs.mean()), 3),
        "careful_share": round(float(careful.mean()), 4),
        "careful_return": round(float(returns[careful].max()), 3) if careful.any() else None,
        "coverage": round(coverage(returns, costs, cap, low, high), 4),
        "learning_core_hours": learning.get("core_hours"),
        "learning_versions": learning.get("versions"),
    }


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of a folder of datasets, by task."""
    file = folder / NAME
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def package_manifest() -> dict[str, dict[str, Any]]:
    """The rows that come with the package: what its behaviour policies recorded elsewhere."""
    return read_manifest(Path(__file__).parent)


def compared(new: Mapping[str, Any]) -> str:
    """Whether a dataset is the one of the package's manifest; nothing where that has none made by the same command."""
    known = package_manifest().get(new["task"], {})
    if known.get("command") != new["command"]:
        return ""
    if known["fingerprint"] == new["fingerprint"]:
        return "its arrays are those of the manifest, bit for bit"
    return f"its arrays are not those of the manifest, which was made elsewhere with {known['versions']}"


def add(folder: Path, new: Mapping[str, Any]) -> None:
    """Put a row into the manifest of a folder, in place of an older one of its task."""
    rows = dict(sorted({**read_manifest(folder), new["task"]: new}.items()))
    lines = ",\n".join(f"{json.dumps(task)}: {json.dumps(found)}" for task, found in rows.items())
    write_whole(folder / NAME, f"{{\n{lines}\n}}\n")
