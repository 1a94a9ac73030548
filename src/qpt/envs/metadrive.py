"""MetaDrive 0.2.6.0 without a screen: nine tasks, one simulator in a process at a time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from qpt.envs.surface import Array, Simulator, own_numpy_state
from qpt.errors import QptError

ROADS = {"easy": (0, "SCS"), "medium": (100, "XST"), "hard": (200, "TRO")}  # the map's seed and blocks
TRAFFIC = {"sparse": 0.1, "mean": 0.15, "dense": 0.2}
NAME = re.compile(rf"SafeMetaDrive-({'|'.join(ROADS)})({'|'.join(TRAFFIC)})-v0")
# imported by MetaDrive, but not used without a screen; seaborn alone takes a second and a half
UNUSED = ("cv2", "gltf", "matplotlib", "matplotlib.pyplot", "scipy", "scipy.optimize", "seaborn", "simplepbr", "tqdm")


def make(env_id: str, render: bool) -> Simulator:
    """The simulator of SafeMetaDrive-{easy,medium,hard}{sparse,mean,dense}-v0."""
    match = NAME.fullmatch(env_id)
    if match is None:
        raise QptError(f"there is no MetaDrive task {env_id!r}; a name looks like SafeMetaDrive-harddense-v0")
    map_seed, blocks = ROADS[match[1]]
    modules = _modules(render)
    engines, reseed = modules["engine.engine_utils"], modules["base_class.randomizable"].Randomizable.seed
    env = modules["envs"].SafeMetaDriveEnv(
        {
            "start_seed": map_seed,
            "environment_num": 1,
            "map": 3,
            "map_config": {"type": "block_sequence", "config": blocks},
            "traffic_density": TRAFFIC[match[2]],
            "traffic_mode": "hybrid",
            "random_traffic": True,
            "accident_prob": 0.0,
            "crash_vehicle_penalty": 0.0,
            "horizon": None,  # the surface cuts episodes off
            "force_destroy": True,  # cars that are used again carry something of their last episode over
        }
    )

    def is_active() -> bool:
        return env.engine is not None and env.engine is engines.get_engine()

    def reset(seed: int | None) -> tuple[Any, dict[str, Any]]:
        if not is_active():  # there is one engine in a process: take it over
            engines.close_engine()
            env.lazy_init()
        reseed(env.engine.traffic_manager, seed)  # it would draw from the system's entropy
        with own_numpy_state(map_seed):  # the roads' looks draw from it
            return env.reset(force_seed=map_seed), {}

    def step(action: Array) -> tuple[Any, ...]:
        if not is_active():
            raise QptError(
                f"{env_id} lost its simulator: a process can run one MetaDrive at a time; reset() or use workers"
            )
        observation, reward, _, info = env.step(action)
        nearest = float(observation[-240:].min())  # lidar
        cost = (
            float(info["cost"])
            + max(0.0, 0.01 * (float(info["velocity"]) - 10.0))
            + 0.01 * max(0.0, 0.1 - nearest) ** 2
        )
        terminated = info["arrive_dest"] or info["crash"] or info["out_of_road"]
        return observation, reward, cost, terminated, False, info

    def close() -> None:
        if is_active():
            engines.close_engine()

    return Simulator(
        env=env,
        observation_dim=env.observation_space.shape[0],
        action_dim=env.action_space.shape[0],
        reset=reset,
        step=step,
        close=close,
        render=(lambda: _picture(env)) if render else None,
    )


def _picture(env: Any) -> Any:
    """The road from above; pygame draws into memory."""
    import pygame

    with _environment(SDL_VIDEODRIVER="dummy"):
        surface = env.render(mode="top_down", screen_size=(500, 500), film_size=(1500, 1500), track_target_vehicle=True)
    return pygame.surfarray.array3d(surface).swapaxes(0, 1)


# ---- import ----------------------------------------------------------------------------------------------------------


@functools.cache
def _modules(render: bool) -> dict[str, types.ModuleType]:
    """Import MetaDrive, whose gym 0.19, numpy 1.23 and protobuf 3 are gone, with stand-ins that live only meanwhile."""
    if importlib.util.find_spec("metadrive") is None or importlib.util.find_spec("panda3d") is None:
        raise QptError("MetaDrive is not installed; run: qpt sims install metadrive")
    names = ["base_class.randomizable", "engine.engine_utils", "envs", "policy.idm_policy"]
    if render:
        if importlib.util.find_spec("pygame") is None:
            raise QptError("drawing MetaDrive needs pygame, which is not installed; run: qpt sims install metadrive")
        names.append("obs.top_down_renderer")
    try:
        with _stand_ins(), _environment(PYGAME_HIDE_SUPPORT_PROMPT="hide"):
            modules = {name: importlib.import_module(f"metadrive.{name}") for name in names}
    except ImportError as error:
        raise QptError(f"MetaDrive cannot be imported ({error}); run: qpt sims install metadrive") from error
    _mend(importlib.import_module("metadrive.engine.core.engine_core"))
    atexit.register(modules["engine.engine_utils"].close_engine)  # an open one crashes when Python ends
    return modules


def _mend(engine_core: Any) -> None:
    """In MetaDrive's own modules: bring back old names of numpy, and keep the root logger out of its hands."""
    old_numpy = types.ModuleType("numpy")
    old_numpy.__dict__.update(np.__dict__, float=float, int=int, bool=bool)
    for name in ("utils.config", "utils.math_utils", "component.vehicle_module.lidar"):
        sys.modules[f"metadrive.{name}"].np = old_numpy  # type: ignore[attr-defined]
    logger = logging.getLogger("metadrive")
    for name, module in list(sys.modules.items()):
        if name.startswith("metadrive.") and vars(module).get("logging") is logging:
            module.logging = logger  # type: ignore[attr-defined]
    engine_core.setup_logger = lambda *_: None
    # panda3d would say that there are no joysticks
    importlib.import_module("panda3d.core").loadPrcFileData("", "notify-level-device fatal\nnotify-level-task error")


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    import gymnasium

    modules: dict[str, Any] = {
        "gym": gymnasium,  # only gym.Env and gym.spaces are used
        "gym.spaces": gymnasium.spaces,
        "metadrive.register": types.ModuleType("metadrive.register"),  # reads a registry that gym no longer has
        "metadrive.utils.waymo_utils.protos.scenario_pb2": None,  # written for protobuf 3; its absence is provided for
        "tensorflow": None,  # the same, and slow to import
    }
    without_pygame = ("pygame",) if importlib.util.find_spec("pygame") is None else ()
    for name in (*UNUSED, *without_pygame):
        modules[name] = types.ModuleType(name)
        modules[name].__getattr__ = lambda attribute: type(attribute, (), {"__init__": lambda *_, **__: None})
    modules["seaborn"].color_palette = lambda *_: [(0.0, 0.4, 0.7), (0.9, 0.6, 0.0), (0.0, 0.6, 0.5), (0.8, 0.5, 0.7)]
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables that are not set, for a while."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
