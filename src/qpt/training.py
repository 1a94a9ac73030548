"""The one loop: one run, or several seeds that take turns on one device; what a run does is in `qpt.session`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qpt import logs, parallel
from qpt.algorithms.base import CONSTANT
from qpt.data import load_dataset, of_task
from qpt.data.checks import noticed
from qpt.data.sampling import Sampler
from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.session import Session, best_evaluation
from qpt.tasks import Task, get_task
from qpt.trackers import check_trackers, open_trackers
from qpt.train_config import TrainConfig

__all__ = ["Run", "TrainConfig", "best_evaluation", "train", "train_seeds"]


NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")  # as torch says it, of a GPU and of the host


@dataclass
class Run:
    """What a training run left behind."""

    folder: Path
    step: int
    metrics: dict[str, float]
    interrupted: bool = False
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def train(config: TrainConfig, data: Trajectories | None = None) -> Run:
    """Train as configured and return where the results are. `data` may be given directly instead of a file.

    Under torchrun the processes share this one run; see `qpt.parallel`.
    """
    if not isinstance(config, TrainConfig):  # a method's, say
        raise QptError(f"train takes a TrainConfig, not a {type(config).__name__}; a method's own goes into its config")
    if config.seeds:
        raise QptError("seeds names several runs; use train_seeds, or leave it empty and give seed")
    return _train([config], data)[0]


def train_seeds(config: TrainConfig, data: Trajectories | None = None) -> list[Run]:
    """Train `config.seeds` together on one device, in folders seed0, ... of `config.out`, each as it would be alone.

    To resume, a seed whose folder is not there yet begins.
    """
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise QptError("give --seeds at least one seed, and each only once")
    folders = {seed: config.out / f"seed{seed}" for seed in config.seeds}
    begun = {seed for seed, folder in folders.items() if (folder / "run.json").exists()}
    if config.resume and not begun:
        raise QptError(f"there is nothing to resume in {config.out}; leave out --resume to start runs there")
    configs = [
        replace(config, seed=seed, seeds=(), out=folder, resume=config.resume and seed in begun)
        for seed, folder in folders.items()
    ]
    return _train(configs, data)


def _train(configs: list[TrainConfig], data: Trajectories | None) -> list[Run]:
    """Runs that differ in seed and folder."""
    config = configs[0]
    if len(configs) > 1 and config.wandb:
        raise QptError("--wandb logs one run of a process; give --seed, or use --tensorboard")
    check_trackers(config.tensorboard, config.wandb)
    task = get_task(config.task) if config.task is not None else None
    if not isinstance(data, Trajectories | None):
        raise QptError(f"data are what qpt.load_dataset returns, not a {type(data).__name__}")
    trajectories = data if data is not None else _load(config, task)
    if task is not None:
        _check_sizes(task, trajectories)
    _tell_small_columns(trajectories)
    if config.eval_every and (task is None or not task.has_simulator):
        raise QptError("evaluation during training needs a task with a simulator; give --task, or --eval-every 0")
    if config.eval_every and task is not None and not task.simulator_installed:  # not when it is due, steps later
        raise QptError(
            f"{task.name} has no simulator here to be evaluated in; run: qpt sims install {task.suite}, or give "
            "--eval-every 0"
        )
    device = _device(config.device)
    _prepare(device, config)
    with _memory(), parallel.group(device):
        if len(configs) > 1 and parallel.processes() > 1:
            raise QptError("several processes train one seed; give --seed, or start qpt train without torchrun")
        sessions: list[Session] = []
        for each in configs:
            sessions.append(Session(each, task, trajectories, device, alone=len(configs) == 1))
            _share_tables(sessions[-1].sampler, sessions[0].sampler)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was made on one stream is used on others from here on
        with ExitStack() as claims:
            for session in sessions:
                with session.turn:
                    session.begin(claims)
            return _loop(sessions)


def _loop(sessions: list[Session]) -> list[Run]:
    """Let every run have its turn until all are done; a run that fails does not stop the others."""
    c, several = sessions[0].config, len(sessions) > 1
    name = f"{c.algorithm}, {len(sessions)} seeds" if several else c.algorithm
    failed: dict[int, QptError] = {}

    @contextmanager
    def fails(session: Session) -> Iterator[None]:
        try:
            yield
        except QptError as error:
            if not several:
                raise
            failed[session.config.seed] = error

    with (
        logs.stop_flag() as stopped,
        logs.progress(
            c.progress and sessions[0].leads,
            name,
            sum(s.step for s in sessions),
            sum(max(s.steps, s.step) for s in sessions),  # resumed with fewer steps than it has
        ) as show,
        ExitStack() as trackers,
    ):
        for session in sessions:
            if session.leads:
                opened = open_trackers(session.config.out, c.tensorboard, c.wandb, session.step)
                session.track = trackers.enter_context(opened)
        # Processes of one run must stop after the same step: they ask each other, but only between rows of the log.
        shared = parallel.processes() > 1
        for session in sessions:
            with fails(session), session.turn:
                session.catch_up()
        running, asked = [s for s in sessions if not s.done and s.config.seed not in failed], False
        while running and not asked:
            for session in running:
                # On CUDA the host only says "go": a step of each in turn keeps all streams busy.
                interleave = several and session.device.type == "cuda"
                most = 1 if interleave else c.log_every - session.step % c.log_every
                with fails(session), session.turn:
                    session.advance(most, (lambda: False) if shared else stopped)
                if session.step % c.log_every == 0 or session.done:
                    show(sum(s.step for s in sessions), session.metrics)
            running = [s for s in running if not s.done and s.config.seed not in failed]
            asked = parallel.anyone(stopped(), sessions[0].device)
        for session in running:
            with fails(session), session.turn:
                session.stop()
    if failed:
        seed, reason = next(iter(failed.items()))
        raise QptError(f"{len(failed)} of {len(sessions)} seeds failed, the others are saved; seed {seed}: {reason}")
    return [Run(s.config.out, s.step, s.metrics, not s.done, s.evaluations) for s in sessions]


# -- little tools ------------------------------------------------------------------------------------------------------


@contextmanager
def _memory() -> Iterator[None]:
    """Too little of it gets a sentence: torch has no exception of its own for that of the host."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        reason = str(error).partition("\n")[0]
        raise QptError(
            "there is not enough memory for this; give a smaller --batch-size, --width, --context or --horizon "
            f"({reason})"
        ) from error


def _share_tables(sampler: Sampler, first: Sampler) -> None:
    """Let a sampler use the other's tensors where they are equal: the data lie on the device once for all seeds."""
    for name, value in vars(sampler).items():
        other = getattr(first, name)
        if isinstance(value, torch.Tensor):
            if value.shape == other.shape and torch.equal(value, other):
                setattr(sampler, name, other)
        elif hasattr(value, "sample"):
            _share_tables(value, other)


def _load(config: TrainConfig, task: Task | None) -> Trajectories:
    if config.data is None and task is None:
        raise QptError("give --task NAME or --data FILE to train from")
    if config.data is not None and config.data_source != "dsrl":
        raise QptError("--data names the data itself; leave out --data-source, or --data")
    source = str(config.data) if config.data is not None else of_task(task.name if task else "", config.data_source)
    found = load_dataset(source)
    for text in noticed(found.info) if parallel.speaks() else ():
        warnings.warn(f"{source}: {text}", stacklevel=2)
    return found


def _tell_small_columns(data: Trajectories) -> None:
    """Columns that `Spec` takes for constant although they may mean something in another unit."""
    spread, size = data.observations.std(0, dtype=np.float64), np.abs(data.observations).mean(0, dtype=np.float64)
    small = np.flatnonzero((spread <= CONSTANT) & (spread > 1e-6 * np.maximum(size, 0.1)))
    if small.size and parallel.speaks():
        named = ", ".join(map(str, small[:5])) + (", ..." if small.size > 5 else "")
        warnings.warn(
            f"observations vary by less than {CONSTANT:g} in {small.size} column(s) ({named}), which are not scaled "
            "and hardly seen; give them in a smaller unit if they matter",
            stacklevel=2,
        )


def _check_sizes(task: Task, data: Trajectories) -> None:
    """Data of another task are refused before the training, not when its policy meets the simulator."""
    for what, found, known in (
        ("observations", data.observation_dim, (task.observation_dim, task.env_observation_dim)),
        ("actions", data.action_dim, (task.action_dim,)),
    ):
        sizes = sorted({size for size in known if size is not None})
        if sizes and found not in sizes:
            wanted = " or ".join(map(str, sizes))
            raise QptError(
                f"the data have {what} of length {found}, but those of {task.name} have {wanted}; "
                "give the data of this task, or leave out --task"
            )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise QptError(f"there is no device {name!r}; use cpu, cuda or auto")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise QptError("there is no CUDA device here; use --device cpu")
    try:
        device = parallel.place(torch.device(name))
    except RuntimeError as error:
        raise QptError(f"there is no device {name!r}; use cpu, cuda or auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise QptError(f"there is no device {str(device)!r}: this machine has {torch.cuda.device_count()} of its kind")
    return device


def _prepare(device: torch.device, config: TrainConfig) -> None:
    """Torch's own settings for this device; they hold for the whole process."""
    if config.threads or device.type == "cpu":
        torch.set_num_threads(config.threads or 1)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # streams, graphs and our own kernels are those of the current device
    if device.type == "cuda":  # TF32 for what bf16 leaves in fp32; "fp32" means what it says
        torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
