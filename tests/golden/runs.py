"""The runs behind the golden traces, and the only module of these tests that uses the package.

`RUNS` maps the name of a trace to a function that returns its sections, {section: {key: numbers}}. When an interface of
the package changes, this module changes with it, and the stored numbers stay. Changed names of metrics, weights,
diagnostics and config fields go into `names.py`.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faulty_envs import walk_task
from qpt.algorithms.base import ALGORITHMS, Context, Spec, algorithm_classes, preset_config
from qpt.behaviour import read_snapshots
from qpt.calibration import calibrate, held_out
from qpt.certify import calibrate_limit, certify
from qpt.collect.learn import learn
from qpt.collect.record import record
from qpt.data import Trajectories, load_dataset
from qpt.data.augment import augment
from qpt.envs.toy import OraclePolicy, tradeoff
from qpt.evaluation import RandomPolicy, evaluate
from qpt.export import export_policy
from qpt.ope import Log, judge, select
from qpt.policy import Policy, load_policy
from qpt.runtime import OnnxPolicy
from qpt.tasks import get_task, register_task
from qpt.training import TrainConfig, train

Trace = dict[str, dict[str, Any]]

LIMITS = (10.0, 20.0, 40.0)

# Everything that differs from a preset, where the method has the field: sizes, and the lengths of schedules that would
# have no effect within 20 steps. The preset's own values of these fields are part of the trace (section "preset").
SHRUNK: dict[str, Any] = {
    "steps": 20,
    "batch_size": 32,
    "critic_batch": 16,  # of FISOR
    "warmup": 10,
    "lr_horizon": 60,  # of FISOR
    "stage_min": 2,  # of OASIS, as the next two: all three stages in 20 steps
    "generator_share": 0.4,
    "labeler_share": 0.2,
    "sequences": 16,
    "layers": 2,
    "width": 32,
    "critic_width": 32,
    "vae_width": 32,
    "policy_width": 32,
    "inverse_width": 32,
    "labeler_width": 32,
}


@dataclass(frozen=True)
class Fit:
    """A training run of one method on the embedded data, or on parts of its episodes (`cut_episodes`)."""

    method: str
    preset: str = "default"
    changes: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    deciding: dict[str, dict[str, Any]] = field(default_factory=dict)  # further decisions, with other settings
    strength: float = 1.0  # factor of all weights in these: after 20 steps a policy hardly depends on its targets


# Candidates that differ. With the offsets below all of them pass the test in some contexts, some or none in others.
WIDE = {"rtg_noise": 2.0, "ctg_noise": 2.0}
FITS: dict[str, Fit] = {
    "qpt/default": Fit(
        "qpt",
        deciding={
            "own": WIDE | {"test_offset": 9.95, "candidates": 1},
            "shield": WIDE | {"test_offset": 9.95},
            "constrained": WIDE | {"test_offset": 9.95, "selection": "constrained"},
            "noise at each step": WIDE | {"test_offset": 9.95, "noise_mode": "step"},
        },
        strength=3.0,
    ),
    "qpt/paper": Fit(
        "qpt",
        "paper",
        deciding={
            "constrained": WIDE | {"test_offset": 10.5},
            "horizon test": WIDE | {"test_offset": 10.5, "cost_test": "horizon"},
        },
        strength=3.0,
    ),
    "qpt/transformer": Fit("qpt", "transformer"),
    "cdt/default": Fit("cdt"),
    "cdt/paper": Fit("cdt", "paper"),
    "cdt/reference": Fit("cdt", changes={"variant": "reference"}),
    "cdt/paper-augmentation": Fit("cdt", changes={"augmentation_rule": "paper"}),
    "cdt/squared-error": Fit("cdt", changes={"stochastic": False}),
    "caps/default": Fit("caps"),
    "caps/paper": Fit("caps", "paper"),
    "caps/reference": Fit("caps", changes={"variant": "reference"}),
    "caps/sac-bc": Fit("caps", changes={"base": "sac-bc"}),
    "caps/sac-bc-reference": Fit("caps", changes={"base": "sac-bc", "variant": "reference"}),
    "bc-safe/default": Fit("bc-safe"),
    "bc-safe/paper": Fit("bc-safe", "paper"),
    **{f"bc-safe/{mode}": Fit("bc-safe", changes={"mode": mode}) for mode in ("all", "risky", "frontier", "boundary")},
    # The paper presets of these three are their reference variants and change nothing else.
    "bcq-lag/default": Fit("bcq-lag", deciding={"ten candidates": {"candidates": 10}}),
    "bcq-lag/paper": Fit("bcq-lag", "paper"),
    "cpq/default": Fit("cpq"),
    "cpq/paper": Fit("cpq", "paper"),
    "coptidice/default": Fit("coptidice"),
    "coptidice/paper": Fit("coptidice", "paper"),
    "fisor/default": Fit("fisor", deciding={"some feasible enough": {"feasible_enough": 0.05}}),
    "fisor/paper": Fit("fisor", "paper"),
    "oasis/default": Fit("oasis"),
    "oasis/paper": Fit("oasis", "paper"),
    "oasis/reference": Fit("oasis", changes={"variant": "reference"}),
}
FITS |= {
    f"{name}-cut": replace(FITS[name], cut=True)
    for method in ("qpt", "cdt", "caps", "bcq-lag", "cpq", "coptidice", "fisor", "oasis")
    for name in (f"{method}/default", f"{method}/paper")
}


# -- data --------------------------------------------------------------------------------------------------------------


@cache
def logged() -> Trajectories:
    return load_dataset("embedded:ballcircle")


@cache
def cut_episodes() -> Trajectories:
    """Parts of the logged episodes, 8 to 24 steps long, with what the whole ones lack.

    A third of them ends with a terminal, the others with a timeout, at the horizon of 24 steps or before it. A third
    has fractional costs. One column of the observations is constant.
    """
    data, rows, ends, final = logged(), [], [], []
    for e, first in enumerate(data.offsets[:-1]):
        start, length = first + 13 * e % 150, 8 + 7 * e % 17
        rows.append(np.arange(start, start + length))
        ends.append(np.arange(length) == length - 1)
        final.append(data.observations[start + length])
    episode = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    row, end = np.concatenate(rows), np.concatenate(ends)
    observations, final_observations = data.observations[row].copy(), np.array(final)
    observations[:, 7] = final_observations[:, 7] = 0.5
    return Trajectories.from_arrays(
        observations,
        data.actions[row],
        data.rewards[row],
        data.costs[row] * np.where(episode % 3 == 1, 0.4, 1.0),
        end & (episode % 3 == 0),
        end & (episode % 3 != 0),
        final_observations=final_observations,
    )


# -- training ----------------------------------------------------------------------------------------------------------


@cache
def fitted(fit_name: str, nudge: bool = False) -> tuple[Any, Trace]:
    """The trained method and the trace of its training.

    With `nudge` the initial weights differ in the last digit, which stands for the rounding of another machine.
    """
    fit = FITS[fit_name]
    data = cut_episodes() if fit.cut else logged()
    spec = Spec.from_data(data, 24) if fit.cut else Spec.from_data(data, task=get_task("BallCircle"))
    own = replace(preset_config(fit.method, fit.preset), **fit.changes)
    shrunk = {name: value for name, value in SHRUNK.items() if getattr(own, name, None) is not None}
    torch.manual_seed(0)
    method = algorithm_classes(fit.method)[0](replace(own, **shrunk), spec)
    if nudge:
        shake(method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the augmentation skips some targets and says so
        sampler = method.make_sampler(data, torch.device("cpu"), 0)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    method.train()
    steps = [{key: value.item() for key, value in method.update(sampler.sample()).items()} for _ in range(20)]
    keys = dict.fromkeys(key for metrics in steps for key in metrics)
    return method, {
        "preset": {name: getattr(own, name) for name in shrunk},
        "metrics": {key: [metrics.get(key) for metrics in steps] for key in keys},
        "weights": weights(before, method.state_dict()),
    }


def shake(method: Any) -> None:
    """Change the last digit of the weights."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in method.parameters():
            weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=draw))


def weights(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For each top-level module: the number of its weights, their sum, their L2 norm, and the norm of their change."""
    groups: dict[str, list[str]] = {}
    for name, value in after.items():
        if value.is_floating_point():
            groups.setdefault(name.split(".")[0], []).append(name)
    found = {}
    for group, names in groups.items():
        now = torch.cat([after[name].double().flatten() for name in names])
        then = torch.cat([before[name].double().flatten() for name in names])
        found[group] = [len(now), now.sum().item(), now.norm().item(), (now - then).norm().item()]
    return found


# -- decisions ---------------------------------------------------------------------------------------------------------


def suggested(method: Any, limit: float) -> float:
    suggest = getattr(method, "suggest_return", method.spec.suggest_return)
    return float(suggest(limit) * getattr(method.config, "target_factor", 1.0))


def contexts(method: Any) -> Context:
    """Five moments of logged episodes, from the lowest cost to the highest, each at three limits: 15 rows."""
    data, k = logged(), method.context
    by_cost = np.argsort(data.episode_costs, kind="stable")
    rows: list[dict[str, Any]] = []
    for place, step in ((0, 0), (125, 3), (250, 9), (375, 60), (499, 199)):
        episode = int(by_cost[place])
        now = int(data.offsets[episode]) + step
        first = max(now - k + 1, int(data.offsets[episode]))
        seen, last = slice(first, now + 1), now - first

        def padded(values: Any, last: int = last) -> Any:
            return np.concatenate([values, np.zeros((k - last - 1, *values.shape[1:]), values.dtype)])

        taken = data.actions[seen].copy()
        taken[-1] = 0  # not taken yet
        for limit in LIMITS:
            target = suggested(method, limit)
            earned = data.returns[episode] - data.returns_to_go[seen]
            spent = data.episode_costs[episode] - data.costs_to_go[seen]
            rows.append(
                {
                    "observations": padded(data.observations[seen]),
                    "actions": padded(taken),
                    "return_to_go": padded((target - earned).astype(np.float32)),
                    "cost_to_go": padded((limit - spent).astype(np.float32)),
                    "steps": padded(data.step_in_episode[seen]),
                    "last": last,
                    "return_target": np.float32(target),
                    "cost_limit": np.float32(limit),
                    "seeds": 100 + len(rows),
                }
            )
    return Context(**{name: torch.from_numpy(np.array([row[name] for row in rows])) for name in rows[0]})


def decisions(method: Any) -> dict[str, Any]:
    with torch.no_grad():
        decision = method.act(contexts(method))
    columns = {f"action {i}": decision.actions[:, i] for i in range(decision.actions.shape[1])}
    return {name: values.tolist() for name, values in (columns | decision.diagnostics).items()}


def training(name: str, nudge: bool = False) -> Trace:
    method, trace = fitted(name, nudge)
    fit, config = FITS[name], method.config
    if fit.cut:
        return trace
    method.eval()
    trace = trace | {"return targets": {f"limit {limit:g}": suggested(method, limit) for limit in LIMITS}}
    trace["decisions"] = decisions(method)
    kept = {name: value.clone() for name, value in method.state_dict().items()}
    with torch.no_grad():
        for weight in method.parameters():
            weight.mul_(fit.strength)
    for what, settings in fit.deciding.items():
        method.config = replace(config, **settings)
        trace[f"decisions, {what}"] = decisions(method)
    method.config = config
    method.load_state_dict(kept)
    return trace


def at_work(name: str, nudge: bool = False) -> Policy:
    """The policy of one of these training runs."""
    method, _ = fitted(name, nudge)
    return Policy(method.eval(), trained_limit=getattr(method.config, "cost_limit", None), name=FITS[name].method)


# -- everything else ---------------------------------------------------------------------------------------------------


TOY = tradeoff(0)


def columns(rows: list[dict[str, Any]], names: str) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in names.split()}


def flows(data: Trajectories) -> dict[str, Any]:
    """Sums of the columns of a dataset, and what its episodes came to."""
    sums = {name: getattr(data, name).astype(np.float64).sum(0).tolist() for name in ("observations", "actions")}
    return sums | {
        "returns": data.returns.tolist(),
        "costs": data.episode_costs.tolist(),
        "lengths": data.lengths.tolist(),
        "terminals": int(data.terminals.sum()),
        "timeouts": int(data.timeouts.sum()),
    }


def augmentation(nudge: bool = False) -> Trace:  # noqa: ARG001
    trace: Trace = {}
    for what, settings in {
        "paper": {"rule": "paper", "task": get_task("BallCircle")},
        "paper, from the data": {"rule": "paper"},
        "osrl": {"rule": "osrl", "task": get_task("BallCircle")},
        "osrl, from the data": {"rule": "osrl", "beta": 20.0, "min_reward": 5.0},
    }.items():
        found = augment(logged(), fraction=0.1, seed=0, **settings)
        trace[what] = {
            "base": found.base.tolist(),
            "return": found.target_return.tolist(),
            "cost": found.target_cost.tolist(),
            "return shift": found.return_shift.tolist(),
            "cost shift": found.cost_shift.tolist(),
            "skipped": found.skipped,
            "max reward": found.max_reward,
        }
    return trace


@cache
def run_folder(method: str) -> tuple[Any, Path]:
    """A run of the training loop on the toy, with logs, checkpoints and, for QPT, evaluations."""
    data, task = TOY.dataset(60, 0), register_task(TOY.task("GoldenToy"))
    own = preset_config(method, "default")
    shrunk = {name: value for name, value in SHRUNK.items() if hasattr(own, name)}
    folder = tempfile.TemporaryDirectory()  # deleted when the process ends
    _folders.append(folder)
    run = train(
        TrainConfig(
            task=task.name,
            algorithm=method,
            config=replace(own, **shrunk, **({"candidates": 1} if method == "qpt" else {})),  # faster evaluations
            out=Path(folder.name) / "run",
            device="cpu",
            log_every=1,
            eval_every=5 if method == "qpt" else 0,
            eval_episodes=2,
            eval_limits=(6.0, 24.0),
            workers=0,
            checkpoint_every=10,
            progress=False,
            threads=1,
        ),
        data,
    )
    return run, run.folder


_folders: list[Any] = []


def loop(nudge: bool = False) -> Trace:  # noqa: ARG001
    run, out = run_folder("qpt")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    keys = [key for key in rows[0] if key not in ("step", "steps_per_second")]
    return {
        "metrics": {key: [row[key] for row in rows] for key in keys},
        "evaluations": {
            f"limit {part['cost_limit']:g}, {key}": [row["limits"][i][key] for row in run.evaluations]
            for i, part in enumerate(run.evaluations[0]["limits"])
            for key in ("return", "cost", "normalized_return", "normalized_cost")
        },
    }


def evaluated(policy: Any, task: Any, episodes: int, limits: tuple[float, ...]) -> Trace:
    found = evaluate(policy, task, episodes=episodes, cost_limits=limits, seed=7, workers=0, slots=3, record=True)
    table = {
        "return": found.returns.tolist(),
        "cost": found.costs.tolist(),
        "length": found.lengths.tolist(),
        "ended by": found.ended_by.tolist(),
        "normalised return": found.normalized_return.tolist(),
        "normalised cost": found.normalized_cost.tolist(),
        "fallback share": found.fallback_share.tolist(),
    }
    names = "return return_interval cost cost_interval within_limit within_limit_interval cost_cvar"
    assert found.trajectories is not None
    return {"episodes": table, "summary": columns(found.summary(), names), "recorded": flows(found.trajectories)}


def toy_policy(nudge: bool, candidates: int = 1) -> Policy:
    """The policy of such a run, with weights three times as large, so that it depends more on what it observes."""
    policy = load_policy(run_folder("qpt")[1], candidates=candidates)
    with torch.no_grad():
        for weight in policy.method.parameters():  # type: ignore[attr-defined]
            weight.mul_(3)
    if nudge:
        shake(policy.method)
    return policy


def evaluation_toy(nudge: bool = False) -> Trace:
    return evaluated(toy_policy(nudge, 50), TOY.task(), 3, (6.0, 24.0))


def evaluation_walk(nudge: bool = False) -> Trace:  # noqa: ARG001
    """An environment whose episodes end by a terminal or by a timeout, at different steps."""
    return evaluated(RandomPolicy(2), walk_task(), 9, (5.0, 15.0))


def evaluation_simulator(nudge: bool = False) -> Trace:
    policy = at_work("bc-safe/default", nudge)
    trace = {f"policy, {k}": v for k, v in evaluated(policy, "BallCircle", 2, (10.0,)).items()}
    return trace | {f"random, {k}": v for k, v in evaluated(RandomPolicy(2), "BallCircle", 2, (10.0,)).items()}


def collection(nudge: bool = False) -> Trace:  # noqa: ARG001
    with tempfile.TemporaryDirectory() as folder:
        schedule = Path(folder) / "schedule.toml"
        schedule.write_text("[default]\nhidden = 16\nbatch = 240\nruns = [{ limits = [[0, 0.2], [1, 1]] }]\n")
        wish: dict[str, Any] = {"seed": 3, "cost_cap": 20.0, "workers": 0}
        (file,) = learn([walk_task()], Path(folder) / "learned", steps=1200, schedule=schedule, **wish)
        learned = read_snapshots(file)
        found = record(walk_task(), Path(folder) / "recorded", snapshots=file, trajectories=30, **wish)
    trace: Trace = {"recorded": flows(found.trajectories) | {"played": found.played, "steps": found.steps}}
    for number, (actor, row) in enumerate(zip(learned.actors, learned.table, strict=True)):
        trace[f"snapshot {number}"] = {
            **{name: float(np.linalg.norm(values.astype(np.float64))) for name, values in actor.arrays().items()},
            **{f"{what}, {key}": row[what][key] for what in ("noisy", "mean_action") for key in row[what]},
        }
    return trace


QUICK: dict[str, Any] = {"members": 3, "width": 16, "steps": 40, "batch": 32}  # of a judgement


def judged(limit: Any) -> dict[str, Any]:
    return {
        "return": [limit.expected_return, *limit.return_interval],
        "cost": [limit.expected_cost, *limit.cost_interval],
        "outside": limit.outside,
        "profile": list(limit.profile),
        "distance": limit.distance,
        "members": [list(pair) for pair in limit.members],
        "warning": limit.warning,
        "verdict": limit.verdict(),
    }


def judgement(nudge: bool = False) -> Trace:
    """On the cut episodes: many states of the toy are equal, and rounding would decide which are the nearest."""
    policy, data = at_work("cdt/default-cut", nudge), cut_episodes().select(np.arange(60))
    found = judge(policy, data, [2.0, 8.0], seed=2, **QUICK)
    return {f"limit {limit.cost_limit:g}": judged(limit) for limit in found.limits}


def selection(nudge: bool = False) -> Trace:  # noqa: ARG001
    found = select([run_folder("caps")[1]], Log(TOY.dataset(40, 1), seed=2, **QUICK), 30.0)
    ranking = {
        f"{place}": [row.candidate.step, row.candidate.last, row.qualifies, row.expected_return, row.cost_bound]
        for place, row in enumerate(found.ranking)
    }
    return {"ranking": ranking}


def certificate(nudge: bool = False) -> Trace:  # noqa: ARG001
    trace = {}
    for limit, risk, seed in ((30.0, 0.3, 4), (36.0, 0.5, 0)):  # the second is decided inside its second batch
        found = certify(RandomPolicy(1), TOY.task(), limit, risk=risk, max_episodes=60, batch=15, seed=seed, workers=0)
        trace[f"limit {limit:g}"] = {
            "verdict": found.verdict,
            "decided after": found.decided_after,
            "bounds": list(found.bounds),
            "sequence": [list(row) for row in found.sequence],
            "costs": list(found.costs),
            "forecasts": [list(vars(row).values()) for row in found.forecasts],
        }
    return trace


class Careless(OraclePolicy):
    """The optimal policy for a limit that is a quarter higher."""

    def reset(self, n: int, *, cost_limits: Any, seeds: Any) -> None:
        super().reset(n, cost_limits=1.25 * cost_limits, seeds=seeds)

    def restart(self, indices: Any, *, cost_limits: Any, seeds: Any) -> None:
        super().restart(indices, cost_limits=1.25 * cost_limits, seeds=seeds)


def calibration(nudge: bool = False) -> Trace:
    limit = calibrate_limit(Careless(TOY), TOY.task(), 20.0, risk=0.3, episodes=10, seed=5, workers=0)
    policy = toy_policy(nudge)
    episodes = evaluate(policy, TOY.task(), episodes=3, cost_limits=(6.0, 24.0), workers=0, record=True)
    critics, off = calibrate(policy.method, episodes), held_out(policy.method, TOY.dataset(10, 1))  # type: ignore[arg-type]
    return {
        "limit": {"internal": limit.internal_limit, "tested": [list(row) for row in limit.tested]},
        "critics": {name.replace("_", " "): values.tolist() for name, values in asdict(critics).items()},
        "held out": {
            "predicted": [off.predicted.mean(), off.predicted.std()],
            "excess": [off.excess.mean(), off.excess.std()],
            "offset": [off.offset(level) for level in (0.5, 0.9)],
        },
    }


def export(nudge: bool = False) -> Trace:  # noqa: ARG001
    """Actions of an exported graph in the first steps of logged episodes, at three limits."""
    with tempfile.TemporaryDirectory() as folder:
        done = export_policy(run_folder("caps")[1], Path(folder) / "policy.onnx")
        policy = OnnxPolicy(done.graph)
    data = TOY.dataset(3, 1)
    policy.reset(3, cost_limits=[6.0, 12.0, 24.0], seeds=[1, 2, 3])
    targets, actions = policy.return_targets.tolist(), []
    for step in range(6):
        rows = data.offsets[:-1] + step
        actions.append(policy.act(data.observations[rows])[:, 0].tolist())
        policy.observe(data.rewards[rows], data.costs[rows])
    found = {name: values.tolist() for name, values in policy.diagnostics().items()}
    return {"policy": {"return targets": targets, "actions": actions}, "diagnostics": found}


RUNS: dict[str, Callable[..., Trace]] = {
    **{name: partial(training, name) for name in FITS},
    "others/augmentation": augmentation,
    "others/loop": loop,
    "others/evaluation-toy": evaluation_toy,
    "others/evaluation-walk": evaluation_walk,
    "others/evaluation-simulator": evaluation_simulator,
    "others/collection": collection,
    "others/judgement": judgement,
    "others/selection": selection,
    "others/certificate": certificate,
    "others/calibration": calibration,
    "others/export": export,
}


def missing(name: str) -> str:
    """Why a run cannot be made here; empty if it can."""
    if name == "others/evaluation-simulator" and not get_task("BallCircle").simulator_installed:
        return "the simulator of BallCircle is not installed"
    packages = ("onnx", "onnxscript", "onnxruntime") if name == "others/export" else ()
    return ", ".join(f"{package} is not installed" for package in packages if find_spec(package) is None)


def method_names() -> list[str]:
    return list(ALGORITHMS)
