"""The one exception that users see: a sentence that says what is wrong and what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class QptError(Exception):
    """Something the user can mend; the command line prints it as one sentence and exits with 1."""


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import a dependency that not everybody needs, or name the command that installs it (by the extra it is in)."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"'qpt[{extra}]'" if extra else module
        raise QptError(
            f"{module} is needed for this but cannot be imported ({error}); run: pip install {what}"
        ) from error
