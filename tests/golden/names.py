"""Names that have changed since the golden traces were made. See "Golden traces" in CONTRIBUTING.md.

A row is (method, section, old name): new name. The method is the first part of a trace's name, or "*" for all of them.
The section is one of the files' sections, such as "metrics", "weights", "decisions" (diagnostics) or "preset" (config
fields), or "*" for all of them. The new name None says that the number was removed on purpose.

Weights are stored by top-level module. A module that was split has a row for each of its parts, from the part's name to
the old one. Modules that were merged have a row each, from the old name to the new one. Their numbers are added up
before they are compared.

When a trace is made again it gets the new names, and its rows have to be deleted: a test demands it.
"""

from __future__ import annotations

RENAMED: dict[tuple[str, str, str], str | None] = {}
