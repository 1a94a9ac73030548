"""Certificates: is P(episode cost > limit) at most the asked risk? And calibration of the limit a policy is given.

The test itself is in `qpt.sequential`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt import stats
from qpt.checkpoint import MODEL, checksums, read_manifest, resolve
from qpt.episodes import provenance
from qpt.errors import QptError
from qpt.evaluation import EpisodePolicy, evaluate
from qpt.runtime import calibrated_limit
from qpt.sequential import Floats, Forecast, Verdict, bounds, decide, foretell
from qpt.tasks import Task, get_task
from qpt.writing import check_file, write_json

FILE = "calibration.json"  # in the checkpoint's folder, beside the manifest
FORMAT = 1


# -- the certificate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    """The verdict on "P(episode cost > limit) <= risk", with all that it rests on."""

    verdict: Verdict
    task: str
    algorithm: str
    checkpoint: str
    sha256: Mapping[str, str]  # of the files that the policy was loaded from
    limit: float
    internal_limit: float  # what the policy was given
    risk: float
    confidence: float
    seed: int
    batch: int
    max_episodes: int
    episodes: int  # all that were run
    violations: int
    decided_after: int | None  # episodes; the batch went on to its end
    bounds: tuple[float, float]  # of the rate of violations; each holds with the confidence
    sequence: Sequence[tuple[int, int, float, float]]  # episodes, violations and bounds after each batch
    costs: Sequence[float]  # of the episodes, in order
    forecasts: Sequence[Forecast]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def statement(self) -> str:
        return f"P(episode cost > {self.limit:g}) <= {self.risk:g}"

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "statement": self.statement, **asdict(self)}


def certify(
    policy: EpisodePolicy,
    task: Task | str,
    limit: float,
    *,
    risk: float = 0.05,
    confidence: float = 0.95,
    max_episodes: int = 2000,
    batch: int = 20,
    seed: int = 0,
    workers: int | None = None,
    show: Callable[[int, int, tuple[float, float]], None] | None = None,
) -> Certificate:
    """Run episodes in batches until "P(episode cost > limit) <= risk" is accepted or rejected, or none are left.

    It is accepted although wrong, or rejected although right, with a probability of at most 1 - confidence each.
    `show(episodes, violations, bounds)` is called after each batch.
    """
    check_statement(limit, risk, confidence)
    check_run(max_episodes, batch, seed)
    task = get_task(task) if isinstance(task, str) else task
    given = _limit_to_give(policy, limit)
    costs: list[float] = []
    sequence: list[tuple[int, int, float, float]] = []
    verdict: Verdict = "undecided"
    low, high, decided = 0.0, 1.0, 0
    while verdict == "undecided" and len(costs) < max_episodes:
        many = min(batch, max_episodes - len(costs))
        costs += run_costs(policy, task, given, many, _seed(seed, 1, len(sequence)), workers).tolist()
        violated = ~(np.array(costs) <= limit)  # what is not a number is no proof
        verdict, decided = decide(violated, risk, confidence)
        for n in (decided, len(costs)):  # bounds hold at all times at once, so the best of each does
            now = bounds(int(violated[:n].sum()), n, confidence)
            low, high = max(low, now[0]), min(high, now[1])
        sequence.append((len(costs), int(violated.sum()), low, high))
        if show is not None:
            show(len(costs), int(violated.sum()), (low, high))
    return Certificate(
        verdict=verdict,
        task=task.name,
        algorithm=str(getattr(policy, "algorithm", type(policy).__name__)),
        checkpoint=str(getattr(policy, "checkpoint", None) or ""),
        sha256=checksums(policy),
        limit=limit,
        internal_limit=float(getattr(policy, "internal_limit", lambda x: x)(given)),
        risk=risk,
        confidence=confidence,
        seed=seed,
        batch=batch,
        max_episodes=max_episodes,
        episodes=len(costs),
        violations=sequence[-1][1],
        decided_after=None if verdict == "undecided" else decided,
        bounds=(low, high),
        sequence=sequence,
        costs=costs,
        forecasts=[foretell(rate, risk, confidence, max_episodes) for rate in assumed_rates(risk)],
        provenance=provenance(),
    )


def assumed_rates(risk: float) -> tuple[float, ...]:
    """The true rates of violations that the length of a run is foretold for."""
    return 0.0, risk / 4, risk / 2, *sorted({min(times * risk, (1 + risk) / 2) for times in (2, 4)})


def run_costs(policy: EpisodePolicy, task: Task, given: float, episodes: int, seed: int, workers: int | None) -> Floats:
    """The costs of fresh episodes with the policy told the limit `given`."""
    return evaluate(policy, task, episodes=episodes, cost_limits=[given], seed=seed, workers=workers).costs


def check_statement(limit: float, risk: float, confidence: float) -> None:
    if not (math.isfinite(limit) and limit >= 0):
        raise QptError(f"a cost limit is a finite number of at least 0, not {limit:g}")
    if not 0 < risk < 1 or 1 - risk == 1:
        raise QptError(f"the risk is a probability above 0 and below 1, not {risk:g}")
    if not 0.5 <= confidence < 1:
        raise QptError(f"the confidence lies between 0.5 and 1, not at {confidence:g}")


def check_run(max_episodes: int, batch: int, seed: int) -> None:
    if max_episodes < 1 or batch < 1:
        raise QptError(
            f"a certificate needs at least one episode in a batch and in all, not {batch} and {max_episodes}"
        )
    if seed < 0:
        raise QptError(f"a seed is a whole number of at least 0, not {seed}")


def _limit_to_give(policy: EpisodePolicy, limit: float) -> float:
    """A policy that was trained for one limit takes no other; it can still be certified for another."""
    trained = getattr(policy, "trained_limit", None)
    return float(trained) if policy.limit_mode == "trained" and trained is not None else limit


def _seed(seed: int, purpose: int, number: int) -> int:
    """A seed of its own for each batch, so that no episode of a calibration or of another batch is used again."""
    return int(np.random.SeedSequence((seed, purpose, number)).generate_state(1, np.uint32)[0])


# -- calibration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LimitCalibration:
    """The largest internal limit of a grid that keeps P(episode cost > limit) <= risk; None where none was found."""

    task: str
    limit: float
    internal_limit: float | None
    risk: float
    confidence: float
    seed: int
    episodes: int  # at each internal limit
    tested: Sequence[
        tuple[float, int, float]
    ]  # internal limit, violations, p-value; in order, the last may have failed
    grid: Sequence[float]


def binomial_p_value(violations: int, n: int, risk: float) -> float:
    """P(at most this many violations in n episodes) at a rate of `risk`: small where the rate must be lower."""
    return min(1.0, stats._binomial_cdf(violations, n, risk))


def default_grid(limit: float) -> tuple[float, ...]:
    """Tenths of the limit."""
    return (*(limit * k / 10 for k in range(1, 10)), limit) if limit > 0 else (0.0,)


def calibrate_limit(
    policy: EpisodePolicy,
    task: Task | str,
    limit: float,
    *,
    risk: float = 0.05,
    confidence: float = 0.95,
    grid: Sequence[float] | None = None,
    episodes: int = 200,
    seed: int = 0,
    workers: int | None = None,
    show: Callable[[float, int, float], None] | None = None,
) -> LimitCalibration:
    """Test internal limits from the lowest upward, each on `episodes` episodes, and stop at the first that fails.

    The last one that passed keeps the risk with the asked confidence, whatever the distribution of costs and however
    it changes with the limit: for a wrong choice the first limit that breaks the risk must have passed, one test.
    """
    check_statement(limit, risk, confidence)
    check_run(episodes, 1, seed)
    task = get_task(task) if isinstance(task, str) else task
    steps = sorted(set(default_grid(limit) if grid is None else map(float, grid)))
    if not steps or not all(0 <= step <= limit for step in steps):
        raise QptError(f"internal limits lie between 0 and the stated limit of {limit:g}; change the grid")
    if policy.limit_mode != "live":
        raise QptError(
            f"this policy takes no limit at deployment (its limit is {policy.limit_mode}), so there is nothing to "
            "calibrate; certify it as it is"
        )
    if binomial_p_value(0, episodes, risk) > 1 - confidence:
        need = math.ceil(math.log1p(-confidence) / math.log1p(-risk))
        need += binomial_p_value(0, need, risk) > 1 - confidence  # rounded down
        raise QptError(f"{episodes} episodes a limit can never show a risk of {risk:g}; take at least {need}")
    tested: list[tuple[float, int, float]] = []
    chosen = None
    for number, step in enumerate(steps):
        costs = run_costs(policy, task, step, episodes, _seed(seed, 2, number), workers)
        violations = int((~(costs <= limit)).sum())
        p_value = binomial_p_value(violations, episodes, risk)
        tested.append((step, violations, p_value))
        if show is not None:
            show(*tested[-1])
        if p_value > 1 - confidence:
            break
        chosen = step
    return LimitCalibration(task.name, limit, chosen, risk, confidence, seed, episodes, tested, steps)


def store(calibration: LimitCalibration, checkpoint: str | Path) -> Path:
    """Keep a calibration with the policy: in calibration.json, for its task and limit, in place of an earlier one."""
    if calibration.internal_limit is None:
        raise QptError("no internal limit passed, so there is no calibration to store")
    folder = resolve(checkpoint)
    entries = [e for e in _read(folder) if (e["task"], e["limit"]) != (calibration.task, calibration.limit)]
    entries.append({**asdict(calibration), "provenance": provenance()})
    text = {"format": FORMAT, "model_sha256": read_manifest(folder)["sha256"][MODEL], "calibrations": entries}
    write_json(folder / FILE, text)
    return folder / FILE


def check_store(checkpoint: str | Path) -> None:
    """What would keep a calibration from being stored is said before its episodes are run."""
    folder = resolve(checkpoint)
    check_file(folder / FILE)
    _read(folder)


def _read(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']}, this version of qpt reads {FORMAT}")
        if found["model_sha256"] != read_manifest(folder)["sha256"][MODEL]:
            raise ValueError("it belongs to other weights")
        entries = [dict(entry) for entry in found["calibrations"]]
        for entry in entries:
            entry["limit"], entry["internal_limit"] = float(entry["limit"]), float(entry["internal_limit"])
            entry["task"] = str(entry["task"])
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise QptError(f"the calibration {path} cannot be used ({error}); delete it and calibrate again") from error


class CalibratedPolicy:
    """A policy that is told stated limits and gives its inner policy the calibrated ones; else it is that policy."""

    def __init__(self, policy: Any, table: Mapping[float, float]) -> None:
        self.policy, self.table = policy, dict(table)

    def internal_limit(self, limit: float) -> float:
        return calibrated_limit(self.table, limit)

    def _mapped(self, limits: npt.ArrayLike | None) -> Floats | None:
        return None if limits is None else np.asarray(np.vectorize(self.internal_limit, otypes=[float])(limits))

    def reset(self, n: int = 1, *, cost_limits: npt.ArrayLike | None = None, **rest: Any) -> None:
        self.policy.reset(n, cost_limits=self._mapped(cost_limits), **rest)

    def restart(self, indices: npt.ArrayLike, *, cost_limits: npt.ArrayLike | None = None, **rest: Any) -> None:
        self.policy.restart(indices, cost_limits=self._mapped(cost_limits), **rest)

    def set_cost_limit(self, cost_limit: npt.ArrayLike, indices: npt.ArrayLike | None = None) -> None:
        self.policy.set_cost_limit(self._mapped(cost_limit), indices)

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # not there yet: while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.policy, name)


def calibrated(policy: Any, path: str | Path | None = None, *, task: str | None = None) -> CalibratedPolicy:
    """The policy with the calibration that lies in its checkpoint (or in the one at `path`) applied to its limits."""
    folder = resolve(path if path is not None else policy.checkpoint)
    name = task or policy.task
    if other := _other_settings(policy, folder):
        raise QptError(
            f"the calibrations in {folder} are of the policy as it was trained, not of one with another {other}; "
            "load it without that setting"
        )
    entries = [entry for entry in _read(folder) if entry["task"] == name]
    if not entries:
        raise QptError(
            f"{folder} has no calibration for {name}; run: qpt certify --calibrate --checkpoint {folder} --limit LIMIT"
        )
    return CalibratedPolicy(policy, {entry["limit"]: entry["internal_limit"] for entry in entries})


def _other_settings(policy: Any, folder: Path) -> str:
    """The settings in which a policy's config differs from its checkpoint's; none where it has no config to compare."""
    config = getattr(getattr(policy, "method", None), "config", None)
    now = json.loads(json.dumps(vars(config), default=str)) if config is not None else {}
    then = read_manifest(folder)["config"]
    return ", ".join(name for name, value in now.items() if then.get(name, value) != value)
