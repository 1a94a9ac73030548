"""Bullet-Safety-Gym: eight tasks. It ignores seeds, and a reset remembers the last episode: both mended here."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from qpt.envs.surface import Simulator, own_numpy_state
from qpt.errors import QptError


def make(env_id: str, render: bool) -> Simulator:
    """The simulator of one of the eight ids, such as SafetyBallRun-v0."""
    with _mute():
        builder = _builder()
        redirect, builder.RedirectStream = builder.RedirectStream, contextlib.nullcontext
        try:
            with own_numpy_state(0), np.errstate(over="ignore"):  # its float64 box with float32 bounds
                env: Any = builder.EnvironmentBuilder(**gymnasium.spec(env_id).kwargs)
        finally:
            builder.RedirectStream = redirect
    with own_numpy_state(0):
        env.reset()  # later resets go back to the state of the first one, so it is the same one everywhere

    def reset(seed: int | None) -> tuple[Any, dict[str, Any]]:
        _forget_episode(env)
        with own_numpy_state(seed):  # in these tasks only resets draw
            observation, info = env.reset()
        return observation, info

    return Simulator(
        env=env,
        observation_dim=env.observation_space.shape[0],
        action_dim=env.action_space.shape[0],
        reset=reset,
        step=env.step,
        close=env.close,
        render=(lambda: _picture(env)) if render else None,
    )


def _builder() -> Any:
    """Import the package, which redirects the file behind sys.stderr; notebooks and test runners have none there."""
    with contextlib.redirect_stderr(sys.__stderr__), contextlib.redirect_stdout(sys.__stdout__):
        try:
            importlib.import_module("bullet_safety_gym")  # registers its environments
            return importlib.import_module("bullet_safety_gym.envs.builder")
        except ImportError as error:
            raise QptError(f"Bullet-Safety-Gym cannot be imported ({error}); run: qpt sims install bullet") from error


@contextlib.contextmanager
def _mute() -> Iterator[None]:
    """pybullet greets on stdout and stderr, past Python."""
    flush = ctypes.CDLL(None).fflush
    with Path(os.devnull).open("w") as null:
        saved = [os.dup(file) for file in (1, 2)]
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            flush(None)
            for file in (1, 2):
                os.dup2(null.fileno(), file)
            yield
        finally:
            flush(None)
            for file, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, file)
                os.close(copy)


def _forget_episode(env: Any) -> None:
    """Let a reset not depend on the episode before it.

    A restored state keeps the motors' targets and the cached contacts, and the reset then steps once: the first
    observation of Car and Drone shows the last action. One step in the air with the zero action clears both and leaves
    rotors near hovering, as in logged data, where nearly every episode follows another.
    """
    env.agent.set_position((0.0, 0.0, 50.0))
    env.agent.set_velocity()
    env.agent.apply_action(np.zeros(env.agent.act_dim))
    env.bc.stepSimulation()


def _picture(env: Any, width: int = 480, height: int = 360) -> Any:
    camera, client = env.world.camera, env.bc
    view = client.computeViewMatrixFromYawPitchRoll(
        camera.cam_base_pos, camera.cam_dist, camera.cam_yaw, camera.cam_pitch, 0, 2
    )
    projection = client.computeProjectionMatrixFOV(fov=60, aspect=width / height, nearVal=0.1, farVal=100.0)
    ball = env.agent.violation_body_id  # a nearly transparent ball around the agent, which this renderer draws solid
    place = client.getBasePositionAndOrientation(ball)
    client.resetBasePositionAndOrientation(ball, (0, 0, -50), place[1])
    pixels = client.getCameraImage(width, height, view, projection, renderer=client.ER_TINY_RENDERER)[2]
    client.resetBasePositionAndOrientation(ball, *place)
    return np.reshape(pixels, (height, width, 4))[:, :, :3]
