"""The proof on tiny CMDPs with a known optimum: QPT beside imitation and the plain conditional transformer.

    python benchmarks/toy.py [--instances 20] [--workers N] [--methods ...] [--set FIELD=VALUE ...] [--json FILE]

Every random instance of `qpt.envs.toy` is logged once; all methods learn from the same episodes with the same number
of steps and learning rate, cloning from 256 single steps a batch and both transformers, whose sizes are the same
(`SHARED`), from 64 windows of 4. They are evaluated at the instance's own limits, which bind. Numbers are shares of the
exact optimum from the same starts: of the best return when no episode costs more than the limit. Prints one line a run
as it ends, then a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: a second thread only waits

import numpy as np
import torch

from qpt.algorithms.base import Spec, algorithm_classes
from qpt.algorithms.bc import BCConfig
from qpt.algorithms.qpt_config import QPTConfig
from qpt.envs import toy as toys
from qpt.envs.toy import OraclePolicy, Toy
from qpt.evaluation import evaluate
from qpt.policy import Policy

KINDS = ("stitching", "tradeoff")
METHODS = ("bc-all", "bc-safe", "transformer", "qpt")
EPISODES = 300  # logged in an instance

STEPS, LR, WIDTH = 4000, 1e-3, 128
SHARED: dict[str, Any] = {  # of both transformers
    "steps": STEPS,
    "batch_size": 64,
    "context": 4,
    "history": 1,  # the states are Markov; a past only tells whose way was followed, and nobody's way is the best
    "width": 32,
    "layers": 1,
    "heads": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "lr": LR,
    "warmup": 100,
    "decay": 0.5,
}
QPT: dict[str, Any] = {  # what the plain transformer has no use for
    "critic_lr": LR,
    "critic_width": WIDTH,
    "critic_ema": 0.95,
    "n_step": 1,  # the best way is no logged one: sums of logged steps would mix in what follows a bad choice
    "reward_expectile": 0.98,
    "cost_expectile": 0.01,
    "unfit_penalty": 0.05,
    "reward_reduction": "mean",
    "selection": "constrained",
    "candidates": 64,  # spread widely: the pair that asks for the best way is not the one that the data suggest
    "rtg_noise": 1.0,
    "ctg_noise": 2.0,
    "limit_factor": 1.0,  # costs are whole numbers here, and can be met exactly
    "frugality": None,  # the best way is no logged one: what logged ones cost says nothing about it
    "test_offset": 0.25,
    "test_radius": 0.3,  # a little less than half a move's band
    "support": 0.5,  # actions between two logged moves are out, whatever the critics make of them
}


def configs(method: str, toy: Toy, changes: dict[str, Any]) -> Iterable[tuple[str, Any, tuple[float, ...]]]:
    """(algorithm, config, limits to evaluate at) of each training run that a method needs."""
    if method in ("bc-all", "bc-safe"):
        plain = BCConfig(steps=changes.get("steps", STEPS), batch_size=256, width=WIDTH, lr=LR)
        if method == "bc-all":
            yield "bc-safe", replace(plain, mode="all"), toy.cost_limits
        else:  # trained anew for every limit
            for limit in toy.cost_limits:
                yield "bc-safe", replace(plain, cost_limit=limit), (limit,)
    elif method == "transformer":
        shared = {name: value for name, value in changes.items() if name in SHARED}
        yield "qpt", replace(QPTConfig.preset("transformer"), **SHARED | shared), toy.cost_limits
    else:
        yield "qpt", replace(QPTConfig(), **SHARED | QPT | changes), toy.cost_limits


def train(name: str, config: Any, toy: Toy, seed: int) -> Policy:
    """The bare loop: sample, update."""
    torch.manual_seed(seed)
    data = toy.dataset(EPISODES, seed)
    algorithm = algorithm_classes(name)[0](config, Spec.from_data(data, task=toy.task()))
    sampler = algorithm.make_sampler(data, torch.device("cpu"), seed)
    algorithm.train()
    for _ in range(config.steps):
        algorithm.update(sampler.sample())
    return Policy(algorithm, trained_limit=getattr(config, "cost_limit", None))


def run(kind: str, instance: int, method: str, changes: dict[str, Any], episodes: int = 20) -> list[dict[str, Any]]:
    """One method on one instance: a row for each limit."""
    torch.set_num_threads(1)
    toy: Toy = getattr(toys, kind)(instance)
    rows = []
    for name, config, limits in configs(method, toy, changes):
        began = time.perf_counter()
        policy = train(name, config, toy, instance)
        seconds = time.perf_counter() - began
        found, oracle = (
            evaluate(one, toy.task(), episodes=episodes, cost_limits=limits, seed=instance, workers=0)
            for one in (policy, OraclePolicy(toy))
        )
        for limit in limits:
            here = found.cost_limit == limit
            returns, costs, best = found.returns[here], found.costs[here], float(oracle.returns[here].mean())
            rows.append(
                {
                    "kind": kind,
                    "instance": instance,
                    "method": method,
                    "limit": limit,
                    "optimum": best,
                    "share": float(returns.mean() / best),
                    "share_within": float((returns * (costs <= limit)).mean() / best),  # an episode beyond earns 0
                    "cost": float(costs.mean()),
                    "seconds": seconds,
                }
            )
    return rows


def _job(job: tuple[str, int, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return run(*job)


def solved(rows: list[dict[str, Any]]) -> list[int]:
    """The instances, of one method on one kind, with a mean share of 95 % over the limits and a cost within each."""
    each = {i: [row for row in rows if row["instance"] == i] for i in sorted({row["instance"] for row in rows})}
    safe = {i for i, some in each.items() if all(row["cost"] <= row["limit"] for row in some)}
    return [i for i, some in each.items() if i in safe and np.mean([row["share"] for row in some]) >= 0.95]


def table(rows: list[dict[str, Any]]) -> str:
    """Means over instances."""
    lines = [
        "| | | share of the optimum | counting only episodes within the limit | cost / limit | instances solved |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for method in METHODS:
            mine = [row for row in rows if (row["kind"], row["method"]) == (kind, method)]
            instances = sorted({row["instance"] for row in mine})
            if not instances:
                continue
            each = [[row for row in mine if row["instance"] == i] for i in instances]

            def means(field: str, each: list[list[dict[str, Any]]] = each) -> np.ndarray[Any, Any]:
                return np.array([np.mean([row[field] for row in some]) for some in each])

            spent = np.mean([row["cost"] / row["limit"] for row in mine])
            share, within, done = means("share").mean(), means("share_within").mean(), len(solved(mine))
            lines.append(f"| {kind} | {method} | {share:.3f} | {within:.3f} | {spent:.2f} | {done} of {len(each)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of QPTConfig; values as JSON"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    # The longest first, so that no worker is left with one at the end.
    order = sorted(args.methods, key=METHODS.index, reverse=True)
    jobs = [(kind, i, method, changes) for method in order for i in range(args.instances) for kind in args.kinds]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for found in pool.imap_unordered(_job, jobs):
            rows += found
            for row in found:
                print(
                    f"{row['kind']}-{row['instance']} {row['method']:12s} limit {row['limit']:g}: "
                    f"{row['share']:.3f} of the optimum ({row['share_within']:.3f} within) at cost {row['cost']:.2f}, "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
            if args.json:  # after each run: an interrupted proof keeps what it has
                args.json.write_text(json.dumps({"changes": changes, "rows": rows}, indent=1))
    minutes = (time.perf_counter() - began) / 60
    print(f"\n{table(rows)}\n\n{args.instances} instances, {minutes:.1f} minutes with {args.workers} workers,", end=" ")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
