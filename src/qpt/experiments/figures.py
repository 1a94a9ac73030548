"""The pictures of the paper's experiments, with the printed numbers in them where there are any."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qpt import plotting
from qpt.data.augment import Relabelled
from qpt.data.trajectories import Trajectories
from qpt.experiments.beside import Row
from qpt.experiments.reproduce import Curve

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#ee7733")
PAPER = "#777777"


def main_table(rows: Sequence[Row]) -> Any:
    """Every cell of the table as a point: printed against measured, for reward and cost."""
    rows = [r for r in rows if r.verdict]  # no averages
    figure, panels = _panels(1, 2, 4.6, 4.4)
    methods = list(dict.fromkeys(r.variant for r in rows))
    for axes, name in zip(panels[0], ("reward", "cost"), strict=True):
        known = [r for r in rows if not math.isnan(getattr(r, f"paper_{name}"))]
        for method, colour in zip(methods, _colours(len(methods)), strict=True):
            part = [r for r in known if r.variant == method]
            x, y = [getattr(r, f"paper_{name}") for r in part], [getattr(r, name) for r in part]
            axes.scatter(x, y, s=26, color=colour, label=method, linewidths=0, alpha=0.85)
        ends = [v for r in known for v in (getattr(r, f"paper_{name}"), getattr(r, name))] or [0.0, 1.0]
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color=PAPER, linewidth=1)
        if name == "cost":
            axes.set_xscale("symlog", linthresh=1)
            axes.set_yscale("symlog", linthresh=1)
            axes.axhline(1, color=plotting.LIMIT, linewidth=1, linestyle="--")
        axes.set_xlabel(f"{name}, printed", color=plotting.INK)
        axes.set_ylabel(f"{name}, measured", color=plotting.INK)
    return _legend(figure, panels[0][0], 5)


def components(rows: Sequence[Row]) -> Any:
    """Bars for the eight experiments, reward above cost, with the printed values as lines across them."""
    figure, panels = _reward_above_cost(rows, 5.2, 2.9, "experiment")
    for axes, part, name in panels:
        x, (measured, spread) = np.arange(len(part)), _values(part, name)
        axes.bar(x, measured, 0.62, yerr=spread, color=COLOURS[0], alpha=0.85, label="measured", capsize=2)
        printed = [getattr(r, f"paper_{name}") for r in part]
        if not all(map(math.isnan, printed)):  # a task that the paper does not have
            axes.hlines(printed, x - 0.4, x + 0.4, color=plotting.FRONTIER, linewidth=2, label="printed")
        axes.set_xticks(x, [r.variant.split(":")[0] for r in part])
    return _legend(figure, panels[1][0], 3)


def candidates(rows: Sequence[Row]) -> Any:
    """Reward and cost over the number of candidates."""
    figure, panels = _reward_above_cost(rows, 4.6, 2.7, "candidates")
    for axes, part, name in panels:
        x, (measured, spread) = [int(r.variant.removeprefix("m = ")) for r in part], _values(part, name)
        axes.errorbar(x, measured, yerr=spread, fmt="o-", color=COLOURS[0], markersize=4, label="measured")
        printed = [getattr(r, f"paper_{name}") for r in part]
        if not all(map(math.isnan, printed)):
            axes.plot(x, printed, "s--", color=PAPER, markersize=4, label="printed")
        axes.set_xscale("log")
        axes.set_xticks(x, [str(v) for v in x])
        axes.minorticks_off()
    return _legend(figure, panels[1][0], 3)


def zero_shot(rows: Sequence[Row]) -> Any:
    """Normalised reward, and the episode cost beside the limit asked for; a column for each task."""
    tasks = list(dict.fromkeys(r.task for r in rows))
    methods = list(dict.fromkeys(r.variant for r in rows))
    figure, panels = _panels(2, len(tasks), 3.6, 2.7)
    for column, task in enumerate(tasks):
        for method, colour in zip(methods, _colours(len(methods)), strict=True):
            part = sorted((r for r in rows if r.task == task and r.variant == method), key=lambda r: r.cost_limit)
            x = np.array([r.cost_limit for r in part])
            for line, name in enumerate(("reward", "cost")):
                axes = panels[line][column]
                measured, spread = map(np.array, _values(part, name))
                if name == "cost":  # normalised by limit, or by (cost + 1) / (0 + 1) at a limit of 0
                    measured = np.where(x == 0, measured - 1, measured * x)
                    spread = np.where(x == 0, spread, spread * x)
                axes.plot(x, measured, "o-", color=colour, markersize=3, linewidth=1.4, label=method)
                axes.fill_between(x, measured - spread, measured + spread, color=colour, alpha=0.18, linewidth=0)
        limits = sorted({r.cost_limit for r in rows if r.task == task})
        panels[1][column].plot(limits, limits, "--", color=plotting.LIMIT, linewidth=1, label="the limit")
        panels[0][column].set_title(task, loc="left", fontsize=10)
        panels[1][column].set_xlabel("cost limit", color=plotting.INK)
    panels[0][0].set_ylabel("normalised reward", color=plotting.INK)
    panels[1][0].set_ylabel("episode cost", color=plotting.INK)
    return _legend(figure, panels[1][0], 4)


def hyperparameters(curves: Sequence[Curve], sweeps: Mapping[str, Mapping[str, float]]) -> Any:
    """Reward and cost over training steps, one line for each η; a column for each task and sweep."""
    tasks = list(dict.fromkeys(c.task for c in curves))
    columns = [(task, sweep) for task in tasks for sweep in sweeps]
    figure, panels = _panels(2, len(columns), 3.6, 2.7)
    for column, (task, sweep) in enumerate(columns):
        found = {c.label: c for c in curves if c.task == task}
        for (label, eta), colour in zip(sweeps[sweep].items(), _colours(len(sweeps[sweep])), strict=True):
            if label not in found:
                continue
            curve, name = found[label], sweep.split(",")[0]
            for line, (mean, spread) in enumerate(((curve.reward, curve.reward_std), (curve.cost, curve.cost_std))):
                axes, y, band = panels[line][column], np.array(mean), np.nan_to_num(spread)  # one seed has no band
                axes.plot(curve.steps, y, "o-", color=colour, markersize=2.5, linewidth=1.4, label=f"{name} = {eta:g}")
                axes.fill_between(curve.steps, y - band, y + band, color=colour, alpha=0.18, linewidth=0)
        panels[0][column].set_title(f"{task}: {sweep}", loc="left", fontsize=9)
        panels[1][column].axhline(1, color=plotting.LIMIT, linewidth=1, linestyle="--")
        panels[1][column].set_xlabel("training steps", color=plotting.INK)
        panels[0][column].legend(fontsize=7, frameon=False)
    panels[0][0].set_ylabel("normalised reward", color=plotting.INK)
    panels[1][0].set_ylabel("normalised cost", color=plotting.INK)
    return figure


def augmentation(data: Trajectories, relabelled: Relabelled, title: str, arrows: int = 40) -> Any:
    """The (cost, return) plane before relabelling and after it; arrows lead from base episodes to their new pairs."""
    figure, panels = _panels(1, 2, 5.2, 4.4)
    costs, returns = data.episode_costs, data.returns
    right = float(max(costs.max(), relabelled.target_cost.max(initial=0.0))) * 1.03 or 1.0
    steps = np.unique(np.concatenate([costs, [right]]))
    for axes, name in zip(panels[0], ("before", "after"), strict=True):
        axes.scatter(costs, returns, s=10, color=COLOURS[0], alpha=0.5, linewidths=0, label="logged episode")
        frontier = data.reward_frontier(steps)
        axes.step(steps, frontier, where="post", color=plotting.FRONTIER, linewidth=1.8, label="reward frontier")
        axes.set_title(
            f"{name}: {len(costs) + (name == 'after') * len(relabelled):,} episodes", loc="left", fontsize=10
        )
        axes.set_xlabel("cost", color=plotting.INK)
    after = panels[0][1]
    cost, value, base = relabelled.target_cost, relabelled.target_return, relabelled.base
    after.scatter(cost, value, s=12, color=COLOURS[2], alpha=0.7, linewidths=0, label="relabelled pair")
    order = np.lexsort((value, cost))
    for row in order[np.linspace(0, len(order) - 1, min(arrows, len(order))).astype(np.int64)]:
        start = (costs[base[row]], returns[base[row]])
        style = {"arrowstyle": "-|>", "color": plotting.INK, "alpha": 0.4, "lw": 0.6, "mutation_scale": 5}
        after.annotate("", (cost[row], value[row]), start, arrowprops=style)
    panels[0][0].set_ylim(after.get_ylim())
    panels[0][0].set_ylabel("return", color=plotting.INK)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11, parse_math=False)
    return _legend(figure, after, 3)


# -- what they share ---------------------------------------------------------------------------------------------------


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[list[Any]]]:
    """Panels of a width and height each, with room for a legend below."""
    return plotting.panels(rows, columns, max(width * columns, 5.0), height * rows + 0.4)


def _reward_above_cost(
    rows: Sequence[Row], width: float, height: float, across: str
) -> tuple[Any, list[tuple[Any, list[Row], str]]]:
    """A column for each task: (axes, the task's rows, "reward" or "cost") of every panel, with the limit drawn in."""
    tasks = list(dict.fromkeys(r.task for r in rows))
    figure, panels = _panels(2, len(tasks), width, height)
    found = []
    for column, task in enumerate(tasks):
        for line, name in enumerate(("reward", "cost")):
            axes = panels[line][column]
            axes.set_ylabel(name, color=plotting.INK)
            if name == "reward":
                axes.set_title(task, loc="left", fontsize=10)
            else:
                axes.axhline(1, color=plotting.LIMIT, linewidth=1, linestyle="--", label="limit")
                axes.set_xlabel(across, color=plotting.INK)
            found.append((axes, [r for r in rows if r.task == task], name))
    return figure, found


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _legend(figure: Any, axes: Any, columns: int) -> Any:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    return figure


def _values(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    spread = [getattr(r, f"{name}_std") for r in rows]
    return [getattr(r, name) for r in rows], [0.0 if math.isnan(s) else s for s in spread]
