"""Settings of the documentation: Markdown by MyST, looks by furo. `make docs` builds it."""

from importlib.metadata import version as installed

project = "qpt"
author = "The qpt authors"
copyright = "the qpt authors"
version = release = installed("qpt")

extensions = ["myst_parser"]
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
