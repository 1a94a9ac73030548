"""What every method promises, whatever it computes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import tiny_data
from qpt.algorithms.base import Spec, algorithm_classes, algorithm_names, config_from
from qpt.algorithms.bc import BCConfig
from qpt.algorithms.fields import fitting
from qpt.algorithms.qpt_config import QPTConfig
from qpt.checkpoint import MODEL, load_algorithm, resolve
from qpt.errors import QptError
from qpt.policy import Policy, load_policy
from qpt.training import TrainConfig, train

LIMIT = 8.0
# Small enough for seconds; each is used where a method has a field of that name.
SMALL: dict[str, Any] = {
    "batch_size": 16,
    "width": 16,
    "critic_width": 16,
    "vae_width": 16,
    "layers": 1,
    "heads": 2,
    "context": 4,
    "candidates": 5,
    "samples": 3,
    "cost_limit": LIMIT,
}
NAMES = algorithm_names()


def small(name: str, **changes: Any) -> Any:
    config_class = algorithm_classes(name)[1]
    known = {f.name for f in fields(config_class)}
    return replace(config_class(), **{k: v for k, v in {**SMALL, **changes}.items() if k in known})


def fit(name: str, out: Path, steps: int = 4, seed: int = 0, **settings: Any) -> Any:
    config = TrainConfig(
        algorithm=name,
        config=small(name, steps=steps),
        seed=seed,
        device="cpu",
        out=out,
        checkpoint_every=2,
        keep=9,
        progress=False,
        threads=1,  # tiny tensors: more threads only wait for each other
        **settings,
    )
    return train(config, tiny_data())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(resolve(folder) / MODEL)


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


def play(policy: Policy, observations: np.ndarray, seeds: list[int], **start: Any) -> np.ndarray:
    """Actions of episodes with given observations [T, n, S]: [T, n, A]."""
    policy.reset(observations.shape[1], seeds=seeds, **start)
    actions = []
    for t, seen in enumerate(observations):
        actions.append(policy.act(seen))
        policy.observe(np.full(len(seen), 0.5 * t), np.full(len(seen), t % 2))
    return np.stack(actions)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One short run of a method, made when first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Path:
        fit(name, folder / name)
        return folder / name

    return run


def watched(n: int = 3, steps: int = 7) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(steps, n, 3)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_fit_changes_weights_and_logs_finite_metrics(name: str, runs: Callable[[str], Path]) -> None:
    rows = [json.loads(line) for line in (runs(name) / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4
    assert any("loss" in key for key in rows[-1])
    assert all(np.isfinite(v) for v in rows[-1].values())
    first = load_file(sorted((runs(name) / "checkpoints").glob("step-*"))[0] / MODEL)
    last = weights(runs(name))
    assert any(not torch.equal(first[k], last[k]) for k in last)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_reaches_its_parameters(name: str) -> None:
    """Two steps move every parameter that an optimiser holds (with a start where FISOR weighs some step above 0)."""
    torch.manual_seed(1)
    data = tiny_data()
    algorithm = algorithm_classes(name)[0](small(name, dropout=0.0), Spec.from_data(data))
    sampler = algorithm.make_sampler(data, torch.device("cpu"), 0)
    held = {id(p) for o in algorithm.optimizers.values() for g in o.param_groups for p in g["params"]}
    before = {n: p.detach().clone() for n, p in algorithm.named_parameters() if id(p) in held}
    assert before
    for _ in range(2):
        algorithm.update(sampler.sample())
    still = [n for n, p in algorithm.named_parameters() if n in before and torch.equal(p, before[n])]
    assert not still


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_policy_acts_the_same(name: str, runs: Callable[[str], Path]) -> None:
    algorithm, _ = load_algorithm(resolve(runs(name)))
    first = play(Policy(algorithm, trained_limit=LIMIT), watched(), [1, 2, 3], cost_limits=LIMIT)
    second = play(load_policy(runs(name)), watched(), [1, 2, 3], cost_limits=LIMIT)
    assert np.array_equal(first, second)
    assert np.abs(first).max() <= 1
    assert np.ptp(first) > 0


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_equals_an_uninterrupted_one(name: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    fit(name, tmp_path / "halves", steps=2)
    run = fit(name, tmp_path / "halves", steps=4, resume=True)
    assert run.step == 4
    assert_equal(weights(tmp_path / "halves"), weights(runs(name)))


@pytest.mark.parametrize("name", NAMES)
def test_seed_decides(name: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    fit(name, tmp_path / "same")
    assert_equal(weights(tmp_path / "same"), weights(runs(name)))
    fit(name, tmp_path / "other", seed=1)
    other, mine = weights(tmp_path / "other"), weights(runs(name))
    assert any(not torch.equal(other[k], mine[k]) for k in mine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_config_survives_json(name: str, preset: str) -> None:
    config_class = algorithm_classes(name)[1]
    config = config_class.preset(preset)
    assert config_from(config_class, json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(QptError, match="nonsense"):
        config_class.preset("nonsense")


@pytest.mark.parametrize("name", NAMES)
def test_no_field_takes_what_its_type_does_not_have(name: str) -> None:
    config = algorithm_classes(name)[1]()
    for field in fields(config):
        for wrong in ("foo", ("foo",), 1j, np.zeros(2), {}):
            with pytest.raises(QptError, match=f"^{field.name} is .+, not "):
                replace(config, **{field.name: wrong})
        if isinstance(value := getattr(config, field.name), int | float):
            given = np.asarray(value)[()]
            assert isinstance(given, np.generic)
            kept = getattr(replace(config, **{field.name: given}), field.name)
            assert (kept, type(kept)) == (value, type(value))  # Python's own: JSON knows no others


@pytest.mark.parametrize(
    ("field", "wrong", "sentence"),
    [
        ("selection", "foo", "selection is 'constrained', 'tradeoff' or 'shield', not 'foo'"),
        ("fallback", None, "fallback is 'least-cost', 'ignore' or 'tradeoff', not None"),
        ("candidates", "many", "candidates is a whole number, not 'many'"),
        ("candidates", 2.5, "candidates is a whole number, not 2.5"),
        ("candidates", True, "candidates is a whole number, not True"),
        ("frugality", "None", "frugality is a number or None, not 'None'"),
        ("augmentation", 1, "augmentation is True or False, not 1"),
        ("betas", (0.9,), "betas is [a number, a number], not (0.9,)"),
        ("betas", [0.9, "x"], "betas is [a number, a number], not [0.9, 'x']"),
    ],
)
def test_the_sentence_names_the_field_the_value_and_the_choices(field: str, wrong: Any, sentence: str) -> None:
    given: dict[str, Any] = {field: wrong}
    for make in (lambda: QPTConfig(**given), lambda: replace(QPTConfig(), **given)):
        with pytest.raises(QptError) as caught:
            make()
        assert str(caught.value) == sentence
    with pytest.raises(QptError, match="precision is 'auto', 'fp32' or 'bf16', not 'fp16'"):
        TrainConfig(precision="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_no_field_takes_what_is_not_a_number(name: str) -> None:
    config = algorithm_classes(name)[1]()
    numbers = [field.name for field in fields(config) if isinstance(getattr(config, field.name), float)]
    assert numbers
    for field, wrong in itertools.product(numbers, (math.nan, math.inf, -math.inf, np.float32(math.nan))):
        with pytest.raises(QptError, match=f"^{field} is a number.*, not "):
            replace(config, **{field: wrong})


@pytest.mark.parametrize(
    ("field", "wrong", "rule"),
    [
        ("dropout", 1.0, "from 0 to below 1"),
        ("eta_cost", -0.1, "at least 0"),
        ("unfit_penalty", -1.0, "at least 0"),  # it would reward what does not fit
        ("ema", -0.5, "from 0 to 1"),
        ("cost_expectile", 1.5, "from 0 to 1"),
        ("lr", -1e-3, "at least 0"),
        ("critic_lr", -1e-3, "at least 0"),
        ("clip", -1.0, "at least 0"),  # a step would go uphill
        ("warmup", -1, "at least 0"),
        ("rtg_noise", -0.1, "at least 0"),
        ("return_scale", 0.0, "above 0"),  # it would count as None
        ("critic_cost_scale", -1.0, "above 0"),
        ("normalizer_floor", 0.0, "above 0"),
        ("betas", (0.9, 1.0), "from 0 to below 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(field: str, wrong: Any, rule: str) -> None:
    with pytest.raises(QptError, match=f"^{field} must be {rule}, not "):
        replace(QPTConfig(), **{field: wrong})


@pytest.mark.parametrize(
    ("name", "field", "wrong", "rule"),
    [
        ("bc-safe", "frontier_width", -0.5, "at least 0"),
        ("bcq-lag", "samples", 0, "at least 1"),
        ("bcq-lag", "caution", 3.0, "from 0 to 1"),
        ("caps", "discount", 1.5, "above 0 and at most 1"),
        ("cdt", "temperature", 0.0, "above 0"),
        ("coptidice", "alpha", 0.0, "above 0"),
        ("coptidice", "discount", 1.0, "above 0 and below 1"),  # its weights would all be 0
        ("cpq", "cost_limit", -1.0, "at least 0"),  # the policy could never be asked
        ("cpq", "unlikely", 1.5, "from 0 to 1"),  # a quantile would be read from the wrong end
        ("cpq", "log_std", (2.0, -20.0), "a low and a higher number"),
        ("fisor", "critic_batch", -3, "at least 1"),
        ("fisor", "feasibility_discount", 2.0, "above 0 and at most 1"),
        ("oasis", "condition_costs", (), "one number or more"),  # noticed only when the third stage began
        ("oasis", "window", 1, "at least 2"),
    ],
)
def test_numbers_that_mean_nothing_to_a_method_are_refused(name: str, field: str, wrong: Any, rule: str) -> None:
    with pytest.raises(QptError, match=f"^{field} must be {rule}, not "):
        replace(algorithm_classes(name)[1](), **{field: wrong})


def test_what_means_the_same_is_taken() -> None:
    config = QPTConfig(lr=1, betas=[0, np.float32(0.5)], frugality=np.float64(0.5), n_step=np.int32(2))  # type: ignore[arg-type]
    assert repr((config.lr, config.betas, config.frugality, config.n_step)) == "(1.0, (0.0, 0.5), 0.5, 2)"
    run = TrainConfig(out="runs/x", seeds=range(1, 3), eval_limits=[5])  # type: ignore[arg-type]
    assert (run.out, run.seeds, repr(run.eval_limits)) == (Path("runs/x"), (1, 2), "(5.0,)")
    # Types that a method of one's own may have.
    assert [fitting(2, Literal[1, 2]), fitting({"a": 1}, dict[str, int]), fitting(1j, Any)] == [2, {"a": 1}, 1j]
    with pytest.raises(ValueError, match=r"^$"):
        fitting(True, Literal[1, 2])


@pytest.mark.parametrize("name", NAMES)
def test_deciding_together_equals_deciding_alone(name: str, runs: Callable[[str], Path]) -> None:
    policy, seen, seeds = load_policy(runs(name)), watched(4), [11, 22, 33, 44]
    together = play(policy, seen, seeds, cost_limits=LIMIT)
    for i in range(4):
        alone = play(policy, seen[:, i : i + 1], seeds[i : i + 1], cost_limits=LIMIT)
        np.testing.assert_allclose(together[:, i], alone[:, 0], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_may_change_when_deciding_is_in_the_config(name: str) -> None:
    cls, config = algorithm_classes(name)
    assert cls.deciding <= {field.name for field in fields(config)}


@pytest.mark.parametrize("name", NAMES)
def test_limit_mode(name: str, runs: Callable[[str], Path]) -> None:
    policy = load_policy(runs(name))
    if policy.limit_mode == "trained":
        policy.reset(2)
        assert policy.cost_limits.tolist() == [LIMIT, LIMIT]
        with pytest.raises(QptError, match="trained for a cost limit of 8 and cannot take another; train one for 9"):
            policy.reset(2, cost_limits=9.0)
        return
    # All history equal, only the limit differs.
    seeds = [5, 5]
    policy.reset(2, cost_limits=[1.0, 1.0], return_targets=[10.0, 10.0], seeds=seeds)
    same = policy.act(np.repeat(watched(1, 1)[0], 2, 0))
    np.testing.assert_allclose(same[0], same[1], atol=1e-6)
    policy.reset(2, cost_limits=[0.0, 20.0], return_targets=[10.0, 10.0], seeds=seeds)
    actions = policy.act(np.repeat(watched(1, 1)[0], 2, 0))
    if policy.limit_mode == "ignored":
        np.testing.assert_allclose(actions[0], actions[1], atol=1e-6)
    elif name in ("qpt", "cdt"):  # others may rightly choose the same action at both
        assert np.abs(actions[0] - actions[1]).max() > 1e-7


@pytest.mark.parametrize("name", [n for n in NAMES if "variant" in {f.name for f in fields(algorithm_classes(n)[1])}])
@pytest.mark.parametrize("variant", ["correct", "reference"])
def test_both_variants_step(name: str, variant: str) -> None:
    data = tiny_data()
    algorithm = algorithm_classes(name)[0](small(name, variant=variant), Spec.from_data(data))
    sampler = algorithm.make_sampler(data, torch.device("cpu"), 0)
    for _ in range(2):
        metrics = algorithm.update(sampler.sample())
    assert all(torch.isfinite(v).all() for v in metrics.values())


def test_modules_that_the_environment_names_register_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "homemade_method.py").write_text(
        "from qpt.algorithms.base import register_algorithm\n"
        "from qpt.algorithms.bc import BC, BCConfig\n"
        "register_algorithm('homemade', BC, BCConfig)\n"
    )
    monkeypatch.setattr("qpt.algorithms.base._registered", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QPT_ALGORITHMS", "homemade_method")
    assert algorithm_classes("homemade")[1] is BCConfig
    assert algorithm_names()[-1] == "homemade"
    monkeypatch.setenv("QPT_ALGORITHMS", "no_such_module")
    with pytest.raises(QptError, match=r"no_such_module.*PYTHONPATH"):
        algorithm_names()
