"""What a policy would have done at every logged step, given the logged history and the budget left under a limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qpt.algorithms.base import Context
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]


def before(data: Trajectories) -> tuple[Sums, Sums]:
    """Return earned and cost spent before each step of its episode: [N] each."""
    return data.returns[data.episode_of_step] - data.returns_to_go, data.episode_costs[
        data.episode_of_step
    ] - data.costs_to_go


def decide(policy: Any, data: Trajectories, cost_limit: float, seed: int = 0, batch: int = 256) -> Floats:
    """The policy's action at every logged step, [N, A]. Episodes have noise of their own, fixed by the seed."""
    seeds = np.random.default_rng([seed, 7]).integers(2**62, size=len(data))
    if isinstance(getattr(policy, "policy", None), Policy) and hasattr(policy, "internal_limit"):  # a calibrated one
        policy, cost_limit = policy.policy, float(policy.internal_limit(cost_limit))
    if isinstance(policy, Policy):
        return _from_windows(policy, data, cost_limit, seeds, batch)
    return _in_lock_step(policy, data, cost_limit, seeds)


def _from_windows(
    policy: Policy, data: Trajectories, cost_limit: float, seeds: npt.NDArray[np.int64], batch: int
) -> Floats:
    """Windows of the logged history, many at once; the same numbers as asking step by step."""
    policy.reset(1, cost_limits=[cost_limit])
    target, k = float(policy.return_targets[0]), policy.method.context
    device = next(iter(policy.method.state_dict().values())).device
    earned, spent = before(data)
    actions = np.empty((data.steps, data.action_dim), np.float32)
    policy.method.eval()
    for first in range(0, data.steps, batch):
        rows = np.arange(first, min(first + batch, data.steps))
        step = data.step_in_episode[rows]
        last = np.minimum(step, k - 1)
        index = (rows - last)[:, None] + np.arange(k)  # [B, K]
        known = np.arange(k) <= last[:, None]
        index = np.where(known, index, rows[:, None])

        def gather(values: npt.NDArray[Any], known: Any = known, index: Any = index) -> torch.Tensor:
            part = values[index]
            part = np.where(known.reshape(known.shape + (1,) * (part.ndim - 2)), part, 0)
            return torch.from_numpy(part.astype(np.float32)).to(device, policy.dtype)

        past = gather(data.actions)
        at = torch.arange(len(rows), device=device)
        place = torch.from_numpy(last).to(device)
        past[at, place] = 0  # not taken yet
        steps = np.where(known, np.minimum(data.step_in_episode[index], policy.spec.horizon - 1), 0)
        full = torch.full((len(rows),), 1.0, dtype=policy.dtype, device=device)
        context = Context(
            gather(data.observations),
            past,
            target - gather(earned),
            cost_limit - gather(spent),
            torch.from_numpy(steps).to(device),
            place,
            full * target,
            full * cost_limit,
            torch.from_numpy(seeds[data.episode_of_step[rows]]).to(device),
        )
        with torch.no_grad():
            actions[rows] = policy.method.act(context).actions.clamp(-1, 1).float().cpu().numpy()
    return _checked(actions, data)


def _in_lock_step(policy: Any, data: Trajectories, cost_limit: float, seeds: npt.NDArray[np.int64]) -> Floats:
    """Any policy with the interface of evaluation: all episodes side by side, told what was logged."""
    n = len(data)
    policy.reset(n, cost_limits=np.full(n, float(cost_limit)), seeds=seeds)
    actions = np.zeros((data.steps, data.action_dim), np.float32)
    for step in range(int(data.lengths.max())):
        active = step < data.lengths
        rows = np.where(active, data.offsets[:-1] + step, 0)
        seen = np.where(active[:, None], data.observations[rows], np.float32(0))
        chosen = np.asarray(policy.act(seen, active), np.float32)
        if chosen.shape != (n, data.action_dim):
            raise QptError(
                f"the policy gives actions of shape {list(chosen.shape)}, but the data have {data.action_dim} columns"
            )
        actions[rows[active]] = np.clip(chosen[active], -1, 1)
        policy.observe(np.where(active, data.rewards[rows], 0.0), np.where(active, data.costs[rows], 0.0))
    return _checked(actions, data)


def _checked(actions: Floats, data: Trajectories) -> Floats:
    bad = ~np.isfinite(actions).all(axis=1)
    if bad.any():
        raise QptError(
            f"the policy gives an action that is not finite, at step {data.step_in_episode[int(np.argmax(bad))]} of a "
            "logged episode; judge an earlier checkpoint, or train it again"
        )
    return actions
