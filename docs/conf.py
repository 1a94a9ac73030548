"""Settings of the documentation: Markdown by MyST, looks by furo. `make docs` builds it."""

import re
from importlib.metadata import version as installed
from typing import Any

project = "qpt"
author = "The qpt authors"
copyright = "the qpt authors"
version = release = installed("qpt")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # spelled out, those of arrays fill lines
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"qpt {version}"
html_show_sphinx = False
html_static_path = ["style"]
html_css_files = ["wide.css"]
# Examples are plain text; what looks like a console session need not parse as one.
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]


def setup(app: Any) -> None:
    """Keep "606 @ 8.5" on one line, also in a narrow column of a table."""

    def bind(_app: Any, _page: str, source: list[str]) -> None:
        source[0] = re.sub(r"(?<=\d) (@|of) (?=\d)", "\u00a0\\1\u00a0", source[0])

    app.connect("source-read", bind)
