"""How a command parses its arguments: tyro, with the docstring as its help."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

Command = Callable[..., int | None]


def run(command: Command, args: Sequence[str], prog: str) -> int:
    """Call `command` with its arguments read from `args`; wrong usage exits with 2."""
    # For a help that reads well: SOURCE and not STR, no {None} (leave the flag out instead), no --no-x beside --x.
    plain = tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff
    return int(tyro.cli(command, args=list(args), prog=f"qpt {prog}", config=plain) or 0)


def run_group(commands: Mapping[str, Command | str], args: Sequence[str], prog: str) -> int:
    """Like `run`, for a command with sub-commands; "module:function" is imported only when it is needed."""
    if args and args[0] in commands:
        return run(_resolve(commands[args[0]]), args[1:], f"{prog} {args[0]}")
    if args and args[0] not in ("-h", "--help"):
        print(f"error: there is no command {f'{prog} {args[0]}'!r}; `qpt {prog} --help` lists them", file=sys.stderr)
        return 2
    width = max(map(len, commands))
    rows = [f"  {name:<{width}}  {_summary(_resolve(command))}" for name, command in commands.items()]
    print(f"usage: qpt {prog} COMMAND ...\n\n" + "\n".join(rows) + f"\n\n`qpt {prog} COMMAND --help` explains each.")
    return 0 if args else 2


def _resolve(command: Command | str) -> Command:
    if not isinstance(command, str):
        return command
    module, _, name = command.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    return found  # type: ignore[no-any-return]


def _summary(command: Command) -> str:
    return (command.__doc__ or "").strip().split("\n")[0]
