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
from qpt.running import Doubles, Running

FORMAT = 1  # of the side file; raised when old exports can no longer be run
_GAMMA, _MIX1, _MIX2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64
_NEEDED = {"sha256", "observation_dim", "action_dim", "context", "horizon", "limit_mode", "return_targets", "noise"}

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


class OnnxPolicy(Running):
    """An exported graph at work, deciding as `qpt.load_policy` would from the checkpoint; see `Running` for how.

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
        super().__init__(
            (int(f["observation_dim"]), int(f["action_dim"])),
            int(f["context"]),
            int(f["horizon"]),
            str(f["limit_mode"]),
            f.get("trained_limit"),
            past_horizon,
        )
        self.algorithm, self.checkpoint, self.task = str(f.get("algorithm", "")), str(path), f.get("task")
        self.sha256 = {path.name: str(f["sha256"])}
        self.surrogate = bool(((f.get("provenance") or {}).get("data") or {}).get("surrogate"))
        self.table = _calibrations(path, f, self.task if calibrated is True else calibrated) if calibrated else None
        self.inputs = {x.name for x in self.session.get_inputs()}
        self.outputs = [x.name for x in self.session.get_outputs()]

    def _default_limit(self) -> float | None:
        if self.table is not None and self.trained_limit is None:
            known = ", ".join(f"{stated:g}" for stated in sorted(self.table))
            raise QptError(f"give a limit that was calibrated: cost_limits={known}")
        return super()._default_limit()

    def internal_limit(self, limit: float) -> float:
        """What the graph is given for a stated limit."""
        return float(limit) if self.table is None else calibrated_limit(self.table, limit)

    def _suggest(self, limits: Doubles) -> Doubles:
        return suggest_returns(self.facts["return_targets"], limits)

    def _decide(
        self,
        last: npt.NDArray[np.int64],
        running: npt.NDArray[np.bool_],  # noqa: ARG002
    ) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        step = self._window["steps"][np.arange(self.count), last]
        found = self.decide({**self._seen(last), "noise": noise(self.facts["noise"], self._seeds, step)})
        return found.pop(self.outputs[0]), found

    def decide(self, context: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """One run of the graph: named inputs to named outputs."""
        feed = {name: value for name, value in context.items() if name in self.inputs}
        return dict(zip(self.outputs, self.session.run(None, feed), strict=True))


# -- little tools ------------------------------------------------------------------------------------------------------


def noise(plan: list[dict[str, Any]], seeds: npt.ArrayLike, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
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
