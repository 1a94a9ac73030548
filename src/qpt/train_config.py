"""The config of a training run, whatever its method: what `qpt train` has a flag for besides the method's own."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qpt.algorithms.fields import check_fields
from qpt.data import DataSource
from qpt.data.paths import expanded
from qpt.errors import QptError


@dataclass(frozen=True)
class TrainConfig:
    """A training run: which data and method, how long, how often to look, where to write."""

    task: str | None = None
    """A task of `qpt tasks`; gives the data, the horizon and a simulator for evaluation."""
    data: Path | None = None
    """A data file; overrides the task's. "embedded:ballcircle" is the set that comes with the package."""
    data_source: DataSource = "dsrl"
    """Without data: the task's published file (dsrl), or what `qpt collect record` made for it (collected)."""
    horizon: int | None = None
    """Longest episode in steps; without a task, the longest logged one."""
    algorithm: str = "qpt"
    """The method."""
    config: Any = None
    """The method's own config; None for its defaults."""
    seed: int = 0
    """Fixes everything: initial weights, batches, dropout, augmentation."""
    seeds: tuple[int, ...] = ()
    """Instead of seed, several that are trained together on one device, each in a folder in out: seed0, ..."""
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
    """bf16 for the transformer and the hidden layers of the critics, or everything in fp32; auto: bf16 on cuda."""
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

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "out", expanded(self.out))  # frozen
        least = dict.fromkeys(("horizon", "keep", "log_every", "checkpoint_every", "eval_episodes", "threads"), 1)
        for name, bound in (least | dict.fromkeys(("eval_every", "eval_seed", "workers"), 0)).items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise QptError(f"--{name.replace('_', '-')} is a whole number of at least {bound}, not {value}")
        if (self.threads or 0) > 4096:
            raise QptError(f"--threads is at most 4096, not {self.threads}; this machine has {os.cpu_count()} cores")
        if not all(0 <= seed < 2**63 for seed in (self.seed, *self.seeds)):
            raise QptError("seeds are whole numbers from 0 to 2**63 - 1")
        limits = self.eval_limits
        if len(set(limits)) < len(limits) or not all(0 <= limit < math.inf for limit in limits) or not limits:
            raise QptError(f"--eval-limits are different numbers of at least 0, not {', '.join(map(str, limits))}")
