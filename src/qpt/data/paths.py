"""Paths as users write them, some of which lead nowhere: an unknown home, a folder that may not be looked into."""

from __future__ import annotations

from pathlib import Path

from qpt.errors import QptError


def expanded(path: str | Path) -> Path:
    """The path with ~ replaced by the home that it stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise QptError(f"{path} begins with a home that is not known here; write the path in full") from error


def file_at(path: str | Path) -> Path | None:
    """The file that a path names; None where there is none, or none that can be reached."""
    try:
        found = Path(path).expanduser()
        return found if found.is_file() else None
    except (OSError, RuntimeError):
        return None
