"""How a command parses its arguments: tyro, with the docstring as its help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro


def run(command: Callable[..., int | None], args: Sequence[str], prog: str) -> int:
    """Call `command` with its arguments read from `args`; wrong usage exits with 2."""
    return int(tyro.cli(command, args=list(args), prog=f"qpt {prog}") or 0)


def run_group(commands: Mapping[str, Callable[..., Any]], args: Sequence[str], prog: str) -> int:
    """Like `run`, for a command with sub-commands."""
    return int(tyro.extras.subcommand_cli_from_dict(dict(commands), args=list(args), prog=f"qpt {prog}") or 0)
