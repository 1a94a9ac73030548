"""`qpt train`: every field of the run and of the chosen method is a flag."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from qpt import parallel
from qpt.algorithms.base import algorithm_classes, algorithm_names, preset_config
from qpt.algorithms.fields import choices, fitting
from qpt.errors import QptError
from qpt.tasks import get_task
from qpt.training import Run, TrainConfig, train, train_seeds

HELP = """Train a policy from logged episodes.

The flags below are those of the run and of the method that --algorithm names. Flags win over the file of --config,
and the file over the preset.

examples:
  qpt train --task BallCircle --data embedded:ballcircle --steps 2000 --out runs/ball
  qpt train --data my.hdf5 --horizon 200 --out runs/mine
  qpt train --task CarRun --algorithm cdt --preset paper --seed 3 --device cuda --out runs/cdt
  qpt train --task BallCircle --out runs/ball --resume
  qpt train --task BallCircle --seeds 0 1 2 --out runs/ball
  torchrun --nproc-per-node 2 -m qpt train --task BallCircle --out runs/ball
"""


@dataclass(frozen=True)
class _RunFlags(TrainConfig):
    """The fields of a run that are flags; the method and its config are flags of their own."""

    algorithm: tyro.conf.Suppress[str] = "qpt"
    config: tyro.conf.Suppress[Any] = None


def main(args: Sequence[str]) -> int:
    file = _peek(args, "--config")
    values = _read(Path(file)) if file else {}
    # These two decide which flags there are, so they are looked up before the others are read.
    named = [str(values.pop(name, usual)) for name, usual in (("algorithm", "qpt"), ("preset", "default"))]
    algorithm, preset = _peek(args, "--algorithm") or named[0], _peek(args, "--preset") or named[1]
    task = _peek(args, "--task") or values.get("task")
    run = _RunFlags(algorithm=algorithm)
    method = preset_config(algorithm, preset, get_task(task) if isinstance(task, str) else None)
    if file:
        run, method = _with_values(run, method, values, file)
    if not hasattr(method, "cost_limit"):
        _no_limit(args, algorithm)
    run = _one_or_several(args, run)
    config = _parse(args, algorithm, preset, run, method)
    if "--seeds" in args and not config.seeds:
        raise QptError("--seeds needs numbers: --seeds 0 1 2")
    results = train_seeds(config) if config.seeds else [train(config)]
    if parallel.speaks():
        print("\n".join(map(_summary, results)))
    return 130 if any(result.interrupted for result in results) else 0


def _one_or_several(args: Sequence[str], run: _RunFlags) -> _RunFlags:
    """--seed and --seeds exclude each other; a flag of one wins over the other's value in the file."""
    one, several = _peek(args, "--seed") is not None, _peek(args, "--seeds") is not None
    if one and several:
        raise QptError("--seed and --seeds exclude each other; give one of them")
    return replace(run, seeds=()) if one else run


def _no_limit(args: Sequence[str], algorithm: str) -> None:
    """A limit given to a method that is trained for none."""
    if _peek(args, "--cost-limit") is None and _peek(args, "--cost_limit") is None:
        return
    if getattr(algorithm_classes(algorithm)[0], "limit_mode", None) == "live":
        said = "takes its limit when it is used: leave --cost-limit out, and give `qpt evaluate` its --limits"
    else:
        said = "takes no limit; leave --cost-limit out"
    raise QptError(f"{algorithm} {said}")


def _parse(args: Sequence[str], algorithm: str, preset: str, run: _RunFlags, method: Any) -> TrainConfig:
    """Let tyro read the flags of both dataclasses, side by side and without prefixes."""

    def command(algorithm: Any, preset: Any, config: Any, run: Any, method: Any) -> TrainConfig:  # noqa: ARG001
        fields_of_run = {f.name: getattr(run, f.name) for f in fields(TrainConfig)}
        return TrainConfig(**fields_of_run | {"algorithm": algorithm, "config": method})

    def flag(kind: Any, text: str, metavar: str) -> Any:
        return Annotated[kind, tyro.conf.arg(help=text, metavar=metavar)]

    plain = tyro.conf.arg(name="")
    command.__annotations__ = {
        "algorithm": flag(str, f"The method: {', '.join(algorithm_names())}.", "NAME"),
        "preset": flag(str, "What the method's flags start from: default, paper or (of qpt) transformer.", "NAME"),
        "config": flag(Path | None, "A TOML file with values of the flags, named as below with _ for -.", "FILE"),
        "run": Annotated[_RunFlags, plain],
        "method": Annotated[type(method), plain],
        "return": TrainConfig,
    }
    command.__defaults__ = (algorithm, preset, None, run, method)
    command.__doc__ = HELP
    prog = "qpt train" if algorithm == "qpt" else f"qpt train --algorithm {algorithm}"  # whose flags its help lists
    return tyro.cli(command, args=list(args), prog=prog)


# -- the TOML file -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QptError(f"the config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QptError(f"the config {path} is not valid TOML: {error}") from error


def _with_values(run: _RunFlags, method: Any, values: dict[str, Any], file: str) -> tuple[_RunFlags, Any]:
    """Both dataclasses with the file's values; a name or a type that does not fit gets an error."""
    hints = {**get_type_hints(TrainConfig), **get_type_hints(type(method))}
    own = {f.name for f in fields(TrainConfig)} - {"config", "algorithm"}
    known = own | {f.name for f in fields(method)}
    if {"seed", "seeds"} <= set(values):
        raise QptError(f"the config {file} has both seed and seeds, which exclude each other; keep one of them")
    values = {name: None if value == "None" else value for name, value in values.items()}  # TOML has no word for it
    for name, value in values.items():
        if name not in known:
            raise QptError(f"the config {file} has {name!r}, which {run.algorithm} does not know; see qpt train --help")
        try:
            values[name] = fitting(value, hints[name])
        except ValueError:
            kind = choices(hints[name])
            raise QptError(f"the config {file} has {name} = {value!r}, which does not fit: it is {kind}") from None
    of_run = {k: v for k, v in values.items() if k in own}
    return replace(run, **of_run), replace(method, **{k: v for k, v in values.items() if k not in own})


def _peek(args: Sequence[str], flag: str) -> str | None:
    """The value of `flag VALUE` or `flag=VALUE`, the last if there are several."""
    found = None
    for arg, following in itertools.zip_longest(args, args[1:]):
        if arg == flag:
            found = following
        elif arg.startswith(flag + "="):
            found = arg[len(flag) + 1 :]
    return found


def _summary(result: Run) -> str:
    state = "interrupted and saved" if result.interrupted else "done"
    rows = [f"{state} at step {result.step}: {result.folder}"]
    for row in result.evaluations[-1:]:
        if row["step"] != result.step:  # its policy is not the last one
            rows.append(f"  evaluated last at step {row['step']}:")
        rows += [f"  limit {p['cost_limit']:g}: return {p['return']:.1f}, cost {p['cost']:.1f}" for p in row["limits"]]
    if result.interrupted:
        rows.append(f"continue with the same command and --out {result.folder} --resume")
    return "\n".join(rows)
