"""The model card of an exported policy: what it is, what it was judged at, where it fails, how to make it again."""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from qpt.algorithms.base import algorithm_classes
from qpt.episodes import Episodes

MODES = {
    "live": "The limit is an input and may change at any step.",
    "trained": "The limit was fixed in training; another one needs another policy.",
    "ignored": "The limit plays no part in its decisions.",
}


def model_card(manifest: dict[str, Any], facts: dict[str, Any], parity: str, episodes: Episodes | None = None) -> str:
    """Markdown; `manifest` is the checkpoint's, `facts` the side file's, `parity` a sentence."""
    data, spec = manifest.get("data", {}), manifest["spec"]
    kind = "a surrogate made for trying things out, not the published data" if data.get("surrogate") else "as logged"
    low, high = facts["cost_range"]
    trained = facts["trained_limit"]
    parts = {
        "What it is": [
            f"A policy for {facts['task'] or 'a task of your own'}: observations of {facts['observation_dim']} numbers "
            f"to actions of {facts['action_dim']} in [-1, 1], from the last {facts['context']} steps of an episode "
            f"of at most {facts['horizon']}.",
            f"Method: {facts['algorithm']}, checkpoint `{facts['provenance']['checkpoint']}` "
            f"(seed {manifest.get('seed')}). "
            + MODES.get(facts["limit_mode"], "")
            + (f" It was trained for a limit of {trained:g}." if trained is not None else ""),
            parity,
        ],
        "Data": [
            f"- source: `{_source(data) or 'given in memory'}` ({kind})",
            f"- episodes: {data.get('episodes', 'unknown')}, steps: {data.get('steps', 'unknown')}",
            f"- returns from {spec['return_min']:.4g} to {spec['return_max']:.4g}, costs up to {spec['cost_max']:.4g}",
            f"- fingerprint: `{data.get('fingerprint', 'unknown')}`",
        ],
        "What it was judged at": _judged(manifest, episodes),
        "Known failures": [
            f"- **Limits outside the data.** Episodes on the data's frontier cost {low:.4g} and more, and none costs "
            f"above {high:.4g}. Below the first, no logged episode shows how to keep the limit; above the second, "
            "a larger limit brings nothing.",
            f"- **Past the horizon.** After {facts['horizon']} steps it refuses to act or, if asked to go on, acts as "
            "at the last step: neither its targets nor its critics mean anything there.",
            "- **Observations unlike the logged ones.** Its estimates are of what was logged; nothing warns of new "
            "situations. Units, order and scaling of observations must be those of the data.",
            "- **A limit is an aim, not a guarantee.** The share of episodes that kept it stands above, if measured.",
        ],
        "Versions": [
            "- exported with " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
            "- trained with " + ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items()),
        ],
        "How to make it again": ["```", train_command(manifest), "```"],
        "Config": ["| field | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in manifest["config"].items())],
    }
    body = (f"## {title}\n\n" + ("\n" if _list(lines) else "\n\n").join(lines) for title, lines in parts.items())
    return f"# Model card: {facts['algorithm']} for {facts['task'] or 'your task'}\n\n" + "\n\n".join(body) + "\n"


def _list(lines: list[str]) -> bool:
    return lines[0].startswith(("-", "|", "```"))


def _judged(manifest: dict[str, Any], episodes: Episodes | None) -> list[str]:
    if episodes is not None:
        rows = [
            f"| {line['cost_limit']:g} | {line['episodes']} | {_interval(line, 'return', 1)} | "
            f"{_interval(line, 'cost', 1)} | {_interval(line, 'within_limit', 2)} |"
            for line in episodes.summary()
        ]
        head = ["| limit | episodes | return | cost | P(cost ≤ limit) |", "|---|---|---|---|---|"]
        return [*head, *rows, "", "Means with 95 % intervals."]
    rows = [
        f"| {part['cost_limit']:g} | {part['return']:.1f} | {part['cost']:.1f} |"
        for row in manifest.get("evaluations", [])
        for part in row["limits"]
    ]
    if not rows:
        return ["Nothing: it was not evaluated. `qpt evaluate` measures it; `qpt export --episodes` adds the results."]
    step = manifest["evaluations"][-1]["step"]
    note = f"Means of the evaluation during training, at step {step}, in the simulator; without intervals."
    return ["| limit | return | cost |", "|---|---|---|", *rows, "", note]


def _source(data: dict[str, Any]) -> str:
    """The data's file; that of the package by its short name."""
    path = Path(str(data.get("source") or ""))
    return f"embedded:{path.stem}" if path.parent.name == "embedded" else str(data.get("source") or "")


def _interval(line: dict[str, Any], key: str, digits: int) -> str:
    mean, (low, high) = line[key], line[f"{key}_interval"]
    return "–" if math.isnan(mean) else f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def train_command(manifest: dict[str, Any]) -> str:
    """The `qpt train` line that trains this policy anew: what differs from the defaults."""
    data, spec = manifest.get("data", {}), manifest["spec"]
    words = ["qpt", "train", "--algorithm", str(manifest["algorithm"])]
    if manifest.get("task"):
        words += ["--task", str(manifest["task"])]
    words += ["--data", _source(data) or "FILE"]
    if not manifest.get("task"):
        words += ["--horizon", str(spec["horizon"])]
    words += ["--seed", str(manifest.get("seed", 0)), "--device", str(manifest.get("device", "cpu"))]
    default = algorithm_classes(manifest["algorithm"])[1]()
    for name in (field.name for field in fields(default)):
        value, usual = manifest["config"].get(name), getattr(default, name)
        value = tuple(value) if isinstance(value, list) else value
        flag = name.replace("_", "-")
        if value == usual or name not in manifest["config"]:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join([*words, "--out", "runs/again"])
