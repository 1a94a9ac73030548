"""The model card of an exported policy: what it is, what it was judged at, where it fails, how to make it again."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.algorithms.base import algorithm_classes
from qpt.checkpoint import MODEL, read_manifest
from qpt.episodes import Episodes, origins, settings_of
from qpt.errors import QptError
from qpt.tasks import all_tasks

MODES = {
    "live": "The limit is an input and may change at any step.",
    "trained": "The limit was fixed in training; another one needs another policy.",
    "ignored": "The limit plays no part in its decisions.",
}
AGAIN = "runs/again"  # where the card's commands train, and measure what they trained

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Evidence:
    """What is known of how a policy behaves, and who told it."""

    episodes: Episodes | None = None  # of `qpt evaluate` or `qpt bench`
    certificates: tuple[dict[str, Any], ...] = ()  # of `qpt certify`
    judgements: tuple[dict[str, Any], ...] = ()  # of `qpt judge`
    calibrations: tuple[dict[str, Any], ...] = ()  # of `qpt certify --calibrate`: stated limits and internal ones


def find_evidence(
    folder: Path, episodes: Episodes | None = None, settings: Mapping[str, Any] | None = None
) -> Evidence:
    """What lies in a checkpoint's folder and in its run's and is about this very checkpoint; the rest is passed over.

    Tables of episodes are `episodes*.csv` or `.parquet`, unless a table is given; certificates and judgements are
    known by what they hold, whatever the name of the .json file. With other `settings` than the checkpoint's it is
    another policy: its episodes are those that were run with them, and no calibration is its own.
    """
    manifest = read_manifest(folder)
    digest, changed = manifest["sha256"][MODEL], changes(manifest, settings or {})
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    found = [
        row for place in dict.fromkeys((run, folder)) for path in sorted(place.glob("*.json")) for row in _rows(path)
    ]
    return Evidence(
        episodes if episodes is not None else _episodes(run, folder, settings or {}),
        tuple(r for r in found if {"statement", "verdict"} <= set(r) and _of(r.get("sha256"), digest)),
        tuple(r for r in found if {"limits", "confidence"} <= set(r) and _of(r.get("sha256"), digest)),
        tuple(
            e
            for r in found
            if "calibrations" in r and r.get("model_sha256") == digest and not changed
            for e in r["calibrations"]
        ),
    )


def changes(manifest: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from those of the checkpoint."""
    return {name: value for name, value in settings.items() if manifest["config"].get(name) != value}


def _rows(path: Path) -> Rows:
    """The objects in a JSON file; none where it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [row for row in (found if isinstance(found, list) else [found]) if isinstance(row, dict)]


def _of(sha256: Any, digest: str) -> bool:
    return isinstance(sha256, dict) and sha256.get(MODEL) == digest


def _episodes(run: Path, folder: Path, settings: Mapping[str, Any]) -> Episodes | None:
    """The episodes of this checkpoint that lie in its run's folder, each once."""
    parts = []
    for path in sorted((*run.glob("episodes*.csv"), *run.glob("episodes*.parquet"))):
        try:
            table = Episodes.load(path)
        except QptError:
            continue
        if with_settings(table, folder, settings):
            parts.append(table.select(rows_of(table, folder)))
    parts = [part for part in parts if len(part)]
    return Episodes.concatenate(parts).once() if len(parts) > 1 else parts[0] if parts else None


def with_settings(table: Episodes, folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the episodes are those of the checkpoint's policy with these settings."""
    manifest = read_manifest(folder)
    wanted = changes(manifest, settings)
    return all(changes(manifest, settings_of(origin)) == wanted for origin in origins(table.provenance))


def rows_of(table: Episodes, folder: Path) -> npt.NDArray[np.bool_]:
    """Which rows are about this checkpoint: by its name and the checksum of its weights.

    A table that was written without checksums is believed unless its path leads to another checkpoint.
    """
    manifest, run = read_manifest(folder), folder.parent.parent
    names = {folder.name}  # or, of a bench, the rule by which it was chosen
    names |= {"last"} if folder in sorted((run / "checkpoints").glob("step-*"))[-1:] else set()
    names |= {"selected"} if folder.match("best-*") else set()
    files = [origin.get("sha256") for origin in origins(table.provenance)]
    known = [each.get(MODEL) if isinstance(each, Mapping) else None for each in files]
    digest = manifest["sha256"][MODEL]
    if known and None not in known and digest not in known:
        return np.zeros(len(table), bool)

    def fits(name: str, algorithm: str) -> bool:
        path = Path(name)
        if path.name not in names or algorithm != manifest["algorithm"]:
            return False
        sure = set(known) == {digest} or name in names  # a bare name leads nowhere
        return sure or not path.exists() or path.resolve() == folder.resolve()

    pairs = zip(table.checkpoint.tolist(), table.algorithm.tolist(), strict=True)
    return np.array([fits(*pair) for pair in pairs], bool)


# -- the page ----------------------------------------------------------------------------------------------------------


def model_card(
    manifest: dict[str, Any],
    facts: dict[str, Any],
    parity: str,
    evidence: Evidence | None = None,
    settings: dict[str, Any] | None = None,
) -> str:
    """Markdown; `manifest` is the checkpoint's, `facts` the side file's, `parity` a sentence.

    `settings` are those that differ from the checkpoint's.
    """
    evidence = evidence or Evidence()
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
        "What it was judged at": _judged(manifest, evidence, settings or {}),
        "Known failures": [
            f"- **Limits outside the data.** Episodes on the data's frontier cost {low:.4g} and more, and none costs "
            f"above {high:.4g}. Below the first, no logged episode shows how to keep the limit; above the second, "
            "a larger limit brings nothing.",
            f"- **Past the horizon.** After {facts['horizon']} steps it refuses to act or, if asked to go on, acts as "
            "at the last step: neither its targets nor its critics mean anything there.",
            "- **Observations unlike the logged ones.** Its estimates are of what was logged; nothing warns of new "
            "situations. Units, order and scaling of observations must be those of the data.",
            *_broken(manifest, evidence),
            "- **A limit is an aim, not a guarantee.** The share of episodes that kept it stands above, if measured.",
        ],
        "Versions": [
            "- exported with " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
            "- trained with " + ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items()),
            *(f"- measured with {text}" for text in _measured_with(evidence)),
        ],
        "How to make it again": ["```", train_command(manifest), *_commands(evidence), "```"],
        "Config": ["| field | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in manifest["config"].items())],
    }
    body = (f"## {title}\n\n" + ("\n" if _list(lines) else "\n\n").join(lines) for title, lines in parts.items())
    return f"# Model card: {facts['algorithm']} for {facts['task'] or 'your task'}\n\n" + "\n\n".join(body) + "\n"


def _list(lines: list[str]) -> bool:
    return lines[0].startswith(("-", "|", "```"))


def _judged(manifest: dict[str, Any], evidence: Evidence, settings: dict[str, Any]) -> list[str]:
    """Paragraphs and tables: measured, certified, told from logs, calibrated."""

    def where(row: dict[str, Any]) -> str:
        return _elsewhere(row, manifest)

    parts: list[str] = []
    rows: list[tuple[Any, ...]]
    heads: tuple[str, ...]
    if evidence.episodes is not None:
        rows = [
            (f"{line['cost_limit']:g}{where(line)}", line["episodes"], *(_interval(line, *what) for what in MEASURED))
            for line in evidence.episodes.summary()
        ]
        table = _table(("limit", "episodes", "return", "cost", "P(cost ≤ limit)"), rows)
        parts += ["**Measured** in the simulator: means with 95 % intervals.", table]
    elif manifest.get("evaluations"):
        last = manifest["evaluations"][-1]
        rows = [(f"{x['cost_limit']:g}", f"{x['return']:.1f}", f"{x['cost']:.1f}") for x in last["limits"]]
        note = f"**Measured** in training, at step {last['step']}, in the simulator: means without intervals."
        parts += [note, _table(("limit", "return", "cost"), rows)]
    if evidence.certificates:
        rows = [
            (c["statement"].replace("<=", "≤") + where(c), c["verdict"], f"{c['confidence']:g}", _given(c),
             f"{c['violations']} of {c['episodes']}", "{:.3f} to {:.3f}".format(*c["bounds"]))
            for c in evidence.certificates
        ]  # fmt: skip
        heads = ("statement", "verdict", "confidence", "limit given", "violations", "rate of violations")
        parts += ["**Certified** by fresh episodes; each bound holds with the confidence.", _table(heads, rows)]
    for judgement in evidence.judgements:
        rows = [
            (f"{x['cost_limit']:g}", _between(x, "return"), _between(x, "cost"), f"{x['outside']:.0%}", x["warning"])
            for x in judgement["limits"]
        ]
        note = (
            f"**Judged** from {judgement['episodes']} logged episodes, without a simulator: expected values with "
            f"{judgement['confidence']:.0%} intervals, and the share of actions unlike the logged ones."
        )
        if judgement.get("fingerprint") and judgement["fingerprint"] == manifest.get("data", {}).get("fingerprint"):
            note += " **These are the episodes it was trained on**: held-out ones would tell more."
        parts += [note, _table(("limit", "return", "cost", "unlike", "warning"), rows)]
    if evidence.calibrations:
        rows = [
            (
                f"{c['limit']:g}{where(c)}",
                *(f"{c[k]:g}" for k in ("internal_limit", "risk", "confidence")),
                c["episodes"],
            )
            for c in evidence.calibrations
        ]
        note = (
            "**Calibrated**: given the internal limit, an episode costs more than the stated one with a probability of "
            "at most the risk. The graph takes limits as they are: give it the internal one, or use "
            "`OnnxPolicy(..., calibrated=True)`, which does."
        )
        heads = ("stated limit", "internal limit", "risk", "confidence", "episodes at each internal limit")
        parts += [note, _table(heads, rows)]
    if not parts:
        return [
            "Nothing: it was not evaluated. `qpt evaluate`, `qpt certify` and `qpt judge` do it; what they write "
            "with `--out` into the run's folder is found by `qpt export`."
        ]
    if settings:
        changed = ", ".join(f"{k} = {v}" for k, v in settings.items())
        parts.append(
            f"**It was exported with other settings** ({changed}): tables of episodes are of these, all else above may "
            "be of the original."
        )
    return parts


def _elsewhere(row: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The task of what was measured in another one than the policy's own."""
    task = row.get("task")
    return "" if not task or task == manifest["spec"]["task"] else f" in {task}"


MEASURED = ("return", 1), ("cost", 1), ("within_limit", 2)


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = (" | ".join(str(cell) for cell in row) for row in (heads, ["---"] * len(heads), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _broken(manifest: dict[str, Any], evidence: Evidence) -> list[str]:
    """The limits that it was seen to break."""
    seen = [
        f"at {line['cost_limit']:g}{_elsewhere(line, manifest)} an episode cost {_interval(line, 'cost', 1)}"
        for line in (evidence.episodes.summary() if evidence.episodes is not None else [])
        if line["cost_interval"][0] > line["cost_limit"]
    ]
    rejected = (c for c in evidence.certificates if c["verdict"] == "rejected")
    seen += [f"{c['statement']}{_elsewhere(c, manifest)} was rejected" for c in rejected]
    return [f"- **Limits that it broke** when it was measured: {'; '.join(seen)}."] if seen else []


def _given(certificate: dict[str, Any]) -> str:
    limit, internal = certificate["limit"], certificate.get("internal_limit")
    return f"{limit:g}" if internal in (None, limit) else f"{internal:g} (calibrated)"


def _between(row: dict[str, Any], key: str) -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[f'expected_{key}']:.1f} [{low:.1f}, {high:.1f}]"


def _origins(evidence: Evidence) -> Rows:
    """The provenance of what was measured."""
    rows: Rows = []
    if evidence.episodes is not None:
        rows += map(dict, origins(evidence.episodes.provenance))
    told = *evidence.judgements, *evidence.calibrations, *evidence.certificates
    return rows + [dict(r.get("provenance") or {}) for r in told]


def _measured_with(evidence: Evidence) -> list[str]:
    texts = (", ".join(f"{k} {v}" for k, v in row.get("versions", {}).items()) for row in _origins(evidence))
    return list(dict.fromkeys(filter(None, texts)))


def _commands(evidence: Evidence) -> list[str]:
    """The commands that measured it; a program of one's own is named as it was called."""
    lines = []
    for row in _origins(evidence):
        program, *words = map(str, row.get("command") or [""])
        if program:
            lines.append(shlex.join([Path(program).name, *_of_the_new_run(words)]))
    return list(dict.fromkeys(lines))


def _of_the_new_run(words: list[str]) -> list[str]:
    """A command's words with the run that `train_command` makes in place of the one that was measured."""
    if "--checkpoint" not in words[:-1]:
        return words
    run = words[words.index("--checkpoint") + 1].partition("/checkpoints/")[0].rstrip("/")
    return [AGAIN + word[len(run) :] if word == run or word.startswith(f"{run}/") else word for word in words]


def _source(data: dict[str, Any]) -> str:
    """The data's file; that of the package by its short name."""
    path = Path(str(data.get("source") or ""))
    return f"embedded:{path.stem}" if path.parent.name == "embedded" else str(data.get("source") or "")


def _interval(line: dict[str, Any], key: str, digits: int) -> str:
    mean, (low, high) = line[key], line[f"{key}_interval"]
    if math.isnan(mean):
        return "–"
    return f"{mean:.{digits}f}" + ("" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def train_command(manifest: dict[str, Any]) -> str:
    """The `qpt train` line that trains this policy anew: what differs from the defaults."""
    data, spec = manifest.get("data", {}), manifest["spec"]
    words = ["qpt", "train", "--algorithm", str(manifest["algorithm"])]
    if manifest.get("task"):
        words += ["--task", str(manifest["task"])]
    words += ["--data", _source(data) or "FILE"]
    known = all_tasks().get(str(manifest.get("task")))
    if known is None or known.horizon != spec["horizon"]:
        words += ["--horizon", str(spec["horizon"])]
    device = str(manifest.get("device", "cpu"))
    words += ["--seed", str(manifest.get("seed", 0)), "--device", device]
    usual_precision = "bf16" if device == "cuda" else "fp32"
    if (precision := manifest.get("precision", usual_precision)) != usual_precision:
        words += ["--precision", str(precision)]
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
    return shlex.join([*words, "--out", AGAIN])
