"""qpt: from logged episodes with rewards and costs to a policy whose cost limit is set at deployment."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and their rooms; resolved on first use, so that `import qpt` does not import torch.
_ROOMS = {
    "Task": "qpt.tasks",
    "get_task": "qpt.tasks",
    "register_task": "qpt.tasks",
    "load_tasks": "qpt.tasks",
    "QptError": "qpt.errors",
    "Trajectories": "qpt.data.trajectories",
    "load_dataset": "qpt.data",
    "make_env": "qpt.envs",
    "evaluate": "qpt.evaluation",
    "train": "qpt.training",
    "TrainConfig": "qpt.training",
    "QPTConfig": "qpt.algorithms.qpt",
    "load_policy": "qpt.policy",
}

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'qpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
