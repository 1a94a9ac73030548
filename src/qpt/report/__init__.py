"""Reports: one self-contained HTML page for a run or a comparison, and the same tables as Markdown, CSV and LaTeX."""

from __future__ import annotations

from qpt.report.page import write_report
from qpt.report.sources import collect

__all__ = ["collect", "write_report"]
