"""The headline table as HTML, Markdown, CSV and LaTeX; whatever comes from data is escaped for each."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from qpt import stats
from qpt.experiments.jobs import RULE_NAMES, RULES
from qpt.experiments.texts import csv_table, latex, markdown
from qpt.report.summary import Line, shown

COLUMNS = ("return", "cost", "P(cost ≤ limit)", "normalised return")
LEGEND = (
    "Bold: mean cost within the limit; blue: the highest return among those; grey: mean cost above the limit. "
    "In brackets: 95 % intervals"
)


@dataclass(frozen=True)
class Block:
    """One table: a task at a limit, methods by rules of choosing a checkpoint."""

    task: str
    cost_limit: float
    rules: list[str]
    rows: list[tuple[str, dict[str, Line]]]


def blocks(lines: Sequence[Line]) -> list[Block]:
    methods = list(dict.fromkeys(line.method for line in lines))
    found: dict[tuple[str, float], list[Line]] = {}
    for line in lines:
        found.setdefault((line.task, line.cost_limit), []).append(line)
    tasks = list(dict.fromkeys(line.task for line in lines))
    made = []
    for task, limit in sorted(found, key=lambda key: (tasks.index(key[0]), key[1])):
        part = found[task, limit]
        rules = [rule for rule in RULES if any(line.selection == rule for line in part)]
        rows = [(m, {line.selection: line for line in part if line.method == m}) for m in methods]
        made.append(Block(task, limit, rules, [row for row in rows if row[1]]))
    return made


def caveat(made: Sequence[Block]) -> str:
    """What the intervals are worth where runs are few; after a space, where there is something to say."""
    runs = [line.runs for block in made for _, by_rule in block.rows for line in by_rule.values()]
    text = stats.caveat(min(runs)) if runs else ""
    return f" {text}" if text else ""


def _cells(line: Line | None) -> tuple[tuple[str, str], ...]:
    """(number, interval) of each column."""
    if line is None:
        return (("–", ""),) * len(COLUMNS)
    return (
        (shown(line.mean_return), _interval(line.return_interval, 1)),
        (shown(line.cost), _interval(line.cost_interval, 1)),
        (shown(line.within, 2), _interval(line.within_interval, 2)),
        (shown(line.normalized_return, 2), _interval(line.normalized_return_interval, 2)),
    )


def _interval(interval: tuple[float, float], digits: int) -> str:
    low, high = interval
    return "" if math.isnan(low) else f"[{shown(low, digits)}, {shown(high, digits)}]"


def mark(line: Line | None) -> str:
    """How a cell is set: "best", "safe" or "unsafe"."""
    return "" if line is None else "best" if line.best else "safe" if line.safe else "unsafe"


# -- HTML --------------------------------------------------------------------------------------------------------------


def to_html(block: Block) -> str:
    """One table; the page's script shows the one of the chosen task and limit."""
    e = html.escape
    groups = "".join(f'<th colspan="{len(COLUMNS)}" scope="colgroup">{e(RULE_NAMES[r])}</th>' for r in block.rules)
    names = "".join(f'<th scope="col">{e(name)}</th>' for name in COLUMNS) * len(block.rules)
    rows = []
    for method, by_rule in block.rows:
        cells = [_cell(line, *cell) for line in map(by_rule.get, block.rules) for cell in _named_cells(line)]
        first = next(iter(by_rule.values()))
        seeds = f"{first.runs} run{'s' if first.runs != 1 else ''}"
        counted = f"{seeds}, {first.episodes} episodes" if first.episodes else f"{seeds}, means of training only"
        rows.append(f'<tr><th scope="row">{e(method)}<small>{counted}</small></th>{"".join(cells)}</tr>')
    several = len(block.rules) > 1
    top = f"<tr><td></td>{groups}</tr>" if several else ""
    said = f"{block.task}, cost limit {block.cost_limit:g}" + ("" if several else f", {RULE_NAMES[block.rules[0]]}")
    head = f'<thead>{top}<tr><th scope="col">method</th>{names}</tr></thead>'
    attributes = f'data-task="{e(block.task)}" data-limit="{block.cost_limit:.10g}"'
    return _framed(attributes, said, f"{head}<tbody>{''.join(rows)}</tbody>")


def _named_cells(line: Line | None) -> list[tuple[str, str, str]]:
    return [(name, *cell) for name, cell in zip(COLUMNS, _cells(line), strict=True)]


def _cell(line: Line | None, name: str, number: str, interval: str) -> str:
    verdict = line.verdict if line is not None and name == "cost" else ""
    before = f'<span class="verdict {verdict}">{verdict}</span> ' if verdict else ""
    after = f"<small>{html.escape(interval)}</small>" if interval else ""
    return f'<td class="{mark(line)}">{before}{html.escape(number)}{after}</td>'


def _framed(attributes: str, said: str, rows: str) -> str:
    """A table that scrolls by itself where it is wider than the page, under a line that says what it is."""
    text = html.escape(said)
    return (
        f'<div {attributes}><p class="caption">{text}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text}"><table>{rows}</table></div></div>'
    )


def matrix_html(lines: Sequence[Line], cost_limit: float, rule: str) -> str:
    """Tasks by methods at one limit, as in the paper's main table: normalised return over cost divided by limit."""
    e = html.escape
    cells = {(x.task, x.method): x for x in lines if x.cost_limit == cost_limit and x.selection == rule}
    tasks, methods = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    rows = []
    for task in tasks:
        found = {method: cells[task, method] for method in methods if (task, method) in cells}
        top = max((x.normalized_return for x in found.values() if x.safe), default=math.nan)
        row = "".join(_small_cell(found.get(method), shown(top, 2)) for method in methods)
        rows.append(f'<tr><th scope="row">{e(task)}</th>{row}</tr>')
    whole = [[cells[t, m] for t in tasks if (t, m) in cells] for m in methods]
    averages = ""
    for part in whole:  # an average over some of the tasks would not compare
        value = sum(x.normalized_return for x in part) / len(part)
        cost = sum(x.normalized_cost for x in part) / len(part)
        style = "" if len(part) < len(tasks) else "safe" if cost <= 1 else "unsafe"
        text = "–" if len(part) < len(tasks) else f"{shown(value, 2)}<small>{shown(cost, 2)}</small>"
        averages += f'<td class="{style}">{text}</td>'
    names = "".join(f'<th scope="col">{e(m)}</th>' for m in methods)
    said = (
        f"All tasks, cost limit {cost_limit:g}, {RULE_NAMES[rule]}: normalised return, below it cost divided by limit"
    )
    average = f'<tr class="average"><th scope="row">average</th>{averages}</tr>'
    head = f'<thead><tr><th scope="col">task</th>{names}</tr></thead>'
    attributes = f'data-limit="{cost_limit:.10g}" data-rule="{e(rule)}"'
    return _framed(attributes, said, f"{head}<tbody>{''.join(rows)}{average}</tbody>")


def _small_cell(line: Line | None, top: str) -> str:
    """Ties count as far as the digits that are shown, here fewer than in the large tables."""
    if line is None:
        return "<td>–</td>"
    value = shown(line.normalized_return, 2)
    style = "unsafe" if not line.safe else "best" if value == top else "safe"
    return f'<td class="{style}">{value}<small>{shown(line.normalized_cost, 2)}</small></td>'


# -- Markdown, LaTeX, CSV ----------------------------------------------------------------------------------------------


def to_markdown(made: Sequence[Block]) -> str:
    """One table for each task and limit."""
    parts = [f"{LEGEND} (here ★ stands for blue and italics for grey).{caveat(made)}\n"]
    for block in made:
        many = len(block.rules) > 1
        names = [f"{c}, {r}" if many else c for r in block.rules for c in COLUMNS]
        parts.append(f"\n### {markdown(block.task)}, cost limit {block.cost_limit:g}\n")
        parts.append(f"| method | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
        for method, by_rule in block.rows:
            cells = []
            for rule in block.rules:
                style = {"best": "**{}** ★", "safe": "**{}**", "unsafe": "_{}_"}.get(mark(by_rule.get(rule)), "{}")
                for number, interval in _cells(by_rule.get(rule)):
                    cells.append(f"{style.format(number) if number != '–' else number} {interval}".strip())
            parts.append(f"| {markdown(method)} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def to_latex(made: Sequence[Block]) -> str:
    """One tabular for each task and limit; needs the package xcolor."""
    parts = [f"% {latex(LEGEND)}.{latex(caveat(made))}", r"% \usepackage{xcolor}"]
    styles = {"best": r"\textcolor{blue}{\textbf{%s}}", "safe": r"\textbf{%s}", "unsafe": r"\textcolor{gray}{%s}"}
    for block in made:
        width = len(COLUMNS) * len(block.rules)
        groups = " & ".join(rf"\multicolumn{{{len(COLUMNS)}}}{{c}}{{{latex(RULE_NAMES[r])}}}" for r in block.rules)
        names = " & ".join(latex(c) for c in COLUMNS * len(block.rules))
        parts.append(f"\n% {latex(block.task)}, cost limit {block.cost_limit:g}")
        parts.append(rf"\begin{{tabular}}{{l{'r' * width}}}" + "\n" + r"\hline")
        parts.append(rf"{latex(block.task)}, $\kappa={block.cost_limit:g}$ & {groups} \\")
        parts.append(rf"method & {names} \\ \hline")
        for method, by_rule in block.rows:
            cells = []
            for rule in block.rules:
                style = styles.get(mark(by_rule.get(rule)), "%s")
                for number, interval in _cells(by_rule.get(rule)):
                    small = rf" {{\scriptsize {interval}}}" if interval else ""
                    cells.append(style % latex(number) + small)
            parts.append(rf"{latex(method)} & {' & '.join(cells)} \\")
        parts.append(r"\hline" + "\n" + r"\end{tabular}")
    return "\n".join(parts) + "\n"


def to_csv(lines: Sequence[Line]) -> str:
    """Every number of every line."""
    return csv_table([_flat(line) for line in lines])


def _flat(line: Line) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, value in vars(line).items():
        if isinstance(value, tuple):
            stem = name.removesuffix("_interval")
            row[f"{stem}_low"], row[f"{stem}_high"] = value
        else:
            row[name] = value
    return row
