"""The one exception that users see: a sentence that says what is wrong and what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class QptError(Exception):
    """Something the user can mend; the command line prints it as one sentence and exits with 1."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or name the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise QptError(
            f"{module} is needed for this but cannot be imported ({error}); run: pip install 'qpt[{extra}]'"
        ) from error
