"""From a log of your own to a policy and the limit to give it, without any simulator.

    python examples/logs_to_policy.py                       # half a minute
    python examples/logs_to_policy.py --steps 5000 --judge-steps 3000 --episodes 1000

The log is a CSV of a battery that operators charged for an hour at a time: ampere hours are rewarded, every minute
above 40 degrees costs 1. For a log of yours, leave out `write_log` and change `read`.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

import qpt
from qpt.ope import judge


def charge(rng, decide, minutes=60):
    """The process behind the log. Nobody below asks it for more, but for the last line of all."""
    air = battery = rng.uniform(18, 22)
    for minute in range(minutes):
        ampere = float(np.clip(decide(minute, battery, air), 0, 100))
        before, battery = battery, battery + ampere**2 / 2500 - 0.1 * (battery - air) + rng.normal(0, 0.2)
        yield before, air, ampere, ampere / 60, float(battery > 40)


def write_log(path, episodes):
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["episode", "battery", "air", "ampere", "charge", "hot"])
        for episode in range(episodes):
            wish, until = rng.uniform(36, 54), rng.integers(60)  # an operator allows this many degrees, for a while

            def decide(minute, battery, _, wish=wish, until=until):
                return 50 + 12 * ((wish if minute < until else 37) - battery) + rng.normal(0, 8)

            log.writerows((episode, *row) for row in charge(rng, decide))


def read(path):
    log = np.genfromtxt(path, delimiter=",", names=True)
    last = np.append(np.diff(log["episode"]) != 0, True)
    return qpt.Trajectories.from_arrays(
        observations=np.stack([log["battery"], log["air"]], axis=1),
        actions=log["ampere"][:, None] / 50 - 1,  # 0 to 100 ampere become -1 to 1
        rewards=log["charge"],
        costs=log["hot"],
        terminals=np.zeros(len(last)),
        timeouts=last,  # the hour is over: cut off, not ended
    )


def main(args=None):
    flags = argparse.ArgumentParser()
    flags.add_argument("--out", type=Path, default=Path("runs/logs-to-policy"))
    flags.add_argument("--episodes", type=int, default=300, help="in the log")
    flags.add_argument("--steps", type=int, default=600, help="of training")
    flags.add_argument("--judge-steps", type=int, default=500)
    flags.add_argument("--budget", type=float, default=20.0, help="hot minutes that an hour may have, on average")
    flags.add_argument("--limits", type=float, nargs="+", default=[5, 10, 15, 20, 30])
    f = flags.parse_args(args)

    f.out.mkdir(parents=True, exist_ok=True)
    write_log(f.out / "log.csv", f.episodes)
    train, held_out = read(f.out / "log.csv").split(0.7, seed=0)  # a policy is judged on what it has not seen

    small = {"batch_size": 64, "context": 5, "width": 32, "layers": 1, "heads": 2, "critic_width": 64, "candidates": 16}
    method = qpt.QPTConfig(steps=f.steps, lr=1e-3, critic_lr=1e-3, warmup=50, **small)
    again = (f.out / "run" / "run.json").exists()  # a finished run is used as it is
    run = qpt.TrainConfig(config=method, out=f.out / "run", device="cpu", progress=False, resume=again)
    policy = qpt.load_policy(qpt.train(run, train).folder)

    judged = judge(policy, held_out, f.limits, steps=f.judge_steps, members=5)
    judged.save(f.out / "run" / "judge.json")
    for x in judged.limits:
        cost, ahead = "{:.1f} [{:.1f}, {:.1f}]".format(x.expected_cost, *x.cost_interval), x.expected_return
        print(f"limit {x.cost_limit:g}: expected return {ahead:.1f}, cost {cost} {x.warning}")
    # Of the limits whose cost is within the budget even at the upper end of the interval, the one that earns most.
    fit = [x for x in judged.limits if x.cost_interval[1] <= f.budget and not x.warning]
    if not fit:
        print(f"no limit is sure to keep {f.budget:g}; log more, train longer, or ask for lower limits")
        return None
    chosen = max(fit, key=lambda x: x.expected_return).cost_limit
    print(f"chosen: limit {chosen:g}")

    costs = []  # what you cannot see without the process: was the choice good?
    for episode in range(20):
        policy.reset(1, cost_limits=chosen, seeds=episode)
        for row in charge(np.random.default_rng(9000 + episode), lambda _, *seen: 50 + 50 * policy.act([seen])[0, 0]):
            policy.observe([row[3]], [row[4]])
        costs.append(policy.spent[0])
    print(f"in 20 real hours: cost {np.mean(costs):.1f} on average, for a budget of {f.budget:g}")
    return chosen, float(np.mean(costs))


if __name__ == "__main__":
    main()
