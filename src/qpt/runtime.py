"""An exported policy at work: needs numpy and onnxruntime, and neither torch nor the rest of the package."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError, require

FORMAT = 1  # of the side file; raised when old exports can no longer be run
_GAMMA, _MIX1, _MIX2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64
_NEEDED = {"sha256", "observation_dim", "action_dim", "context", "horizon", "limit_mode", "return_targets", "noise"}

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


def _hash(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def episode_uniform(seeds: npt.ArrayLike, steps: npt.ArrayLike, count: int, stream: int = 0) -> Doubles:
    """Uniform numbers in (0, 1), a fixed function of (seed, step, position, stream): [n], [n] -> [n, count]."""
    seed, step = (np.asarray(x).astype(np.int64).astype(np.uint64) for x in (seeds, steps))
    key = _hash(seed * _GAMMA + np.uint64(stream + 1))
    key = _hash(key + (step + np.uint64(1)) * _GAMMA)
    bits = _hash(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    uniform: Doubles = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniform


def episode_normal(seeds: npt.ArrayLike, steps: npt.ArrayLike, count: int, stream: int = 0) -> Doubles:
    """Standard normal numbers by the same rule (Box and Muller's transform): [n], [n] -> [n, count]."""
    half = (count + 1) // 2
    u = episode_uniform(seeds, steps, 2 * half, stream)
    radius, angle = np.sqrt(-2 * np.log(u[:, :half])), 2 * np.pi * u[:, half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)[:, :count]


class OnnxPolicy:
    """Decides for n parallel episodes with an exported graph, as `qpt.load_policy` would from the checkpoint.

    A step is `actions = act(observations)`, then `observe(rewards, costs)`; `set_cost_limit` may come at any time.
    With `calibrated=True` limits are stated ones: the graph is given those that `qpt certify --calibrate` found for
    them before the export, for the policy's own task (or for the one that is named instead of True).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        calibrated: bool | str = False,
        past_horizon: Literal["error", "clamp"] = "error",
        threads: int = 1,
    ) -> None:
        path = Path(path)
        self.facts = read_facts(path)
        self.session = _session(path, self.facts, threads)
        f = self.facts
        self.observation_dim, self.action_dim = int(f["observation_dim"]), int(f["action_dim"])
        self.context, self.horizon = int(f["context"]), int(f["horizon"])
        self.limit_mode, self.trained_limit, self.past_horizon = (
            str(f["limit_mode"]),
            f.get("trained_limit"),
            past_horizon,
        )
        self.algorithm, self.checkpoint, self.task = str(f.get("algorithm", "")), str(path), f.get("task")
        self.sha256 = {path.name: str(f["sha256"])}
        self.table = _calibrations(path, f, self.task if calibrated is True else calibrated) if calibrated else None
        self.inputs = {x.name for x in self.session.get_inputs()}
        self.outputs = [x.name for x in self.session.get_outputs()]
        self.count = 0

    # -- episodes ------------------------------------------------------------------------------------------------------

    def reset(
        self,
        n: int = 1,
        *,
        cost_limits: npt.ArrayLike | None = None,
        return_targets: npt.ArrayLike | None = None,
        seeds: npt.ArrayLike | None = None,
    ) -> None:
        """Begin n episodes. Without return targets, the best safe logged return for each limit is the target.

        Without limits the policy's own trained one counts, or 0 for policies that take any.
        """
        if n < 1:
            raise QptError(f"reset needs at least one episode, not {n}")
        self.count, k = n, self.context
        self._window: dict[str, npt.NDArray[Any]] = {
            "observations": np.zeros((n, k, self.observation_dim), np.float32),
            "actions": np.zeros((n, k, self.action_dim), np.float32),
            "earned": np.zeros((n, k), np.float32),  # before each step of the window
            "spent": np.zeros((n, k), np.float32),
            "steps": np.zeros((n, k), np.int64),
        }
        self._step, self._seeds, self._decisions = (np.zeros(n, np.int64) for _ in range(3))
        self._limits, self._targets, self._return, self._cost = (np.zeros(n) for _ in range(4))
        self._fixed, self._limited = np.zeros(n, bool), np.zeros(n, bool)
        self._sums = {name: np.zeros(n) for name in self.outputs[1:]}
        self._acted: npt.NDArray[np.bool_] | None = None
        if cost_limits is None and self.limit_mode == "live" and self.table is None:
            cost_limits = self.trained_limit or 0.0
        self.restart(np.arange(n), cost_limits=cost_limits, return_targets=return_targets, seeds=seeds)

    def restart(
        self,
        indices: npt.ArrayLike,
        *,
        cost_limits: npt.ArrayLike | None = None,
        return_targets: npt.ArrayLike | None = None,
        seeds: npt.ArrayLike | None = None,
    ) -> None:
        """Begin new episodes in the given rows; limits, targets and seeds are kept where none are given."""
        rows = self._rows(indices)
        for values in (self._step, self._return, self._cost, self._decisions, *self._window.values()):
            values[rows] = 0
        for values in self._sums.values():
            values[rows] = 0
        if self._acted is not None:
            self._acted[rows] = False
        if seeds is not None:
            self._seeds[rows] = np.asarray(seeds)
        if return_targets is not None:
            self._targets[rows], self._fixed[rows] = np.asarray(return_targets, float), True
        if cost_limits is None and not self._limited[rows].any():
            cost_limits = self.trained_limit
            if cost_limits is None and self.table is not None:
                known = ", ".join(f"{stated:g}" for stated in sorted(self.table))
                raise QptError(f"give a limit that was calibrated: cost_limits={known}")
        if cost_limits is not None:
            self.set_cost_limit(cost_limits, rows)

    def set_cost_limit(self, cost_limit: npt.ArrayLike, indices: npt.ArrayLike | None = None) -> None:
        """Set the limit on the whole episode's cost, of all rows or of some, from the next decision on."""
        rows = self._rows(np.arange(self.count) if indices is None else indices)
        limits = np.broadcast_to(np.asarray(cost_limit, float), rows.shape)
        if not np.isfinite(limits).all() or (limits < 0).any():
            raise QptError(f"a cost limit is a number of at least 0, not {np.asarray(cost_limit)}")
        trained = self.trained_limit if self.limit_mode == "trained" else None
        if trained is not None and not np.allclose(limits, trained):
            raise QptError(
                f"this policy was trained for a cost limit of {trained:g} and cannot take another; "
                f"train one for {limits[~np.isclose(limits, trained)][0]:g}"
            )
        if self.table is not None:
            limits = np.array([self.internal_limit(limit) for limit in limits])
        self._limits[rows], self._limited[rows] = limits, True
        free = ~self._fixed[rows]
        self._targets[rows[free]] = suggest_returns(self.facts["return_targets"], limits[free])

    def internal_limit(self, limit: float) -> float:
        """What the graph is given for a stated limit."""
        return float(limit) if self.table is None else calibrated_limit(self.table, limit)

    # -- one step ------------------------------------------------------------------------------------------------------

    def act(self, observations: npt.ArrayLike, active: npt.ArrayLike | None = None) -> Floats:
        """Actions of all rows [n, A]; rows that are not active do not move on and get zeros."""
        if self.count == 0:
            raise QptError("call reset(n) before act")
        seen = np.asarray(observations, np.float32)
        if seen.shape != (self.count, self.observation_dim):
            raise QptError(
                f"act needs observations of shape [{self.count}, {self.observation_dim}], not {list(seen.shape)}"
            )
        running = np.ones(self.count, bool) if active is None else np.asarray(active, bool)
        if not np.isfinite(seen[running]).all():
            raise QptError("an observation holds NaN or infinite values; the policy cannot decide on it")
        if self._acted is not None and (self._acted & running).any():
            raise QptError("observe(rewards, costs) must follow act before the next act")
        if self.past_horizon == "error" and (self._step[running] >= self.horizon).any():
            raise QptError(
                f"an episode is past the horizon of {self.horizon} steps that the policy was trained for; "
                "restart it, or load the policy with past_horizon='clamp'"
            )
        last = self._advance(seen, running)
        decision = self.decide(self._context(last))
        actions = decision.pop(self.outputs[0])
        self._window["actions"][running, last[running]] = actions[running]
        for name, values in decision.items():
            self._sums[name][running] += values[running]
        self._decisions[running] += 1
        self._acted = running
        return np.where(running[:, None], actions, 0).astype(np.float32)

    def decide(self, context: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """One run of the graph: named inputs to named outputs."""
        feed = {name: value for name, value in context.items() if name in self.inputs}
        return dict(zip(self.outputs, self.session.run(None, feed), strict=True))

    def _advance(self, seen: Floats, running: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Move the windows of running rows on by one step: a full window loses its oldest step."""
        full = running & (self._step >= self.context)
        for values in self._window.values():
            values[full] = np.roll(values[full], -1, 1)
        last = np.minimum(self._step, self.context - 1)
        now: dict[str, npt.NDArray[Any]] = {
            "observations": seen,
            "actions": np.zeros((self.count, self.action_dim)),
            "earned": self._return,
            "spent": self._cost,
            "steps": np.minimum(self._step, self.horizon - 1),
        }
        for name, values in now.items():
            self._window[name][running, last[running]] = values[running]
        return last

    def _context(self, last: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        w, targets, limits = self._window, self._targets.astype(np.float32), self._limits.astype(np.float32)
        step = w["steps"][np.arange(self.count), last]
        return {
            "observations": w["observations"],
            "actions": w["actions"],
            "return_to_go": targets[:, None] - w["earned"],
            "cost_to_go": limits[:, None] - w["spent"],
            "steps": w["steps"],
            "last": last,
            "return_target": targets,
            "cost_limit": limits,
            "noise": noise(self.facts["noise"], self._seeds, step),
        }

    def observe(self, rewards: npt.ArrayLike, costs: npt.ArrayLike) -> None:
        """What the last actions brought, for the rows that were active in them."""
        if self.count == 0 or self._acted is None:
            raise QptError("observe follows act; no decision is waiting for its outcome")
        reward, cost = np.asarray(rewards, float), np.asarray(costs, float)
        if reward.shape != (self.count,) or cost.shape != (self.count,):
            raise QptError(
                f"observe needs {self.count} rewards and costs, not {list(reward.shape)} and {list(cost.shape)}"
            )
        rows = self._acted
        self._return[rows] += reward[rows]
        self._cost[rows] += cost[rows]
        self._step[rows] += 1
        self._acted = None

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def cost_limits(self) -> Doubles:
        """What the graph is given: internal limits, where they are calibrated."""
        return self._limits.copy()

    @property
    def return_targets(self) -> Doubles:
        return self._targets.copy()

    @property
    def spent(self) -> Doubles:
        """Cost of each running episode so far."""
        return self._cost.copy()

    def diagnostics(self) -> dict[str, Doubles]:
        """Means over the running episodes' decisions; `fallback_share` is how often no candidate was feasible."""
        count = np.maximum(self._decisions, 1)
        return {("fallback_share" if k == "fallback" else k): v / count for k, v in self._sums.items()}

    def _rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        if self.count == 0:
            raise QptError("call reset(n) first")
        rows = np.atleast_1d(np.asarray(indices))
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.count):
            raise QptError(f"there are {self.count} episodes; row {int(rows.max())} does not exist")
        return rows


# -- little tools ------------------------------------------------------------------------------------------------------


def noise(plan: list[dict[str, Any]], seeds: npt.ArrayLike, steps: npt.NDArray[np.int64]) -> Floats:
    """The graph's noise input [n, W] by the side file's plan: its draws side by side."""
    parts = [np.zeros((len(steps), 0))]
    for draw in plan:
        kind = episode_uniform if draw["uniform"] else episode_normal
        parts.append(kind(seeds, steps if draw["each_step"] else 0 * steps, int(draw["size"]), int(draw["stream"])))
    return np.concatenate(parts, 1).astype(np.float32)


def suggest_returns(table: dict[str, Any] | None, limits: Doubles) -> Doubles:
    """The return targets that belong to cost limits, by the side file's table."""
    if table is None:
        raise QptError("this policy has no suggested return targets; give return_targets to reset")
    costs, returns = np.asarray(table["costs"], float), np.asarray(table["returns"], float)
    if table["between"] == "linear":
        found = np.interp(limits, costs, returns)
    else:  # the best logged return within the limit; below the cheapest episode, that episode's
        found = returns[np.maximum(np.searchsorted(costs, limits, side="right") - 1, 0)]
    return np.asarray(found * float(table["factor"]), float)


def calibrated_limit(table: Mapping[float, float], limit: float) -> float:
    """The internal limit of a stated one; nothing is known of those between the calibrated ones."""
    for stated, internal in table.items():
        if math.isclose(stated, limit, rel_tol=1e-9, abs_tol=1e-12):
            return internal
    known = ", ".join(f"{stated:g}" for stated in sorted(table)) or "none"
    raise QptError(
        f"the policy is not calibrated for a limit of {limit:g} (it is for {known}); "
        f"run: qpt certify --calibrate --limit {limit:g}"
    )


def _calibrations(path: Path, facts: dict[str, Any], task: Any) -> dict[float, float]:
    entries = facts.get("calibrations", [])
    table = {float(e["limit"]): float(e["internal_limit"]) for e in entries if e["task"] == task}
    if not table:
        known = ", ".join(sorted({str(e["task"]) for e in entries})) or "none"
        raise QptError(
            f"{path} has no calibrated limit for the task {task} (it has them for {known}); run `qpt certify "
            "--calibrate` on its checkpoint, and export it again"
        )
    return table


def read_facts(path: Path) -> dict[str, Any]:
    """The side file of an exported graph, checked."""
    side = path.with_suffix(".json")
    try:
        facts = json.loads(side.read_text(encoding="utf-8"))
    except OSError as error:
        raise QptError(
            f"the side file {side} cannot be read ({error.strerror}); `qpt export` writes it beside the graph"
        ) from error
    except ValueError as error:
        raise QptError(f"the side file {side} is not valid JSON; export the policy again") from error
    if not isinstance(facts, dict) or not set(facts) >= _NEEDED:
        raise QptError(f"{side} is not the side file of an exported policy; export the policy again")
    if facts.get("format") != FORMAT:
        raise QptError(
            f"the export {side} has format {facts.get('format')}, this version of qpt runs {FORMAT}; export it again"
        )
    try:
        sizes = [int(facts[name]) for name in ("observation_dim", "action_dim", "context", "horizon")]
        noise(facts["noise"], [0], np.zeros(1, np.int64))
        limits = [(e["task"], float(e["limit"]), float(e["internal_limit"])) for e in facts.get("calibrations", [])]
        table = facts["return_targets"]
        sound = min(sizes) > 0 and all(0 <= internal <= stated for _, stated, internal in limits)
        sound = sound and (table is None or len(table["costs"]) == len(table["returns"]) > 0)
        sound = sound and (table is None or bool(np.isfinite(suggest_returns(table, np.zeros(1))).all()))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError):
        sound = False
    if not sound:
        raise QptError(f"the side file {side} is damaged; copy it anew, or export the policy again")
    return facts


def _session(path: Path, facts: dict[str, Any], threads: int) -> Any:
    ort = require("onnxruntime", "onnx")
    try:
        graph = path.read_bytes()
    except OSError as error:
        raise QptError(f"the graph {path} cannot be read: {error.strerror}; `qpt export` writes one") from error
    if hashlib.sha256(graph).hexdigest() != facts["sha256"]:
        raise QptError(
            f"{path} is damaged, or not the graph that its side file describes; copy both anew, or export again"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # small matrices gain nothing from more
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds
        raise QptError(f"onnxruntime cannot run {path}: {str(error).splitlines()[0]}") from error
    shapes = {x.name: x.shape[1:] for x in session.get_inputs()}
    k, width = facts["context"], sum(draw["size"] for draw in facts["noise"])
    wanted = {"observations": [k, facts["observation_dim"]], "actions": [k, facts["action_dim"]], "noise": [width]}
    if any(shapes[name] != wanted[name] for name in shapes.keys() & wanted.keys()):
        raise QptError(f"the side file of {path} is damaged: its sizes are not the graph's; export the policy again")
    return session
