"""Choose among checkpoints without a simulator: the best expected return whose upper bound on cost meets the limit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qpt import stats
from qpt.checkpoint import checkpoints, read_manifest, resolve
from qpt.data.trajectories import Trajectories
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.ope.fqe import Show
from qpt.ope.judge import Judgement, Log, check, judge
from qpt.policy import load_policy


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be chosen."""

    run: str
    checkpoint: str
    algorithm: str
    step: int
    last: bool  # the last checkpoint of its run


@dataclass(frozen=True)
class Ranked:
    """A judged candidate. `given_limit` is what the policy was told: its own, where it knows but one."""

    candidate: Candidate
    judgement: Judgement
    given_limit: float
    qualifies: bool

    @property
    def expected_return(self) -> float:
        return self.judgement.limits[0].expected_return

    @property
    def expected_cost(self) -> float:
        return self.judgement.limits[0].expected_cost

    @property
    def cost_bound(self) -> float:
        return self.judgement.limits[0].cost_interval[1]


@dataclass(frozen=True)
class Selection:
    """All candidates, best first: those that qualify by expected return, then the others by their bound on cost."""

    cost_limit: float
    ranking: tuple[Ranked, ...]

    @property
    def chosen(self) -> Ranked:
        return self.ranking[0]

    @property
    def qualified(self) -> bool:
        """Whether any candidate's upper bound on cost meets the limit."""
        return self.ranking[0].qualifies

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **asdict(r.candidate),
                "given_limit": r.given_limit,
                "qualifies": r.qualifies,
                **{k: v for k, v in r.judgement.to_json()["limits"][0].items() if k != "members"},
            }
            for r in self.ranking
        ]
        return {"cost_limit": self.cost_limit, "qualified": self.qualified, "ranking": rows}


def candidates(runs: Sequence[str | Path]) -> list[Candidate]:
    """All checkpoints kept in run folders (and checkpoint folders themselves), in the order given."""
    found: list[Candidate] = []
    for run in map(Path, runs):
        last = resolve(run)
        folders = [run] if last == run else checkpoints(run)
        for folder in folders:
            manifest = read_manifest(folder)
            step = int(manifest.get("step", 0))
            # A checkpoint that was named itself is the last one of what was asked for.
            candidate = Candidate(str(run), str(folder), str(manifest["algorithm"]), step, folder == last)
            if all(os.path.realpath(c.checkpoint) != os.path.realpath(folder) for c in found):
                found.append(candidate)
    if not found:
        raise QptError("give at least one run folder or checkpoint to select from")
    return found


def select(
    runs: Sequence[str | Path],
    data: Trajectories | Log,
    limit: float,
    *,
    device: str = "cpu",
    show: Show | None = None,
    **settings: Any,
) -> Selection:
    """Judge every checkpoint of the runs and rank them for one cost limit. Settings are those of Log."""
    if isinstance(data, Log) and settings:
        raise QptError("the settings of a prepared log are given when it is made: Log(data, ...)")
    options, policies = candidates(runs), []
    for option in options:  # all of them first, should one not fit the data
        policy = load_policy(option.checkpoint, device=str(data.fits.device) if isinstance(data, Log) else device)
        own = policy.trained_limit if policy.limit_mode == "trained" else None
        given = limit if own is None else float(own)
        check(policy, data, [given])
        policies.append((option, policy, given))
    log = data if isinstance(data, Log) else Log(data, device=device, show=show, **settings)
    judged = []
    for number, (option, policy, given) in enumerate(policies):
        if show is not None:
            show("judging checkpoints", number, len(options))
        judgement = judge(policy, log, [given])
        found = judgement.limits[0]
        judged.append(Ranked(option, judgement, given, found.cost_interval[1] <= limit and not found.partial))
    return rank(judged, limit)


def rank(judged: Sequence[Ranked], limit: float) -> Selection:
    """Those that qualify first, by expected return; then the others, by their upper bound on cost."""
    order = sorted(
        judged, key=lambda r: (not r.qualifies, -r.expected_return if r.qualifies else r.cost_bound, r.cost_bound)
    )
    return Selection(limit, tuple(order))


@dataclass(frozen=True)
class OracleReport:
    """The choice against what episodes in a simulator show; a regret is the oracle's return less the choice's."""

    cost_limit: float
    chosen: str
    chosen_return: float
    chosen_cost: float
    oracle: str
    oracle_return: float
    oracle_cost: float
    regret: float
    last_return: float  # mean over the runs of their last checkpoints
    last_cost: float
    last_regret: float
    last_safe: float  # share of the last checkpoints whose mean cost meets the limit


def oracle_report(selection: Selection, realised: Mapping[str, tuple[float, float]]) -> OracleReport:
    """Compare with realised (return, cost) by checkpoint: the oracle is the best return whose mean cost is within."""
    for r in selection.ranking:
        if r.candidate.checkpoint not in realised:
            raise QptError(
                f"the episodes hold none of {r.candidate.checkpoint} at the limit that it is given, "
                f"{r.given_limit:g}; evaluate every candidate at that limit for the comparison"
            )
    names = [r.candidate.checkpoint for r in selection.ranking]
    rows = [{"return": realised[n][0], "cost": realised[n][1]} for n in names]
    best = stats.select_checkpoint(rows, selection.cost_limit)
    last = [realised[r.candidate.checkpoint] for r in selection.ranking if r.candidate.last]
    last_return, last_cost = (sum(x[i] for x in last) / len(last) for i in (0, 1))
    return OracleReport(
        selection.cost_limit,
        names[0],
        *realised[names[0]],
        names[best],
        *realised[names[best]],
        realised[names[best]][0] - realised[names[0]][0],
        last_return,
        last_cost,
        realised[names[best]][0] - last_return,
        sum(cost <= selection.cost_limit for _, cost in last) / len(last),
    )


def realised_values(episodes: Episodes, selection: Selection) -> dict[str, tuple[float, float]]:
    """Mean return and cost of each candidate in a table of episodes, at the limit it was given."""
    found = {}
    for r in selection.ranking:
        same = [os.path.realpath(str(c)) == os.path.realpath(r.candidate.checkpoint) for c in episodes.checkpoint]
        part = [i for i, s in enumerate(same) if s and abs(episodes.cost_limit[i] - r.given_limit) < 1e-9]
        if part:
            found[r.candidate.checkpoint] = (
                float(episodes.returns[part].mean()),
                float(episodes.costs[part].mean()),
            )
    return found
