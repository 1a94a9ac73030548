"""Exported policies: they decide as PyTorch does, for any number of episodes, and explain themselves."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from faulty_envs import walk_task
from helpers import tiny_data
from qpt.algorithms.base import Spec, algorithm_classes
from qpt.checkpoint import write_checkpoint
from qpt.cli import main
from qpt.cli.train import _parse, _RunFlags
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.modelcard import Evidence, _broken, _commands, _interval, _judged, find_evidence, rows_of, train_command
from qpt.nets import noise
from qpt.ope import judge
from qpt.policy import load_policy
from qpt.training import TrainConfig, train

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from qpt.export import EXPORTABLE, Export, _check_episodes, _return_targets, export_policy, parity
from qpt.runtime import OnnxPolicy, episode_normal, episode_uniform, suggest_returns

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "onnx_policy.py"
TINY = {"batch_size": 16, "width": 16, "critic_width": 16, "layers": 1, "heads": 2, "context": 4, "candidates": 6}
FAST = {"lr": 1e-2, "critic_lr": 3e-3, "warmup": 1, "clip": 10.0}


def trained(out: Path, algorithm: str = "qpt", steps: int = 60, **changes: Any) -> Path:
    """A run folder after a few large steps: enough that candidates differ in worth by more than rounding."""
    config_class = algorithm_classes(algorithm)[1]
    known = config_class.__dataclass_fields__
    method = config_class(**{k: v for k, v in {**TINY, **FAST, "steps": steps, **changes}.items() if k in known})
    settings: dict[str, Any] = {"device": "cpu", "progress": False, "threads": 1, "seed": 3}
    train(TrainConfig(algorithm=algorithm, config=method, out=out, **settings), tiny_data())
    return out


# The candidates differ much and every way of choosing occurs: noise decides.
EPISODE = {
    "rtg_noise": 0.5,
    "ctg_noise": 0.8,
    "selection": "constrained",
    "noise_mode": "episode",
    "careful_costs": True,
}
STEP = {
    "rtg_noise": 0.5,
    "ctg_noise": 0.8,
    "selection": "shield",
    "noise_mode": "step",
    "action_noise": 0.2,
    "choice": "softmax",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Export]:
    """A run with noise drawn once an episode, and its export."""
    folder = tmp_path_factory.mktemp("episode")
    run = trained(folder / "run", **EPISODE)
    return run, export_policy(run, folder / "out" / "policy.onnx")


@pytest.fixture(scope="module")
def exported_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Export]:
    """A run with every kind of noise, anew at each step, and its export."""
    folder = tmp_path_factory.mktemp("step")
    run = trained(folder / "run", **STEP)
    return run, export_policy(run, folder / "policy.onnx")


def assert_same_episodes(expected: Any, got: Any, n: int, limits: Any = (2.0, 5.0, 11.0)) -> None:
    """Both act through whole episodes on their own histories, with limits that change and rows that pause."""
    rng = np.random.default_rng(n)
    live = expected.limit_mode == "live"
    for policy in (expected, got):
        policy.reset(n, cost_limits=np.resize(limits, n), seeds=np.arange(n) - 1)
    for step in range(expected.spec.horizon):
        if step == 9 and live:
            for policy in (expected, got):
                policy.set_cost_limit(1.5, [0])
        if step == 12:
            for policy in (expected, got):
                policy.restart([n - 1], seeds=[99])
        active = rng.random(n) < 0.9
        seen, reward, cost = rng.normal(size=(n, 3)), rng.random(n), rng.integers(0, 2, n)
        np.testing.assert_allclose(got.act(seen, active), expected.act(seen, active), atol=1e-5, rtol=0)
        for policy in (expected, got):
            policy.observe(reward, cost)
    np.testing.assert_array_equal(got.spent, expected.spent)
    np.testing.assert_array_equal(got.return_targets, expected.return_targets)
    assert got.diagnostics().keys() == expected.diagnostics().keys()
    for name, values in expected.diagnostics().items():
        np.testing.assert_allclose(got.diagnostics()[name], values, atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_whole_episodes_equal_pytorch(exported: tuple[Path, Export], n: int) -> None:
    run, done = exported
    policy = OnnxPolicy(done.graph)
    assert policy.outputs == ["action", "fallback", "reward_q", "cost_q"]
    assert_same_episodes(load_policy(run), policy, n)
    # The comparison would notice: other noise and other limits lead elsewhere.
    a, b, c = (OnnxPolicy(done.graph) for _ in range(3))
    a.reset(n, cost_limits=5.0, seeds=np.arange(n))
    b.reset(n, cost_limits=5.0, seeds=np.arange(n) + 1000)
    c.reset(n, cost_limits=1.0, seeds=np.arange(n))
    first = a.act(np.ones((n, 3)))
    assert np.abs(first - b.act(np.ones((n, 3)))).max() > 1e-3
    assert np.abs(first - c.act(np.ones((n, 3)))).max() > 1e-3


@pytest.mark.parametrize("n", [1, 3, 7])
def test_every_kind_of_noise_at_each_step_equals_pytorch(exported_step: tuple[Path, Export], n: int) -> None:
    run, done = exported_step
    policy = OnnxPolicy(done.graph)
    assert [draw["size"] for draw in policy.facts["noise"]] == [12, 12, 6]
    assert_same_episodes(load_policy(run), policy, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTABLE[1:])
def test_other_methods_equal_pytorch(tmp_path: Path, name: str) -> None:
    run = trained(tmp_path / "run", name, cost_limit=8.0)
    done = export_policy(run, tmp_path / "policy.onnx")
    policy = load_policy(run)
    assert_same_episodes(policy, OnnxPolicy(done.graph), 3, 8.0 if policy.limit_mode == "trained" else (2.0, 11.0))


def test_a_method_without_history_is_exported_too(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "bc-safe", cost_limit=8.0)
    policy = OnnxPolicy(export_policy(run, tmp_path / "policy.onnx").graph)
    assert_same_episodes(load_policy(run), policy, 3, 8.0)
    policy.reset(2)
    assert policy.cost_limits.tolist() == [8.0, 8.0]
    with pytest.raises(QptError, match="trained for a cost limit of 8"):
        policy.set_cost_limit(3.0)


def test_the_parity_check_notices_other_weights(exported: tuple[Path, Export]) -> None:
    policy, graph = load_policy(exported[0]), OnnxPolicy(exported[1].graph)
    assert parity(policy, graph)[0] <= 1e-5
    with torch.no_grad():
        policy.method.state_dict()["head.bias"].add_(1e-3)
    assert parity(policy, graph)[0] > 1e-4
    own = graph.decide
    graph.decide = lambda context: {k: x * np.nan for k, x in own(context).items()}  # type: ignore[method-assign]
    assert np.isnan(parity(policy, graph)[0])  # of a graph
    with torch.no_grad():
        policy.method.state_dict()["head.bias"].fill_(float("nan"))
    with pytest.raises(QptError, match=r"not finite, so nothing was written; export an earlier checkpoint"):
        parity(policy, graph)


def test_numpy_draws_the_numbers_of_pytorch() -> None:
    seeds, steps = np.array([0, 1, -5, 2**62, 7]), np.array([0, 3, 1, 999, 3])
    for stream in (0, 1, 2):
        for count in (1, 2, 7):
            a = noise.episode_uniform(torch.from_numpy(seeds), torch.from_numpy(steps), count, stream)
            np.testing.assert_array_equal(episode_uniform(seeds, steps, count, stream), a.numpy())
            b = noise.episode_normal(torch.from_numpy(seeds), torch.from_numpy(steps), count, stream)
            np.testing.assert_allclose(episode_normal(seeds, steps, count, stream), b.numpy(), rtol=1e-12)


def test_the_example_needs_numpy_and_onnxruntime_alone(exported: tuple[Path, Export]) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80
    code = (
        f"import runpy, sys; sys.argv = ['x', {str(exported[1].graph)!r}, '9', '2']; "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__'); "
        "print(*(m for m in ('torch', 'qpt', 'h5py', 'gymnasium') if m in sys.modules), 'end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert last == "end"
    assert [re.findall(r"limit (\S+)", row)[0] for row in rows] == ["9"] * 10 + ["2"] * 10


@pytest.mark.parametrize("which", ["exported", "exported_step"])
def test_the_example_decides_as_the_policy(request: pytest.FixtureRequest, which: str) -> None:
    run, done = request.getfixturevalue(which)
    episode = example().Episode(str(done.graph), 9.0)
    policy = OnnxPolicy(done.graph)
    policy.reset(1, cost_limits=9.0)
    rng = np.random.default_rng(0)
    for step in range(load_policy(run).spec.horizon):
        # The same numbers, in place of the example's own generator.
        draws = iter([drawn(draw, step) for draw in policy.facts["noise"]])
        episode.draw = lambda _, draws=draws: next(draws)
        episode.noise = [drawn(draw, step) for draw in policy.facts["noise"]]
        if step == 8:
            episode.cost_limit = 2.0
            policy.set_cost_limit(2.0)
        seen, reward, cost = rng.normal(size=3), float(rng.random()), float(rng.integers(0, 2))
        np.testing.assert_allclose(episode.act(seen)[0], policy.act(seen[None])[0], atol=1e-5)
        episode.observe(reward, cost)
        policy.observe([reward], [cost])


def drawn(draw: dict[str, Any], step: int) -> Any:
    kind = episode_uniform if draw["uniform"] else episode_normal
    return kind([0], [step if draw["each_step"] else 0], draw["size"], draw["stream"])[0]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("onnx_policy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_runtime_does_not_import_torch(exported: tuple[Path, Export]) -> None:
    code = (
        "import sys, numpy as np; from qpt.runtime import OnnxPolicy; "
        f"p = OnnxPolicy({str(exported[1].graph)!r}); p.reset(2, cost_limits=[3, 5]); "
        "print(p.act(np.zeros((2, 3))).shape); "
        "print(*(m for m in ('torch', 'h5py', 'gymnasium', 'safetensors') if m in sys.modules), 'end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "(2, 2)\nend\n", done.stderr


# -- the files beside the graph ----------------------------------------------------------------------------------------


def test_the_side_file_and_the_card_say_where_the_policy_comes_from(exported: tuple[Path, Export]) -> None:
    run, done = exported
    data, facts = tiny_data(), json.loads(done.side.read_text(encoding="utf-8"))
    assert facts["provenance"]["data"]["fingerprint"] == data.fingerprint
    assert facts["horizon"] == load_policy(run).spec.horizon
    method, limits = load_policy(run).method, np.arange(0, 40, 0.5)
    suggested = [method.suggest_return(limit) for limit in limits]
    assert suggest_returns(facts["return_targets"], limits).tolist() == suggested
    card = done.card.read_text(encoding="utf-8")
    for fact in (data.fingerprint, f"episodes: {len(data)}", "not evaluated", "Past the horizon", torch.__version__):
        assert fact in card, fact
    assert f"up to {data.episode_costs.max():.4g}" in card
    assert done.difference <= 1e-5
    assert done.ties == 0


def test_the_card_shows_evaluations_of_the_checkpoint() -> None:
    rows = [{"step": 7, "limits": [{"cost_limit": 10.0, "return": 61.25, "cost": 8.5}]}]
    note, table = _judged({"evaluations": rows}, Evidence(), {})
    assert "at step 7" in note  # and nothing about other settings
    assert table.splitlines()[2:] == ["| 10 | 61.2 | 8.5 |"]


def episodes_of(checkpoint: str) -> Episodes:
    """Four made-up episodes at a limit of 10, with costs of 6, 8, 10 and 12."""
    names = {"task": "T", "algorithm": "qpt", "checkpoint": checkpoint, "ended_by": "timeout"}
    numbers = {"cost_limit": 10.0, "fallback_share": 0.0, "normalized_return": 0.5, "normalized_cost": 0.9}
    columns: dict[str, Any] = {k: np.full(4, v) for k, v in {**names, **numbers}.items()}
    columns |= {k: np.arange(4) for k in ("seed", "episode", "lengths")}
    return Episodes(**columns, returns=np.array([1.0, 2.0, 3.0, 4.0]), costs=np.array([6.0, 8.0, 10.0, 12.0]))


def test_the_card_shows_evaluated_episodes_of_this_checkpoint_alone(
    exported: tuple[Path, Export], tmp_path: Path
) -> None:
    (row,) = _judged({"spec": {"task": "T"}}, Evidence(episodes_of("x")), {})[1].splitlines()[2:]
    assert row.startswith("| 10 | 4 | 2.5 [")
    assert "| 9.0 [" in row
    assert "| 0.75 [" in row
    with pytest.raises(QptError, match=r"not those of the checkpoint .*step-000000060"):
        export_policy(exported[0], tmp_path / "policy.onnx", episodes=episodes_of("runs/a/checkpoints/step-000000031"))


def test_episodes_of_another_policy_are_refused(exported: tuple[Path, Export], tmp_path: Path) -> None:
    (folder,) = (exported[0] / "checkpoints").iterdir()
    digest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sha256"]["model.safetensors"]
    mine, away = episodes_of(str(folder)), episodes_of(f"gone/checkpoints/{folder.name}")
    other = tmp_path / "other" / "checkpoints" / folder.name
    other.mkdir(parents=True)

    def told(table: Episodes, sha256: str) -> Episodes:
        return replace(table, provenance={"sha256": {"model.safetensors": sha256}})

    for table in (mine, away, told(away, digest), told(episodes_of(str(other)), digest)):
        assert rows_of(table, folder).all()
    cases = {
        "other weights under the same name": told(mine, "0" * 64),
        "no checksum, and the path leads to another run": episodes_of(str(other)),
        "no checksum, and another method": replace(away, algorithm=np.full(4, "cdt")),
        "two runs put together": Episodes.concatenate([told(mine, digest), told(episodes_of(str(other)), "0" * 64)]),
    }
    for what, table in cases.items():
        assert not rows_of(table, folder).all(), what
        with pytest.raises(QptError, match="not those of the checkpoint"):
            _check_episodes(table, folder, {})
    changed = replace(mine, provenance={"settings": {"candidates": 1}})
    _check_episodes(changed, folder, {"candidates": 1})
    _check_episodes(replace(mine, provenance={"settings": {"candidates": 6}}), folder, {})  # as it was trained
    for table, settings in ((changed, {}), (mine, {"candidates": 1}), (changed, {"candidates": 2})):
        with pytest.raises(QptError, match="run with other settings"):
            _check_episodes(table, folder, settings)


@pytest.fixture
def judged_run(exported: tuple[Path, Export], tmp_path: Path) -> Path:
    """A run with all that can be known of its checkpoint beside it, and as much that is about others."""
    run = tmp_path / "run"
    shutil.copytree(exported[0], run)
    (folder,) = (run / "checkpoints").iterdir()
    digest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sha256"]["model.safetensors"]
    for file, sha256, limit, verdict in (
        ("certificate", digest, 10.0, "rejected"),
        ("calibrated", digest, 12.0, "accepted"),
        ("of another policy", "0" * 64, 99.0, "accepted"),
    ):
        numbers = {"violations": 3, "episodes": 40, "bounds": [0.01, 0.2], "limit": limit, "internal_limit": 10.0}
        origin = {"provenance": {"command": ["/some/where/qpt", "certify", "--limit", f"{limit:g}"]}}
        text = {"statement": f"P(episode cost > {limit:g}) <= 0.05", "verdict": verdict, "confidence": 0.95}
        (run / f"{file}.json").write_text(
            json.dumps(text | numbers | origin | {"sha256": {"model.safetensors": sha256}})
        )
    for file, sha256, limit in (("judge", digest, 11.0), ("judge of others", "0" * 64, 88.0)):
        numbers = {"expected_return": 2.0, "return_interval": [1.0, 3.0], "expected_cost": 4.0, "cost_interval": [0, 8]}
        part = {"cost_limit": limit, "outside": 0.25, "warning": "far from the log", **numbers}
        row = {"checkpoint": str(folder), "confidence": 0.9, "episodes": 17, "limits": [part]}
        origin = {"sha256": {"model.safetensors": sha256}, "provenance": {"command": ["qpt", "judge", file]}}
        (run / f"{file}.json").write_text(json.dumps(row | origin))
    calibration = {"task": "T", "limit": 12.0, "internal_limit": 10.5, "risk": 0.05, "confidence": 0.95, "episodes": 60}
    text = {"format": 1, "model_sha256": digest, "calibrations": [calibration]}
    (folder / "calibration.json").write_text(json.dumps(text))
    (run / "notes.json").write_text("not JSON")
    (run / "list.json").write_text("[1, 2]")
    episodes_of(str(folder)).save(run / "episodes.csv")
    episodes_of("step-000000031").save(run / "episodes-of-others.csv")
    (run / "episodes-bad.csv").write_text("a,b\n1\n")
    return run


def test_the_card_shows_what_lies_beside_the_run_and_is_about_this_policy(judged_run: Path, tmp_path: Path) -> None:
    done = export_policy(judged_run, tmp_path / "policy.onnx")
    card = done.card.read_text(encoding="utf-8")
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert "| P(episode cost > 10) ≤ 0.05 | rejected | 0.95 | 10 | 3 of 40 | 0.010 to 0.200 |" in rows
    assert "| P(episode cost > 12) ≤ 0.05 | accepted | 0.95 | 10 (calibrated) | 3 of 40 | 0.010 to 0.200 |" in rows
    assert "| 11 | 2.0 [1.0, 3.0] | 4.0 [0.0, 8.0] | 25% | far from the log |" in rows
    assert "**Judged** from 17 logged episodes" in card
    assert "with 90% intervals" in card
    assert "| 12 in T | 10.5 | 0.05 | 0.95 | 60 |" in rows
    assert sum(row.startswith("| 10 in T | 4 | 2.5 [") for row in rows) == 1
    assert "Limits that it broke** when it was measured: P(episode cost > 10) <= 0.05 was rejected." in card
    assert "\nqpt certify --limit 10\n" in card
    assert "\nqpt judge judge\n" in card
    assert "These are the episodes it was trained on" not in card
    assert "/some/where" not in card
    for stranger in ("99", "88"):
        assert f"> {stranger})" not in card
        assert f"| {stranger} |" not in card
    assert "other settings" not in card
    kept = {"task": "T", "limit": 12.0, "internal_limit": 10.5, "risk": 0.05, "confidence": 0.95}
    assert json.loads(done.side.read_text(encoding="utf-8"))["calibrations"] == [kept]
    OnnxPolicy(done.graph).reset(1, cost_limits=3.0)


def test_the_card_says_when_a_judgement_is_of_the_training_data(judged_run: Path) -> None:
    (folder,) = (judged_run / "checkpoints").iterdir()
    row = json.loads((judged_run / "judge.json").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (judged_run / "judge.json").write_text(json.dumps(row | {"fingerprint": manifest["data"]["fingerprint"]}))
    assert "**These are the episodes it was trained on**" in "\n".join(_judged(manifest, find_evidence(folder), {}))


def test_what_was_measured_in_another_task_says_so() -> None:
    certificate = {"task": "T", "statement": "P(episode cost > 5) <= 0.05", "verdict": "rejected", "confidence": 0.95}
    certificate |= {"limit": 5.0, "violations": 3, "episodes": 40, "bounds": [0.01, 0.2]}
    calibration = {"task": "T", "limit": 12.0, "internal_limit": 10.5, "risk": 0.05, "confidence": 0.95, "episodes": 60}
    costly = replace(episodes_of("x"), costs=np.full(4, 30.0))
    evidence = Evidence(costly, (certificate,), (), (calibration,))
    own, other = ({"spec": {"task": task}} for task in ("T", "U"))
    text = "\n".join(_judged(other, evidence, {}) + _broken(other, evidence))
    for words in ("| 10 in T |", "≤ 0.05 in T |", "| 12 in T |", "at 10 in T an episode", "<= 0.05 in T was rejected"):
        assert words in text, words
    assert " in T" not in "\n".join(_judged(own, evidence, {}) + _broken(own, evidence))


def test_calibrated_limits_are_applied_when_asked_for(exported: tuple[Path, Export], tmp_path: Path) -> None:
    shutil.copy(exported[1].graph, tmp_path / "policy.onnx")
    calibration = {"task": "T", "limit": 12.0, "internal_limit": 10.5}
    graph = damage(exported[1].side.read_text(encoding="utf-8"), tmp_path / "policy.json", calibrations=[calibration])
    plain, policy = OnnxPolicy(graph), OnnxPolicy(graph, calibrated="T")
    policy.reset(2, cost_limits=12.0, seeds=[0, 1])
    plain.reset(2, cost_limits=10.5, seeds=[0, 1])
    seen = np.random.default_rng(0).normal(size=(2, policy.observation_dim))
    assert policy.cost_limits.tolist() == [10.5, 10.5]
    assert policy.return_targets.tolist() == plain.return_targets.tolist()
    np.testing.assert_array_equal(policy.act(seen), plain.act(seen))
    policy.restart([1])  # keeps its limit
    assert policy.cost_limits.tolist() == [10.5, 10.5]
    assert (policy.internal_limit(12.0), plain.internal_limit(12.0)) == (10.5, 12.0)
    with pytest.raises(QptError, match=r"not calibrated for a limit of 11 \(it is for 12\)"):
        policy.set_cost_limit(11.0, [0])
    before = policy._seeds.tolist(), policy.return_targets.tolist(), policy.cost_limits.tolist()
    with pytest.raises(QptError, match="not calibrated for a limit of 11"):
        policy.restart([0], cost_limits=11.0, return_targets=99.0, seeds=[7])
    assert (policy._seeds.tolist(), policy.return_targets.tolist(), policy.cost_limits.tolist()) == before
    policy.set_cost_limit(12.0)
    assert policy.return_targets.tolist() == before[1]  # nor were the refused targets kept as given ones
    with pytest.raises(QptError, match=r"has no calibrated limit for the task .* \(it has them for T\)"):
        OnnxPolicy(graph, calibrated=True)  # for the policy's own task, there is none


def test_an_exported_policy_can_be_judged(exported: tuple[Path, Export]) -> None:
    graph = exported[1].graph
    found = judge(OnnxPolicy(graph), tiny_data(), [6.0], members=2, width=8, steps=2, batch=8)
    assert found.sha256 == {graph.name: hashlib.sha256(graph.read_bytes()).hexdigest()}
    assert (found.checkpoint, found.algorithm) == (str(graph), "qpt")


def test_an_exported_policy_says_what_it_learned_from_and_how_long(
    exported: tuple[Path, Export], tmp_path: Path
) -> None:
    task = walk_task(horizon=tiny_data().lengths.max() + 1)
    with pytest.raises(QptError, match=r"trained for episodes of 20 steps, but Walk has 21; .* past_horizon='clamp'"):
        evaluate(OnnxPolicy(exported[1].graph), task, workers=0)
    folder = shutil.copytree(exported[1].graph.parent, tmp_path / "out")
    graph, side = folder / exported[1].graph.name, folder / exported[1].side.name
    facts = json.loads(side.read_text())
    for surrogate in (False, True):
        facts["provenance"]["data"]["surrogate"] = surrogate
        side.write_text(json.dumps(facts))
        results = evaluate(OnnxPolicy(graph, past_horizon="clamp"), task, episodes=1, workers=0)
        assert results.provenance["surrogate_data"] is surrogate


def test_a_bench_names_its_checkpoints_by_rule(judged_run: Path) -> None:
    (folder,) = (judged_run / "checkpoints").iterdir()
    for path in judged_run.glob("episodes*"):
        path.unlink()
    assert find_evidence(folder).episodes is None
    Episodes.concatenate([episodes_of("last"), episodes_of("oracle"), episodes_of("selected")]).save(
        judged_run / "episodes.csv"
    )
    best = folder.with_name("best-000000020")
    shutil.copytree(folder, best)
    for checkpoint, rule in ((folder, "last"), (best, "selected")):  # the oracle's rows chose the checkpoint
        found = find_evidence(checkpoint).episodes
        assert found is not None
        assert set(found.checkpoint) == {rule}


def test_episodes_of_several_tables_are_of_these_settings_and_count_once(judged_run: Path) -> None:
    (folder,) = (judged_run / "checkpoints").iterdir()
    table = episodes_of(str(folder))
    changed = replace(table, returns=table.returns + 100, provenance={"settings": {"candidates": 1}})
    changed.save(judged_run / "episodes-one.csv")
    table.save(judged_run / "episodes-again.csv")
    replace(table, seed=table.seed + 50).save(judged_run / "episodes-more.csv")
    found = find_evidence(folder).episodes
    assert found is not None
    assert sorted(found.returns) == [1, 1, 2, 2, 3, 3, 4, 4]
    found = find_evidence(folder, settings={"candidates": 1}).episodes
    assert found is not None
    assert found.returns.tolist() == [101, 102, 103, 104]
    assert find_evidence(folder, settings={"candidates": 2}).episodes is None


@pytest.mark.parametrize("algorithm", ["qpt", "cdt", "caps"])
def test_the_command_of_the_card_trains_with_the_same_config(algorithm: str) -> None:
    config_class = algorithm_classes(algorithm)[1]
    config = replace(config_class(), steps=123)
    if algorithm != "caps":
        config = replace(config_class.preset("paper"), steps=123, augmentation=False, betas=(0.8, 0.9))
    manifest = {
        "algorithm": algorithm,
        "config": json.loads(json.dumps(asdict(config))),
        "spec": {"horizon": 77},
        "data": {"source": "my logs/a.hdf5"},
        "seed": 5,
    }
    words = shlex.split(train_command(manifest))
    assert words[:2] == ["qpt", "train"]
    parsed = _parse(words[2:], algorithm, "default", _RunFlags(algorithm=algorithm), config_class())
    assert parsed.config == config
    assert (parsed.seed, parsed.horizon, parsed.data) == (5, 77, Path("my logs/a.hdf5"))
    assert "--horizon" in shlex.split(train_command(manifest | {"task": "BallCircle"}))  # not the task's own
    assert "--horizon" not in train_command(manifest | {"task": "BallCircle", "spec": {"horizon": 200}})

    assert "--precision" not in train_command(manifest | {"precision": "fp32"})
    assert "--precision bf16" in train_command(manifest | {"precision": "bf16"})
    assert "--precision fp32" in train_command(manifest | {"precision": "fp32", "device": "cuda"})


@pytest.mark.parametrize("named", ["runs/x", "runs/x/", "runs/x/checkpoints/step-000000030"])
def test_the_commands_of_the_card_measure_what_it_trains(named: str) -> None:
    command = ["/bin/qpt", "certify", "--checkpoint", named, "--data", "runs/xy.hdf5", "--out", "runs/x/c.json"]
    (line,) = _commands(Evidence(certificates=({"provenance": {"command": command}},)))
    words = shlex.split(line)
    assert words[:2] == ["qpt", "certify"]
    assert words[3] == named.replace("runs/x", "runs/again")
    assert words[4:] == ["--data", "runs/xy.hdf5", "--out", "runs/again/c.json"]
    (other,) = _commands(Evidence(certificates=({"provenance": {"command": ["mine.py", "runs/x"]}},)))
    assert other == "mine.py runs/x"


def test_targets_that_a_method_suggests_itself_are_exported_or_left_to_the_caller(
    exported: tuple[Path, Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, limits = load_policy(exported[0]), np.linspace(0, 60, 31)
    monkeypatch.setattr(policy.method, "suggest_return", lambda limit: 5.0 * limit)
    assert suggest_returns(_return_targets(policy), limits) == pytest.approx(5 * limits)
    monkeypatch.setattr(policy.method, "suggest_return", lambda limit: float(np.sin(50 * limit)))  # no table holds it
    assert _return_targets(policy) is None


def test_a_card_of_two_episodes_gives_no_interval() -> None:
    assert _interval({"cost": 4.0, "cost_interval": (np.nan, np.nan)}, "cost", 1) == "4.0"
    assert _interval({"cost": 4.0, "cost_interval": (3.0, 5.0)}, "cost", 1) == "4.0 [3.0, 5.0]"


# -- what can go wrong -------------------------------------------------------------------------------------------------


def test_the_command_writes_three_files_and_refuses_to_overwrite(
    judged_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = judged_run
    out = tmp_path / "new" / "p.onnx"
    assert main(["export", "--checkpoint", str(run), "--out", str(out), "--candidates", "1"]) == 0
    told = capfd.readouterr()
    assert sorted(p.name for p in out.parent.iterdir()) == ["p.json", "p.md", "p.onnx"]
    assert told.err == ""
    assert told.out.count("\n") == 4
    policy = OnnxPolicy(out)
    assert policy.facts["noise"] == []
    assert policy.facts["calibrations"] == []  # those of the run are of another policy, as are its episodes
    card = (out.parent / "p.md").read_text(encoding="utf-8")
    assert "It was exported with other settings** (candidates = 1)" in card
    assert "Calibrated" not in card
    assert "simulator: means with" not in card
    assert_same_episodes(load_policy(run, candidates=1), policy, 2)
    assert main(["export", "--checkpoint", str(run), "--out", str(out)]) == 1
    assert "exists already" in capfd.readouterr().err


def test_wrong_files_and_methods_get_a_sentence(exported: tuple[Path, Export], tmp_path: Path) -> None:
    run, _ = exported
    with pytest.raises(QptError, match=r"written as \.onnx"):
        export_policy(run, tmp_path / "policy.pt")
    with pytest.raises(QptError, match="there is no folder"):
        export_policy(tmp_path / "nothing", tmp_path / "policy.onnx")
    (tmp_path / "given.onnx").touch()
    with pytest.raises(QptError, match="exported policy, not a checkpoint"):
        export_policy(tmp_path / "given.onnx", tmp_path / "policy.onnx")
    with pytest.raises(QptError, match="no best checkpoint"):
        export_policy(run, tmp_path / "policy.onnx", which="best")
    (tmp_path / "file").write_text("x")
    with pytest.raises(QptError, match="cannot be made"):
        export_policy(run, tmp_path / "file" / "policy.onnx")
    for name in ("fisor", "bcq-lag", "oasis"):
        cls, config_class = algorithm_classes(name)
        method = cls(config_class(), Spec.from_data(tiny_data()))
        write_checkpoint(tmp_path / name, name, method, json.loads(json.dumps(asdict(method.config))), {}, {})
        with pytest.raises(QptError, match=r"cannot be exported; these can: qpt, cdt, bc-safe"):
            export_policy(tmp_path / name, tmp_path / "policy.onnx")
    assert not list(tmp_path.glob("*policy*"))


def test_damaged_exports_get_a_sentence(exported: tuple[Path, Export], tmp_path: Path) -> None:
    graph, side = tmp_path / "policy.onnx", tmp_path / "policy.json"
    with pytest.raises(QptError, match=r"side file .* cannot be read"):
        OnnxPolicy(graph)
    facts = exported[1].side.read_text(encoding="utf-8")
    side.write_text(facts)
    with pytest.raises(QptError, match=r"graph .* cannot be read"):
        OnnxPolicy(graph)
    graph.write_bytes(exported[1].graph.read_bytes()[:-100])
    with pytest.raises(QptError, match="damaged"):
        OnnxPolicy(graph)
    for text, message in (
        ("{", "not valid JSON"),
        ("[1]", "not the side file"),
        ('{"format": 1}', "not the side file"),
        (facts.replace('"format": 1', '"format": 9'), "format 9"),
    ):
        side.write_text(text)
        with pytest.raises(QptError, match=message):
            OnnxPolicy(graph)
    graph.write_bytes(exported[1].graph.read_bytes())
    OnnxPolicy(damage(facts, side)).reset(1, cost_limits=1.0)
    for changes in (
        {"context": "x"},
        {"context": 3},
        {"action_dim": 0},
        {"calibrations": [{"task": "T", "limit": 3.0}]},
        {"calibrations": [{"task": "T", "limit": 3.0, "internal_limit": 4.0}]},
        {"noise": "x"},
        {"noise": [{"size": 5, "stream": 0, "uniform": False, "each_step": True}]},
        {"return_targets": {"costs": [1.0], "returns": [], "between": "previous", "factor": 1.0}},
        {"return_targets": {"costs": [1.0]}},
    ):
        with pytest.raises(QptError, match="damaged"):
            OnnxPolicy(damage(facts, side, **changes))
    graph.write_bytes(b"not a graph")
    right = json.loads(facts) | {"sha256": hashlib.sha256(b"not a graph").hexdigest()}
    side.write_text(json.dumps(right))
    with pytest.raises(QptError, match="onnxruntime cannot run"):
        OnnxPolicy(graph)


def damage(facts: str, side: Path, **changes: Any) -> Path:
    """Write the side file with other entries; the path of its graph."""
    side.write_text(json.dumps(json.loads(facts) | changes))
    return side.with_suffix(".onnx")


def test_misuse_gets_a_sentence(exported: tuple[Path, Export]) -> None:
    policy = OnnxPolicy(exported[1].graph)
    with pytest.raises(QptError, match="past_horizon is 'error' or 'clamp'"):
        OnnxPolicy(exported[1].graph, past_horizon="wrap")  # type: ignore[arg-type]
    with pytest.raises(QptError, match="reset"):
        policy.act(np.zeros((1, 3)))
    with pytest.raises(QptError, match="reset"):
        policy.set_cost_limit(1.0)
    policy.reset(2, cost_limits=1.0)
    with pytest.raises(QptError, match="shape"):
        policy.act(np.zeros((1, 3)))
    with pytest.raises(QptError, match="NaN"):
        policy.act(np.full((2, 3), np.nan))
    with pytest.raises(QptError, match="at least 0"):
        policy.set_cost_limit(-1.0)
    with pytest.raises(QptError, match="does not exist"):
        policy.restart([2])
    for _ in range(policy.horizon):
        policy.act(np.zeros((2, 3)))
        with pytest.raises(QptError, match="observe"):
            policy.act(np.zeros((2, 3)))
        policy.observe([0, 0], [0, 0])
    with pytest.raises(QptError, match="no decision"):
        policy.observe([0, 0], [0, 0])
    with pytest.raises(QptError, match="past the horizon"):
        policy.act(np.zeros((2, 3)))
