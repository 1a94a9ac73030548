"""The page: tables and texts made here, pictures drawn by the page's own script from the numbers inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from qpt import __version__
from qpt.episodes import origins, provenance
from qpt.errors import QptError
from qpt.experiments.jobs import RULE_NAMES
from qpt.experiments.texts import write_texts
from qpt.report import tables
from qpt.report.sources import Collected, Result, Run, collect
from qpt.report.summary import Line, curves, lines, training_metrics
from qpt.tasks import all_tasks
from qpt.writing import write_whole

EPISODES_SHOWN = 400  # of one method at one limit in the page; its numbers are of all


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "",
    table_folder: str | Path | None = None,
    data: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the page of these runs and tables (see `collect`) and return what was written, the page first."""
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise QptError(f"a report is a page, but {out.name!r} does not end in .html; change the ending of --out")
    collected = collect(paths, data)
    made = lines(collected.results)
    texts = table_texts(made)
    page = render(collected, made, texts, title)
    write_whole(out, page)
    return [out, *(write_texts(Path(table_folder), texts) if table_folder is not None else [])]


def table_texts(made: Sequence[Line]) -> dict[str, str]:
    """The headline tables by the names of their files."""
    blocks = tables.blocks(made)
    return {
        "headline.md": tables.to_markdown(blocks),
        "headline.csv": tables.to_csv(made),
        "headline.tex": tables.to_latex(blocks),
    }


def render(collected: Collected, made: Sequence[Line], texts: Mapping[str, str], title: str = "") -> str:
    """The whole page as text."""
    style, script = _template("style.css"), _template("charts.js") + _template("report.js")
    blocks = tables.blocks(made)
    matrices = ""
    if len(collected.tasks) > 1:
        pairs = sorted({(line.cost_limit, line.selection) for line in made})
        matrices = "".join(tables.matrix_html(made, limit, rule) for limit, rule in pairs)
    links = [
        f'<a download="{name}" href="data:text/plain;charset=utf-8,{quote(text)}">{name.removeprefix("headline.")}</a>'
        for name, text in texts.items()
    ]
    parts = {
        # Nothing is loaded, and no script runs but the one below, whatever a name in the data may hold.
        "policy": f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "title": html.escape(title or _title(collected)),
        "subtitle": html.escape(_subtitle(collected)),
        "warning": _warning(collected),
        "style": style,
        "script": script,
        "matrix": matrices,
        "headline": "".join(map(tables.to_html, blocks)) or '<p class="empty">Nothing was evaluated yet.</p>',
        "legend": html.escape(tables.LEGEND),
        "caveat": html.escape(tables.caveat(blocks)),
        "downloads": " · ".join(links),
        "runs": _runs(collected.runs),
        "tables": _tables(collected.provenance),
        "made": html.escape(f"qpt {__version__}, {provenance()['time']}"),
        "payload": _json(_payload(collected, made)),
    }
    # In one pass: a placeholder inside of data stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("page.html"))


# -- texts -------------------------------------------------------------------------------------------------------------


def _title(collected: Collected) -> str:
    tasks, methods = collected.tasks, collected.methods
    where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    return f"{where}: {methods[0] if len(methods) == 1 else f'{len(methods)} methods'}"


def _subtitle(collected: Collected) -> str:
    runs = {r.run for r in collected.results} | {r.name for r in collected.runs}
    episodes = sum(len(r.returns) for r in collected.results if r.whole)
    limits = {r.cost_limit for r in collected.results}
    counts = [(len(runs), "run"), (episodes, "evaluation episode"), (len(limits), "cost limit")]
    return ", ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in counts if n)


def _warning(collected: Collected) -> str:
    trained = [(r.task, (r.facts.get("data") or {}).get("surrogate")) for r in collected.runs]
    evaluated = [
        (str(p.get("task", "")), p.get("surrogate_data")) for _, whole in collected.provenance for p in origins(whole)
    ]
    tasks = sorted(
        {t for t, flag in trained + evaluated if flag} | {t for t, p in collected.planes.items() if p.surrogate}
    )
    notes = list(collected.notes)
    if tasks:
        named = ", ".join(filter(None, tasks))
        notes.insert(0, f"Surrogate data ({named}): collected anew, not the published data; these are no DSRL scores.")
    return "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)


def _runs(runs: Sequence[Run]) -> str:
    """Configuration and origin of every method's runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.method), []).append(run)
    parts = []
    for (task, method), members in groups.items():
        rows = []
        for run in members:
            data = run.facts.get("data") or {}
            steps = max((int(row["step"]) for row in run.metrics), default=0)
            versions = ", ".join(f"{k} {v}" for k, v in (run.facts.get("versions") or {}).items())
            values = (
                run.name,
                run.seed,
                f"{steps:,}",
                data.get("source"),
                data.get("episodes"),
                data.get("fingerprint"),
            )
            rows.append([*values, run.facts.get("device"), versions])
        heads = ("folder", "seed", "steps", "data", "episodes", "fingerprint", "device", "versions")
        config = members[0].facts.get("config") or {}
        settings = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in config.items())
        count = f"{len(members)} run{'s' if len(members) > 1 else ''}"
        parts.append(
            f"<details><summary>{_text(task)} · {_text(method)} <small>{count}</small></summary>"
            f"{_grid(heads, rows)}<dl>{settings}</dl></details>"
        )
    return "".join(parts)


def _tables(given: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = []
    for name, part in ((name, part) for name, whole in given for part in origins(whole)):
        command = " ".join(map(str, part.get("command") or []))
        versions = ", ".join(f"{k} {v}" for k, v in (part.get("versions") or {}).items())
        rows.append(
            [name, part.get("time"), part.get("seed"), command, part.get("commit"), part.get("machine"), versions]
        )
    unique = list(dict.fromkeys(tuple(map(str, row)) for row in rows))
    if not unique:
        return ""
    heads = ("table", "made", "seed", "command", "commit", "machine", "versions")
    count = f"{len(given)} table{'s' if len(given) > 1 else ''}"
    return f"<details><summary>Evaluations <small>{count}</small></summary>{_grid(heads, unique)}</details>"


def _grid(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(value)}</td>' for value in row)}</tr>" for row in rows)
    return (
        '<div class="scroll plain" role="region" tabindex="0" aria-label="origin"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _text(value: Any) -> str:
    return "–" if value in (None, "", "None") else html.escape(str(value))


# -- numbers for the script --------------------------------------------------------------------------------------------


def _payload(collected: Collected, made: Sequence[Line]) -> dict[str, Any]:
    methods, known = collected.methods, all_tasks()
    tasks: dict[str, Any] = {}
    for task in collected.tasks:
        limits = {line.cost_limit for line in made if line.task == task}
        for run in collected.runs:
            if run.task == task:
                limits |= {float(part["cost_limit"]) for row in run.evaluations for part in row["limits"]}
        plane = collected.planes.get(task)
        paper = known[task].paper_cost_limit if task in known else None
        tasks[task] = {
            "limits": sorted(limits),
            "first": paper if paper in limits else None,
            "plane": plane
            and {
                "episodes": plane.episodes,
                "costs": plane.costs,
                "returns": plane.returns,
                "frontier": plane.frontier,
                "surrogate": plane.surrogate,
            },
        }
    results: dict[tuple[str, float, str, str], list[Result]] = {}
    for r in collected.results:
        results.setdefault((r.task, r.cost_limit, r.selection, r.method), []).append(r)
    shown = [
        {
            **vars(line),
            "method": methods.index(line.method),
            **_episodes(results[line.task, line.cost_limit, line.selection, line.method]),
        }
        for line in made
    ]
    by_index = [
        [{**row, "method": methods.index(row["method"])} for row in rows]
        for rows in (curves(collected.runs), training_metrics(collected.runs))
    ]
    calibrations = [
        {"task": r.task, "method": methods.index(r.method), **r.calibration} for r in collected.runs if r.calibration
    ]
    rules = [rule for rule in RULE_NAMES if any(line.selection == rule for line in made)]
    return {
        "methods": methods,
        "tasks": tasks,
        "rules": {rule: RULE_NAMES[rule] for rule in rules},
        "lines": shown,
        "curves": by_index[0],
        "metrics": by_index[1],
        "calibration": calibrations,
    }


def _episodes(results: Sequence[Result]) -> dict[str, Any]:
    """Costs and returns of single episodes for the pictures; of very many, some."""
    whole = [r for r in results if r.whole]
    if not whole:
        return {"costs": [], "returns": []}
    costs, returns = (np.concatenate([getattr(r, name) for r in whole]) for name in ("costs", "returns"))
    if len(costs) > EPISODES_SHOWN:
        kept = np.sort(np.random.default_rng(0).choice(len(costs), EPISODES_SHOWN, replace=False))
        costs, returns = costs[kept], returns[kept]
    return {"costs": costs, "returns": returns}


def _json(value: Any) -> str:
    """JSON that may stand inside of a page: no `<`, no NaN, ten digits."""
    text = json.dumps(_short(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _short(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_short(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def _template(name: str) -> str:
    return resources.files("qpt.report").joinpath("template", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
