"""Off-policy evaluation: what would a policy earn and cost, told from logged episodes alone."""

from __future__ import annotations

from qpt.ope.judge import Judgement, LimitJudgement, Log, judge
from qpt.ope.select import Candidate, Selection, candidates, oracle_report, select

__all__ = [
    "Candidate",
    "Judgement",
    "LimitJudgement",
    "Log",
    "Selection",
    "candidates",
    "judge",
    "oracle_report",
    "select",
]
