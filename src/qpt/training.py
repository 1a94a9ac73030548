"""The one loop: sample, update, log, evaluate, checkpoint, resume."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from qpt import checkpoint, logs
from qpt.algorithms.base import Algorithm, Spec, algorithm_classes
from qpt.data import load_dataset
from qpt.data.sampling import Sampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy
from qpt.stepping import Stepper
from qpt.tasks import Task, get_task
from qpt.trackers import open_trackers

DIVERGED = 1e8  # a loss of this size never comes back


@dataclass(frozen=True)
class TrainConfig:
    """A training run: which data and method, how long, how often to look, where to write."""

    task: str | None = None
    """A task of `qpt tasks`; gives the data, the horizon and a simulator for evaluation."""
    data: Path | None = None
    """A data file; overrides the task's. "embedded:ballcircle" is the set that comes with the package."""
    horizon: int | None = None
    """Longest episode in steps; without a task, the longest logged one."""
    algorithm: str = "qpt"
    """The method."""
    config: Any = None
    """The method's own config; None for its defaults."""
    seed: int = 0
    """Fixes everything: initial weights, batches, dropout, augmentation."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    out: Path = Path("runs/latest")
    """The run folder."""
    resume: bool = False
    """Continue the run in `out` from its last checkpoint."""
    checkpoint_every: int = 5_000
    """Steps between checkpoints."""
    keep: int = 2
    """Step checkpoints kept, besides the best one."""
    eval_every: int = 0
    """Steps between evaluations in the simulator; 0 for none."""
    eval_episodes: int = 20
    """Episodes at each limit."""
    eval_limits: tuple[float, ...] = (10.0, 20.0, 40.0)
    """Cost limits of the evaluations; the best checkpoint is chosen by all of them together."""
    eval_seed: int = 1_000
    """Seed of the evaluation episodes."""
    workers: int | None = None
    """Simulator processes; None for one a core."""
    log_every: int = 100
    """Steps between log rows; the only moments when the host waits for the device."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 for the transformer, or everything in fp32; auto: bf16 on cuda."""
    fast: bool = True
    """On cuda: capture the step as a graph."""
    compile: bool | None = None
    """Compile the losses with torch.compile; None: on cuda."""
    threads: int | None = None
    """CPU threads of torch. None: 1 on cpu (small networks gain nothing from more, and lose much on a busy machine)."""
    tensorboard: bool = False
    """Also log for TensorBoard."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""
    progress: bool = True
    """Show a progress bar."""


@dataclass
class Run:
    """What a training run left behind."""

    folder: Path
    step: int
    metrics: dict[str, float]
    interrupted: bool = False
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def train(config: TrainConfig, data: Trajectories | None = None) -> Run:
    """Train as configured and return where the results are. `data` may be given directly instead of a file."""
    task = get_task(config.task) if config.task else None
    trajectories = data if data is not None else _load(config, task)
    if config.eval_every and (task is None or not task.has_simulator):
        raise QptError("evaluation during training needs a task with a simulator; give --task, or --eval-every 0")
    device = _device(config.device)
    _prepare(device, config)
    cls, config_class = algorithm_classes(config.algorithm)
    config = replace(config, config=config.config or config_class())
    torch.manual_seed(config.seed)
    algorithm = cls(config.config, Spec.from_data(trajectories, config.horizon, task)).to(device)
    algorithm.make_optimizers()
    sampler = algorithm.make_sampler(trajectories, device, config.seed)
    session = _Session(config, task, trajectories, algorithm, sampler)
    session.begin()
    return session.run()


class _Session:
    """The state of a run between two steps, and the files that it keeps."""

    def __init__(
        self, config: TrainConfig, task: Task | None, data: Trajectories, algorithm: Algorithm, sampler: Sampler
    ) -> None:
        self.config, self.task, self.data, self.algorithm, self.sampler = config, task, data, algorithm, sampler
        self.step, self.steps = 0, int(config.config.steps)
        self.metrics: dict[str, float] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.device = next(iter(algorithm.state_dict().values())).device
        on_cuda = self.device.type == "cuda"
        if hasattr(algorithm, "autocast"):
            algorithm.autocast = config.precision == "bf16" or (config.precision == "auto" and on_cuda)

    # -- beginning and going on ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        out = self.config.out
        found = checkpoint.checkpoints(out) if out.exists() else []
        if self.config.resume:
            if not found:
                if (out / "run.json").exists():
                    return self._start_files()  # killed before its first checkpoint: begin again
                raise QptError(f"there is nothing to resume in {out}; leave out --resume to start a run there")
            return self._resume(found[-1])
        if found or (out / "run.json").exists():
            raise QptError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
        return self._start_files()

    def _start_files(self) -> None:
        out = self.config.out
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "run.json").write_text(json.dumps(self._facts(), indent=1, default=str), encoding="utf-8")
            for name in ("metrics.jsonl", "metrics.csv", "evaluations.jsonl"):
                (out / name).unlink(missing_ok=True)
        except OSError as error:
            raise QptError(f"the run folder {out} cannot be written: {error.strerror}; choose another --out") from error

    def _resume(self, folder: Path) -> None:
        manifest = checkpoint.read_manifest(folder)
        if manifest["data"]["fingerprint"] != self.data.fingerprint:
            raise QptError(
                f"the run in {self.config.out} began with other data; "
                "give the same data, or start a new run with another --out"
            )
        old, new = dict(manifest["config"]), json.loads(json.dumps(asdict(self.config.config)))
        changed = sorted(k for k in new if k != "steps" and old.get(k) != new[k])
        if manifest["algorithm"] != self.config.algorithm or manifest["seed"] != self.config.seed or changed:
            what = ", ".join(changed) or "its algorithm or seed"
            raise QptError(
                f"the run in {self.config.out} began with other settings ({what}); "
                "resume with the same, or start a new run"
            )
        self.algorithm.load_state_dict(checkpoint.read_tensors(folder, checkpoint.MODEL, manifest))
        generators = checkpoint.restore_training(folder, self.algorithm, manifest)
        self.sampler.generator.set_state(generators["generator/sampler"].cpu())
        torch.set_rng_state(generators["generator/torch"].cpu())
        if "generator/cuda" in generators and self.device.type == "cuda":
            torch.cuda.set_rng_state(generators["generator/cuda"].cpu(), self.device)
        self.step = int(manifest["step"])
        out = self.config.out
        self.evaluations = [row for row in logs.rows(out / "evaluations.jsonl") if row["step"] <= self.step]
        logs.rewrite(out / "evaluations.jsonl", self.evaluations)
        kept = [row for row in logs.rows(out / "metrics.jsonl") if row["step"] <= self.step]
        logs.rewrite(out / "metrics.jsonl", kept)
        logs.rewrite_csv(out / "metrics.csv", kept)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        c = self.config
        on_cuda = self.device.type == "cuda"
        stepper = Stepper(
            self.algorithm,
            self.sampler,
            fast=c.fast and on_cuda,
            compile=c.compile if c.compile is not None else on_cuda and c.fast,
        )
        interrupted = False
        with (
            logs.stop_flag() as stopped,
            logs.progress(c.progress, c.algorithm, self.step, self.steps) as show,
            open_trackers(c.out, c.tensorboard, c.wandb) as track,
        ):
            self.algorithm.train()
            began, first = time.perf_counter(), self.step
            while self.step < self.steps:
                metrics = stepper.step()
                self.step += 1
                last = self.step == self.steps
                if self.step % c.log_every == 0 or last or self.step % c.checkpoint_every == 0:
                    rate = (self.step - first) / (time.perf_counter() - began)
                    self._log(metrics, rate, track)
                    show(self.step, self.metrics)
                if c.eval_every and (self.step % c.eval_every == 0 or last):
                    self._evaluate(track)
                if self.step % c.checkpoint_every == 0 or last:
                    self._save()
                if stopped() and not last:
                    self._log(metrics, 0.0, track)
                    self._save()
                    interrupted = True
                    break
        return Run(c.out, self.step, self.metrics, interrupted, self.evaluations)

    def _log(self, metrics: dict[str, Tensor], rate: float, track: Callable[[int, dict[str, float]], None]) -> None:
        names = list(metrics)
        stacked = torch.stack([metrics[n].detach().float().reshape(()) for n in names])
        values = stacked.tolist()  # the one wait for the device
        self.metrics = dict(zip(names, values, strict=True))
        for name, value in self.metrics.items():
            if not math.isfinite(value) or abs(value) > DIVERGED:
                good = checkpoint.checkpoints(self.config.out)
                where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
                raise QptError(
                    f"training diverged: {name} is {value:g} at step {self.step}; {where}; lower the learning rate or η"
                )
        row = {"step": self.step, "steps_per_second": round(rate, 2), **self.metrics}
        logs.append(self.config.out / "metrics.jsonl", row)
        logs.append_csv(self.config.out / "metrics.csv", row)
        track(self.step, self.metrics)

    def _evaluate(self, track: Callable[[int, dict[str, float]], None]) -> None:
        from qpt.evaluation import evaluate  # simulators are needed only here

        c, task = self.config, self.task
        assert task is not None
        trained = getattr(c.config, "cost_limit", None)
        limits = (trained,) if self.algorithm.limit_mode == "trained" and trained is not None else c.eval_limits
        episodes = evaluate(
            Policy(self.algorithm, trained_limit=trained, name=c.algorithm),
            task,
            episodes=c.eval_episodes,
            cost_limits=limits,
            seed=c.eval_seed,
            workers=c.workers,
        )
        self.algorithm.train()
        row: dict[str, Any] = {"step": self.step, "limits": []}
        for limit in limits:
            part = episodes.select(episodes.cost_limit == limit)
            row["limits"].append(
                {
                    "cost_limit": limit,
                    "return": float(part.returns.mean()),
                    "cost": float(part.costs.mean()),
                    "normalized_return": float(part.normalized_return.mean()),
                    "normalized_cost": float(part.normalized_cost.mean()),
                }
            )
            track(
                self.step,
                {
                    f"eval/return@{limit:g}": row["limits"][-1]["return"],
                    f"eval/cost@{limit:g}": row["limits"][-1]["cost"],
                },
            )
        best_before = best_evaluation(self.evaluations)
        self.evaluations.append(row)
        logs.append(c.out / "evaluations.jsonl", row)
        if best_evaluation(self.evaluations) is row and row is not best_before:
            self._save_best()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._write(self.config.out / "checkpoints" / f"step-{self.step:09d}")
        checkpoint.rotate(self.config.out, self.config.keep)

    def _save_best(self) -> None:
        folder = self._write(self.config.out / "checkpoints" / f"best-{self.step:09d}")
        for old in folder.parent.glob("best-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _write(self, folder: Path) -> Path:
        generators = {"generator/sampler": self.sampler.generator.get_state(), "generator/torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["generator/cuda"] = torch.cuda.get_rng_state(self.device)
        facts = self._facts() | {"step": self.step, "metrics": self.metrics, "evaluations": self.evaluations[-1:]}
        config = facts.pop("config")
        return checkpoint.write_checkpoint(folder, self.config.algorithm, self.algorithm, config, generators, facts)

    def _facts(self) -> dict[str, Any]:
        c = self.config
        return {
            "algorithm": c.algorithm,
            "config": json.loads(json.dumps(asdict(c.config))),
            "seed": c.seed,
            "task": c.task,
            "data": {
                "source": str(self.data.info.get("source", c.data or "")),
                "fingerprint": self.data.fingerprint,
                "episodes": len(self.data),
                "steps": self.data.steps,
                "surrogate": self.data.is_surrogate,
            },
            "device": self.device.type,
            "versions": checkpoint.versions(),
        }


def best_evaluation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The paper's rule: the highest mean return among evaluations whose cost meets every limit, else the least cost."""
    if not rows:
        return None

    def worst(row: dict[str, Any]) -> float:
        return max(float(part["normalized_cost"]) for part in row["limits"])

    def reward(row: dict[str, Any]) -> float:
        return sum(float(part["return"]) for part in row["limits"]) / len(row["limits"])

    safe = [row for row in rows if worst(row) <= 1.0]
    return max(safe, key=reward) if safe else min(rows, key=worst)


# -- little tools ------------------------------------------------------------------------------------------------------


def _load(config: TrainConfig, task: Task | None) -> Trajectories:
    if config.data is not None:
        return load_dataset(str(config.data))
    if task is None:
        raise QptError("give --task NAME or --data FILE to train from")
    return load_dataset(task.name)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise QptError("there is no CUDA device here; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise QptError(f"there is no device {name!r}; use cpu, cuda or auto") from error


def _prepare(device: torch.device, config: TrainConfig) -> None:
    """Torch's own settings for this device; they hold for the whole process."""
    if config.threads or device.type == "cpu":
        torch.set_num_threads(config.threads or 1)
    if device.type == "cuda":  # TF32 for what bf16 leaves in fp32; "fp32" means what it says
        torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
