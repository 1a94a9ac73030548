"""Tables as text: whatever comes from data is escaped for Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qpt.writing import write_whole

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "≤": r"$\leq$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "Δ": r"$\Delta$",
    "η": r"$\eta$",
    "–": "--",
}


def markdown(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", " ".join(text.split()))


def latex(text: str) -> str:
    """Text for a cell of a LaTeX table."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows by column; a spreadsheet must not take a name for a formula."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["task"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        safe = {k: f"'{v}" if isinstance(v, str) and re.match(r"[=+\-@\t\r]", v) else v for k, v in row.items()}
        writer.writerow(safe)
    return text.getvalue()


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Texts by the names of their files, into a folder."""
    return [write_whole(folder / name, text) for name, text in texts.items()]
