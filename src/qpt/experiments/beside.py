"""What was measured beside what was printed: one table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qpt.experiments.jobs import LAST, ORACLE, RULE_NAMES, SELECTED
from qpt.experiments.paper import Score
from qpt.experiments.results import Results, summarize
from qpt.experiments.texts import csv_table, latex, markdown, write_texts

Published = Callable[[str, str, float], Score | None]  # (task, variant, cost limit)
ORDER = (ORACLE, SELECTED, LAST)  # the paper's rule comes first


@dataclass(frozen=True)
class Row:
    """One variant of one task at one limit, by one rule of choosing a checkpoint; NaN where nothing was printed."""

    task: str
    variant: str
    cost_limit: float
    rule: str
    seeds: int
    episodes: int
    reward: float  # normalised
    reward_std: float = math.nan  # over seeds
    reward_low: float = math.nan  # 95 % interval over seeds and episodes
    reward_high: float = math.nan
    paper_reward: float = math.nan
    cost: float = math.nan
    cost_std: float = math.nan
    cost_low: float = math.nan
    cost_high: float = math.nan
    paper_cost: float = math.nan
    verdict: str = ""  # of the interval of the cost: safe, unsafe or unclear; none for averages of tasks
    best: bool = False  # the highest reward among the variants whose mean cost is within the limit

    @property
    def reward_difference(self) -> float:
        return self.reward - self.paper_reward

    @property
    def cost_difference(self) -> float:
        return self.cost - self.paper_cost

    @property
    def safe(self) -> bool:
        return self.cost <= 1


def compare(results: Results, published: Published) -> list[Row]:
    """The results' summary with the printed numbers; the paper's rule comes first."""
    rows = []
    for line in summarize(results):
        task, variant, limit, rule = line["task"], line["label"], line["cost_limit"], line["rule"]
        printed = published(task, variant, limit)
        numbers: dict[str, Any] = {}
        for name, column in (("reward", "normalized_return"), ("cost", "normalized_cost")):
            numbers[name], numbers[f"{name}_std"] = line[column], line[f"{column}_std"]
            numbers[f"{name}_low"], numbers[f"{name}_high"] = line[f"{column}_interval"]
            numbers[f"paper_{name}"] = getattr(printed, name) if printed else math.nan
        found = (line["seeds"], line["episodes"])
        rows.append(Row(task, variant, limit, rule, *found, **numbers, verdict=line["verdict"]))
    return mark_best(sorted(rows, key=lambda row: ORDER.index(row.rule)))


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """Ties count as far as the two digits that are shown."""
    tops: dict[tuple[str, float, str], float] = {}
    for row in rows:
        key = (row.task, row.cost_limit, row.rule)
        if row.safe:
            tops[key] = max(tops.get(key, -math.inf), round(row.reward, 2))
    return [
        replace(r, best=r.safe and round(r.reward, 2) == tops.get((r.task, r.cost_limit, r.rule), math.nan))
        for r in rows
    ]


def averages(rows: Sequence[Row], groups: dict[str, str]) -> list[Row]:
    """Rows of means over the tasks of a group (by task), measured and printed over the same tasks."""
    found: dict[tuple[str, str, float, str], list[Row]] = {}
    for row in rows:
        if row.task in groups:
            found.setdefault((groups[row.task], row.variant, row.cost_limit, row.rule), []).append(row)
    made = []
    for (group, variant, limit, rule), part in found.items():
        means = ("reward", "paper_reward", "cost", "paper_cost")
        numbers: dict[str, Any] = {name: float(np.mean([getattr(r, name) for r in part])) for name in means}
        name = f"{group} average ({len(part)} task{'s' * (len(part) > 1)})"
        seeds, episodes = min(r.seeds for r in part), sum(r.episodes for r in part)
        made.append(Row(name, variant, limit, rule, seeds, episodes, **numbers))
    return mark_best(made)


# -- the table in three forms ------------------------------------------------------------------------------------------

HEAD = ("task", "variant", "limit", "seeds", "reward", "paper", "Δ", "cost", "paper", "Δ", "verdict")
LEGEND = (
    "Normalised reward and cost, ± standard deviation over seeds; Δ is ours minus the paper's. Bold: mean cost within "
    "the limit; {best}: the highest reward among those; {unsafe}: mean cost above the limit. The verdict is that of "
    "the 95 % interval of the cost."
)


def cells(row: Row) -> list[str]:
    """The texts of one line, in the order of HEAD."""

    def number(value: float, sign: str = "") -> str:
        return "–" if math.isnan(value) else f"{value:{sign}z.2f}"

    def with_std(value: float, std: float) -> str:
        return number(value) if math.isnan(std) else f"{number(value)} ± {std:.2f}"

    return [
        *(row.task, row.variant, f"{row.cost_limit:g}", str(row.seeds)),
        *(with_std(row.reward, row.reward_std), number(row.paper_reward), number(row.reward_difference, "+")),
        *(with_std(row.cost, row.cost_std), number(row.paper_cost), number(row.cost_difference, "+")),
        row.verdict,
    ]


MEASURED = (4, 7)  # the columns that are styled


def to_markdown(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """One table for each rule of choosing a checkpoint."""
    parts = [f"# {title}", LEGEND.format(best="★", unsafe="italics"), *notes]
    for rule in dict.fromkeys(r.rule for r in rows):
        lines = [f"## Checkpoint: {RULE_NAMES[rule]}", "", f"| {' | '.join(HEAD)} |"]
        lines.append("|" + "".join("---|" if name in ("task", "variant", "verdict") else "---:|" for name in HEAD))
        for row in (r for r in rows if r.rule == rule):
            texts = [markdown(text) for text in cells(row)]
            for place in MEASURED:
                texts[place] = f"**{texts[place]}**" if row.safe else f"_{texts[place]}_"
            texts[MEASURED[0]] += " ★" * row.best
            lines.append(f"| {' | '.join(texts)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def to_latex(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """One tabular for each rule; needs the packages booktabs and xcolor."""
    parts = [f"% {title}", r"% \usepackage{booktabs, xcolor}", "% " + LEGEND.format(best="blue", unsafe="grey")]
    parts += [f"% {note}" for note in notes]
    for rule in dict.fromkeys(r.rule for r in rows):
        parts.append(f"% checkpoint: {RULE_NAMES[rule]}")
        parts += [r"\begin{tabular}{llrrrrrrrrl}", r"\toprule", " & ".join(map(latex, HEAD)) + r" \\", r"\midrule"]
        for row in (r for r in rows if r.rule == rule):
            texts = [latex(text) for text in cells(row)]
            for place in MEASURED:
                shown = rf"\textbf{{{texts[place]}}}" if row.safe else rf"\textcolor{{gray}}{{{texts[place]}}}"
                texts[place] = rf"\textcolor{{blue}}{{{shown}}}" if row.best else shown
            parts.append(" & ".join(texts) + r" \\")
        parts += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(parts) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Every number, in full."""
    differences = ("reward_difference", "cost_difference")
    return csv_table([asdict(row) | {name: getattr(row, name) for name in differences} for row in rows])


def write_tables(out: Path, name: str, title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> list[Path]:
    """NAME.md, NAME.csv and NAME.tex in a folder."""
    texts = {"md": to_markdown(title, rows, notes), "csv": to_csv(rows), "tex": to_latex(title, rows, notes)}
    return write_texts(out, {f"{name}.{ending}": text for ending, text in texts.items()})
