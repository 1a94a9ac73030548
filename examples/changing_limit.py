"""Deploy a policy whose cost limit changes while episodes run.

    python examples/changing_limit.py                                   # a toy road, half a minute
    python examples/changing_limit.py --task BallCircle --data embedded:ballcircle --limits 60 20 --steps 5000
    python examples/changing_limit.py --checkpoint runs/ball --limits 60 20

Three groups of episodes run side by side with one policy: the first keeps the first limit, the second is given the
other one half-way, and the third has that from the start. A limit is for the whole episode: what is spent stays spent.
"""

import argparse
from pathlib import Path

import numpy as np

import qpt
from qpt.envs.toy import tradeoff


def trained(f):
    """A policy for the task, small and briefly trained."""
    toy = tradeoff(0)
    if f.task == toy.name:
        qpt.register_task(toy.task())
    data = toy.dataset(300) if f.data is None else qpt.load_dataset(f.data)
    small = {"batch_size": 64, "context": 5, "width": 32, "layers": 1, "heads": 2, "critic_width": 64, "candidates": 16}
    method = qpt.QPTConfig(steps=f.steps, lr=1e-3, critic_lr=1e-3, warmup=50, **small)
    again = (f.out / "run.json").exists()  # a finished run is used as it is
    run = qpt.TrainConfig(task=f.task, config=method, out=f.out, device="cpu", progress=False, resume=again)
    return qpt.load_policy(qpt.train(run, data).folder)


def run(policy, task, limits, n):
    """Costs [2, 3n] of the two halves of 3n episodes, and the returns [3n]."""
    first, other = limits
    envs = [qpt.make_env(task) for _ in range(3 * n)]
    observations = np.stack([env.reset(seed=i % n)[0] for i, env in enumerate(envs)])  # the groups start alike
    policy.reset(3 * n, cost_limits=np.repeat([first, first, other], n), seeds=np.tile(np.arange(n), 3))
    costs, returns, active = np.zeros((2, 3 * n)), np.zeros(3 * n), np.ones(3 * n, bool)
    half = policy.spec.horizon // 2
    for step in range(policy.spec.horizon):
        if step == half:
            policy.set_cost_limit(other, indices=np.arange(n, 2 * n))  # the second group, from this decision on
        actions = policy.act(observations, active)  # [3n, A] in [-1, 1]
        rewards, spent = np.zeros(3 * n), np.zeros(3 * n)
        for i in np.flatnonzero(active):
            observations[i], rewards[i], terminated, truncated, info = envs[i].step(actions[i])
            spent[i], active[i] = info["cost"], not (terminated or truncated)
        policy.observe(rewards, spent)  # so that it knows what is left
        returns += rewards
        costs[int(step >= half)] += spent
        if not active.any():
            break
    for env in envs:
        env.close()
    return costs, returns


def main(args=None):
    flags = argparse.ArgumentParser()
    flags.add_argument("--checkpoint", type=Path, help="a run of yours; without one, a policy is trained first")
    flags.add_argument("--task", default="Tradeoff-0")
    flags.add_argument("--data", help="of the task; the toy brings its own")
    flags.add_argument("--limits", type=float, nargs=2, default=[30, 15], metavar=("FIRST", "OTHER"))
    flags.add_argument("--episodes", type=int, default=10, help="in each group")
    flags.add_argument("--steps", type=int, default=1000, help="of training")
    flags.add_argument("--out", type=Path, default=Path("runs/changing-limit"))
    f = flags.parse_args(args)
    policy = qpt.load_policy(f.checkpoint) if f.checkpoint else trained(f)
    costs, returns = run(policy, policy.task, f.limits, f.episodes)
    first, other = f.limits
    groups = (f"limit {first:g}", f"limit {first:g}, then {other:g}", f"limit {other:g}")
    means = np.concatenate([costs, costs.sum(0, keepdims=True), returns[None]]).reshape(4, 3, -1).mean(2).T  # [3, 4]
    for name, (early, late, whole, earned) in zip(groups, means, strict=True):
        print(f"{name:<22} cost {early:5.1f} + {late:5.1f} = {whole:5.1f}   return {earned:6.1f}")
    return means


if __name__ == "__main__":
    main()
