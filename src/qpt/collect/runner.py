"""One run: play, learn, save; from its first step or from where it was interrupted, with the same result."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.collect import spool
from qpt.collect.ppo import Batch, Learner
from qpt.collect.recorder import Rollout, play
from qpt.collect.schedules import Plan
from qpt.collect.workers import Report
from qpt.envs import make_env, one_per_process
from qpt.errors import QptError
from qpt.tasks import Task

SLOTS = (4, 32)  # learning environments of a run, at least and at most
HORIZON = 200  # assumed where a task does not tell
SNAPSHOTS = 100  # of a run, about
STATE = "state.npz"


def run(
    task: Task, plan: Plan, cap: float, folder: Path, versions: str, report: Report, until: float = math.inf
) -> None:
    """Carry out a plan, up to the time `until`; the learner is on disk before each rollout.

    Rollouts consist of whole episodes and take their randomness from (seed, run, iteration): a run that is continued
    plays the interrupted rollout again, alike.
    """
    saved = load_state(folder)
    facts: dict[str, Any] = saved[1] if saved else {"iteration": 0, "steps": 0, "times": {}, "versions": []}
    report({"steps": facts["steps"]})
    if facts["steps"] >= plan.steps or time.time() >= until:
        return
    if versions not in facts["versions"]:
        facts["versions"].append(versions)
    horizon = task.horizon or HORIZON
    learning = int(np.clip(plan.settings.batch // horizon, *SLOTS))
    quota = -(-plan.settings.batch // learning)
    envs = [make_env(task)]
    try:
        learner = Learner(plan.settings, envs[0].observation_dim, envs[0].action_dim, _cost_scale(plan, cap, horizon))
        if saved is None:
            learner.initialise(np.random.default_rng([plan.seed, plan.number]))
        else:
            learner.load(saved[0])
        if not one_per_process(task):
            envs += [make_env(task) for _ in range(learning)]
        while facts["steps"] < plan.steps and time.time() < until:
            report(_iterate(envs, learning + 1, quota, learner, plan, cap, horizon, folder, facts))
    finally:
        for env in envs:
            env.close()


def load_state(folder: Path) -> tuple[spool.Arrays, dict[str, Any]] | None:
    """The learner's last state, or None where there is none yet."""
    return spool.load(folder / STATE) if (folder / STATE).exists() else None


def _iterate(
    envs: list[Any], slots: int, quota: int, learner: Learner, plan: Plan, cap: float, horizon: int, folder: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One rollout and one update; moves `facts` on and gives what there is to say."""
    rng = np.random.default_rng([plan.seed, plan.number, 1 + facts["iteration"]])
    times, began, used = facts["times"], time.perf_counter(), time.process_time()
    actor = learner.actor()
    penalty = plan.penalty
    rollout = play(envs, slots, quota, actor, actor.std, rng, times, penalty.of if penalty else ())
    if not (np.isfinite(rollout.rewards).all() and np.isfinite(rollout.observations).all()):
        raise QptError("the environment gave a reward or an observation that is not finite; fix it before collecting")
    trained = ~rollout.mean_action
    costs = rollout.episode_costs
    cost = float(costs[trained].mean())
    steady = horizon * float(costs[trained].sum()) / int(rollout.lengths[trained].sum())
    share = min(facts["steps"] / plan.steps, 1.0)
    limit = plan.limit_at(share)
    told = {"limit": limit, "multiplier": learner.multiplier.value}
    noisy = episodes_summary(rollout.returns[trained], costs[trained], rollout.lengths[trained])
    if facts["iteration"] % max(1, round(plan.steps / (slots * quota) / SNAPSHOTS)) == 0:
        mean = ~trained
        calm = episodes_summary(rollout.returns[mean], costs[mean], rollout.lengths[mean])
        where = {"run": plan.number, "iteration": facts["iteration"], "steps": facts["steps"]}
        path = folder / "snapshots" / f"{facts['iteration']:06d}.npz"
        spool.save(path, actor.arrays(), {**where, **told, "noisy": noisy, "mean_action": calm})

    before = time.thread_time()
    batch = _batch(rollout, trained)
    if penalty is not None:  # for learning alone: what is reported are the environment's rewards
        batch.rewards = batch.rewards - penalty.at(share, rollout.watched[np.repeat(trained, rollout.lengths)])
    learned = learner.update(batch, steady if plan.settings.rate else cost, limit, cap, rng, share)
    times["learner"] = times.get("learner", 0.0) + time.thread_time() - before

    facts["iteration"] += 1
    facts["steps"] += len(rollout.rewards)
    times["wall"] = times.get("wall", 0.0) + time.perf_counter() - began
    times["cpu"] = times.get("cpu", 0.0) + time.process_time() - used
    spool.save(folder / STATE, learner.tensors(), facts)
    return {
        "progress": True, "steps": facts["steps"], "times": times, "return": noisy["return"], "cost": cost, **told,
        **learned,
    }  # fmt: skip


def episodes_summary(
    returns: npt.NDArray[np.float64], costs: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Means of episodes, and the standard deviations of their returns and costs."""
    return {
        "episodes": len(returns),
        "return": float(returns.mean()),
        "return_std": float(returns.std()),
        "cost": float(costs.mean()),
        "cost_std": float(costs.std()),
        "length": float(lengths.mean()),
    }


def _batch(rollout: Rollout, trained: Any) -> Batch:
    """The episodes to learn from: those with noise."""
    rows = np.repeat(trained, rollout.lengths)
    return Batch(
        rollout.observations[rows],
        rollout.drawn[rows],
        rollout.rewards[rows],
        rollout.costs[rows],
        rollout.terminals[rows],
        (rollout.terminals | rollout.timeouts)[rows],
        rollout.final_observations[trained],
    )


def _cost_scale(plan: Plan, cap: float, horizon: int) -> float:
    """The discounted cost of spending the cap evenly."""
    gamma = plan.settings.gamma
    return max(cap / horizon * (1 - gamma**horizon) / (1 - gamma), 1e-3)
