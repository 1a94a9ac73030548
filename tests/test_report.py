"""The report without a browser: what is read, the numbers of its tables, and that nothing in data becomes markup."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qpt import stats
from qpt.cli import main
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.report import collect, write_report
from qpt.report.page import table_texts
from qpt.report.summary import Line, lines
from report_samples import HOSTILE, run_folder, table


def by_name(made: list[Line], limit: float = 10.0, rule: str = "last") -> dict[str, Line]:
    return {x.method: x for x in made if x.cost_limit == limit and x.selection == rule}


@pytest.fixture
def comparison(tmp_path: Path) -> list[Path]:
    """Three methods at limit 10: one safe and better, one safe, one unsafe; two runs of the first."""
    first = table({10.0: ([100, 120, 140], [5, 6, 7]), 40.0: ([300, 300, 300], [30, 31, 50])}, fallback=0.25)
    second = table({10.0: ([200, 200, 200, 200, 200], [8, 8, 8, 8, 8])}, checkpoint="runs/b/checkpoints/step-000000300")
    careful = table({10.0: ([50, 50, 50], [0, 0, 0])}, algorithm="cpq", checkpoint="")
    bold = table({10.0: ([900, 900, 900], [90, 91, 95])}, algorithm="bc", checkpoint="")
    paths = []
    for name, part in {"one": first, "two": second, "careful": careful, "bold": bold}.items():
        paths.append(part.save(tmp_path / f"{name}.csv"))
    return paths


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_line_is_the_mean_of_the_runs_means(comparison: list[Path]) -> None:
    line = by_name(lines(collect(comparison).results))["qpt"]
    assert (line.runs, line.episodes) == (2, 8)
    assert line.mean_return == pytest.approx((120 + 200) / 2)  # not the mean of the eight episodes
    assert line.cost == pytest.approx((6 + 8) / 2)
    assert line.normalized_return == pytest.approx(0.16)
    assert line.normalized_cost == pytest.approx(0.7)
    assert line.within == 1.0
    assert line.within_interval == pytest.approx(stats.wilson_interval(8, 8))
    groups = ["a"] * 3 + ["b"] * 5
    expected = stats.bootstrap_mean_interval([100, 120, 140] + [200] * 5, groups=groups, samples=2_000)
    assert line.return_interval == pytest.approx(expected)
    assert line.normalized_return_interval == pytest.approx(tuple(x / 1000 for x in expected))
    assert math.isnan(line.fallback)  # one of the two tables has none


def test_marks_follow_the_paper_and_verdicts_the_interval(comparison: list[Path]) -> None:
    made = by_name(lines(collect(comparison).results))
    assert {m: (x.safe, x.best, x.verdict) for m, x in made.items()} == {
        "qpt": (True, True, "safe"),
        "cpq": (True, False, "safe"),
        "bc": (False, False, "unsafe"),  # the highest return of all, but not safe
    }
    wide = table({10.0: ([1, 1, 1, 1], [0, 0, 0, 39])}).save(comparison[0].parent / "wide.csv")
    line = by_name(lines(collect([wide]).results))["qpt"]
    assert (line.safe, line.verdict) == (True, "unclear")
    assert line.cost_cvar == 39.0


def test_ties_share_the_mark(tmp_path: Path) -> None:
    parts = {"a": 100.0, "b": 100.04, "c": 99.0}
    paths = [table({10.0: ([r] * 3, [1] * 3)}, algorithm=a).save(tmp_path / f"{a}.csv") for a, r in parts.items()]
    assert {m for m, x in by_name(lines(collect(paths).results)).items() if x.best} == {"a", "b"}


def test_few_values_have_no_interval(tmp_path: Path) -> None:
    path = table({10.0: ([1, 2], [3, 4])}).save(tmp_path / "few.csv")
    line = by_name(lines(collect([path]).results))["qpt"]
    assert math.isnan(line.cost_interval[0])
    assert line.verdict == "unclear"


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_last_and_its_oracle_evaluation(tmp_path: Path) -> None:
    rows = [(100, {10.0: (500.0, 9.0)}), (200, {10.0: (700.0, 30.0)})]
    for seed in range(3):
        run_folder(tmp_path / f"s{seed}", seed=seed, evaluations=rows)
    found = collect([tmp_path])
    assert found.tasks == ["BallCircle"]
    assert found.methods == ["qpt"]
    made = lines(found.results)
    assert (by_name(made)["qpt"].mean_return, by_name(made)["qpt"].safe) == (700.0, False)
    oracle = by_name(made, rule="oracle")["qpt"]
    assert (oracle.mean_return, oracle.safe, oracle.runs, oracle.episodes) == (500.0, True, 3, 0)
    plane = found.planes["BallCircle"]
    assert (plane.episodes, plane.surrogate) == (500, True)
    returns = [r for _, r in plane.frontier]
    assert returns == sorted(returns)
    assert returns[-1] == plane.returns.max()


def test_episodes_stand_in_for_the_means_of_training(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", evaluations=[(200, {10.0: (1.0, 1.0)})])
    table({10.0: ([10, 20, 30], [4, 5, 6])}).save(folder / "episodes.csv")
    made = lines(collect([folder]).results)
    assert [(x.selection, x.mean_return, x.episodes) for x in made] == [("last", 20.0, 3)]


def test_a_table_finds_its_run_by_the_checkpoint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", algorithm="cdt")
    other = run_folder(tmp_path / "other", algorithm="cdt", lr=1.0)
    best = str(folder / "checkpoints" / "best-000000100")
    path = table({10.0: ([1] * 3, [2] * 3)}, algorithm="cdt", checkpoint=best).save(tmp_path / "t.csv")
    (result,) = collect([folder, other, path]).results
    assert (result.run, result.selection, result.method) == (str(folder), "selected", "cdt · lr=0.0003")


def test_earlier_checkpoints_are_left_out_and_said(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for step, value in ((20, 1.0), (40, 9.0)):
        checkpoint = str(folder / "checkpoints" / f"step-{step:09}")
        table({10.0: ([value] * 3, [2] * 3)}, checkpoint=checkpoint).save(folder / f"episodes-{step}.csv")
    found = collect([folder])
    (line,) = lines(found.results)
    assert (line.mean_return, line.episodes) == (9.0, 3)
    assert any("step 20" in note for note in found.notes)


def test_what_is_given_twice_counts_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    path = table({10.0: ([1, 2, 3], [2] * 3)}).save(folder / "episodes.csv")
    for given in ([folder, folder], [folder, path], [path, path], [tmp_path, folder, path]):
        (line,) = lines(collect(given).results)
        assert (line.runs, line.episodes) == (1, 3)


def test_the_same_episodes_in_two_tables_count_once(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = run_folder(tmp_path / "run")
    part = table({10.0: ([1, 2, 3], [2] * 3)}, fallback=0.5)
    more = table({10.0: ([1, 2, 3, 10], [2] * 4)}, fallback=0.5)
    other = replace(part, seed=part.seed + 1, returns=part.returns + 100, fallback_share=np.full(3, 0.0))
    part.save(folder / "episodes.csv")
    part.save(folder / "episodes.parquet")
    copy = more.save(tmp_path / "more.csv")
    (line,) = lines(collect([folder]).results)
    assert (line.runs, line.episodes, line.mean_return) == (1, 3, 2.0)
    checkpoint = str(folder / "checkpoints" / "step-000000300")
    for name, rows in (("copy", more), ("fresh", other)):
        replace(rows, checkpoint=np.full(len(rows), checkpoint)).save(tmp_path / f"{name}.csv")
    (line,) = lines(collect([folder, tmp_path / "copy.csv", tmp_path / "fresh.csv"]).results)
    assert (line.runs, line.episodes) == (1, 7)
    assert line.mean_return == pytest.approx((1 + 2 + 3 + 10 + 101 + 102 + 103) / 7)
    assert line.fallback == pytest.approx(4 * 0.5 / 7)
    (line,) = lines(collect([copy, tmp_path / "more.csv", part.save(tmp_path / "part.csv")]).results)
    assert (line.runs, line.episodes) == (1, 4)  # of one checkpoint, whose run is not given


def test_other_settings_are_another_policy(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", evaluations=[(200, {10.0: (5.0, 1.0)})])
    changed = table({10.0: ([11, 12, 13], [2] * 3)}, settings={"candidates": 1, "choice": "max"})
    changed.save(folder / "episodes-one.csv")
    assert by_name(lines(collect([folder]).results))["qpt"].mean_return == 5.0  # of training, still all that is known
    table({10.0: ([1, 2, 3], [2] * 3)}, settings={}).save(folder / "episodes.csv")
    for given in ([folder], [folder / "episodes.csv", folder / "episodes-one.csv"]):
        made = lines(collect(given).results)
        assert {x.method: (x.mean_return, x.episodes) for x in made} == {
            "qpt": (2.0, 3),
            "qpt · candidates=1 · choice=max": (12.0, 3),
        }
    mixed = Episodes.concatenate([table({10.0: ([1], [1])}), replace(changed, seed=changed.seed + 1)])
    (line,) = lines(collect([mixed.save(tmp_path / "mixed.csv")]).results)
    assert line.method == "qpt · as trained or candidates=1 · choice=max"


@pytest.mark.parametrize(
    ("configs", "names"),
    [
        ([{}, {}], ["qpt", "qpt"]),
        ([{"eta": 0.1}, {"eta": 0.5}], ["qpt · eta=0.1", "qpt · eta=0.5"]),
        ([{"cost_limit": 10}, {"cost_limit": 20}], ["qpt", "qpt"]),  # one method, trained for two limits
        ([dict.fromkeys("abcd", 1), dict.fromkeys("abcd", 2)], ["qpt · run0", "qpt · run1"]),
    ],
)
def test_methods_are_named_by_what_sets_them_apart(tmp_path: Path, configs: list[Any], names: list[str]) -> None:
    for i, config in enumerate(configs):
        run_folder(tmp_path / f"run{i}", seed=i, **config)
    assert [run.method for run in collect([tmp_path]).runs] == names


def test_runs_on_other_data_are_another_method(tmp_path: Path) -> None:
    for i, source in enumerate(("here/a.hdf5", "there/a.hdf5", "b.hdf5")):
        run_folder(tmp_path / f"run{i}", seed=i, source=source)
    assert [run.method for run in collect([tmp_path]).runs] == ["qpt · data=a.hdf5"] * 2 + ["qpt · data=b.hdf5"]


def test_a_name_can_be_given(tmp_path: Path) -> None:
    path = table({10.0: ([1] * 3, [2] * 3)}).save(tmp_path / "t.csv")
    folder = run_folder(tmp_path / "run")
    found = collect([f"Ours={path}", f"The run={folder}"])
    assert found.methods == ["Ours", "The run"]
    (tmp_path / "a=b.csv").write_bytes(path.read_bytes())
    assert collect([tmp_path / "a=b.csv"]).methods == ["qpt"]  # a file that is there is no name


def bench(root: Path, time: float = 1.0, key: str = "BallCircle/qpt/default/seed0", value: float = 5.0) -> Path:
    """A finished job as `qpt bench` leaves it."""
    folder = run_folder(root / key)
    (folder / "job.json").write_text(json.dumps({"task": "BallCircle", "algorithm": "qpt", "label": "qpt (mine)"}))
    (folder / "done.json").write_text(json.dumps({"key": key, "time": time}))
    rules = {"last": value, "oracle": value + 1, "selected": value + 2}
    parts = [table({10.0: ([r] * 4, [1] * 4)}, checkpoint=rule) for rule, r in rules.items()]
    Episodes.concatenate(parts).save(folder / "episodes.csv")
    return folder


def test_the_root_of_a_benchmark(tmp_path: Path) -> None:
    bench(tmp_path / "here")
    bench(tmp_path / "here", key="BallCircle/qpt/default/seed1")
    bench(tmp_path / "copied", time=2.0, value=7.0)  # the same job again, newer
    made = lines(collect([tmp_path]).results)
    assert {(x.method, x.selection, x.runs, x.mean_return) for x in made} == {
        ("qpt (mine)", "last", 2, 6.0),
        ("qpt (mine)", "oracle", 2, 7.0),
        ("qpt (mine)", "selected", 2, 8.0),
    }


def test_a_copy_of_a_benchmark_is_no_second_run(tmp_path: Path) -> None:
    bench(tmp_path / "m1")
    bench(tmp_path / "m2", time=2.0, value=7.0)
    bench(tmp_path / "m2", key="BallCircle/qpt/default/seed1", value=9.0)
    found = collect([tmp_path / "m1", tmp_path / "m2"])
    line = by_name(lines(found.results))["qpt (mine)"]
    assert (line.runs, line.episodes, line.mean_return) == (2, 8, 8.0)
    assert any("1 run is left out: a newer copy" in note for note in found.notes)
    apart = by_name(lines(collect([f"old={tmp_path / 'm1'}", f"new={tmp_path / 'm2'}"]).results))
    assert {name: x.mean_return for name, x in apart.items()} == {"old": 5.0, "new": 8.0}  # asked for by name


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_table_of_a_benchmark_keeps_its_runs_apart(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("pyarrow")
    from qpt.experiments.jobs import Job
    from qpt.experiments.results import Results

    episodes = table({10.0: ([10, 10, 10, 40, 40, 40], [1] * 6)}, checkpoint="last")
    jobs = {name: Job(task="BallCircle", algorithm="qpt", seed=seed) for seed, name in enumerate(("a", "b"))}
    whole = Results(episodes, np.repeat(["a", "b"], 3), np.full(6, "mine"), np.repeat([0, 1], 3).astype(np.int64), jobs)
    (line,) = lines(collect([whole.save(tmp_path / f"all.{ending}")]).results)
    assert (line.method, line.runs, line.mean_return) == ("mine", 2, 25.0)
    bench(tmp_path / "root", key="a", value=10.0)  # one of the two is given as a folder too
    both = [x for x in lines(collect([tmp_path / "root", tmp_path / f"all.{ending}"]).results) if x.selection == "last"]
    assert sorted((x.method, x.runs) for x in both) == [("mine", 1), ("qpt (mine)", 1)]
    assert line.return_interval == (10.0, 40.0)  # over runs: episodes within each are alike


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: [p / "nothing"], "there is no file or folder"),
        (lambda p: [p], "there is no run in"),
        (lambda p: [(run_folder(p / "run") / "run.json").write_text("{") and p / "run"], "cannot be read"),
        (lambda p: [(run_folder(p / "run") / "run.json").write_text("[]") and p / "run"], "does not describe a run"),
        (lambda p: [(p / "x.csv").write_text("a,b\n1,2\n") and p / "x.csv"], "has no column 'task'"),
        (lambda p: [(p / "x.csv").write_bytes(b"\x89PNG\xff\x00") and p / "x.csv"], "no table of episodes"),
        (lambda p: [(p / "x.parquet").write_bytes(b"PAR1") and p / "x.parquet"], "no table of episodes"),
        (lambda p: [(run_folder(p / "run") / "calibration.csv").write_text("a\n1\n") and p / "run"], "calibration"),
        (lambda _: [], "at least one"),
    ],
)
def test_bad_paths_are_one_sentence(tmp_path: Path, make: Any, sentence: str) -> None:
    with pytest.raises(QptError, match=sentence):
        collect(make(tmp_path))


def test_data_that_are_gone_leave_a_note(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", source="gone.hdf5")
    found = collect([folder])
    assert not found.planes
    assert "BallCircle are not shown" in found.notes[0]
    assert collect([folder], {"BallCircle": "embedded:ballcircle"}).planes["BallCircle"].episodes == 500
    with pytest.raises(QptError, match=r"gone\.hdf5"):  # asked for by name: no mere note
        collect([folder], {"": "gone.hdf5"})
    with pytest.raises(QptError, match="no task 'Ball'"):
        collect([folder], {"Ball": "embedded:ballcircle"})


def test_a_log_cut_short_by_a_kill_is_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", evaluations=[(100, {10.0: (1.0, 2.0)})])
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 300, "lo')
    (run,) = collect([folder]).runs
    assert [row["step"] for row in run.metrics] == [100, 200]


# -- the page ----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.setdefault(self.tags[-1][0], []).append(data)


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', page, re.DOTALL)
    assert found
    assert not re.search("[<>&]", found[1])
    result: dict[str, Any] = json.loads(found[1])
    return result


def hostile_runs(folder: Path) -> list[str | Path]:
    """Runs and tables whose every text tries to become markup."""
    run = run_folder(folder / "run", algorithm=HOSTILE, task=HOSTILE, source=HOSTILE, evil=HOSTILE)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 300, HOSTILE: 1.0}) + "\n")
    part = table(
        {10.0: ([1, 2, 3], [4, 5, 60])},
        task=HOSTILE,
        algorithm=HOSTILE,
        checkpoint=HOSTILE,
        command=[HOSTILE],
        commit=HOSTILE,
        machine=HOSTILE,
        surrogate_data=True,
    )
    part = replace(part, provenance={**part.provenance, "task": HOSTILE})
    other = table({10.0: ([1, 2, 3], [4, 5, 60])}, task="Other", algorithm="fine").save(folder / "fine.csv")
    return [run, part.save(folder / "table.csv"), other]


def test_surrogate_data_are_named_however_deep_their_table_lies(tmp_path: Path) -> None:
    one = replace(table({10.0: ([1] * 3, [1] * 3)}), provenance={"task": "BallCircle", "surrogate_data": True})
    path = Episodes.concatenate([Episodes.concatenate([one]), one]).save(tmp_path / "t.csv")
    page = write_report([path], tmp_path / "r.html")[0].read_text("utf-8")
    assert "Surrogate data (BallCircle)" in page


def test_nothing_in_data_becomes_markup(tmp_path: Path) -> None:
    out, *_ = write_report(hostile_runs(tmp_path), tmp_path / "out.html", title=HOSTILE)
    page = out.read_text("utf-8")
    tags = Tags(page)
    names = [tag for tag, _ in tags.tags]
    assert names.count("script") == 2  # the numbers and the page's own
    assert "img" not in names
    assert not [a for _, attributes in tags.tags for a in attributes if a.startswith("on")]
    assert HOSTILE in payload(page)["methods"]  # it arrives whole, as text
    assert HOSTILE in "".join(tags.texts["h1"])
    outside = [v for _, a in tags.tags for k, v in a.items() if k in ("src", "href") and v]
    assert all(v.startswith(("data:", "#")) for v in outside)


def test_names_are_escaped_in_every_kind_of_table() -> None:
    name = "a|b_c%&$#{}\\<i>*x*"
    line = replace(_line(), method=name, task="=1+1")
    texts = table_texts([line])
    row = texts["headline.md"].splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", row)) == 6  # five cells
    assert r"\<i\>\*x\*" in row
    tex = texts["headline.tex"]
    assert r"a|b\_c\%\&\$\#\{\}\textbackslash{}\textless{}i\textgreater{}*x*" in tex
    for text_row in tex.splitlines():
        assert text_row.startswith("%") or not re.search(r"(?<!\\)[%#_]", text_row), text_row
    (read,) = csv.DictReader(io.StringIO(texts["headline.csv"]))
    assert (read["method"], read["task"]) == (name, "'=1+1")


def test_few_runs_are_told_beside_the_intervals() -> None:
    for runs, words in ((4, "over 4 training seeds cover less"), (10, "")):
        texts = table_texts([replace(_line(), runs=runs)])
        assert words in texts["headline.md"].splitlines()[0]
        assert ("seeds" in texts["headline.tex"]) == bool(words)


def _line() -> Line:
    pair = (1.0, 2.0)
    return Line("T", 10.0, "last", "m", 2, 8, 1.5, pair, 0.5, pair, 3.0, pair, 0.3, 0.9, pair, 4.0, 0.1, "safe", True)


def test_the_tables_agree_with_the_lines(comparison: list[Path], tmp_path: Path) -> None:
    made = lines(collect(comparison).results)
    page, *files = write_report(comparison, tmp_path / "r.html", table_folder=tmp_path / "tables")
    assert [f.name for f in files] == ["headline.md", "headline.csv", "headline.tex"]
    rows = list(csv.DictReader(files[1].open(newline="")))
    assert len(rows) == len(made) == 4
    for row, line in zip(rows, made, strict=True):
        assert (row["method"], float(row["cost"]), float(row["cost_low"])) == (
            line.method,
            line.cost,
            line.cost_interval[0],
        )
        assert (row["best"], row["safe"]) == (str(line.best), str(line.safe))
    markdown = files[0].read_text("utf-8")
    assert re.search(r"\| qpt \| \*\*160\.0\*\* ★ \[\d", markdown)
    assert re.search(r"\| bc \| _900\.0_ ", markdown)
    tex = files[2].read_text("utf-8")
    assert r"\textcolor{blue}{\textbf{160.0}}" in tex
    assert r"\textcolor{gray}{900.0}" in tex
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    html = page.read_text("utf-8")
    for text in (markdown, html):
        assert "1 training seed say nothing" in text  # two of the methods have one run
    assert '<td class="best">160.0' in html
    assert '<td class="unsafe">900.0' in html


def test_the_payload_holds_the_numbers(comparison: list[Path], tmp_path: Path) -> None:
    rows = [(100, {10.0: (1.0, 2.0)}), (200, {10.0: (3.0, 4.0)})]
    runs = [run_folder(tmp_path / f"s{i}", algorithm="cdt", seed=i, evaluations=rows) for i in range(2)]
    (runs[1] / "evaluations.jsonl").write_text((runs[1] / "evaluations.jsonl").read_text().replace("3.0", "5.0"))
    (runs[0] / "calibration.csv").write_text("cost_limit,predicted_cost,realised_cost\n10.0,3.5,nan\n10.0,4.5,7.0\n")
    page = write_report([*comparison, *runs], tmp_path / "r.html")[0].read_text("utf-8")
    found = payload(page)
    assert found["tasks"]["BallCircle"]["limits"] == [10.0, 40.0]
    assert found["rules"] == {"last": "last checkpoint", "oracle": "oracle (the paper's rule)"}
    (curve,) = found["curves"]
    assert (curve["return"], curve["return_low"], curve["return_high"]) == ([1.0, 4.0], [1.0, 3.0], [1.0, 5.0])
    assert found["methods"][curve["method"]] == "cdt"
    (metric,) = found["metrics"]
    assert (metric["value"][0], metric["seeds"]) == (pytest.approx(0.51), 2)
    (calibration,) = found["calibration"]
    assert calibration["realised_cost"] == [None, 7.0]  # NaN is no JSON
    shown = [x for x in found["lines"] if x["cost_limit"] == 40.0]
    assert [x["costs"] for x in shown] == [[30.0, 31.0, 50.0]]
    assert shown[0]["fallback"] == 0.25
    assert "these are no DSRL scores" in page


def test_many_tasks_have_one_table_of_all(tmp_path: Path) -> None:
    values = {"One": {"a": (0.2, 5), "b": (0.9, 50)}, "Two": {"a": (0.4, 7)}}
    paths = []
    for task, methods in values.items():
        for method, (value, cost) in methods.items():
            part = table({10.0: ([value * 1000] * 3, [cost] * 3)}, task=task, algorithm=method)
            paths.append(part.save(tmp_path / f"{task}-{method}.csv"))
    page = write_report(paths, tmp_path / "r.html")[0].read_text("utf-8")
    matrix = re.search(r'<div id="matrix">(.*?)<div id="tables">', page, re.DOTALL)
    assert matrix
    cells = re.findall(r'<td class="(\w*)">([^<]*)(?:<small>([^<]*)</small>)?', matrix[1])
    assert cells == [
        ("best", "0.20", "0.50"),
        ("unsafe", "0.90", "5.00"),
        ("best", "0.40", "0.70"),
        ("safe", "0.30", "0.60"),  # the average of a
        ("", "–", ""),  # b was not run on both
    ]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(comparison: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "new" / "r.html", tmp_path / "tables"
    args = ["report", *map(str, comparison), "--out", str(out), "--tables", str(folder), "--title", "Mine"]
    assert main([*args, "--data", "BallCircle=embedded:ballcircle"]) == 0
    page = out.read_text("utf-8")
    assert "<title>Mine</title>" in page
    assert payload(page)["tasks"]["BallCircle"]["plane"]["episodes"] == 500
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line] == [
        f"wrote {path}" for path in (out, *(folder / f"headline.{e}" for e in ("md", "csv", "tex")))
    ]
    assert sorted(p.name for p in out.parent.iterdir()) == ["r.html"]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--out", "report.pdf"], "does not end in .html"),
        (["--data", "x=a", "x=b"], "twice"),
        (["nowhere"], "there is no file or folder nowhere"),
    ],
)
def test_errors_of_the_command(
    comparison: list[Path], extra: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(comparison[0]), *extra]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_place_that_cannot_be_written_is_said(comparison: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QptError, match="cannot be written"):
        write_report(comparison, tmp_path / "file" / "r.html")
    with pytest.raises(QptError, match="cannot be written"):
        write_report(comparison, tmp_path / "r.html", table_folder=tmp_path / "file" / "t")


def test_a_calibration_is_saved_as_the_report_reads_it(tmp_path: Path) -> None:
    from qpt.calibration import Calibration, save

    folder = run_folder(tmp_path / "run")
    columns = (np.array([10.0, 20.0]), np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.zeros(2), np.zeros(2))
    save(Calibration(*columns), folder / "calibration.csv")
    (run,) = collect([folder]).runs
    assert run.calibration == {"cost_limit": [10, 20], "predicted_cost": [1, 2], "realised_cost": [3, 4]}
