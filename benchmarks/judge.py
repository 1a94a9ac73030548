"""How well does `qpt judge` foretell what policies do? Over 40 small policies, in one task with logs and a simulator.

    python benchmarks/judge.py --task BallCircle --data FILE --work runs/judge --out docs/results/judge

The episodes are split: policies are trained on one part (several methods, checkpoints and limits, on the CPU), judged
on the other and then run in the simulator. Each stage leaves its results in the folder of --work and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qpt import plotting
from qpt.algorithms.base import algorithm_classes
from qpt.checkpoint import checkpoints
from qpt.data import Trajectories, load_dataset
from qpt.ope import Candidate, Log, judge, oracle_report
from qpt.ope.judge import Judgement, LimitJudgement
from qpt.ope.select import Ranked, rank
from qpt.policy import Policy, load_policy
from qpt.training import TrainConfig, train

Floats = npt.NDArray[np.float64]

# name of the run: (method, settings); three checkpoints of each are kept
SMALL: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "dropout": 0.0, "attention_dropout": 0.0, "warmup": 100}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc-10": ("bc-safe", {"steps": 1800, "batch_size": 256, "width": 128, "cost_limit": 10.0}),
    "bc-20": ("bc-safe", {"steps": 1800, "batch_size": 256, "width": 128, "cost_limit": 20.0}),
    "bc-40": ("bc-safe", {"steps": 1800, "batch_size": 256, "width": 128, "cost_limit": 40.0}),
    "caps": ("caps", {"steps": 2400, "batch_size": 256, "width": 128, "lr": 1e-3}),
    "bcq-10": ("bcq-lag", {"steps": 1800, "batch_size": 128, "width": 128, "vae_width": 128, "cost_limit": 10.0}),
    "bcq-40": ("bcq-lag", {"steps": 1800, "batch_size": 128, "width": 128, "vae_width": 128, "cost_limit": 40.0}),
    "cdt": ("cdt", {**SMALL, "steps": 1500, "batch_size": 64, "context": 5, "lr": 1e-3}),
    "qpt": (
        "qpt",
        {**SMALL, "steps": 2100, "batch_size": 64, "context": 3, "critic_width": 64, "lr": 1e-3, "critic_lr": 1e-3,
         "candidates": 16, "target_factor": 0.95},
    ),
}  # fmt: skip
LIMITS = (10.0, 20.0, 40.0)


def train_all(task: str, data: Trajectories, work: Path, seed: int) -> None:
    for name, (method, settings) in RUNS.items():
        out = work / "runs" / name
        if out.exists():
            continue
        config = replace(algorithm_classes(method)[1](), **settings)
        every = config.steps // 3
        train(
            TrainConfig(
                task=task, algorithm=method, config=config, seed=seed, out=out, checkpoint_every=every, keep=3,
                device="cpu", progress=False,
            ),
            data,
        )  # fmt: skip
        print(f"trained {name}", flush=True)


def policies(work: Path) -> list[tuple[str, Path, tuple[float, ...]]]:
    """Every checkpoint with the limits it is asked at: its own, where it knows but one."""
    found = []
    for run in RUNS:
        for folder in checkpoints(work / "runs" / run):
            policy = load_policy(folder)
            own = policy.trained_limit if policy.limit_mode == "trained" else None
            found.append((run, folder, LIMITS if own is None else (own,)))
    return found


def simulate_all(task: str, work: Path, episodes: int) -> dict[str, Any]:
    """Realised returns and costs of each policy and limit, by "run/checkpoint/limit"."""
    from qpt.evaluation import evaluate

    results = _read(work / "simulated.json")
    for run, folder, limits in policies(work):
        if f"{run}/{folder.name}/{limits[-1]:g}" in results:
            continue
        rows = evaluate(load_policy(folder), task, episodes=episodes, cost_limits=limits, seed=123)
        for limit in limits:
            part = rows.select(rows.cost_limit == limit)
            key = f"{run}/{folder.name}/{limit:g}"
            results[key] = {"returns": part.returns.tolist(), "costs": part.costs.tolist()}
            print(f"{key}: return {part.returns.mean():.1f}, cost {part.costs.mean():.1f}", flush=True)
        _write(work / "simulated.json", results)
    return results


def judge_all(data: Trajectories, work: Path, seed: int, device: str) -> dict[str, Any]:
    """Judgements by the same keys; "seconds" says how long they took."""
    results = _read(work / "judged.json")
    log: Log | None = None
    for run, folder, limits in policies(work):
        if f"{run}/{folder.name}/{limits[-1]:g}" in results:
            continue
        if log is None:
            began = time.perf_counter()
            log = Log(data, seed=seed, device=device)
            results.setdefault("seconds", {"policies": []})["log"] = time.perf_counter() - began
            where = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
            results["made_with"] = {"device": where, "torch": torch.__version__}
        policy: Policy = load_policy(folder, device=device)
        for limit in limits:
            began = time.perf_counter()
            key, found = f"{run}/{folder.name}/{limit:g}", judge(policy, log, [limit])
            results["seconds"]["policies"].append(time.perf_counter() - began)
            results[key] = {"algorithm": found.algorithm, **asdict(found.limits[0])}
            print(f"{key}: return {found.limits[0].expected_return:.1f}, cost {found.limits[0].expected_cost:.1f}")
        _write(work / "judged.json", results)
    return results


# -- what is reported ----------------------------------------------------------------------------------------------


def spearman(a: Floats, b: Floats) -> float:
    def ranks(values: Floats) -> Floats:
        ordered = np.sort(values)
        return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2.0

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def spearman_interval(a: Floats, b: Floats, runs: npt.NDArray[np.str_], draws: int = 2000) -> tuple[float, float]:
    """By a bootstrap over whole runs: the checkpoints and limits of one are much alike."""
    rng, names = np.random.default_rng(0), np.unique(runs)
    places = [np.flatnonzero(runs == name) for name in names]
    values = []
    for _ in range(draws):
        rows = np.concatenate([places[i] for i in rng.integers(len(names), size=len(names))])
        if np.ptp(a[rows]) > 0 and np.ptp(b[rows]) > 0:
            values.append(spearman(a[rows], b[rows]))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def report(simulated: dict[str, Any], judged: dict[str, Any]) -> dict[str, Any]:
    """Rank correlation, errors and coverage of return and cost, and the regret of selection at each limit."""
    keys = [k for k in judged if k in simulated]
    runs = np.array([k.split("/")[0] for k in keys])
    result: dict[str, Any] = {"policies": len(keys), "episodes": len(simulated[keys[0]]["returns"])}
    for name, estimate, bounds in (
        ("return", "expected_return", "return_interval"),
        ("cost", "expected_cost", "cost_interval"),
    ):
        real = np.array([np.mean(simulated[k][f"{name}s"]) for k in keys])
        error = np.array(
            [np.std(simulated[k][f"{name}s"], ddof=1) / len(simulated[k][f"{name}s"]) ** 0.5 for k in keys]
        )
        guess = np.array([judged[k][estimate] for k in keys])
        low, high = np.array([judged[k][bounds] for k in keys]).T
        result[name] = {
            "spearman": spearman(guess, real),
            "spearman_interval": spearman_interval(guess, real, runs),
            "mean_absolute_error": float(np.abs(guess - real).mean()),
            "bias": float((guess - real).mean()),
            "spread_of_truth": float(real.std()),
            "coverage": float(((low <= real) & (real <= high)).mean()),
            "coverage_allowing_for_episodes": float(((low - 2 * error <= real) & (real <= high + 2 * error)).mean()),
            "mean_width": float((high - low).mean()),
            "below_upper_bound": float((real <= high + 2 * error).mean()),
        }
    far = np.array([judged[k]["outside"] > 0.3 for k in keys])
    result["warned"] = int(far.sum())
    result["selection"] = [_selection(limit, simulated, judged, keys) for limit in LIMITS]
    result["rows"] = [
        {
            "policy": k,
            "return": float(np.mean(simulated[k]["returns"])),
            "cost": float(np.mean(simulated[k]["costs"])),
            **{n: judged[k][n] for n in ("expected_return", "return_interval", "expected_cost", "cost_interval")},
            "outside": judged[k]["outside"],
        }
        for k in keys
    ]
    return result


def _selection(limit: float, simulated: dict[str, Any], judged: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What `qpt select` would choose at a limit among all checkpoints, against the oracle and the last ones."""
    own = {k: float(k.split("/")[2]) for k in keys}
    trained = [k for k in keys if RUNS[k.split("/")[0]][0] in ("bc-safe", "bcq-lag")]
    options = [k for k in keys if own[k] == limit or k in trained]
    ranked = []
    for k in options:
        run, name, _ = k.split("/")
        last = name == max(x.split("/")[1] for x in keys if x.split("/")[0] == run)
        row = {n: v for n, v in judged[k].items() if n != "algorithm"}
        found = Judgement(judged[k]["algorithm"], k, 0.95, 0, 0, 0, (LimitJudgement(**row),))
        step = int(name.removeprefix("step-"))
        ranked.append(
            Ranked(Candidate(run, k, found.algorithm, step, last), found, own[k], row["cost_interval"][1] <= limit)
        )
    chosen = rank(ranked, limit)
    real = {k: (float(np.mean(simulated[k]["returns"])), float(np.mean(simulated[k]["costs"]))) for k in options}
    return {"candidates": len(options), "qualified": chosen.qualified, **asdict(oracle_report(chosen, real))}


COLOURS = {"bc": "#4477aa", "caps": "#228833", "bcq": "#aa3377", "cdt": "#ee7733", "qpt": "#222222"}


def draw(result: dict[str, Any], task: str, out: Path) -> None:
    """rank.png: estimated against realised ranks; calibration.png: values with their intervals."""
    for what in ("rank", "calibration"):
        figure, first = plotting.new_figure(10.4, 4.9)
        first.remove()
        for place, (name, estimate, bounds) in enumerate(
            (("return", "expected_return", "return_interval"), ("cost", "expected_cost", "cost_interval"))
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            axes.grid(color=plotting.GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            real = np.array([row[name] for row in result["rows"]])
            guess = np.array([row[estimate] for row in result["rows"]])
            ends = np.array([row[bounds] for row in result["rows"]])
            if what == "rank":
                order = lambda v: np.argsort(np.argsort(v)) + 1  # noqa: E731
                real, guess = order(real), order(guess)
            for kind, colour in COLOURS.items():
                mine = np.array([row["policy"].split("/")[0].split("-")[0] == kind for row in result["rows"]])
                if what == "rank":
                    axes.scatter(real[mine], guess[mine], s=34, color=colour, label=kind if place == 0 else None)
                else:
                    reach = np.abs(ends[mine].T - guess[mine])
                    axes.errorbar(
                        real[mine], guess[mine], yerr=reach, fmt="o", markersize=5, color=colour, elinewidth=1.1,
                        alpha=0.85, label=kind if place == 0 else None,
                    )  # fmt: skip
            low, high = min(real.min(), guess.min()), max(real.max(), guess.max())
            axes.plot([low, high], [low, high], color=plotting.INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
            unit = "rank of the " if what == "rank" else ""
            axes.set_xlabel(f"{unit}realised {name} ({result['episodes']} episodes)")
            axes.set_ylabel(f"{unit}judged {name}")
            r = result[name]
            ends_ = "[{:.2f}, {:.2f}]".format(*r["spearman_interval"])
            axes.set_title(
                f"{name}: rank correlation {r['spearman']:.2f} {ends_}"
                if what == "rank"
                else f"{name}: {r['coverage']:.0%} of 95 % intervals hold the mean of the episodes",
                fontsize=10, loc="left",
            )  # fmt: skip
        title = f"{task}: {result['policies']} policies judged on held-out logs, and run in the simulator"
        figure.suptitle(title, x=0.015, ha="left", fontsize=12, fontweight="bold", color=plotting.INK)
        figure.legend(loc="outside lower left", ncols=5, frameon=False, fontsize=9)
        plotting.save(figure, out / f"{what}.png")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="BallCircle")
    parser.add_argument("--data", default="embedded:ballcircle")
    parser.add_argument("--work", type=Path, default=Path("runs/judge"))
    parser.add_argument("--out", type=Path, default=None, help="where the results and pictures go")
    parser.add_argument("--episodes", type=int, default=30, help="in the simulator, of each policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="for the fits of the judgement")
    parser.add_argument("--stage", choices=("all", "train", "simulate", "judge", "report"), default="all")
    arguments = parser.parse_args()
    work, stage = arguments.work, arguments.stage
    training, held_out = load_dataset(arguments.data).split(0.5, arguments.seed)
    if stage in ("all", "train"):
        train_all(arguments.task, training, work, arguments.seed)
    if stage in ("all", "simulate"):
        simulate_all(arguments.task, work, arguments.episodes)
    if stage in ("all", "judge"):
        judge_all(held_out, work, arguments.seed, arguments.device)
    if stage in ("all", "report"):
        judged = _read(work / "judged.json")
        result = report(_read(work / "simulated.json"), judged)
        result |= {"task": arguments.task, "held_out_episodes": len(held_out)}
        result["made_with"] = judged["made_with"]
        out = arguments.out or work
        _write(out / "results.json", result)
        draw(result, arguments.task, out)
        print(json.dumps({k: v for k, v in result.items() if k not in ("rows", "seconds")}, indent=1))


if __name__ == "__main__":
    main()
