"""Trajectories: logged episodes as flat read-only arrays, cut by episode offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.data.checks import as_array, as_flags, as_floats, check_continuous
from qpt.errors import QptError

Array = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Complete episodes, one after the other. Make them with `from_arrays` or `qpt.load_dataset`, which check them.

    Step i belongs to episode e where offsets[e] <= i < offsets[e + 1]. An episode ends by a terminal (the task is over;
    no value follows) or by a timeout (cut off; the future would have gone on). `final_observations[e]` is what was seen
    after the last action of episode e, so that next_observations need not be stored.
    """

    observations: Array  # [N, S]
    actions: Array  # [N, A]
    rewards: Array  # [N]
    costs: Array  # [N]
    terminals: Flags  # [N]
    timeouts: Flags  # [N]
    offsets: Index  # [E + 1]
    final_observations: Array  # [E, S]
    info: Mapping[str, Any] = field(default_factory=dict)  # provenance: source, note, surrogate, what was dropped

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @classmethod
    def from_arrays(
        cls,
        observations: npt.ArrayLike,
        actions: npt.ArrayLike,
        rewards: npt.ArrayLike,
        costs: npt.ArrayLike,
        terminals: npt.ArrayLike,
        timeouts: npt.ArrayLike | None = None,
        *,
        next_observations: npt.ArrayLike | None = None,
        final_observations: npt.ArrayLike | None = None,
        action_bound: float | None = 1.0,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectories:
        """Check flat arrays of steps and cut them into episodes at `terminals | timeouts`.

        Rows after the last flag are an unfinished episode and are dropped, as DSRL does; `info["dropped_steps"]` counts
        them. Without next or final observations, the last observation of an episode stands in for the one after it.
        """
        if action_bound is not None and not action_bound > 0:
            raise QptError(f"action_bound, the largest size of an action, must be above 0, not {action_bound:g}")
        actions = as_array("actions", actions)
        check_continuous(actions.dtype)
        obs = as_floats("observations", observations, 2)
        act = as_floats("actions", actions, 2)
        rew = as_floats("rewards", rewards, 1)
        cost = as_floats("costs", costs, 1)
        term = as_flags("terminals", terminals)
        tout = np.zeros_like(term) if timeouts is None else as_flags("timeouts", timeouts)
        n = len(obs)
        if n == 0:
            raise QptError("the data hold no steps; give at least one complete episode")
        for name, array in (
            ("actions", act),
            ("rewards", rew),
            ("costs", cost),
            ("terminals", term),
            ("timeouts", tout),
        ):
            if len(array) != n:
                raise QptError(f"{name} has {len(array)} rows but observations has {n}; every key needs one row a step")
        if obs.shape[1] == 0 or act.shape[1] == 0:
            raise QptError("observations and actions need at least one column each")
        if cost.min() < 0:
            raise QptError(
                f"costs must not be negative, but row {int(cost.argmin())} holds {cost.min():g}; "
                "a cost is what a limit bounds"
            )
        if action_bound is not None:
            largest = np.abs(act).max()
            if largest > action_bound * (1 + 1e-4):
                raise QptError(
                    f"actions must lie in [-{action_bound:g}, {action_bound:g}], but the largest magnitude is "
                    f"{largest:g}; rescale them, and remember the scale for deployment"
                )
        done = term | tout
        ends = np.flatnonzero(done)
        if len(ends) == 0:
            raise QptError(
                "no episode is complete: no row of terminals or timeouts is set; mark the last step of each episode"
            )
        kept = int(ends[-1]) + 1
        offsets = np.concatenate([[0], ends + 1]).astype(np.int64)
        extra: dict[str, Any] = dict(info or {})
        if kept < n:
            extra["dropped_steps"] = n - kept
        if final_observations is not None:
            final = as_floats("final_observations", final_observations, 2)
            if len(final) not in (len(ends), len(ends) + (kept < n)):
                raise QptError(f"final_observations has {len(final)} rows but there are {len(ends)} episodes")
            final = final[: len(ends)]
        elif next_observations is not None:
            final, differing = _finals("next_observations", next_observations, obs, done)
            if differing:
                extra["next_observations"] = (
                    f"{differing} rows differ from the observation of the step that follows; the latter are used"
                )
        else:
            final = obs[ends].copy()
            extra["final_observations"] = "missing: the last observation of each episode stands in"
        if final.shape[1] != obs.shape[1]:
            raise QptError(
                f"observations have {obs.shape[1]} columns but the observations after them have {final.shape[1]}"
            )
        return cls(obs[:kept], act[:kept], rew[:kept], cost[:kept], term[:kept], tout[:kept], offsets, final, extra)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        return len(self.observations)

    @property
    def observation_dim(self) -> int:
        return int(self.observations.shape[1])

    @property
    def action_dim(self) -> int:
        return int(self.actions.shape[1])

    @cached_property
    def lengths(self) -> Index:
        return np.diff(self.offsets)

    @cached_property
    def episode_of_step(self) -> Index:
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def step_in_episode(self) -> Index:
        return np.arange(self.steps) - self.offsets[:-1][self.episode_of_step]

    # -- returns and costs ---------------------------------------------------------------------------------------------

    @cached_property
    def returns(self) -> npt.NDArray[np.float64]:
        """Undiscounted return of each episode, summed in float64."""
        return np.add.reduceat(self.rewards.astype(np.float64), self.offsets[:-1])

    @cached_property
    def episode_costs(self) -> npt.NDArray[np.float64]:
        """Undiscounted cost of each episode, summed in float64."""
        return np.add.reduceat(self.costs.astype(np.float64), self.offsets[:-1])

    @cached_property
    def returns_to_go(self) -> Array:
        """Sum of the rewards from each step to the end of its episode."""
        return self._to_go(self.rewards)

    @cached_property
    def costs_to_go(self) -> Array:
        """Sum of the costs from each step to the end of its episode."""
        return self._to_go(self.costs)

    def _to_go(self, values: Array) -> Array:
        # One cumulative sum over all steps; what lies before a step is taken from the sum at the end of its episode.
        total = np.cumsum(values, dtype=np.float64)
        before = np.concatenate([[0.0], total[:-1]])
        to_go: Array = (total[self.offsets[1:] - 1][self.episode_of_step] - before).astype(np.float32)
        return to_go

    def next_observations(self) -> Array:
        """What was observed after each step, as DSRL stores it (a copy)."""
        following = np.empty_like(self.observations)
        following[:-1] = self.observations[1:]
        following[self.offsets[1:] - 1] = self.final_observations
        return following

    # -- parts ---------------------------------------------------------------------------------------------------------

    def select(self, episodes: npt.ArrayLike) -> Trajectories:
        """The given episodes (indices or a mask), in the given order."""
        index = np.atleast_1d(np.asarray(episodes))
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise QptError(f"the mask has {index.size} entries for {len(self)} episodes")
            index = np.flatnonzero(index)
        if index.size == 0:
            raise QptError("no episode is left in the selection; loosen it")
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise QptError("episodes are selected by a list of whole numbers or by a mask")
        index = index.astype(np.int64)
        wrong = index[(index < -len(self)) | (index >= len(self))]
        if len(wrong):
            raise QptError(f"there are {len(self)} episodes, numbered from 0; {wrong[0]} is none of them")
        index = index % len(self)  # -1 is the last, as in a list
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        rows = np.repeat(self.offsets[index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Trajectories(
            self.observations[rows],
            self.actions[rows],
            self.rewards[rows],
            self.costs[rows],
            self.terminals[rows],
            self.timeouts[rows],
            offsets,
            self.final_observations[index],
            # a list with one entry an episode goes along
            {
                k: [v[i] for i in index] if isinstance(v, list) and len(v) == len(self) else v
                for k, v in self.info.items()
            },
        )

    def split(self, fraction: float, seed: int = 0) -> tuple[Trajectories, Trajectories]:
        """Two disjoint random parts by episode; the first holds `fraction` of them (at least one each)."""
        if len(self) < 2:
            raise QptError("a split needs at least two episodes")
        if not 0 < fraction < 1:
            raise QptError(f"the fraction of a split lies between 0 and 1, not {fraction:g}")
        if seed < 0:
            raise QptError(f"a seed is a whole number of at least 0, not {seed}")
        order = np.random.default_rng(seed).permutation(len(self))
        first = min(max(round(fraction * len(self)), 1), len(self) - 1)
        return self.select(np.sort(order[:first])), self.select(np.sort(order[first:]))

    @classmethod
    def concatenate(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """All episodes of the parts, one after the other."""
        if not parts:
            raise QptError("nothing to concatenate")
        if len({(p.observation_dim, p.action_dim) for p in parts}) > 1:
            raise QptError("the parts differ in the size of observations or actions")
        shifts = np.cumsum([0, *(p.steps for p in parts)])
        offsets = np.concatenate([[0], *(p.offsets[1:] + s for p, s in zip(parts, shifts, strict=False))])
        return cls(
            observations=np.concatenate([p.observations for p in parts]),
            actions=np.concatenate([p.actions for p in parts]),
            rewards=np.concatenate([p.rewards for p in parts]),
            costs=np.concatenate([p.costs for p in parts]),
            terminals=np.concatenate([p.terminals for p in parts]),
            timeouts=np.concatenate([p.timeouts for p in parts]),
            offsets=offsets.astype(np.int64),
            final_observations=np.concatenate([p.final_observations for p in parts]),
            info=_joined(parts),
        )

    # -- what a limit allows -------------------------------------------------------------------------------------------

    def reward_frontier(self, cost_limits: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """RF(κ): the highest return among episodes with cost <= κ, for each κ; -inf where there is none."""
        order = np.argsort(self.episode_costs, kind="stable")
        best = np.maximum.accumulate(self.returns[order])
        limits = np.asarray(cost_limits, np.float64)
        count = np.searchsorted(self.episode_costs[order], limits, side="right")
        return np.where((count > 0) & ~np.isnan(limits), best[np.maximum(count - 1, 0)], -np.inf)

    def best_safe_episode(self, cost_limit: float) -> int | None:
        """The index of the episode with the highest return among those with cost <= limit; None if there is none."""
        safe = np.flatnonzero(self.episode_costs <= cost_limit)
        return int(safe[np.argmax(self.returns[safe])]) if len(safe) else None

    def pareto_episodes(self) -> Index:
        """Episodes that no other beats in both return and cost, by rising cost."""
        return pareto(self.returns, self.episode_costs)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def statistics(self, cost_limits: Sequence[float] = (10.0, 20.0, 40.0)) -> dict[str, Any]:
        """The numbers of `qpt data info`."""
        frontier = self.reward_frontier(cost_limits)
        return {
            "episodes": len(self),
            "steps": self.steps,
            "observation_dim": self.observation_dim,
            "action_dim": self.action_dim,
            "length": _spread(self.lengths),
            "return": _spread(self.returns),
            "cost": _spread(self.episode_costs),
            "ended_by_terminal": float(self.terminals[self.offsets[1:] - 1].mean()),
            "limits": [
                {
                    "cost_limit": float(limit),
                    "share_within": float((self.episode_costs <= limit).mean()),
                    "best_safe_return": None if np.isneginf(best) else float(best),
                }
                for limit, best in zip(cost_limits, frontier, strict=True)
            ],
            **({"surrogate": True} if self.is_surrogate else {}),
        }

    @property
    def is_surrogate(self) -> bool:
        """Whether the file says that it stands in for published data; such results must not pass for DSRL's."""
        return bool(self.info.get("surrogate", False))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the data themselves, so that a run is resumed with the data it began with."""
        digest = hashlib.sha256()
        for name in (
            "observations",
            "actions",
            "rewards",
            "costs",
            "terminals",
            "timeouts",
            "offsets",
            "final_observations",
        ):
            digest.update(np.ascontiguousarray(getattr(self, name)).view(np.uint8).data)
        return digest.hexdigest()[:32]


def pareto(returns: npt.NDArray[Any], costs: npt.NDArray[Any]) -> Index:
    """Episodes that no other beats in both return and cost, by rising cost."""
    order = np.lexsort((-returns, costs))
    ordered = returns[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ordered)[:-1]])
    return order[ordered > before].astype(np.int64)


def _spread(values: npt.NDArray[Any]) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}


def _joined(parts: Sequence[Trajectories]) -> dict[str, Any]:
    # What all parts agree on, every note, and one surrogate makes the whole a surrogate.
    first = parts[0].info
    info = {
        k: v for k, v in first.items() if all(k in p.info and p.info[k] == v for p in parts) and not isinstance(v, list)
    }
    for key in {k for p in parts for k, v in p.info.items() if isinstance(v, list)}:  # lists with one entry an episode
        lists = [p.info.get(key) for p in parts]
        if all(isinstance(v, list) and len(v) == len(p) for v, p in zip(lists, parts, strict=True)):
            info[key] = [item for v in lists for item in v or ()]
    for key in ("source", "note"):
        values = dict.fromkeys(str(p.info[key]) for p in parts if key in p.info)
        if values:
            info[key] = "; ".join(values)
    if any(p.is_surrogate for p in parts):
        info["surrogate"] = True
    return info


def _finals(
    name: str, following: npt.ArrayLike, observations: Array, done: Flags, block: int = 2**20
) -> tuple[Array, int]:
    """The rows of next_observations at the ends of episodes, and how many others are not the next row's observation.

    Goes by blocks, so that an array that still lies on disk is never in memory as a whole.
    """
    source: Any = following if hasattr(following, "shape") else as_array(name, following)
    if source.shape != observations.shape:
        raise QptError(
            f"{name} has shape {list(source.shape)} but observations has {list(observations.shape)}; they must be equal"
        )
    finals, differing = [], 0
    for start in range(0, len(observations), block):
        ends = done[start : start + block]
        rows = as_floats(name, source[start : start + block], 2, first_row=start)
        finals.append(rows[ends])
        expected = observations[start + 1 : start + 1 + len(rows)]
        differing += int((~ends[: len(expected)] & (rows[: len(expected)] != expected).any(axis=1)).sum())
    return np.concatenate(finals), differing
