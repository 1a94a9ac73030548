"""One training run between two steps: its networks, its batches, its noise, and the files that it keeps."""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qpt import checkpoint, logs, parallel, resuming, trackers
from qpt.algorithms.base import Algorithm, Spec, algorithm_classes
from qpt.data.sampling import Sampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.policy import Policy
from qpt.stepping import Stepper
from qpt.tasks import Task
from qpt.train_config import TrainConfig
from qpt.turns import Turn
from qpt.writing import alone, check_folder, write_json

DIVERGED = 1e8  # a loss or a weight never comes back from here, unless errors of returns are that large squared
LOGS = ("metrics.jsonl", "metrics.csv", "evaluations.jsonl")


class Session:
    """A run that can be taken further at any time.

    Of several in one process each is used within its `turn`. With several processes each has a session of the same
    run, and the first writes the files.
    """

    def __init__(
        self, config: TrainConfig, task: Task | None, data: Trajectories, device: torch.device, *, alone: bool = True
    ) -> None:
        cls, config_class = algorithm_classes(config.algorithm)
        given = type(config.config)
        if config.config is not None and not issubclass(given, config_class):
            raise QptError(f"{config.algorithm} takes a {config_class.__name__} as its config, not a {given.__name__}")
        self.config = replace(config, config=config.config or config_class())
        self.task, self.data, self.device, self.leads = task, data, device, parallel.rank() == 0
        self.step, self.steps = 0, int(self.config.config.steps)
        self.metrics: dict[str, float] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.track: Callable[[int, dict[str, float]], None] = lambda _step, _metrics: None
        on_cuda, together = device.type == "cuda", parallel.processes() > 1

        torch.manual_seed(config.seed)
        spec = Spec.from_data(data, config.horizon, task)
        self._diverged = max(DIVERGED, 100 * max(-spec.return_min, spec.return_max, spec.cost_max) ** 2)
        self.algorithm: Algorithm = cls(_share(self.config.config), spec).to(device)
        self.algorithm.make_optimizers()
        if hasattr(self.algorithm, "autocast"):
            self.algorithm.autocast = config.precision == "bf16" or (config.precision == "auto" and on_cuda)
        self.sampler: Sampler = self.algorithm.make_sampler(data, device, config.seed)
        if parallel.rank():  # the same weights and relabelled episodes as the first process, other batches and noise
            mixed = int(np.random.SeedSequence([config.seed, parallel.rank()]).generate_state(1)[0])
            torch.manual_seed(mixed)
            self.sampler.generator.manual_seed(mixed)

        self.turn: Any = nullcontext() if alone else Turn(device)
        compiled = config.compile if config.compile is not None else on_cuda and config.fast and not together
        self._stepper = Stepper(
            self.algorithm,
            self.sampler,
            fast=config.fast and on_cuda and not together,
            compile=compiled,
            stream=getattr(self.turn, "stream", None),
        )
        self._phase: Any = None
        self._last: dict[str, Tensor] = {}

    # -- beginning and going on ----------------------------------------------------------------------------------------

    def begin(self, claims: ExitStack) -> None:
        """Start the run's files, or take up its last checkpoint; `claims` keep other processes out of its folder."""
        if self.config.eval_every:
            self._check_evaluation()
        out, resume = self.config.out, self.config.resume
        found = checkpoint.checkpoints(out)
        if resume and found:
            self._claim(claims)
            with checkpoint.fitting(found[-1]):
                self._resume(found[-1])
            self._take_up_files()
        elif self.leads:
            if resuming.check_free(out, LOGS, resume):  # killed before its first checkpoint
                began, now = resuming.read_facts(out), self._facts()
                with checkpoint.fitting(out):
                    resuming.check_same(out, began, now, self.config.config)
                warnings.warn(f"the run in {out} has no checkpoint yet; it begins again", stacklevel=2)
            self._claim(claims)
            self._start_files()
        if self.config.resume and self.leads:
            self._sweep()
        parallel.agree(self.algorithm.state_dict().values())
        self.algorithm.train()
        self._began, self._first = time.perf_counter(), self.step
        self._logged = self._saved = self.step

    def _claim(self, claims: ExitStack) -> None:
        if self.leads:
            check_folder(out := self.config.out)
            claims.enter_context(alone(out / ".training.lock", f"training in {out}"))

    def _start_files(self) -> None:
        out = self.config.out
        write_json(out / "run.json", self._facts())
        for name in (*LOGS, trackers.ID):
            (out / name).unlink(missing_ok=True)

    def _take_up_files(self) -> None:
        """Leave out of the logs what a killed run wrote after its last checkpoint: it comes again."""
        out = self.config.out
        self.evaluations = [row for row in logs.rows(out / "evaluations.jsonl") if row["step"] <= self.step]
        if self.leads:
            logs.rewrite(out / "evaluations.jsonl", self.evaluations)
            kept = [row for row in logs.rows(out / "metrics.jsonl") if row["step"] <= self.step]
            logs.rewrite(out / "metrics.jsonl", kept)
            logs.rewrite_csv(out / "metrics.csv", kept)

    def _sweep(self) -> None:
        """Delete what a kill left half-written. Nobody else writes these files of a run that is taken up."""
        checkpoint.sweep(self.config.out)
        for name in ("run.json", *LOGS, trackers.ID):
            for left in self.config.out.glob(f".{name}.*.tmp"):
                left.unlink(missing_ok=True)

    def _resume(self, folder: Path) -> None:
        manifest = checkpoint.read_manifest(folder)
        now = self._facts() | {"spec": self.algorithm.spec.to_json()}
        resuming.check_same(self.config.out, manifest, now, self.config.config)
        self.algorithm.load_state_dict(checkpoint.read_tensors(folder, checkpoint.MODEL, manifest))
        generators = checkpoint.restore_training(folder, self.algorithm, manifest)
        mine = f"/{parallel.rank()}" if parallel.rank() else ""
        self.sampler.generator.set_state(generators[f"generator/sampler{mine}"].cpu())
        torch.set_rng_state(generators[f"generator/torch{mine}"].cpu())
        if f"generator/cuda{mine}" in generators and self.device.type == "cuda":
            torch.cuda.set_rng_state(generators[f"generator/cuda{mine}"].cpu(), self.device)
        self.step, self.metrics = manifest["step"], dict(manifest.get("metrics", {}))

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def advance(self, most: int, stopped: Callable[[], bool]) -> None:
        """Up to `most` steps, each with what falls due after it; fewer where the run ends or is asked to stop."""
        c = self.config
        for _ in range(min(most, self.steps - self.step)):
            self._last = self._one_step()
            self.step += 1
            evaluates, saves = c.eval_every > 0 and self._due(c.eval_every), self._due(c.checkpoint_every)
            if evaluates or saves or self._due(c.log_every):  # what has diverged is neither evaluated nor saved
                self._log()
            if evaluates:
                self._look()
            if saves:
                self._save()
            if stopped():
                break

    def catch_up(self) -> None:
        """The evaluation of the step that the run stands at, where it was due and did not come to its end."""
        every = self.config.eval_every
        if self.step and every and self._due(every) and all(row["step"] != self.step for row in self.evaluations):
            self._look()

    def stop(self) -> None:
        """Log and save where the run stands, before its end."""
        if self.step != self._saved:
            if self.step != self._logged:
                self._log()
            self._save()

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.done

    def _one_step(self) -> dict[str, Tensor]:
        phase = getattr(self.algorithm, "phase", None)
        metrics = self._stepper.step()
        if phase != self._phase:  # a new stage may begin with data that it generates: all processes take the first's
            parallel.agree(self.algorithm.state_dict().values())
            self._phase = phase
        return metrics

    def _log(self) -> None:
        seen = self._last | _largest_weight(self.algorithm)
        stacked = torch.stack([value.detach().float().reshape(()) for value in seen.values()])
        values = parallel.mean(stacked).tolist()  # the one wait for the device
        self.metrics = dict(zip(self._last, values, strict=False))
        for name, value in zip(seen, values, strict=True):
            if not math.isfinite(value) or abs(value) > self._diverged:
                good = checkpoint.checkpoints(self.config.out)
                where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
                raise QptError(
                    f"training diverged: {name} is {value:g} at step {self.step}; {where}; start a new run with a "
                    "lower learning rate or η"
                )
        self._logged = self.step
        if not self.leads:
            return
        rate = (self.step - self._first) / (time.perf_counter() - self._began)
        row = {"step": self.step, "steps_per_second": round(rate, 2), **self.metrics}
        logs.append(self.config.out / "metrics.jsonl", row)
        logs.append_csv(self.config.out / "metrics.csv", row)
        self.track(self.step, self.metrics)

    def _look(self) -> None:
        generators = self._generators()
        if self.leads:
            try:
                self._evaluate(generators)
            except BaseException:  # of a simulator, say, or a second Ctrl-C: the steps so far are kept
                if self.step != self._saved:
                    self._write_step(generators)
                raise

    def _evaluated(self) -> tuple[Policy, tuple[float, ...]]:
        """The policy as it stands, and the limits that it is to keep."""
        c, mode = self.config, self.algorithm.limit_mode
        trained = getattr(c.config, "cost_limit", None)
        limits = (trained,) if mode == "trained" and trained is not None else c.eval_limits
        return Policy(self.algorithm, trained_limit=trained, name=c.algorithm), limits

    def _check_evaluation(self) -> None:
        """What cannot be evaluated is said now, not when it is due."""
        from qpt.evaluation import check

        c, task = self.config, self.task
        assert task is not None
        policy, limits = self._evaluated()
        try:
            check(policy, task, c.eval_episodes, np.asarray(limits), c.eval_seed, c.workers, None)
        except QptError as error:
            raise QptError(f"no evaluation during training is possible: {error}; or give --eval-every 0") from error

    def _evaluate(self, generators: dict[str, Tensor]) -> None:
        from qpt.evaluation import evaluate  # simulators are needed only here

        c, task = self.config, self.task
        assert task is not None
        policy, limits = self._evaluated()
        episodes = evaluate(
            policy,
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
            self.track(
                self.step,
                {
                    f"eval/return@{limit:g}": row["limits"][-1]["return"],
                    f"eval/cost@{limit:g}": row["limits"][-1]["cost"],
                },
            )
        best = best_evaluation([*self.evaluations, row]) is row
        self.evaluations.append(row)
        if best:
            self._save_best(generators)
        logs.append(c.out / "evaluations.jsonl", row)  # last: what is in it does not come again on --resume

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        generators, self._saved = self._generators(), self.step
        if self.leads:
            self._write_step(generators)

    def _write_step(self, generators: dict[str, Tensor]) -> None:
        self._write(self.config.out / "checkpoints" / f"step-{self.step:09d}", generators)
        checkpoint.rotate(self.config.out, self.config.keep)

    def _save_best(self, generators: dict[str, Tensor]) -> None:
        folder = self._write(self.config.out / "checkpoints" / f"best-{self.step:09d}", generators)
        for old in checkpoint.numbered(self.config.out, "best"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _generators(self) -> dict[str, Tensor]:
        """The state of every generator: generator/NAME of the first process, generator/NAME/RANK of the others."""
        own = {"sampler": self.sampler.generator.get_state(), "torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            f"generator/{name}" + (f"/{rank}" if rank else ""): part
            for name, state in own.items()
            for rank, part in enumerate(parallel.gather(state, self.device))
        }

    def _write(self, folder: Path, generators: dict[str, Tensor]) -> Path:
        facts = self._facts() | {"step": self.step, "metrics": self.metrics, "evaluations": self.evaluations[-1:]}
        config = facts.pop("config")
        return checkpoint.write_checkpoint(folder, self.config.algorithm, self.algorithm, config, generators, facts)

    @property
    def _precision(self) -> str:
        """What "auto" came to."""
        return "bf16" if getattr(self.algorithm, "autocast", False) else "fp32"

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
            "precision": self._precision,
            "processes": parallel.processes(),
            "versions": checkpoint.versions(),
        }


def best_evaluation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The paper's rule: the highest mean return among evaluations whose cost meets every limit, else the least cost.

    A run that was resumed may have others before: only those at the limits of the last one compare with it.
    """
    if not rows:
        return None

    def limits(row: dict[str, Any]) -> set[float]:
        return {part["cost_limit"] for part in row["limits"]}

    rows = [row for row in rows if limits(row) == limits(rows[-1])]

    def worst(row: dict[str, Any]) -> float:
        return max(float(part["normalized_cost"]) for part in row["limits"])

    def reward(row: dict[str, Any]) -> float:
        return sum(float(part["return"]) for part in row["limits"]) / len(row["limits"])

    safe = [row for row in rows if worst(row) <= 1.0]
    return max(safe, key=reward) if safe else min(rows, key=worst)


# -- little tools ------------------------------------------------------------------------------------------------------


def _largest_weight(algorithm: Algorithm) -> dict[str, Tensor]:
    """Of those that are learned, NaN if one is: a step's metrics belong to the weights before it, not to its result."""
    groups = [group for optimizer in algorithm.optimizers.values() for group in optimizer.param_groups]
    weights = [weight.detach() for group in groups for weight in group["params"] if weight.numel()]
    return {"the largest weight": torch.stack(torch._foreach_norm(weights, math.inf)).max()} if weights else {}


def _share(config: Any) -> Any:
    """The method's config with this process's share of every batch."""
    count, changes = parallel.processes(), {}
    for name in ("batch_size", "critic_batch"):
        whole = getattr(config, name, None)
        if count > 1 and whole is not None:
            if whole % count:
                flag = name.replace("_", "-")
                raise QptError(f"{count} processes cannot share a {flag} of {whole}; give a multiple of {count}")
            changes[name] = whole // count
    return replace(config, **changes) if changes else config
