"""One run: play, record, learn, save; from its first step or from where it was interrupted, with the same result."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qpt.collect.ppo import Batch, Learner
from qpt.collect.recorder import Rollout, play
from qpt.collect.schedules import Plan
from qpt.collect.spool import append, load_state, save_state, summary
from qpt.envs import make_env, one_per_process
from qpt.errors import QptError
from qpt.tasks import Task

Report = Callable[[dict[str, Any]], None]
SLOTS = (4, 32)  # learning environments of a run, at least and at most
HORIZON = 200  # assumed where a task does not tell


def run(task: Task, plan: Plan, cap: float, folder: Path, report: Report) -> None:
    """Carry out a plan. A rollout is on disk before it is learned from, the learner before the next rollout.

    Rollouts consist of whole episodes and take their randomness from (seed, run, iteration): a run that is continued
    plays the interrupted rollout again, alike.
    """
    horizon = task.horizon or HORIZON
    learning = int(np.clip(plan.settings.batch // horizon, *SLOTS))
    quota = -(-plan.settings.batch // learning)
    envs = [make_env(task)]
    try:
        learner = Learner(plan.settings, envs[0].observation_dim, envs[0].action_dim, _cost_scale(plan, cap, horizon))
        facts: dict[str, Any] = {"iteration": 0, "steps": 0, "times": {}}
        saved = load_state(folder)
        if saved is None:
            learner.initialise(np.random.default_rng([plan.seed, plan.number]))
        else:
            learner.load(saved[0])
            facts = saved[1]
        report({"steps": facts["steps"], "times": facts["times"], "episodes": summary(folder)})
        if facts["steps"] < plan.steps and not one_per_process(task):
            envs += [make_env(task) for _ in range(learning)]
        while facts["steps"] < plan.steps:
            report(_iterate(envs, learning + 1, quota, learner, plan, cap, horizon, folder, facts))
    finally:
        for env in envs:
            env.close()


def _iterate(
    envs: list[Any], slots: int, quota: int, learner: Learner, plan: Plan, cap: float, horizon: int, folder: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One rollout and one update; moves `facts` on and gives what there is to say."""
    rng = np.random.default_rng([plan.seed, plan.number, 1 + facts["iteration"]])
    times, began = facts["times"], time.perf_counter()
    actor = learner.actor()
    penalty = plan.penalty
    rollout = play(envs, slots, quota, actor, actor.std, rng, times, penalty.of if penalty else ())
    if not (np.isfinite(rollout.rewards).all() and np.isfinite(rollout.observations).all()):
        raise QptError("the environment gave a reward or an observation that is not finite; mend it before collecting")
    kept = append(folder, facts["iteration"], rollout, cap)

    trained = ~rollout.mean_action
    costs, returns = rollout.episode_costs, rollout.returns
    cost = float(costs[trained].mean())
    steady = horizon * float(costs[trained].sum()) / int(rollout.lengths[trained].sum())
    share = min(facts["steps"] / plan.steps, 1.0)
    limit = plan.limit_at(share)
    before = time.thread_time()
    batch = _batch(rollout, trained)
    if penalty is not None:  # for learning alone: the recorded rewards are the environment's
        batch.rewards = batch.rewards - penalty.at(share, rollout.watched[np.repeat(trained, rollout.lengths)])
    learned = learner.update(batch, steady if plan.settings.rate else cost, limit, cap, rng, share)
    times["learner"] = times.get("learner", 0.0) + time.thread_time() - before
    times["wall"] = times.get("wall", 0.0) + time.perf_counter() - began

    facts["iteration"] += 1
    facts["steps"] += len(rollout.rewards)
    save_state(folder, learner.tensors(), facts)
    return {
        "steps": facts["steps"],
        "times": times,
        "return": float(returns[trained].mean()),
        "cost": cost,
        "limit": limit,
        **learned,
        "episodes": list(
            zip(returns[kept].tolist(), costs[kept].tolist(), rollout.lengths[kept].tolist(), strict=True)
        ),
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
