"""`qpt bench`: train and evaluate a grid of tasks, methods, limits and seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from qpt import stats
from qpt.cli.grid import (
    Files,
    Ints,
    Machine,
    Names,
    Numbers,
    Settings,
    Worker,
    carry_out,
    check_simulators,
    console,
    read_files,
    read_settings,
    tell,
)
from qpt.cli.run import run
from qpt.data import DataSource
from qpt.errors import QptError, require
from qpt.experiments.bench import Bench
from qpt.experiments.jobs import LAST, grid
from qpt.experiments.results import Results, collect_results, summarize
from qpt.experiments.texts import write_texts


def bench_command(
    out: Path,
    tasks: Names = (),
    algorithms: Names = ("qpt", "cdt", "bc-safe"),
    seeds: Ints = (0, 1, 2),
    limits: Numbers = (),
    episodes: int = 20,
    steps: int | None = None,
    eval_every: int | None = None,
    preset: str = "default",
    data_dir: Path | None = None,
    data: Files = (),
    data_source: DataSource = "dsrl",
    settings: Settings = (),
    table: Path | None = None,
    machine: Worker = Machine(),  # noqa: B008 (frozen)
) -> int:
    """Train and evaluate a grid of runs, each in a folder of its own, and compare the methods with 95 % intervals.

    Run the same command again to go on after an interruption: finished runs are skipped, begun ones are resumed.
    Results of several machines are put together by copying their folders into one. Without --tasks, the runs that lie
    in OUT are summarised.

    Example: qpt bench --tasks BallCircle CarRun --algorithms qpt cdt bc-safe --seeds 0 1 2 --limits 10 20 --out results

    Args:
        out: The folder of all runs.
        tasks: Tasks by name; `qpt tasks` lists them.
        algorithms: Methods by name; those that are trained for one limit get one run a limit.
        seeds: Training seeds.
        limits: Cost limits; by default each task's own.
        episodes: Episodes of each evaluation, at each limit.
        steps: Training steps; by default those of each method's preset.
        eval_every: Steps between the evaluations that choose a checkpoint; by default a tenth of the steps, 0 for none.
        preset: What each method's settings start from: default or paper.
        data_dir: A folder with the tasks' data files; what is not there is looked for in the cache.
        data: Data of single tasks, as in BallCircle=embedded:ballcircle.
        data_source: Data of all other tasks: the published files, or what `qpt collect record` made.
        settings: Settings of the methods and of the runs, as in batch_size=256 qpt.candidates=10.
        table: Where the table of all episodes goes (.csv or .parquet); by default OUT/table.csv.
    """
    table = table or out / "table.csv"
    if table.suffix not in (".csv", ".parquet"):
        raise QptError(f"a table is saved as .csv or .parquet, not as {table.name!r}; change the ending of --table")
    if table.suffix == ".parquet":
        require("pyarrow.parquet", "parquet")
    if not tasks:
        results = collect_results(out)
        if not len(results):
            raise QptError(f"there are no finished runs in {out}; name the --tasks to run")
        return _finish(Bench(results, {}, (), 0), out, table)
    if not seeds or not algorithms or episodes < 1:
        raise QptError("a bench needs at least one of --seeds, of --algorithms and of --episodes")
    check_simulators(tasks)
    overrides = read_settings(settings, algorithms) | {"device": machine.device}
    jobs = grid(
        tasks,
        algorithms,
        seeds=seeds,
        limits=limits or None,
        data=read_files(data, data_dir, tasks, data_source),
        preset=preset,
        overrides=overrides | ({} if steps is None else {"steps": steps}),
        episodes=episodes,
        eval_every=eval_every,
    )
    return _finish(carry_out(jobs, out, machine), out, table)


def _finish(bench: Bench, out: Path, table: Path) -> int:
    if len(bench.results):
        lines, page = summarize(bench.results), console()
        page.print(summary_table(lines))
        fewest = min(line["seeds"] for line in lines)
        for note in (*_explanations(bench.results, fewest), *bench.results.notes):
            page.print(note, highlight=False, markup=False)
        collect_results(out).save(table)  # of everything that lies there
        write_texts(out, {"summary.json": _json(lines)})
        print(f"wrote {table} and {out / 'summary.json'}")
    return tell(bench)


def _json(lines: Sequence[dict[str, Any]]) -> str:
    """JSON knows no NaN: it becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{name: plain(value) for name, value in line.items()} for line in lines]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def summary_table(lines: Sequence[dict[str, Any]]) -> Table:
    """One line for each task, method, limit and rule; the rules of one method stand together."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "method", "limit", "rule", "seeds", "normalized return", "normalized cost", "P(cost ≤ limit)"):
        grid.add_column(name, justify="left" if name in ("task", "method", "rule") else "right", overflow="fold")
    grid.add_column("")
    before: tuple[Any, ...] = ()
    for line in lines:
        group = (line["task"], line["label"], f"{line['cost_limit']:g}")
        if before and group[:2] != before[:2]:
            grid.add_section()
        grid.add_row(
            *(("", "", "") if group == before else map(escape, group)),
            line["rule"],
            str(line["seeds"]),
            _with_interval(line, "normalized_return"),
            _with_interval(line, "normalized_cost"),
            _with_interval(line, "within_limit"),
            line["verdict"],
            style={"safe": "bold", "unsafe": "dim"}.get(line["verdict"], ""),
        )
        before = group
    return grid


def _explanations(results: Results, fewest: int) -> list[str]:
    texts = ["last: the last checkpoint."]
    if (results.episodes.checkpoint != LAST).any():
        texts = [
            "last: the last checkpoint. oracle: the best evaluation during training, as it was seen (the paper's "
            "rule; flattering).",
            "selected: the oracle's checkpoint on other episodes, which had no part in the choice.",
        ]
    return [*texts, *filter(None, [stats.caveat(fewest)])]


def _with_interval(line: dict[str, Any], key: str) -> str:
    mean, low, high = (f"{value:z.2f}" for value in (line[key], *line[f"{key}_interval"]))  # z: no -0.0
    if math.isnan(line[key]):
        return "–"
    return mean if low == "nan" else escape(f"{mean} [{low}, {high}]")


def main(args: Sequence[str]) -> int:
    return run(bench_command, args, "bench")
