"""What a policy keeps of n episodes that run side by side. Numpy alone: an exported policy needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

Doubles = npt.NDArray[np.float64]
# Texts, or rows of several lengths; numbers beyond any type; tensors with a gradient, or on another device.
UNREADABLE = (TypeError, ValueError, OverflowError, RuntimeError)


class Running(ABC):
    """Decides for n parallel episodes that may start and end at different times.

    A step is `actions = act(observations)`, then `observe(rewards, costs)` with what came of it. `set_cost_limit` takes
    effect at the next `act`; it limits the whole episode, so cost-to-go becomes the limit minus what is spent already.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        context: int,
        horizon: int,
        limit_mode: str,
        trained_limit: float | None,
        past_horizon: Literal["error", "clamp"],
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        if past_horizon not in ("error", "clamp"):
            raise QptError(f"past_horizon is 'error' or 'clamp', not {past_horizon!r}")
        self.observation_dim, self.action_dim = sizes
        self.context, self.horizon = context, horizon
        self.limit_mode, self.trained_limit, self.past_horizon = limit_mode, trained_limit, past_horizon
        self.count = 0
        self._dtype = dtype

    @abstractmethod
    def _decide(
        self, last: npt.NDArray[np.int64], running: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Actions [n, A] for the windows as they are, whose current step is at `last`, and diagnostics [n] by name.

        Only those of running rows are used.
        """

    @abstractmethod
    def _suggest(self, limits: Doubles) -> Doubles:
        """The return targets that belong to cost limits."""

    def _default_limit(self) -> float | None:
        """What counts where nobody gives a limit."""
        return 0.0 if self.trained_limit is None and self.limit_mode == "live" else self.trained_limit

    def internal_limit(self, limit: float) -> float:
        """What the policy is told for a stated limit."""
        return float(limit)

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

        Without limits the policy's own trained one counts, or 0 for policies that take any. Seeds are those of the
        episodes' noise; without, all have that of seed 0, so that the same episode gets the same decisions in any row.
        """
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise QptError(f"reset needs a whole number of episodes, at least 1, not {n}")
        self.count, k = n, self.context
        self._window: dict[str, npt.NDArray[Any]] = {
            "observations": np.zeros((n, k, self.observation_dim), self._dtype),
            "actions": np.zeros((n, k, self.action_dim), self._dtype),
            "earned": np.zeros((n, k), self._dtype),  # before each step of the window
            "spent": np.zeros((n, k), self._dtype),
            "steps": np.zeros((n, k), np.int64),
        }
        self._step, self._seeds, self._decisions = (np.zeros(n, np.int64) for _ in range(3))
        self._limits, self._targets, self._return, self._cost = (np.zeros(n) for _ in range(4))
        self._fixed, self._limited = np.zeros(n, bool), np.zeros(n, bool)  # the target, the limit was given
        self._sums: dict[str, Doubles] = {}
        self._acted: npt.NDArray[np.bool_] | None = None
        self._shown = np.zeros(n, bool)  # the window holds the current step already: its decision failed, and may again
        try:
            self.restart(np.arange(n), cost_limits=cost_limits, return_targets=return_targets, seeds=seeds)
        except BaseException:  # nothing has begun, least of all with a limit and a target of 0
            self.count = 0
            raise

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
        if cost_limits is None and not self._limited[rows].any():
            cost_limits = self._default_limit()
        # First all is looked at: what is refused changes nothing and ends no episode.
        fixed, targets = self._fixed[rows], self._targets[rows]
        if return_targets is not None:
            targets = _each("a return target is a finite number", return_targets, len(rows))
            fixed = np.ones(len(rows), bool)
        if seeds is not None:
            seeds = _each("a seed is a whole number", seeds, len(rows), np.int64)
        if cost_limits is not None:
            limits = self._internal_limits(cost_limits, len(rows))
            targets = self._suited(targets, limits, ~fixed)
            self._limits[rows], self._limited[rows] = limits, True
        if seeds is not None:
            self._seeds[rows] = seeds
        self._targets[rows], self._fixed[rows] = targets, fixed
        for values in (self._step, self._return, self._cost, self._decisions, *self._window.values()):
            values[rows] = 0
        for values in self._sums.values():
            values[rows] = 0
        self._shown[rows] = False
        if self._acted is not None:
            self._acted[rows] = False

    def set_cost_limit(self, cost_limit: npt.ArrayLike, indices: npt.ArrayLike | None = None) -> None:
        """Set the limit on the whole episode's cost, of all rows or of some, from the next decision on."""
        rows = self._rows(np.arange(self.count) if indices is None else indices)
        limits = self._internal_limits(cost_limit, len(rows))
        targets = self._suited(self._targets[rows], limits, ~self._fixed[rows])
        self._limits[rows], self._limited[rows], self._targets[rows] = limits, True, targets

    def _suited(self, targets: Doubles, limits: Doubles, free: npt.NDArray[np.bool_]) -> Doubles:
        """The targets, where they are free those that belong to the limits."""
        found = targets.copy()
        if free.any():
            found[free] = self._suggest(limits[free])
        return found

    def _internal_limits(self, cost_limits: npt.ArrayLike, count: int) -> Doubles:
        limits: Doubles = _each("a cost limit is a finite number of at least 0", cost_limits, count, least=0)
        trained = self.trained_limit if self.limit_mode == "trained" else None
        if trained is not None and not np.allclose(limits, trained):
            raise QptError(
                f"this policy was trained for a cost limit of {trained:g} and cannot take another; "
                f"train one for {limits[~np.isclose(limits, trained)][0]:g}"
            )
        return np.array([self.internal_limit(limit) for limit in limits], np.float64)

    # -- one step ------------------------------------------------------------------------------------------------------

    def act(self, observations: npt.ArrayLike, active: npt.ArrayLike | None = None) -> npt.NDArray[Any]:
        """Actions of all rows [n, A], of the policy's type; rows that are not active do not move on and get zeros."""
        self._begun()
        seen = _numbers("observations", observations, self._dtype)
        if seen.shape != (self.count, self.observation_dim):
            raise QptError(
                f"act needs observations of shape [{self.count}, {self.observation_dim}], not {list(seen.shape)}"
            )
        running = np.ones(self.count, bool) if active is None else _numbers("active flags", active).copy()
        if running.dtype != bool or running.shape != (self.count,):  # row numbers would be taken for flags
            raise QptError(f"act needs {self.count} active flags, True or False, one for each row, not {active!r}")
        if not np.isfinite(seen[running]).all():
            raise QptError("an observation holds NaN or infinite values; the policy cannot decide on it")
        if self._acted is not None and self._acted.any():
            raise QptError("observe(rewards, costs) must follow act before the next act, also one of other rows")
        if self.past_horizon == "error" and (self._step[running] >= self.horizon).any():
            raise QptError(
                f"an episode is past the horizon of {self.horizon} steps that the policy was trained for; "
                "restart it, or load the policy with past_horizon='clamp'"
            )
        last = self._advance(seen, running)
        actions, diagnostics = self._decide(last, running)
        if not np.isfinite(actions[running]).all():
            raise QptError(
                "the decision is not a number: an observation, limit, target, reward or cost is too large for the "
                "policy's arithmetic; check their units"
            )
        self._window["actions"][running, last[running]] = actions[running]
        for name, values in diagnostics.items():
            self._sums.setdefault(name, np.zeros(self.count))[running] += values[running]
        self._decisions[running] += 1
        self._acted = running
        return np.where(running[:, None], actions, 0).astype(self._dtype)

    def _advance(self, seen: npt.NDArray[Any], running: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Move the windows of running rows on by one step: a full window loses its oldest step."""
        full = running & (self._step >= self.context) & ~self._shown
        if full.any():
            for values in self._window.values():
                values[full, :-1] = values[full, 1:]
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
        self._shown |= running
        return last

    def _seen(self, last: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """The windows as a method sees them: targets and limits less what was earned and spent before each step."""
        w, targets, limits = self._window, self._targets.astype(self._dtype), self._limits.astype(self._dtype)
        return {
            "observations": w["observations"],
            "actions": w["actions"],
            "return_to_go": targets[:, None] - w["earned"],
            "cost_to_go": limits[:, None] - w["spent"],
            "steps": w["steps"],
            "last": last,
            "return_target": targets,
            "cost_limit": limits,
        }

    def observe(self, rewards: npt.ArrayLike, costs: npt.ArrayLike) -> None:
        """What the last actions brought, for the rows that were active in them."""
        if self.count == 0 or self._acted is None:
            raise QptError("observe follows act; no decision is waiting for its outcome")
        reward, cost = _numbers("rewards", rewards, float), _numbers("costs", costs, float)
        if reward.shape != (self.count,) or cost.shape != (self.count,):
            raise QptError(
                f"observe needs {self.count} rewards and costs, not {list(reward.shape)} and {list(cost.shape)}"
            )
        rows = self._acted
        reward, cost = reward[rows], cost[rows]
        if not (np.isfinite(reward).all() and np.isfinite(cost).all()):
            raise QptError("a reward or cost is NaN or infinite; what is left of the limit would be unknown")
        if (cost < 0).any():
            raise QptError(f"costs must not be negative, but one is {cost.min():g}; a cost is what a limit bounds")
        self._return[rows] += reward
        self._cost[rows] += cost
        self._step[rows] += 1
        self._shown[rows] = False
        self._acted = None

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def cost_limits(self) -> Doubles:
        """What the policy is told: internal limits, where they are calibrated."""
        self._begun()
        return self._limits.copy()

    @property
    def return_targets(self) -> Doubles:
        """The return of the whole episode that each is asked for."""
        self._begun()
        return self._targets.copy()

    @property
    def spent(self) -> Doubles:
        """Cost of each running episode so far."""
        self._begun()
        return self._cost.copy()

    def diagnostics(self) -> dict[str, Doubles]:
        """Means over the running episodes' decisions; `fallback_share` is how often no candidate was feasible."""
        self._begun()
        count = np.maximum(self._decisions, 1)
        return {("fallback_share" if k == "fallback" else k): v / count for k, v in self._sums.items()}

    def _begun(self) -> None:
        if self.count == 0:
            raise QptError("call reset(n) first")

    def _rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        self._begun()
        rows = np.atleast_1d(np.asarray(indices))
        if rows.ndim > 1 or (rows.size and rows.dtype.kind not in "biu"):  # an empty list is one of floats
            raise QptError(f"rows are whole numbers or flags, not {rows}")
        if rows.dtype == bool and rows.size not in (0, self.count):
            raise QptError(f"there are {self.count} episodes, and as many flags are needed, not {rows.size}")
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        if (wrong := rows[(rows < 0) | (rows >= self.count)]).size:
            raise QptError(f"there are {self.count} episodes; row {int(wrong[0])} does not exist")
        return rows


def _numbers(what: str, values: Any, kind: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    try:
        if np.iscomplexobj(values):
            raise TypeError("they are complex")
        return np.asarray(values, kind)
    except UNREADABLE as error:
        raise QptError(f"{what} are an array of numbers, which this is not: {error}") from error


def _each(
    what: str, values: Any, count: int, kind: npt.DTypeLike = np.float64, least: float = -np.inf
) -> npt.NDArray[Any]:
    """The values of so many rows, where one value is that of all; refused unless they are what they must be."""
    try:
        found = np.broadcast_to(np.asarray(values).astype(kind, casting="same_kind"), count)
    except UNREADABLE:  # or not so many
        found = np.full(1, np.nan)
    if not (np.isfinite(found) & (found >= least)).all():
        raise QptError(f"{what}, one for all or one for each of {count}, not {values}")
    return found
