"""Collect: from a simulator with a cost to a data set of DSRL's kind."""

from __future__ import annotations

from qpt.collect.collection import Collected, collect, record_policy
from qpt.collect.filter import grid_filter
from qpt.collect.schedules import Plan, plans

__all__ = ["Collected", "Plan", "collect", "grid_filter", "plans", "record_policy"]
