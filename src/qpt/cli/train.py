"""`qpt train`: every field of the run and of the chosen method is a flag."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from qpt.algorithms.base import algorithm_classes, algorithm_names, config_from
from qpt.errors import QptError
from qpt.training import Run, TrainConfig, train

HELP = """Train a policy from logged episodes.

The flags below are those of the run and of the algorithm named by --algorithm (default qpt); `--preset paper` starts from the
published hyper-parameters, `--config FILE` from a TOML file with the same names. Flags win over the file, the file over the preset.

examples:
  qpt train --task BallCircle --data embedded:ballcircle --steps 2000 --out runs/ball
  qpt train --data my.hdf5 --horizon 200 --out runs/mine
  qpt train --task CarRun --algorithm cdt --preset paper --seed 3 --device cuda --out runs/cdt
  qpt train --task BallCircle --out runs/ball --resume
"""


def main(args: Sequence[str]) -> int:
    rest = list(args)
    algorithm = _take(rest, "--algorithm") or "qpt"
    preset = _take(rest, "--preset") or "default"
    file = _take(rest, "--config")
    _, config_class = algorithm_classes(algorithm)
    run, method = TrainConfig(algorithm=algorithm), _preset(config_class, preset, algorithm)
    if file:
        run, method = _from_file(Path(file), run, method)
    config = _parse(rest, run, method, config_class)
    result = train(config)
    print(_summary(result))
    return 130 if result.interrupted else 0


def _preset(config_class: type, name: str, algorithm: str) -> Any:
    if hasattr(config_class, "preset"):
        return config_class.preset(name)
    if name != "default":
        raise QptError(f"{algorithm} has no preset {name!r}; leave out --preset")
    return config_class()


def _parse(args: list[str], run: TrainConfig, method: Any, config_class: type) -> TrainConfig:
    """Let tyro read the flags of both dataclasses, side by side and without prefixes."""

    def command(run: Any, method: Any) -> TrainConfig:
        return replace(run, config=method)

    hidden = Annotated[TrainConfig, tyro.conf.arg(name="")]
    command.__annotations__ = {"run": hidden, "method": Annotated[config_class, tyro.conf.arg(name="")], "return": TrainConfig}
    command.__defaults__ = (run, method)
    command.__doc__ = HELP + f"\nalgorithms: {', '.join(algorithm_names())}"
    return tyro.cli(command, args=args, prog="qpt train")


def _from_file(path: Path, run: TrainConfig, method: Any) -> tuple[TrainConfig, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QptError(f"the config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QptError(f"the config {path} is not valid TOML: {error}") from error
    own = {f.name for f in fields(TrainConfig)} - {"config", "algorithm"}
    run_values = {k: Path(v) if k in ("data", "out") else v for k, v in values.items() if k in own}
    rest = {k: v for k, v in values.items() if k not in own and k != "algorithm"}
    config_from(type(method), rest)  # names unknown fields
    return replace(run, **run_values), replace(method, **{k: tuple(v) if isinstance(v, list) else v for k, v in rest.items()})


def _take(args: list[str], flag: str) -> str | None:
    """Take `flag VALUE` or `flag=VALUE` out of the arguments: these decide which flags there are."""
    for place, arg in enumerate(args):
        if arg == flag:
            if place + 1 == len(args):
                raise QptError(f"{flag} needs a value")
            value = args[place + 1]
            del args[place : place + 2]
            return value
        if arg.startswith(flag + "="):
            del args[place]
            return arg[len(flag) + 1 :]
    return None


def _summary(result: Run) -> str:
    state = "interrupted and saved" if result.interrupted else "done"
    rows = [f"{state} at step {result.step}: {result.folder}"]
    for row in result.evaluations[-1:]:
        rows += [f"  limit {p['cost_limit']:g}: return {p['return']:.1f}, cost {p['cost']:.1f}" for p in row["limits"]]
    if result.interrupted:
        rows.append(f"continue with: qpt train ... --out {result.folder} --resume")
    return "\n".join(rows)
