"""Deployment: a policy for n episodes that run side by side, with a cost limit that can change at any step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qpt.algorithms.base import Algorithm, Context, Decision
from qpt.checkpoint import load_algorithm, resolve
from qpt.errors import QptError

Floats = npt.NDArray[np.float32]


class Policy:
    """Decides for n parallel episodes that may start and end at different times.

    A step is `actions = act(observations)`, then `observe(rewards, costs)` with what came of it. `set_cost_limit` takes
    effect at the next `act`; it limits the whole episode, so cost-to-go becomes the limit minus what is spent already.
    """

    def __init__(
        self,
        method: Algorithm,
        *,
        trained_limit: float | None = None,
        past_horizon: Literal["error", "clamp"] = "error",
        dtype: torch.dtype = torch.float32,
        name: str = "",
        checkpoint: str = "",
    ) -> None:
        self.method, self.spec, self.limit_mode = method, method.spec, method.limit_mode
        self.algorithm, self.checkpoint, self.task = name, checkpoint, self.spec.task  # names, for results
        self.trained_limit, self.past_horizon, self.dtype = trained_limit, past_horizon, dtype
        self.observation_dim, self.action_dim = self.spec.observation_dim, self.spec.action_dim
        self.count = 0
        self._away: _Away | None = None  # on another device than the host: how to decide there

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
        self.count, k = n, self.method.context
        self._device = next(iter(self.method.state_dict().values())).device

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:  # on the host, whatever device decides
            return torch.zeros(n, *shape, dtype=dtype)

        self._observations, self._actions = zeros(k, self.observation_dim), zeros(k, self.action_dim)
        self._earned, self._spent = zeros(k), zeros(k)  # before each step of the window
        self._steps = zeros(k, dtype=torch.long)
        self._step = np.zeros(n, np.int64)  # steps taken so far
        self._limits, self._targets, self._fixed = np.zeros(n), np.zeros(n), np.zeros(n, bool)
        self._seeds = np.zeros(n, np.int64)
        self._return, self._cost = np.zeros(n), np.zeros(n)
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._decisions = np.zeros(n, np.int64)
        self._acted: npt.NDArray[np.bool_] | None = None
        if cost_limits is None and self.limit_mode == "live":
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
        self._step[rows] = self._return[rows] = self._cost[rows] = self._decisions[rows] = 0
        for values in self._sums.values():
            values[rows] = 0
        if self._acted is not None:
            self._acted[rows] = False
        for window in (self._observations, self._actions, self._earned, self._spent, self._steps):
            window[torch.from_numpy(rows)] = 0
        if seeds is not None:
            self._seeds[rows] = np.asarray(seeds)
        if return_targets is not None:
            self._targets[rows], self._fixed[rows] = np.asarray(return_targets, float), True
        if cost_limits is None and self.trained_limit is not None and not self._limits[rows].any():
            cost_limits = self.trained_limit
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
        self._limits[rows] = limits
        for row, limit in zip(rows, limits, strict=True):
            if not self._fixed[row]:
                self._targets[row] = self._suggest(float(limit))

    def _suggest(self, limit: float) -> float:
        suggest = getattr(self.method, "suggest_return", self.spec.suggest_return)  # a method may know better targets
        return float(suggest(limit)) * float(getattr(self.method.config, "target_factor", 1.0))

    # -- one step ------------------------------------------------------------------------------------------------------

    def act(self, observations: npt.ArrayLike, active: npt.ArrayLike | None = None) -> Floats:
        """Actions of all rows [n, A]; rows that are not active do not move on and get zeros."""
        if self.count == 0:
            raise QptError("call reset(n) before act")
        seen = np.asarray(observations, np.float64 if self.dtype == torch.float64 else np.float32)
        if seen.shape != (self.count, self.observation_dim):
            raise QptError(
                f"act needs observations of shape [{self.count}, {self.observation_dim}], not {list(seen.shape)}"
            )
        running = np.ones(self.count, bool) if active is None else np.asarray(active, bool)
        if not np.isfinite(seen[running]).all():
            raise QptError("an observation holds NaN or infinite values; the policy cannot decide on it")
        if self._acted is not None and (self._acted & running).any():
            raise QptError("observe(rewards, costs) must follow act before the next act")
        if self.past_horizon == "error" and (self._step[running] >= self.spec.horizon).any():
            raise QptError(
                f"an episode is past the horizon of {self.spec.horizon} steps that the policy was trained for; "
                "restart it, or load the policy with past_horizon='clamp'"
            )
        context = self._advance(torch.from_numpy(seen), running)
        if self.method.training:
            self.method.eval()
        with torch.no_grad():
            decision = self._decide(context)
            actions = decision.actions.clamp(-1, 1)
        move, at = torch.from_numpy(running), torch.arange(self.count)
        self._actions[at, context.last] = torch.where(move[:, None], actions, self._actions[at, context.last])
        for name, values in decision.diagnostics.items():
            self._sums.setdefault(name, np.zeros(self.count))[running] += values.double().numpy()[running]
        self._decisions[running] += 1
        self._acted = running
        return np.where(running[:, None], actions.float().numpy(), 0).astype(np.float32)

    def _advance(self, seen: Tensor, running: npt.NDArray[np.bool_]) -> Context:
        """Move the windows of running rows on by one step: a full window loses its oldest step."""
        k = self.method.context
        full = running & (self._step >= k)
        if full.any():
            rows = torch.from_numpy(np.flatnonzero(full))
            for window in (self._observations, self._actions, self._earned, self._spent, self._steps):
                window[rows, :-1] = window[rows, 1:]
        last = torch.from_numpy(np.minimum(self._step, k - 1))
        rows = torch.from_numpy(np.flatnonzero(running))
        place = last[rows]
        self._observations[rows, place] = seen[rows]
        self._actions[rows, place] = 0
        self._earned[rows, place] = torch.from_numpy(self._return[running]).to(self.dtype)
        self._spent[rows, place] = torch.from_numpy(self._cost[running]).to(self.dtype)
        step = np.minimum(self._step, self.spec.horizon - 1)
        self._steps[rows, place] = torch.from_numpy(step[running])
        targets = torch.from_numpy(self._targets).to(self.dtype)
        limits = torch.from_numpy(self._limits).to(self.dtype)
        return Context(
            self._observations,
            self._actions,
            targets[:, None] - self._earned,
            limits[:, None] - self._spent,
            self._steps,
            last,
            targets,
            limits,
            torch.from_numpy(self._seeds),
        )

    def _decide(self, context: Context) -> Decision:
        if self._device.type == "cpu":
            return self.method.act(context)
        key = (self.count, self.method.config)
        if self._away is None or self._away.key != key:
            self._away = _Away(key, self.method, self._device, context)
        return self._away.act(context)

    def observe(self, rewards: npt.ArrayLike, costs: npt.ArrayLike) -> None:
        """What the last actions brought, for the rows that were active in them."""
        if self._acted is None:
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
    def cost_limits(self) -> npt.NDArray[np.float64]:
        return self._limits.copy()

    @property
    def return_targets(self) -> npt.NDArray[np.float64]:
        return self._targets.copy()

    @property
    def spent(self) -> npt.NDArray[np.float64]:
        """Cost of each running episode so far."""
        return self._cost.copy()

    def diagnostics(self) -> dict[str, npt.NDArray[np.float64]]:
        """Means over the running episodes' decisions; `fallback_share` is how often no candidate was feasible."""
        count = np.maximum(self._decisions, 1)
        return {("fallback_share" if k == "fallback" else k): v / count for k, v in self._sums.items()}

    def _rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        rows = np.atleast_1d(np.asarray(indices))
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.count):
            raise QptError(f"there are {self.count} episodes; row {int(rows.max())} does not exist")
        return rows


class _Away:
    """Decisions on a GPU: one copy there, one copy back, and between them from the second on one captured graph."""

    def __init__(self, key: Any, method: Algorithm, device: torch.device, like: Context) -> None:
        self.key, self.method, self.device = key, method, device
        given = [x for x in like if x is not None]
        sizes = [-(-x.numel() * x.element_size() // 16) * 16 for x in given]  # aligned
        self._here = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty_like(self._here, device=device)

        def views(buffer: Tensor) -> list[Tensor]:
            parts = zip(torch.split(buffer, sizes), given, strict=True)
            return [part[: x.numel() * x.element_size()].view(x.dtype).view(x.shape) for part, x in parts]

        self._fields, self._context = views(self._here), Context(*views(self._there))
        self._graph: Any = None
        self._calls = 0

    def act(self, context: Context) -> Decision:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._act(context)

    def _act(self, context: Context) -> Decision:
        for field, value in zip(self._fields, context, strict=False):  # the caller draws no noise here
            field.copy_(value)  # type: ignore[arg-type]
        self._there.copy_(self._here, non_blocking=True)
        self._calls += 1
        if self._calls == 1 or self.device.type != "cuda":  # the first plainly: libraries set themselves up
            self._result = self._packed()
        elif self._graph is None:
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(self._graph, stream=stream):  # torch's own would be of the GPU that it first saw
                self._result = self._packed()
        if self._graph is not None:
            self._graph.replay()
        rows = self._result.cpu()  # [n, A + diagnostics]
        width = rows.shape[1] - len(self._names)
        return Decision(rows[:, :width], {name: rows[:, width + i] for i, name in enumerate(self._names)})

    def _packed(self) -> Tensor:
        decision = self.method.act(self._context)
        self._names = list(decision.diagnostics)
        columns = [x[:, None].to(decision.actions.dtype) for x in decision.diagnostics.values()]
        return torch.cat([decision.actions, *columns], 1)


def load_policy(
    path: str | Path,
    *,
    which: Literal["last", "best"] = "last",
    device: str = "cpu",
    past_horizon: Literal["error", "clamp"] = "error",
    **settings: Any,
) -> Policy:
    """The policy of a checkpoint or run folder; settings replace fields of its config (e.g. candidates=10)."""
    folder = resolve(path, which)
    algorithm, manifest = load_algorithm(folder, device)
    if settings:
        from dataclasses import replace

        try:
            algorithm.config = replace(algorithm.config, **settings)
        except TypeError as error:
            raise QptError(f"the {manifest['algorithm']} policy has no such setting: {error}") from error
        free = getattr(algorithm, "deciding", set(settings))  # a method of one's own need not say
        if fixed := sorted(set(settings) - free):
            raise QptError(
                f"the {manifest['algorithm']} policy was trained with its {', '.join(fixed)}, which cannot change now; "
                f"what can: {', '.join(sorted(free)) or 'nothing'}"
            )
    limit = getattr(algorithm.config, "cost_limit", None)
    return Policy(
        algorithm, trained_limit=limit, past_horizon=past_horizon, name=manifest["algorithm"], checkpoint=str(folder)
    )
