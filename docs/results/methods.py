"""Tables (Markdown, to stdout) and pictures of a comparison of methods:  python docs/results/methods.py FILE.json

FILE.json is a list of evaluations, each with one return, cost and cost limit an episode; `--data DIR` names the folder
of the data sets, for the question where a limit binds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qpt import plotting, stats
from qpt.data import load_dataset
from qpt.experiments.paper import main_table
from qpt.tasks import get_task

HERE = Path(__file__).parent
Floats = npt.NDArray[np.float64]
SAMPLES = 4000  # of a bootstrap
ROWS = {  # row of a table: name, colour, marker. Colours that stay apart for colour-blind readers, warm ones for QPT.
    "qpt": ("QPT", "#cc3311", "*"),
    "qpt-fresh": ("QPT, new seeds", "#ff5544", "*"),
    "qpt/critics": ("QPT, chosen by Q^r", "#991100", "*"),
    "qpt/single": ("QPT, one candidate", "#ee7733", "P"),
    "qpt/narrow": ("QPT, 5 %, by Q^r", "#ddaa33", "X"),
    "qpt/whole": ("QPT, unfrugal, by Q^r", "#bb8844", "8"),
    "qpt-long": ("QPT, 90 % of the data", "#aa5533", "H"),
    "qpt-long/cal75": ("90 %, calibrated 0.75", "#884422", "H"),
    "qpt-long/cal90": ("90 %, calibrated 0.9", "#663311", "H"),
    "qpt-scale": ("QPT, batch 2048", "#ff8866", "*"),
    "qpt-scale/single": ("QPT, batch 2048, one candidate", "#ff8866", "P"),
    "qpt-paper": ("paper preset", "#ee3377", "*"),
    "qpt-paper-scale": ("paper preset, batch 2048", "#aa1155", "*"),
    "qpt-paper-scale/single": ("paper preset, batch 2048, one candidate", "#dd77aa", "P"),
    "transformer": ("conditional transformer", "#004488", "o"),
    "transformer-fresh": ("conditional transformer, new seeds", "#2266aa", "o"),
    "transformer-scale": ("conditional transformer, batch 2048", "#6699cc", "o"),
    "cdt": ("CDT", "#33bbee", "s"),
    "caps": ("CAPS", "#009988", "D"),
    "oasis": ("OASIS", "#117733", "^"),
    "fisor": ("FISOR", "#88aa22", "v"),
    "cpq": ("CPQ", "#aa4499", "<"),
    "cpq-reference": ("CPQ, variant reference", "#dd99cc", "<"),
    "bcq-lag": ("BCQ-Lag", "#882255", ">"),
    "coptidice": ("COptiDICE", "#7766bb", "d"),
    "bc-safe": ("BC-Safe", "#222222", "p"),
    "bc-safe-fresh": ("BC-Safe, new seeds", "#444444", "p"),
    "bc-all": ("BC-All", "#777777", "h"),
    "random": ("random actions", "#bbbbbb", "x"),
}
IGNORE_THE_LIMIT = {"fisor", "bc-all", "random"}  # their episodes at one limit count for every other
VARIANTS = (
    "-fresh",
    "-long",
    "-scale",
    "-reference",
)  # rows of the tables alone: in one picture nobody tells all apart
PICTURED = [row for row in ROWS if "/" not in row and not row.endswith(VARIANTS)]
WHOLE = ("qpt", "qpt-fresh", "qpt-scale", "qpt-paper-scale")  # the method whole, each with the limits of a sweep
BESIDE = {  # what a row of QPT is held against: the transformer and BC-Safe, of its own seeds and scale where there are
    "qpt-fresh": ("transformer-fresh", "bc-safe-fresh"),
    "qpt-scale": ("transformer-scale", "bc-safe"),
    "qpt-paper-scale": ("transformer-scale", "bc-safe"),
}


@dataclass(frozen=True)
class Check:
    """The episodes of one checkpoint at one limit."""

    step: int
    last: bool
    returns: Floats
    costs: Floats


Table = dict[tuple[str, str], dict[float, dict[int, list[Check]]]]  # (task, row) -> limit -> seed -> checkpoints
Seeds = dict[int, Check]  # one checkpoint a training seed


def read(path: Path) -> tuple[Table, int]:
    """The evaluations by task, row, limit and seed, and how many had no episodes; a repeated one replaces the first."""
    table: Table = {}
    empty = 0
    for e in json.loads(path.read_text(encoding="utf-8")):
        if not e.get("returns"):
            empty += 1
            continue
        row = e["label"] if e["variant"] == "default" else f"{e['label']}/{e['variant']}"
        returns, costs, limits = (np.asarray(e[k], np.float64) for k in ("returns", "costs", "cost_limit"))
        for limit in map(float, np.unique(limits)):
            if e.get("trained_limit") not in (None, limit) and e["label"] not in IGNORE_THE_LIMIT:
                continue  # a policy trained for one limit says nothing about another
            at = limits == limit
            checks = table.setdefault((e["task"], row), {}).setdefault(limit, {}).setdefault(e["seed"], [])
            checks[:] = [c for c in checks if c.step != e["step"]]
            checks.append(Check(e["step"], bool(e["last"]), returns[at], costs[at]))
    return table, empty


def last(table: Table, task: str, row: str, limit: float, best: bool = False) -> Seeds:
    """The last checkpoint of each seed; with `best`, the one that the rule would choose on these very episodes."""
    limits = table.get((task, row), {})
    there = min(limits) if limits and limit not in limits and row in IGNORE_THE_LIMIT else limit
    found: Seeds = {}
    for seed, checks in limits.get(there, {}).items():
        checks = sorted(checks, key=lambda c: c.step)
        if best:
            means = [{"return": c.returns.mean(), "cost": c.costs.mean()} for c in checks]
            found[seed] = checks[stats.select_checkpoint(means, limit)]
        elif checks[-1].last:
            found[seed] = checks[-1]
    return found


def points(table: Table, task: str, row: str) -> dict[int, dict[float, tuple[float, float]]]:
    """Seed -> limit -> mean cost and return of the last checkpoint, the limits of a sweep among them."""
    found: dict[int, dict[float, tuple[float, float]]] = {}
    for source in (f"{row}/sweep", row):
        for limit in table.get((task, source), {}):
            for seed, c in last(table, task, source, limit).items():
                found.setdefault(seed, {})[limit] = (float(c.costs.mean()), float(c.returns.mean()))
    return found


def summary(task: str, limit: float, seeds: Seeds) -> Floats:
    """Normalised return and cost, each as mean, low and high, [2, 3]; NaN intervals where there are too few seeds."""
    facts, names = get_task(task), np.repeat(list(seeds), [len(c.returns) for c in seeds.values()])
    returns = [facts.normalized_return(x) for c in seeds.values() for x in c.returns]
    costs = [facts.normalized_cost(x, limit) for c in seeds.values() for x in c.costs]
    found = [stats.mean_over_seeds(values, names, samples=SAMPLES) for values in (returns, costs)]
    return np.array([(m, *(i if len(seeds) >= stats.FEWEST else (np.nan, np.nan))) for m, i in found])


def bracket(interval: Iterable[float], form: str = ".2f") -> str:
    low, high = interval
    return f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else ""


def cell(task: str, row: str, limit: float, seeds: Seeds) -> str:
    if not seeds:
        return "–"
    (reward, _, _), (cost, *interval) = summary(task, limit, seeds)
    text = f"{reward:.2f} @ {cost:.2f}{bracket(interval)}"
    wanted = 5 if row.split("/")[0].removesuffix("-long").removesuffix("-fresh") in ("qpt", "transformer") else 3
    few = f" ({len(seeds)} seed{'s' * (len(seeds) > 1)})" if len(seeds) < wanted else ""
    return (f"**{text}**" if cost <= 1 else text) + few


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n")


def name(row: str) -> str:
    return ROWS[row][0] if row in ROWS else row


def rows_of(table: Table, task: str) -> list[str]:
    """The task's rows in the order of ROWS, then those unknown; without the searches and sweeps."""
    there = [r for t, r in table if t == task and not r.startswith("eta-") and not r.endswith("/sweep")]
    return sorted(there, key=lambda r: list(ROWS).index(r) if r in ROWS else len(ROWS))


# -- 0: QPT at every limit -----------------------------------------------------------------------------------------


def limits_of_qpt(table: Table, tasks: list[str]) -> None:
    print(
        "## QPT at every limit\n\nMean return @ mean cost [95 % interval of the cost: bootstrap over training seeds "
        "and episodes], last checkpoints, 20 episodes a seed; bold where the mean cost keeps the limit. *New seeds*: "
        "5 to 9, and other episodes; all else has seeds 0 to 4. *Best*: of each seed's half-way and last checkpoint "
        "the one with more return if it keeps the limit, else with less cost, chosen on these very episodes. BC-Safe "
        "has a policy for every limit.\n"
    )
    columns = ("qpt", "qpt-fresh", "transformer", "transformer-fresh", "bc-safe-fresh")
    rows = []
    for task in tasks:
        swept = {k for r in columns[:2] for source in (r, f"{r}/sweep") for k in table.get((task, source), {})}
        for limit in sorted(swept):
            cells = [plain(table, task, row, limit) for row in columns]
            cells.insert(2, plain(table, task, "qpt-fresh", limit, best=True))
            rows.append([task, f"{limit:g}", *cells])
    head = [
        "task",
        "limit",
        "QPT",
        "new seeds",
        "new seeds, best",
        "transformer",
        "transformer, new seeds",
        "BC-Safe, new",
    ]
    markdown(head, rows)


def single_episodes(table: Table, tasks: list[str]) -> None:
    print(
        "## Single episodes\n\nThe same episodes: the share of them whose own cost keeps the limit, and the cost of "
        "the dearest. A limit that is kept on the mean says nothing about either.\n"
    )
    columns = ("qpt", "qpt-fresh", "transformer", "bc-safe-fresh")
    rows = []
    for task in tasks:
        for limit in sorted({k for r in columns[:2] for at in (r, f"{r}/sweep") for k in table.get((task, at), {})}):
            costs = [
                [c.costs for c in (last(table, task, r, limit) or last(table, task, f"{r}/sweep", limit)).values()]
                for r in columns
            ]
            cells = [f"{np.mean(np.concatenate(c) <= limit):.0%}, {np.max(c):g}" if c else "–" for c in costs]
            rows.append([task, f"{limit:g}", *cells])
    markdown(["task", "limit", "QPT", "new seeds", "transformer", "BC-Safe, new"], rows)


def plain(table: Table, task: str, row: str, limit: float, best: bool = False) -> str:
    """Return @ cost as they are."""
    seeds = last(table, task, row, limit, best) or last(table, task, f"{row}/sweep", limit, best)
    several = any(len(checks) > 1 for checks in table.get((task, row), {}).get(limit, {}).values())
    if not seeds or (best and not several):
        return "–"
    cost, *interval = summary(task, limit, seeds)[1] * limit
    earned = np.mean([c.returns.mean() for c in seeds.values()])
    text = f"{earned:.{0 if abs(earned) >= 100 else 1}f} @ {cost:.1f}{bracket(interval, '.1f')}"
    return f"**{text}**" if cost <= limit else text


# -- 1: every method -----------------------------------------------------------------------------------------------


def methods(table: Table, tasks: list[str], limits: list[float]) -> None:
    print(
        "## Every method\n\nNormalised return @ normalised cost [95 % interval of the cost: bootstrap over training "
        "seeds and episodes], bold where the mean cost keeps the limit. 5 seeds for QPT and the conditional "
        f"transformer, 3 for the others; a cell with fewer says so, and has no interval below {stats.FEWEST}. *Best* "
        "is each seed's checkpoint with the highest return among those that keep the limit, else with the lowest "
        "cost, chosen on the very episodes that are reported: optimistic. A row with one checkpoint has it in both "
        "places. *Paper*: its Table 1, made with other data (DSRL's) and far more steps.\n"
    )
    for task in tasks:
        head = [task, "steps"] + [f"{k:g}, {rule}" for rule in ("last", "best") for k in limits] + ["paper"]
        found = (
            [name(r), length(table, task, r)]
            + [cell(task, r, k, last(table, task, r, k, best)) for best in (False, True) for k in limits]
            + [printed(task, r)]
            for r in rows_of(table, task)
        )
        markdown(head, found)


def printed(task: str, row: str) -> str:
    """The paper's cell of Table 1."""
    score = main_table().get((task, name(row)))
    return f"{score.reward:.2f} @ {score.cost:.2f}" if score else ""


def length(table: Table, task: str, row: str) -> str:
    """Steps of training of the last checkpoints, the fewest where they differ."""
    steps = [c.step for seeds in table[task, row].values() for checks in seeds.values() for c in checks if c.last]
    return f"{min(steps):,}" if steps and min(steps) else "–"


def plane(table: Table, tasks: list[str], limits: list[float]) -> None:
    """Cost against return of every method: a row of panels for each limit, a column for each task."""
    figure, panels = plotting.panels(len(limits), len(tasks), 3.3 * len(tasks), 3.0 * len(limits) + 0.8)
    handles = {}
    for limit, line in zip(limits, panels, strict=True):
        for task, axes in zip(tasks, line, strict=True):
            axes.axvspan(-0.1, 1, color="#e5f2e5", zorder=0)
            for row in (r for r in reversed(rows_of(table, task)) if r in PICTURED):
                if not (seeds := last(table, task, row, limit)):
                    continue
                y, x = summary(task, limit, seeds)
                bars = [np.abs(np.nan_to_num(v[1:] - v[0]))[:, None] for v in (y, x)]  # none where there is no interval
                label, colour, marker = ROWS[row]
                style = {"fmt": marker, "color": colour, "ms": 11 if marker == "*" else 6, "lw": 1, "mew": 0.8}
                drawn = axes.errorbar(x[0], y[0], *bars, **style)
                handles[row] = (drawn[0], label)
            axes.set_xscale("symlog", linthresh=1, linscale=1)  # even up to the limit, by powers above it
            right = max(2.2, axes.get_xlim()[1])
            ticks = [x for x in (0, 0.5, 1, 2, 5, 10, 20, 50) if x <= right]
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
            axes.set_xlim(-0.1, right)
            axes.set_title(f"{task}, limit {limit:g}", fontsize=10, color=plotting.INK)
            axes.set_xlabel("cost / limit", fontsize=8)
            axes.set_ylabel("normalised return", fontsize=8)
    shown = zip(*(handles[r] for r in ROWS if r in handles), strict=True)
    figure.legend(*shown, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    plotting.save(figure, HERE / "methods.png")
    print("![Every method: the shaded part keeps the limit; bars are 95 % intervals](results/methods.png)\n")


# -- 2: paired differences -----------------------------------------------------------------------------------------


def difference(values: Floats) -> str:
    """Mean [interval] of paired differences, bold where the interval leaves out 0."""
    low, high = stats.bootstrap_mean_interval(values) if len(values) >= stats.FEWEST else (np.nan, np.nan)
    text = f"{values.mean():+.3g}{bracket((low, high), '+.3g')}"
    return f"**{text}**" if low > 0 or high < 0 else text


def paired(table: Table, task: str, row: str, other: str) -> dict[str, Floats]:
    """Limit -> [seeds, 4]: return, cost and return at `row`'s cost, each less the other's, and whether it was clipped.

    At the same cost: the other's return comes from the line through its own points of all limits, by rising cost.
    """
    ours, theirs = points(table, task, row), points(table, task, other)
    each: dict[float, dict[int, list[float]]] = {}
    for seed in sorted(set(ours) & set(theirs)):
        costs, returns = np.array(list(theirs[seed].values())).T
        levels = np.unique(costs)
        heights = [returns[costs == level].mean() for level in levels]
        for limit in sorted(set(ours[seed]) & set(theirs[seed])):
            (cost, reward), (cost2, reward2) = ours[seed][limit], theirs[seed][limit]
            same = reward - float(np.interp(cost, levels, heights))
            clipped = not levels[0] <= cost <= levels[-1]
            each.setdefault(limit, {})[seed] = [reward - reward2, cost - cost2, same, clipped]
    found = {f"{limit:g}": np.array(list(seeds.values())) for limit, seeds in sorted(each.items())}
    if whole := [s for s in ours if all(s in seeds for seeds in each.values())] if len(each) > 1 else []:
        found["all"] = np.array([np.mean([seeds[s] for seeds in each.values()], axis=0) for s in whole])
    return found


def beside(row: str) -> tuple[str, str]:
    return BESIDE.get(row.split("/")[0], ("transformer", "bc-safe"))


def comparisons(table: Table, tasks: list[str]) -> None:
    print(
        "## QPT beside the conditional transformer, seed by seed\n\nQPT minus transformer, last checkpoints, not "
        "normalised: mean over seeds [95 % bootstrap interval over seeds], bold where the interval leaves out 0. A row "
        "with batch 2048 is held against the transformer with that batch and 100,000 steps, one of new seeds against "
        "that of the same seeds. *At the same cost*: for "
        "each seed the transformer's return is read off the line through its own (cost, return) points of all limits, "
        "at QPT's realised cost; outside of its costs its nearest end counts (*clipped*: the share of readings; where "
        "that is all of them, nothing is said). "
        "*All*: each seed's mean over the limits above it; where none stands there, over 10, 20 and 40. The intervals "
        "are not corrected for number; "
        "by chance alone, one of 5 seeds leaves out 0 at least once in 16 times, one of 3 seeds once in 4.\n"
    )
    rows = []
    ours = [r for r in ROWS if r.startswith("qpt") and not r.startswith("qpt-long")]  # those had fewer episodes
    for task, row in ((t, r) for t in tasks for r in ours if (t, r) in table):
        for limit, values in paired(table, task, row, beside(row)[0]).items():
            if row not in WHOLE and limit != "all":
                continue
            reward, cost, same = map(difference, values[:, :3].T)
            sign = "higher" if values[:, 2].mean() > 0 else "lower"
            says = "too few seeds" if "[" not in same else f"yes: {sign}" if "**" in same else "no"
            share = f"{values[:, 3].mean():.0%}"
            if values[:, 3].min() == 1:  # the transformer was nowhere as cheap: there is nothing to hold it against
                same, says = "–", "no such cost"
            rows.append([task, name(row), limit, reward, cost, same, says, str(len(values)), share])
    head = ["task", "QPT", "limit", "return", "cost", "return at the same cost", "excludes 0", "seeds", "clipped"]
    markdown(head, rows)
    print("QPT minus BC-Safe, the returns as they are (at different costs), paired by seed:\n")
    both = ((t, r) for t in tasks for r in WHOLE if (t, r) in table)
    safe = [(t, r, k, v) for t, r in both for k, v in paired(table, t, r, beside(r)[1]).items() if k != "all"]
    rows = [[t, name(r), k, difference(v[:, 0]), difference(v[:, 1]), str(len(v))] for t, r, k, v in safe]
    markdown(["task", "QPT", "limit", "return", "cost", "seeds"], rows)


# -- 3: where a limit binds ----------------------------------------------------------------------------------------


def binding(table: Table, tasks: list[str], folder: Path) -> None:
    print(
        "## Where a limit binds\n\nRF(κ) is the best logged return within cost κ. A limit binds where RF(κ) exceeds "
        "RF(κ/2) by at least 5 % of the range of logged returns; there QPT should spend between 0.7 κ and κ (last "
        "checkpoints).\n"
    )
    rows = []
    for task in tasks:
        path = next(iter(sorted([*folder.glob(f"*{task}*.hdf5"), *folder.glob(f"*{task}*.npz")])), None)
        if path is None:
            print(f"There are no data of {task} in the folder.\n")
            continue
        data = load_dataset(path)
        trained = [row for row in WHOLE if (task, row) in table]
        found = [(r, k, s) for r in trained for s in (r, f"{r}/sweep") for k in table.get((task, s), {})]
        for row, limit, source in sorted(found, key=lambda one: (trained.index(one[0]), one[1])):
            if not (seeds := last(table, task, source, limit)):
                continue
            half, whole = map(float, data.reward_frontier([limit / 2, limit]))
            share = (whole - half) / float(np.ptp(data.returns)) if np.isfinite(whole) else 0.0
            cost, *interval = summary(task, limit, seeds)[1] * limit
            binds = share >= 0.05
            meets = "no: over" if cost > limit else "–" if not binds else "yes" if cost >= 0.7 * limit else "no: under"
            line = [
                task,
                name(row),
                f"{limit:g}",
                f"{half:.1f}",
                f"{whole:.1f}",
                f"{share:.1%}",
                "**yes**" if binds else "no",
            ]
            rows.append([*line, f"{cost:.1f}{bracket(interval, '.1f')}", meets])
    head = ["task", "QPT", "limit κ", "RF(κ/2)", "RF(κ)", "rise / range", "binds", "its cost", "in [0.7 κ, κ]"]
    markdown(head, rows)


# -- 4: eta search -------------------------------------------------------------------------------------------------


def etas(table: Table) -> None:
    found = {r: tuple(map(float, r.split("-")[1:])) for _, r in table if r.startswith("eta-") and "/" not in r}
    if not found:
        return
    print("## Search over η\n\nCells as in the first tables, last checkpoints; *default* is QPT of those tables.\n")
    places = sorted({(t, k) for (t, r), limits in table.items() if r in found for k in limits})
    lines = sorted(found.items(), key=lambda item: item[1])
    shown = [(row, [f"{eta:g}" for eta in pair]) for row, pair in lines] + [("qpt", ["default", "default"])]
    rows = ([*pair, *(cell(t, row, k, last(table, t, row, k)) for t, k in places)] for row, pair in shown)
    markdown(["η reward", "η cost", *(f"{t}, {k:g}" for t, k in places)], rows)


# -- 5: the sweep --------------------------------------------------------------------------------------------------


def spearman(a: Floats, b: Floats) -> float:
    """Rank correlation, ties by their mean rank; 0 where the second is constant: it does not follow the first."""

    def ranks(v: Floats) -> Floats:
        return (np.searchsorted(np.sort(v), v, "left") + np.searchsorted(np.sort(v), v, "right")) / 2.0

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1]) if np.ptp(b) > 0 else 0.0


def sweep(table: Table, tasks: list[str]) -> None:
    swept = [(t, r) for t in tasks for r in ROWS if (t, f"{r}/sweep") in table or (r in WHOLE and (t, r) in table)]
    if not swept:
        return
    print(
        "## Does the cost follow the limit?\n\nSpearman's rank correlation of limit and mean cost of each seed, last "
        "checkpoints: mean over seeds [95 % bootstrap interval over seeds], and the lowest seed.\n"
    )
    shown = sorted({t for t, _ in swept})
    wide = -(-len(shown) // 2)
    figure, grid = plotting.panels(2, wide, 4.6 * wide, 7.4)
    panels = [axes for line in grid for axes in line]
    rows = []
    for task, row in swept:
        axes, (label, colour, marker) = panels[shown.index(task)], ROWS[row]
        values, known = [], set()
        for number, line in enumerate(points(table, task, row).values()):
            limits, costs = np.array([(k, line[k][0]) for k in sorted(line)]).T
            style = {"color": colour, "marker": marker, "ms": 4, "lw": 1, "alpha": 0.75}
            axes.plot(limits, costs, **style, label=None if number else f"{label}, one line a seed")
            known |= set(line)
            if len(limits) > 2:
                values.append(spearman(limits, costs))
        if values:
            interval = stats.bootstrap_mean_interval(values) if len(values) >= stats.FEWEST else (np.nan, np.nan)
            counted = [f"{np.mean(values):.2f}{bracket(interval)}", f"{min(values):.2f}", str(len(values))]
            rows.append([task, name(row), ", ".join(f"{k:g}" for k in sorted(known)), *counted])
    for axes in panels[len(shown) :]:
        axes.axis("off")
    for task, axes in zip(shown, panels, strict=False):
        top = max(axes.get_xlim()[1], 1.0)
        axes.plot([0, top], [0, top], color="grey", lw=1, ls="--", label="cost = limit")
        axes.set_xlabel("cost limit")
        axes.set_ylabel("mean cost")
        axes.set_title(task, fontsize=10)
    shared = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shared.values(), shared, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    plotting.save(figure, HERE / "methods-sweep.png")
    markdown(["task", "method", "limits", "Spearman", "lowest", "seeds"], rows)
    print("![Mean cost against the limit, one line a seed](results/methods-sweep.png)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the evaluations")
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--limits", type=float, nargs="+", default=[10.0, 20.0], help="the limits of the first tables")
    options = parser.parse_args()
    table, empty = read(options.file)
    if not table:
        parser.error(f"{options.file} holds no evaluation with episodes")
    tasks = sorted({task for task, _ in table})
    if empty:
        print(f"{empty} evaluations have no episodes and are left out.\n")
    print(
        "# The comparison in tables\n\nEvery table and picture behind the [comparison](comparison.md), made by "
        "`python docs/results/methods.py docs/results/methods.json --data DIR > docs/comparison-tables.md`, DIR being "
        "the folder of the data sets. How the runs were made stands [on its own page](comparison-runs.md).\n"
    )
    limits_of_qpt(table, tasks)
    single_episodes(table, tasks)
    methods(table, tasks, options.limits)
    plane(table, tasks, options.limits)
    comparisons(table, tasks)
    if options.data:
        binding(table, tasks, options.data)
    etas(table)
    sweep(table, tasks)


if __name__ == "__main__":
    main()
