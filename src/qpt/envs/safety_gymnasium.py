"""Safety-Gymnasium 0.4.0 on Gymnasium 1.x, mujoco 3.4 and numpy 2.4: sixteen navigation and five velocity tasks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from qpt.envs.surface import Simulator, own_numpy_state
from qpt.errors import QptError

NAVIGATION = re.compile(r"Safety(Point|Car|Doggo|Racecar|Ant)(Button|Circle|Goal|Push|Run)[0-2]-v0")
AGENTS = ("Ant", "HalfCheetah", "Hopper", "Humanoid", "Swimmer", "Walker2d")
VELOCITY = re.compile(rf"Safety({'|'.join(AGENTS)})Velocity-v[01]")
PACKAGE = "safety_gymnasium"


def make(env_id: str, render: bool) -> Simulator:
    """The simulator of one of Safety-Gymnasium's own ids, such as SafetyPointGoal1-v0 or SafetyAntVelocity-v1."""
    if match := NAVIGATION.fullmatch(env_id):
        env, reset = _navigation(env_id, agent=match[1])
    elif match := VELOCITY.fullmatch(env_id):
        env, reset = _velocity(env_id)
    else:
        raise QptError(f"Safety-Gymnasium has no environment {env_id!r}; a name looks like SafetyPointGoal1-v0")
    draw = _Pictures(env) if render else None
    return Simulator(
        env=env,
        observation_dim=env.observation_space.shape[0],
        action_dim=env.action_space.shape[0],
        reset=reset,
        step=env.step,  # gives six values, the cost third
        close=draw.close if draw else lambda: None,
        render=draw,
    )


Reset = Callable[[int | None], tuple[Any, dict[str, Any]]]


def _navigation(env_id: str, agent: str) -> tuple[Any, Reset]:
    modules = _modules()
    with own_numpy_state(0), _size_one_ids(), np.errstate(over="ignore"):
        env = modules["builder"].Builder(task_id=env_id, config={"agent_name": agent})
    generator = env.task.random_generator
    generator.sample_layout = functools.partial(_sample_layout, generator)

    def reset(seed: int | None) -> tuple[Any, dict[str, Any]]:
        try:
            with _no_sky(modules["world"]):
                observation, info = env.reset(seed=seed)
            return observation, info
        except (AssertionError, modules["utils.common_utils"].ResamplingError) as error:
            raise QptError(f"{env_id} cannot begin with the seed {seed} ({error}); choose another seed") from error

    return env, reset


def _sample_layout(generator: Any) -> bool:
    """Place all objects without overlap or give up; the same draws as the package's own, ten times as fast.

    Button tasks try some ten thousand places in a reset, so plain floats pay.
    """
    draw, margin = generator.random_generator.random_sample, generator.placements_margin
    layout: dict[str, tuple[float, float]] = {}
    taken: list[tuple[float, float, float]] = []
    for name, (areas, keepout) in generator.placements.items():
        x_low, y_low, x_high, y_high = generator.placements_extents if areas is None else areas[0]
        x_low, y_low, x_high, y_high = x_low + keepout, y_low + keepout, x_high - keepout, y_high - keepout
        for _ in range(100):
            if areas is None or len(areas) == 1:
                x, y = x_low + (x_high - x_low) * draw(), y_low + (y_high - y_low) * draw()
            else:
                x, y = generator.draw_placement(areas, keepout).tolist()
            if all(
                math.sqrt((x - u) * (x - u) + (y - v) * (y - v)) >= other + margin + keepout for u, v, other in taken
            ):
                break
        else:
            return False
        layout[name] = (x, y)
        taken.append((x, y, keepout))
    generator.layout = {name: np.array(place) for name, place in layout.items()}
    return True


def _velocity(env_id: str) -> tuple[Any, Reset]:
    modules = _modules()
    import mujoco

    name = env_id.removeprefix("Safety").split("-")[0]  # AntVelocity
    with np.errstate(over="ignore"):
        env = getattr(modules[_velocity_module(env_id)], f"Safety{name}Env")()

    def reset(seed: int | None) -> tuple[Any, dict[str, Any]]:
        _, info = env.reset(seed=seed)
        mujoco.mj_normalizeQuat(env.model, env.data.qpos)  # mujoco did so itself before 3.2; shows in Ant's observation
        return env._get_obs(), info

    return env, reset


def _velocity_module(env_id: str) -> str:
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", env_id.replace("-", "_")).lower()  # safety_half_cheetah_velocity_v1
    return f"tasks.safety_velocity.{snake}"


# ---- import ----------------------------------------------------------------------------------------------------------


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    """Import what is needed of the package without its __init__, which needs names that Gymnasium 1.0 removed.

    The modules are then taken out of sys.modules again: nobody else meets a package without its __init__.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        raise QptError("Safety-Gymnasium is not installed; run: qpt sims install safety-gymnasium")
    others = _take_out()
    package = types.ModuleType(PACKAGE)
    package.__file__, package.__path__ = spec.origin, list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = package
    velocity = (_velocity_module(f"Safety{agent}Velocity-v{version}") for agent in AGENTS for version in (0, 1))
    names = ("utils.common_utils", "world", "tasks", "builder", *velocity)
    try:
        with _unhashable_defaults():
            return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in names}
    except ImportError as error:
        raise QptError(
            f"Safety-Gymnasium cannot be imported ({error}); run: qpt sims install safety-gymnasium"
        ) from error
    finally:
        _take_out()
        sys.modules.update(others)


def _take_out() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


@contextlib.contextmanager
def _unhashable_defaults() -> Iterator[None]:
    """Since Python 3.11 a dataclass takes no array as a default: make each one a default_factory."""
    original = dataclasses.dataclass

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        for name, default in list(vars(cls).items()):
            if isinstance(default, np.ndarray):
                setattr(cls, name, dataclasses.field(default_factory=functools.partial(copy.deepcopy, default)))
        return original(cls, **options)

    dataclasses.dataclass = dataclass
    try:
        yield
    finally:
        dataclasses.dataclass = original


# ---- while it makes and resets ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _size_one_ids() -> Iterator[None]:
    """numpy 2.4 makes no index of a size-one array, which Car's constructor hands to mujoco."""
    import mujoco

    original = mujoco.MjModel.jnt
    mujoco.MjModel.jnt = lambda model, key: original(model, key.item() if isinstance(key, np.ndarray) else key)
    try:
        yield
    finally:
        mujoco.MjModel.jnt = original


@contextlib.contextmanager
def _no_sky(world: types.ModuleType) -> Iterator[None]:
    """Leave the sky's 191 MB of pictures out of the model: they cost a second at every reset and no physics."""
    xmltodict = world.xmltodict

    def unparse(document: Any, *args: Any, **options: Any) -> str:
        for texture in document["mujoco"]["asset"]["texture"]:
            if texture.get("@type") == "skybox":
                texture.clear()
                texture.update({"@type": "skybox", "@builtin": "gradient", "@width": "64", "@height": "64"})
                texture.update({"@rgb1": "0.3 0.5 0.7", "@rgb2": "0 0 0"})
        return str(xmltodict.unparse(document, *args, **options))

    world.xmltodict = types.SimpleNamespace(parse=xmltodict.parse, unparse=unparse)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        world.xmltodict = xmltodict  # type: ignore[attr-defined]


# ---- pictures --------------------------------------------------------------------------------------------------------


class _Pictures:
    """mujoco's own renderer with an off-screen context; rebuilt whenever a reset builds a new model."""

    def __init__(self, env: Any, width: int = 480, height: int = 360) -> None:
        self.scene = getattr(env, "task", env)  # navigation keeps model and data in its task
        self.camera = "fixedfar" if hasattr(env, "task") else "track"
        self.size = {"width": width, "height": height}
        self.context = _off_screen_context()
        self.renderer: Any = None

    def __call__(self) -> Any:
        import mujoco

        if self.renderer is None or self.renderer.model is not self.scene.model:
            self.close()
            original = mujoco.gl_context.__dict__.get("GLContext")
            mujoco.gl_context.GLContext = self.context
            try:
                self.renderer = mujoco.Renderer(self.scene.model, **self.size)
            finally:
                mujoco.gl_context.GLContext = original
        options = mujoco.MjvOption()
        options.geomgroup[:] = 1  # hazards and goals are in groups that are hidden otherwise
        self.renderer.update_scene(self.scene.data, camera=self.camera, scene_option=options)
        return self.renderer.render()

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()
            self.renderer = None


def _off_screen_context() -> Any:
    """EGL, or OSMesa where that is missing; MUJOCO_GL decides when it names one of them."""
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    failures = []
    for name in (wanted,) if wanted in ("egl", "osmesa") else ("egl", "osmesa"):
        try:
            context = importlib.import_module(f"mujoco.{name}").GLContext
            context(64, 64).free()
            return context
        except Exception as error:  # whatever a GL library raises
            failures.append(f"{name}: {error}")
    why = "; ".join(failures)
    raise QptError(f"mujoco cannot draw without a screen ({why}); install libegl1 and libgl1-mesa-dri, or libosmesa6")
