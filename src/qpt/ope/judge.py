"""Judge a policy by logged episodes alone: its expected return and cost at each limit, with intervals and warnings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from qpt.checkpoint import checksums
from qpt.data.trajectories import Trajectories
from qpt.episodes import provenance
from qpt.errors import QptError
from qpt.ope.decisions import decide
from qpt.ope.fqe import FitConfig, Fits, Show, student_quantile, thin
from qpt.ope.support import Neighbours
from qpt.writing import write_csv, write_json

Interval = tuple[float, float]
FAR = 0.3  # share of steps outside the log's spread from which on a warning is given
FLOOR = 0.02  # the least standard error, as a share of the standard deviation among logged episodes
COLUMNS = (
    "algorithm", "checkpoint", "cost_limit", "return", "return_low", "return_high", "cost", "cost_low", "cost_high",
    "outside", "distance", "warning",
)  # fmt: skip


@dataclass(frozen=True)
class LimitJudgement:
    """What is expected of an episode at one cost limit."""

    cost_limit: float
    expected_return: float
    return_interval: Interval
    expected_cost: float
    cost_interval: Interval
    outside: float  # share of steps at which the action is unlike those logged in similar states
    profile: tuple[float, ...]  # that share in each tenth of an episode
    distance: float  # mean distance from the logged actions, in their standard deviations
    warning: str  # empty where there is none
    members: tuple[tuple[float, float], ...] = field(repr=False)  # return and cost by each fit
    partial: bool = False  # the logs were cut off: these are sums of the first part of an episode

    def verdict(self) -> str:
        """ "safe" or "unsafe" only where the whole interval of the cost says so; a part alone is never safe."""
        low, high = self.cost_interval
        if high <= self.cost_limit and not self.partial:
            return "safe"
        return "unsafe" if low > self.cost_limit else "unclear"


@dataclass(frozen=True)
class Judgement:
    """A policy judged at one or more limits."""

    algorithm: str
    checkpoint: str
    confidence: float
    episodes: int  # of the log
    steps: int
    horizon: int
    limits: tuple[LimitJudgement, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)  # of the files that the policy was loaded from
    fingerprint: str = ""  # of the log
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def rows(self) -> list[dict[str, Any]]:
        """One row a limit, by the names of COLUMNS."""
        return [
            dict(
                zip(
                    COLUMNS,
                    (
                        self.algorithm, self.checkpoint, x.cost_limit, x.expected_return, *x.return_interval,
                        x.expected_cost, *x.cost_interval, x.outside, x.distance, x.warning,
                    ),
                    strict=True,
                )
            )
            for x in self.limits
        ]  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write .json (everything) or .csv (one row a limit)."""
        return save_judgements([self], path)


def save_judgements(judgements: Sequence[Judgement], path: str | Path) -> Path:
    """Write one judgement, or a list of them, as .json or .csv."""
    path = Path(path)
    if path.suffix not in (".json", ".csv"):
        raise QptError(f"a judgement is saved as .json or .csv, not as {path.name!r}; change the ending of --out")
    if path.suffix == ".json":
        content = [j.to_json() for j in judgements]
        return write_json(path, content[0] if len(content) == 1 else content)
    rows = ([row.get(name, "") for name in COLUMNS] for j in judgements for row in j.rows())
    return write_csv(path, COLUMNS, rows)


class Log:
    """Held-out episodes, prepared once for any number of policies."""

    def __init__(
        self,
        data: Trajectories,
        *,
        config: FitConfig | None = None,
        seed: int = 0,
        device: str = "cpu",
        show: Show | None = None,
        **settings: Any,
    ) -> None:
        try:
            config = replace(config or FitConfig(), **settings)
        except TypeError as error:
            raise QptError(f"the evaluation has no such setting: {error}") from error
        if seed < 0:
            raise QptError(f"a seed is a whole number of at least 0, not {seed}")
        if len(data) < 2:
            raise QptError("a judgement needs at least two logged episodes; give more data")
        self.seed, self.fingerprint = seed, data.fingerprint  # of the whole log
        self.data = thin(data, config.max_steps, seed)
        self.fits = Fits(self.data, config, seed=seed, device=device, show=show)
        self.neighbours = Neighbours(self.data, seed)


def judge(
    policy: Any,
    data: Trajectories | Log,
    limits: Sequence[float],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    show: Show | None = None,
    **settings: Any,
) -> Judgement:
    """The expected return and cost of whole episodes at each limit, from logged episodes alone.

    `policy` is one of `load_policy`, or anything that `evaluate` takes. `data` should not be what it was trained on; to
    judge several policies, prepare it once: `log = Log(data)`. Settings are the fields of FitConfig.
    """
    check(policy, data, limits, confidence)
    if isinstance(data, Log) and (settings or seed):
        raise QptError("the settings of a prepared log, its seed among them, are given when it is made: Log(data, ...)")
    log = data if isinstance(data, Log) else Log(data, seed=seed, show=show, **settings)
    parts = tuple(_at_limit(policy, log, float(limit), confidence, show) for limit in limits)
    name = str(getattr(policy, "algorithm", type(policy).__name__))
    sizes = len(log.data), log.data.steps, log.fits.horizon
    checkpoint = str(getattr(policy, "checkpoint", "") or "")
    origin = checksums(policy), log.fingerprint, provenance()
    return Judgement(name, checkpoint, confidence, *sizes, parts, *origin)


def missing(policy: Any, data: Trajectories) -> int:
    """How many steps of the policy's episodes the longest logged ones lack, where these were cut off."""
    own = getattr(getattr(policy, "spec", None), "horizon", None)
    longest = data.lengths == data.lengths.max()
    cut = bool(data.timeouts[data.offsets[1:] - 1][longest].any())
    return max(int(own) - int(data.lengths.max()), 0) if own is not None and cut else 0


def _at_limit(policy: Any, log: Log, limit: float, confidence: float, show: Show | None) -> LimitJudgement:
    actions = decide(policy, log.data, limit, log.seed)
    values = log.fits.values(actions, show)  # [E, 2]
    count = len(values)
    # The error of one fit about the truth is like its spread about the mean of the fits; the mean itself varies too.
    reach = student_quantile(0.5 + confidence / 2, count - 1) * math.sqrt(1 + 1 / count)
    # What no member can resolve: a small part of the log's own spread.
    floor = FLOOR * np.array([log.data.returns.std(), log.data.episode_costs.std()])
    mean, half = values.mean(0), reach * np.hypot(values.std(0, ddof=1), floor)
    support = log.neighbours.support(actions)
    return LimitJudgement(
        limit,
        float(mean[0]),
        (float(mean[0] - half[0]), float(mean[0] + half[0])),
        float(mean[1]),
        (max(float(mean[1] - half[1]), 0.0), float(mean[1] + half[1])),
        support.outside,
        support.profile,
        support.distance,
        _warning(support.outside, limit, log.data, missing(policy, log.data)),
        tuple((float(r), float(c)) for r, c in values),
        missing(policy, log.data) > 0,
    )


def _warning(outside: float, limit: float, data: Trajectories, lacking: int) -> str:
    found = []
    if lacking:
        found.append(f"the logged episodes are cut off, {lacking} steps before the policy's: these are sums of a part")
    if outside > FAR:
        found.append(f"{outside:.0%} of its actions are unlike those logged in similar states")
    costs = data.episode_costs
    if limit < costs.min() or limit > costs.max():
        found.append(f"the limit {limit:g} lies outside the logged costs, {costs.min():g} to {costs.max():g}")
    return "; ".join(found)


def check(policy: Any, data: Trajectories | Log, limits: Sequence[float], confidence: float = 0.95) -> None:
    """Refuse at once what could not be judged after the long part."""
    data = data.data if isinstance(data, Log) else data
    if not limits:
        raise QptError("give at least one cost limit to judge the policy at")
    for limit in limits:
        if not np.isfinite(limit) or limit < 0:
            raise QptError(f"a cost limit is a number of at least 0, not {limit:g}")
    if not 0 < confidence < 1:
        raise QptError(f"the confidence lies between 0 and 1, not at {confidence:g}")
    for what, found in (("observation", data.observation_dim), ("action", data.action_dim)):
        wanted = getattr(policy, f"{what}_dim", None)
        if wanted is not None and wanted != found:
            raise QptError(
                f"the policy works with {what}s of {wanted} numbers, but the data have {found}; "
                "judge it on logs of its own task"
            )
    horizon = getattr(getattr(policy, "spec", None), "horizon", None)
    if horizon is not None and data.lengths.max() > horizon and getattr(policy, "past_horizon", "") == "error":
        raise QptError(
            f"the data have episodes of {data.lengths.max()} steps, but the policy was trained for {horizon}; "
            "judge it on logs of its own task, or load it with past_horizon='clamp'"
        )
    trained = getattr(policy, "trained_limit", None)
    if getattr(policy, "limit_mode", "") == "trained" and trained is not None:
        for limit in limits:
            if not np.isclose(limit, trained):
                raise QptError(
                    f"the policy was trained for a cost limit of {trained:g} and knows no other; judge it at that "
                    f"limit, or train one for {limit:g}"
                )
