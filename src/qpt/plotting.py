"""Pictures, drawn without a display and without touching matplotlib's global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError, require
from qpt.writing import write_whole

# Colours that stay apart for colour-blind readers and in grey print.
EPISODE, FRONTIER, LIMIT, WARNING, INK, GRID = "#4477aa", "#cc3311", "#ee7733", "#aa4411", "#333333", "#e4e4e4"


class CostsAndReturns(Protocol):
    """What a picture needs of Trajectories."""

    @property
    def episode_costs(self) -> npt.NDArray[np.float64]: ...
    @property
    def returns(self) -> npt.NDArray[np.float64]: ...
    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def is_surrogate(self) -> bool: ...
    def reward_frontier(self, cost_limits: npt.ArrayLike) -> npt.NDArray[np.float64]: ...


def cost_return_plane(episodes: CostsAndReturns, limits: Sequence[float] = (), title: str = "") -> Any:
    """A matplotlib Figure: every episode as a point, the reward frontier as a step line, the limits as vertical lines.

    `figure.axes[0]` has cost on x and return on y, for whatever else is to be drawn on top.
    """
    figure, axes = new_figure()
    costs, returns = episodes.episode_costs, episodes.returns
    right = max([float(costs.max()), *limits]) * 1.04 or 1.0
    # Few points may be large and clear; many must be small and faint to show where they are dense.
    crowd = min(max((len(costs) - 100) / 2000, 0.0), 1.0)
    axes.scatter(
        costs,
        returns,
        s=26 - 16 * crowd,
        color=EPISODE,
        alpha=0.65 - 0.35 * crowd,
        linewidths=0,
        zorder=2,
        label="episode",
    )
    steps = np.unique(np.concatenate([costs, [right]]))
    axes.step(
        steps,
        episodes.reward_frontier(steps),
        where="post",
        color=FRONTIER,
        linewidth=2,
        zorder=3,
        label="reward frontier (best return within a cost)",
    )
    for number, limit in enumerate(limits):
        label = "cost limit" if number == 0 else None
        axes.axvline(limit, color=LIMIT, linewidth=1.4, linestyle=(0, (4, 2)), zorder=1.5, label=label)
        axes.annotate(  # above the plane, where it hides no episode
            f"{limit:g}",
            (limit, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=WARNING,
            fontsize=9,
        )
    axes.set_xlim(-0.02 * right, right)
    axes.set_xlabel("episode cost", color=INK)
    axes.set_ylabel("episode return", color=INK)
    figure.suptitle(
        textwrap.fill(title, 70), x=0.015, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False
    )
    if episodes.is_surrogate:
        note = str(episodes.info.get("note", ""))
        note = note if "surrogate" in note.lower() else f"surrogate data: {note}".rstrip(": ")
        axes.set_title(
            textwrap.shorten(note, 110), loc="left", pad=16, fontsize=9, style="italic", color=WARNING, parse_math=False
        )
    figure.legend(loc="outside lower left", ncols=3, frameon=False, handletextpad=0.5, fontsize=9)
    return figure


def new_figure(width: float = 7.2, height: float = 4.8) -> tuple[Any, Any]:
    """A Figure of our style and its one pair of axes."""
    figure, ((axes,),) = panels(1, 1, width, height)
    axes.tick_params(labelsize="medium")
    return figure, axes


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[list[Any]]]:
    """A Figure of our style with axes by row and column; small letters, for there may be many."""
    require("matplotlib", "plot")
    figure = require("matplotlib.figure", "plot").Figure(figsize=(width, height), dpi=150, layout="constrained")
    made = [[figure.add_subplot(rows, columns, r * columns + c + 1) for c in range(columns)] for r in range(rows)]
    for axes in (axes for line in made for axes in line):
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
    return figure, made


def save(figure: Any, path: str | Path) -> Path:
    """Write the picture; the ending of the name chooses the format (png, svg, pdf)."""
    path = Path(path)
    known = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.lower().lstrip(".") not in known:
        raise QptError(f"a picture cannot be written as {path.name!r}; end its name in .png, .svg or .pdf")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower().lstrip("."))
    return write_whole(path, content.getvalue())
