"""Simulators behind one surface: the 38 tasks of DSRL, and environments of one's own."""

from __future__ import annotations

import importlib

from qpt.envs.surface import SafeEnv, wrap_env
from qpt.errors import QptError
from qpt.tasks import Task, get_task

__all__ = ["SafeEnv", "make_env", "one_per_process", "wrap_env"]

_ADAPTERS = {
    "bullet": "qpt.envs.bullet",
    "safety-gymnasium": "qpt.envs.safety_gymnasium",
    "metadrive": "qpt.envs.metadrive",
}


def make_env(task: Task | str, *, render: bool = False) -> SafeEnv:
    """The task's environment: Gymnasium's API, float32, actions in [-1, 1], a float in `info["cost"]`.

    An episode is truncated at the task's horizon. With `render=True`, `render()` gives one RGB picture, with no screen.
    """
    task = get_task(task) if isinstance(task, str) else task
    if task.env_factory is not None:
        env = wrap_env(task.env_factory(), task.horizon, name=task.name)
    elif task.suite in _ADAPTERS and task.env_id is not None:
        simulator = importlib.import_module(_ADAPTERS[task.suite]).make(task.env_id, render)
        env = SafeEnv(simulator, task.horizon, name=task.name, render=render)
    else:
        raise QptError(f'task {task.name!r} has no simulator; give it one with env = "module:function" or env_factory')
    for what, found, expected in (
        ("observations", env.observation_dim, task.env_observation_dim),
        ("actions", env.action_dim, task.action_dim),
    ):
        if expected is not None and found != expected:
            env.close()
            raise QptError(
                f"the environment of {task.name!r} has {what} of length {found}, but the task says {expected}"
            )
    return env


def one_per_process(task: Task) -> bool:
    """Whether a process can run one environment of this task at a time; a second one takes the first one's place."""
    return task.suite == "metadrive"
