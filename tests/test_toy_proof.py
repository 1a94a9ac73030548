"""The proof on toys: QPT reaches the exact optimum within the limit where imitation and the transformer do not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qpt.envs.toy import OraclePolicy, stitching

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "toy.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("toy_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_methods_get_the_same_steps_and_the_transformer_gets_augmentation() -> None:
    proof, toy = load(), stitching(0)
    found = {method: list(proof.configs(method, toy, {"steps": 7})) for method in proof.METHODS}
    for runs in found.values():
        assert {config.steps for _, config, _ in runs} == {7}
        assert {config.lr for _, config, _ in runs} == {proof.LR}
        # Logged steps in a batch: single ones, or windows of them.
        assert {config.batch_size * getattr(config, "context", 1) for _, config, _ in runs} == {256}
        assert sorted(limit for _, _, limits in runs for limit in limits) == sorted(toy.cost_limits)
    (_, plain, _), (_, full, _) = found["transformer"][0], found["qpt"][0]
    assert plain.augmentation
    switches = (plain.train_with_reward_critic, plain.train_with_cost_critic, plain.inference_with_candidates)
    assert not any(switches)
    assert all(getattr(plain, name) == getattr(full, name) for name in proof.SHARED)


def test_rows_are_shares_of_the_optimum_and_an_episode_beyond_the_limit_earns_nothing(monkeypatch: Any) -> None:
    proof, toy = load(), stitching(0)

    class Found:  # four episodes at each of the two limits
        cost_limit = np.repeat(toy.cost_limits, 4)
        returns = np.array([2.0, 4.0, 6.0, 8.0, 1.0, 1.0, 1.0, 1.0])
        costs = np.array([0.0, 99.0, 0.0, 99.0, 0.0, 0.0, 0.0, 0.0])

    class Best(Found):  # of the optimal policy, from the same starts
        returns = np.array([9.0, 9.0, 11.0, 11.0, 12.0, 12.0, 12.0, 12.0])

    asked = []

    def evaluate(policy: Any, *_args: Any, **more: Any) -> Any:
        asked.append(more)
        return Best if isinstance(policy, OraclePolicy) else Found

    monkeypatch.setattr(proof, "evaluate", evaluate)
    rows = proof.run("stitching", 0, "bc-all", {"steps": 1})
    best = [10.0, 12.0]
    assert asked[0] == asked[1]  # the same seed, episodes and limits
    assert [row["share"] for row in rows] == pytest.approx([5.0 / best[0], 1.0 / best[1]])
    assert [row["share_within"] for row in rows] == pytest.approx([2.0 / best[0], 1.0 / best[1]])
    assert [row["cost"] for row in rows] == pytest.approx([49.5, 0.0])


def test_the_table_counts_an_instance_as_solved_only_within_every_limit() -> None:
    def row(instance: int, limit: float, share: float, cost: float) -> dict[str, Any]:
        return {
            "kind": "tradeoff", "instance": instance, "method": "qpt", "limit": limit, "share": share,
            "share_within": share / 2, "cost": cost,
        }  # fmt: skip

    rows = [row(0, 4, 0.97, 4), row(0, 8, 0.95, 6), row(1, 4, 1.0, 4.1), row(1, 8, 1.0, 4), row(2, 4, 0.9, 0)]
    line = load().table(rows).splitlines()[-1]
    share = np.mean([0.96, 1.0, 0.9])
    spent = np.mean([1.0, 0.75, 1.025, 0.5, 0.0])
    assert line == f"| tradeoff | qpt | {share:.3f} | {share / 2:.3f} | {spent:.2f} | 1 of 3 |"


def test_the_stored_runs_solve_as_many_instances_as_the_documentation_says() -> None:
    proof, docs = load(), BENCHMARK.parent.parent / "docs"
    stored = json.loads((docs / "results" / "toy.json").read_text(encoding="utf-8"))
    found = [
        len(proof.solved([row for row in stored if (row["kind"], row["method"]) == (kind, method)]))
        for kind in proof.KINDS
        for method in proof.METHODS
    ]
    told = re.findall(r"\| \**(\d+) of 20\** \|$", (docs / "toy.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found == list(map(int, told))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["stitching", "tradeoff"])
def test_qpt_reaches_95_percent_of_the_optimum_where_the_others_do_not(kind: str) -> None:
    """Three instances by default; QPT_TOY_INSTANCES=20 is the whole proof."""
    proof = load()
    instances = range(int(os.environ.get("QPT_TOY_INSTANCES", "3")))
    shares, solved = {}, {}
    for method in proof.METHODS:
        rows = [row for i in instances for row in proof.run(kind, i, method, {})]
        shares[method] = np.mean([row["share_within"] for row in rows])
        solved[method] = len(proof.solved(rows))
        if method == "qpt":
            assert np.mean([row["share"] for row in rows]) >= 0.95
            assert np.mean([row["cost"] / row["limit"] for row in rows]) <= 1.0
    slack = max(1, 0.15 * len(instances))  # 19 and 20 of 20 were solved, by the others 0 or 1; roundings may differ
    assert solved["qpt"] >= len(instances) - slack
    for method in ("bc-all", "bc-safe", "transformer"):
        assert solved[method] <= slack
        assert shares[method] < 0.95
        assert shares[method] <= shares["qpt"] - 0.02
