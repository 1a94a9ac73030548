"""The paper's experiments: what ships with the package, the tables beside it, and every command on tiny runs."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qpt.cli import main
from qpt.data import write
from qpt.envs.toy import tradeoff
from qpt.episodes import Episodes
from qpt.errors import QptError
from qpt.evaluation import evaluate
from qpt.experiments import beside, figures, paper, reproduce
from qpt.experiments.bench import data_files, run_jobs
from qpt.experiments.executors import local_executor
from qpt.experiments.jobs import Job
from qpt.experiments.results import Results
from qpt.policy import load_policy
from qpt.report import collect
from qpt.tasks import dsrl_tasks, register_task

NAN = math.nan


# -- what the paper printed --------------------------------------------------------------------------------------------


def test_the_main_table_is_whole_and_says_what_the_paper_says() -> None:
    table = paper.main_table()
    assert len(table) == (38 + 3) * 9
    assert paper.main_table_tasks() == list(dsrl_tasks())
    assert {method for _, method in table} == set(paper.METHODS.values())
    # cells read in the paper by eye: first, last, negative, unsafe, and the misspelt task
    assert table["PointButton1", "QPT"] == paper.Score(0.13, 0.81)
    assert table["harddense", "CAPS"] == paper.Score(0.19, 0.10)
    assert table["PointPush2", "OASIS"] == paper.Score(-1.30, 1.33)
    assert table["HalfCheetahVelocity", "BCQ-Lag"] == paper.Score(1.04, 57.06)
    assert table["easymean", "CDT"] == paper.Score(0.52, 0.99)
    assert table["BulletGym", "QPT"] == paper.Score(0.62, 0.60)


def test_the_printed_averages_follow_from_the_cells_but_for_two() -> None:
    table, wrong = paper.main_table(), []
    for suite, name in paper.SUITES.items():
        tasks = [t.name for t in dsrl_tasks().values() if t.suite == suite]
        for method in paper.METHODS.values():
            for signal in ("reward", "cost"):
                mean = np.mean([getattr(table[task, method], signal) for task in tasks])
                if abs(mean - getattr(table[name, method], signal)) > 0.00501:
                    wrong.append((name, method, signal))
    assert wrong == [("SafetyGym", "FISOR", "cost"), ("MetaDrive", "CPQ", "cost")]


def test_the_ablations_agree_with_each_other_and_with_the_main_table() -> None:
    rows, counts = paper.components(), paper.candidates()
    assert [c.number for c in rows] == list(range(1, 9))
    assert rows[7].label == "8: augmentation + Q^r + Q^c + candidates"
    assert all(rows[7].overrides.values())
    assert not any(rows[0].overrides.values())
    for task in paper.COMPONENT_TASKS:
        last, printed = rows[7].scores[task], paper.main_table()[task, "QPT"]
        assert (last.reward, last.cost) == (printed.reward, printed.cost)
    assert rows[3].scores["HopperVelocity"] == paper.Score(0.15, 0.22, 0.02, 0.01)
    assert tuple(counts) == paper.CANDIDATES
    assert counts[1] == rows[4].scores["harddense"]  # one candidate is no choice
    assert counts[100] == paper.Score(0.48, 0.80, 0.04, 0.03)


def test_the_protocol_is_the_papers() -> None:
    printed = paper.hyperparameters()
    assert float(printed["cost_threshold"]) == paper.COST_LIMIT
    assert (int(printed["n_seeds"]), int(printed["eval_episodes"])) == (paper.SEEDS, paper.EPISODES)
    scale = reproduce.SCALES["paper"]
    assert (scale.seeds, scale.episodes, scale.steps) == (3, 20, None)
    jobs = reproduce.Plan(("BallRun", "harddense"), scale).jobs("qpt")
    config = {job.task: job for job in jobs}
    assert len(jobs) == 6
    assert config["BallRun"].steps == int(printed["training_steps_bullet_safetygym"])
    assert config["harddense"].steps == int(printed["training_steps_metadrive"])
    assert config["BallRun"].eval_every == 2_500
    assert {job.eval_limits for job in jobs} == {(10.0,)}


def test_numbers_at_other_limits() -> None:
    assert len(paper.other_limits()) == 38 * 3 * 2
    assert paper.other_limits()["PointButton1", "CDT", 30.0] == paper.Score(0.53, 3.60)


@pytest.mark.slow
def test_every_number_stands_in_the_paper() -> None:
    """Against the paper's LaTeX, where it lies beside the data folder that QPT_EXTRA_DATA names."""
    source = Path(os.environ.get("QPT_EXTRA_DATA", "nowhere")).parent / "reference" / "qpt-paper.tex"
    if not source.is_file():
        pytest.skip("the paper's LaTeX is not at hand")
    text = source.read_text(encoding="utf-8")
    start = text.index(r"\label{tab:res}")
    body = text[start : text.index(r"\end{table*}", start)]
    body = re.sub(r"\\begin\{tabular\}\[c\].*?\\end\{tabular\}", lambda m: m[0].replace(r"\\", " "), body, flags=re.S)
    found = 0
    for line in body.replace("\n", " ").split(r"\\"):
        name, *cells = line.split("&")
        numbers = [re.findall(r"-?\d+\.?\d*(?![\d]*\])", re.sub(r"\[HTML\]\{\w+\}", "", cell)) for cell in cells]
        if len(cells) != 18 or not all(len(n) == 1 for n in numbers):
            continue
        words = re.findall(r"[A-Za-z]\w+", name.replace("eastmean", "easymean"))
        known = [w for w in words if w in dsrl_tasks() or w in paper.SUITES.values()]
        task = known[-1]
        values = [float(n[0]) for n in numbers]
        for i, method in enumerate(paper.METHODS.values()):
            assert paper.main_table()[task, method] == paper.Score(values[2 * i], values[2 * i + 1]), (task, method)
            found += 1
    assert found == 41 * 9
    for score in (*(s for c in paper.components() for s in c.scores.values()), *paper.candidates().values()):
        for mean, std in ((score.reward, score.reward_std), (score.cost, score.cost_std)):
            assert rf"${mean:.2f} \pm {std:.2f}$" in text


# -- tables, by hand ---------------------------------------------------------------------------------------------------


def made_up(label: str, rewards: dict[int, list[float]], costs: dict[int, list[float]], rule: str) -> Results:
    """Results of one variant: normalised scores by training seed, at the limit 10."""
    reward, cost = (np.concatenate([np.array(v) for v in x.values()]) for x in (rewards, costs))
    n, seeds = len(reward), np.repeat(list(rewards), [len(v) for v in rewards.values()])
    text = {"task": "BallRun", "algorithm": "qpt", "checkpoint": rule, "ended_by": "timeout"}
    episodes = Episodes(
        **{name: np.full(n, value) for name, value in text.items()},
        seed=np.zeros(n, np.int64),
        cost_limit=np.full(n, 10.0),
        episode=np.arange(n),
        returns=reward * 100,
        costs=cost * 10,
        lengths=np.full(n, 100),
        fallback_share=np.zeros(n),
        normalized_return=reward,
        normalized_cost=cost,
    )
    job = Job(task="BallRun", algorithm="qpt", label=label, eval_limits=(10.0,))
    return Results(episodes, np.full(n, job.key), np.full(n, label), seeds, {job.key: job})


def together(*parts: Results) -> Results:
    columns = [np.concatenate([getattr(p, name) for p in parts]) for name in ("job", "label", "train_seed")]
    return Results(Episodes.concatenate([p.episodes for p in parts]), *columns, parts[0].jobs)


def test_a_comparison_is_of_seed_means_and_marks_the_best_safe_one() -> None:
    good = made_up("A", {0: [0.5, 0.7], 1: [0.8, 0.8]}, {0: [0.2, 0.4], 1: [0.5, 0.5]}, "oracle")
    bold = made_up("B", {0: [0.9, 0.9, 0.9]}, {0: [1.5, 2.0, 2.5]}, "oracle")
    late = made_up("A", {0: [0.1, 0.1]}, {0: [0.0, 0.0]}, "last")
    rows = beside.compare(together(late, bold, good), lambda _, v, __: paper.Score(0.6, 0.3) if v == "A" else None)
    assert [(r.variant, r.rule) for r in rows] == [("A", "oracle"), ("B", "oracle"), ("A", "last")] or [
        (r.variant, r.rule) for r in rows
    ] == [("B", "oracle"), ("A", "oracle"), ("A", "last")]  # the paper's rule first
    a = next(r for r in rows if r.variant == "A" and r.rule == "oracle")
    assert (a.seeds, a.episodes, a.best, a.safe, a.verdict) == (2, 4, True, True, "safe")
    assert (a.reward, a.cost) == pytest.approx((0.7, 0.4))
    assert (a.reward_std, a.cost_std) == pytest.approx((0.2 / math.sqrt(2), 0.2 / math.sqrt(2)))
    assert (a.reward_difference, a.cost_difference) == pytest.approx((0.1, 0.1))
    assert a.reward_low < 0.7 < a.reward_high
    b = next(r for r in rows if r.variant == "B")
    assert (b.safe, b.best, b.verdict) == (False, False, "unsafe")
    assert math.isnan(b.paper_reward)
    assert math.isnan(b.reward_std)  # one seed has no spread
    last = next(r for r in rows if r.rule == "last")
    assert (last.safe, last.verdict) == (True, "unclear")  # two episodes show nothing


ROWS = [
    beside.Row(
        *("BallRun", "Q^r & A_1", 10.0, "oracle", 2, 40),
        *(0.704, 0.1, 0.6, 0.8, 0.6, 0.4, 0.05, 0.3, 0.5, 0.3, "safe", True),
    ),
    beside.Row(*("BallRun", "B", 10.0, "oracle", 1, 20), *(0.9, NAN, 0.8, 1.0, NAN, 2.0, NAN, 1.5, 2.5, NAN, "unsafe")),
]


def test_the_table_in_markdown() -> None:
    text = beside.to_markdown("A title", ROWS, ["A note."])
    assert text.startswith("# A title\n\nNormalised reward and cost")
    assert "\n\nA note.\n\n## Checkpoint: oracle (the paper's rule)\n\n" in text
    assert text.endswith(
        "| task | variant | limit | seeds | reward | paper | Δ | cost | paper | Δ | verdict |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|\n"
        "| BallRun | Q^r \\& A\\_1 | 10 | 2 | **0.70 ± 0.10** ★ | 0.60 | +0.10 | **0.40 ± 0.05** "
        "| 0.30 | +0.10 | safe |\n"
        "| BallRun | B | 10 | 1 | _0.90_ | – | – | _2.00_ | – | – | unsafe |\n"
    )


def test_the_table_in_latex() -> None:
    lines = beside.to_latex("A title", ROWS).splitlines()
    assert lines[0] == "% A title"
    assert lines[-5:-2] == [
        r"\midrule",
        r"BallRun & Q\textasciicircum{}r \& A\_1 & 10 & 2 & \textcolor{blue}{\textbf{0.70 $\pm$ 0.10}} & 0.60 & +0.10 "
        r"& \textcolor{blue}{\textbf{0.40 $\pm$ 0.05}} & 0.30 & +0.10 & safe \\",
        r"BallRun & B & 10 & 1 & \textcolor{gray}{0.90} & -- & -- & \textcolor{gray}{2.00} & -- & -- & unsafe \\",
    ]
    columns = re.search(r"tabular\}\{(\w+)\}", "\n".join(lines))
    assert columns is not None
    assert len(columns[1]) == len(beside.HEAD)


def test_the_table_in_csv_has_every_number_in_full(tmp_path: Path) -> None:
    beside.write_tables(tmp_path, "x", "A title", ROWS)
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert float(first["reward"]) == 0.704
    assert float(first["reward_difference"]) == pytest.approx(0.104)
    assert second["paper_cost"] == "nan"


def test_averages_are_over_the_tasks_that_were_run_on_both_sides() -> None:
    other = replace(ROWS[0], task="CarRun", reward=0.2, paper_reward=0.4, cost=1.8, paper_cost=0.5)
    (row,) = beside.averages([ROWS[0], other], {"BallRun": "BulletGym", "CarRun": "BulletGym"})
    assert row.task == "BulletGym average (2 tasks)"
    assert (row.reward, row.paper_reward, row.cost, row.paper_cost) == pytest.approx((0.452, 0.5, 1.1, 0.4))
    assert not row.best  # its mean cost is above the limit


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_are_found_by_name_in_a_folder_or_told_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QPT_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DSRL_DATASET_DIR", raising=False)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "SafetyBallRun-v0-80-940.hdf5").touch()
    (folder / "SafetyCarRun-v0-40-12.hdf5").touch()  # with another number of episodes
    tasks = ("BallRun", "CarRun", "BallCircle")
    found = data_files(tasks, {"BallCircle": "embedded:ballcircle"}, folder)
    assert found == {
        "BallRun": str(folder / "SafetyBallRun-v0-80-940.hdf5"),
        "CarRun": str(folder / "SafetyCarRun-v0-40-12.hdf5"),
        "BallCircle": "embedded:ballcircle",
    }
    (folder / "SafetyCarRun-v0-40-13.hdf5").touch()
    with pytest.raises(QptError, match="several data files of CarRun"):
        data_files(tasks, {}, folder)
    with pytest.raises(QptError, match="'AntRun', which is not among the tasks"):
        data_files(tasks, {"AntRun": "x.hdf5"}, None)
    plan = reproduce.Plan(("DroneRun", "AntRun"), reproduce.SCALES["smoke"], data_files(("DroneRun",), {}, folder))
    with pytest.raises(QptError, match=r"`qpt data download DroneRun AntRun`.*`qpt collect record DroneRun AntRun`"):
        run_jobs(plan.jobs("bc-safe"), tmp_path / "runs", show="none")


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_experiments_share_the_runs_they_have_in_common() -> None:
    plan = reproduce.Plan(("BallRun",), reproduce.SCALES["smoke"])
    (table,) = reproduce.main_table_jobs(plan, ("qpt",))
    everything = reproduce.component_jobs(plan)
    assert len({job.key for job in everything}) == 8
    assert everything[7].key == table.key
    assert {job.key for job in reproduce.zero_shot_jobs(plan)} >= {table.key}
    config = {f: getattr(everything[3], f) for f in ("overrides", "label")}
    assert config["label"] == "4: augmentation + Q^c"
    assert config["overrides"]["train_with_reward_critic"] is False
    assert config["overrides"]["inference_with_candidates"] is False
    assert "augmentation" not in config["overrides"]  # it is on by default
    jobs, sweeps = reproduce.hyperparameter_jobs(plan, (0.1, 1.0), fixed_reward=0.1, fixed_cost=0.1)
    assert len(jobs) == 3  # (0.1, 0.1) stands in both sweeps
    assert [list(s.values()) for s in sweeps.values()] == [[0.1, 1.0], [0.1, 1.0]]
    assert list(sweeps) == ["η1, with η2 = 0.1", "η2, with η1 = 0.1"]
    assert jobs[0].key == table.key  # the preset's own weights
    assert len(reproduce.component_jobs(plan, (8, 8))) == 1
    with pytest.raises(QptError, match="1 to 8"):
        reproduce.component_jobs(plan, (9,))


def test_overrides_go_to_the_methods_that_have_them() -> None:
    plan = reproduce.Plan(("BallRun",), reproduce.SCALES["smoke"], overrides={"qpt.candidates": 7, "device": "cpu"})
    jobs = {job.algorithm: job for job in reproduce.main_table_jobs(plan)}
    assert list(jobs) == list(paper.METHODS)
    assert jobs["qpt"].overrides["candidates"] == 7  # wins over the scale's
    assert "layers" not in jobs["bc-safe"].overrides
    assert all(job.steps == 20 for job in jobs.values())


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The flags for a registered toy task, and a folder of runs that the tests share."""
    folder = tmp_path_factory.mktemp("reproduce")
    task = register_task(
        replace(tradeoff(0).task("ReproduceToy"), reward_min=0.0, reward_max=10.0, targets=((8.0, 10.0),))
    )
    path = write(tradeoff(0).dataset(40), folder / "toy.hdf5")
    return f"--scale smoke --tasks {task.name} --data {task.name}={path} --workers 0 --device cpu", folder / "runs"


def command(name: str, toy: tuple[str, Path], out: Path, *more: str) -> list[dict[str, str]]:
    assert main(["reproduce", name, *toy[0].split(), "--runs", str(toy[1]), "--out", str(out), *more]) == 0
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for ending in ("md", "tex"):
        assert "ReproduceToy" in (out / f"{name}.{ending}").read_text(encoding="utf-8")
    with (out / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_main_table(toy: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = command("main-table", toy, tmp_path, "--algorithms", "qpt", "bc-safe")
    assert [(r["variant"], r["rule"]) for r in rows if r["verdict"]] == [
        *(("QPT", "oracle"), ("BC-Safe", "oracle"), ("QPT", "selected"), ("BC-Safe", "selected")),
        *(("QPT", "last"), ("BC-Safe", "last")),
    ]
    assert "oracle (the paper's rule)" in capsys.readouterr().out


def test_components(toy: tuple[str, Path], tmp_path: Path) -> None:
    rows = command("components", toy, tmp_path, "--experiments", "2", "8")
    assert [r["variant"] for r in rows if r["rule"] == "oracle"] == [paper.components()[i].label for i in (1, 7)]


def test_candidates_asks_one_trained_policy(toy: tuple[str, Path], tmp_path: Path) -> None:
    rows = command("candidates", toy, tmp_path, "--counts", "1", "6", "6")
    assert {r["episodes"] for r in rows} == {"2"}  # what is named twice counts once
    assert {r["variant"] for r in rows} == {"m = 1", "m = 6"}
    runs = [path.parent for path in toy[1].rglob("done.json") if "/qpt/" in str(path)]
    asked = [folder for folder in runs if (folder / "asked").exists()]
    assert len(asked) == 1  # no matter how many there are by now
    # the last checkpoint's rows are those of an evaluation with that setting
    job = json.loads((asked[0] / "job.json").read_text())
    policy = load_policy(asked[0], candidates=6)
    direct = evaluate(policy, "ReproduceToy", episodes=2, cost_limits=[10.0], seed=1_000_000, workers=0)
    (last,) = [r for r in rows if r["variant"] == "m = 6" and r["rule"] == "last"]
    assert job["seed"] == 0
    assert float(last["reward"]) == pytest.approx(direct.normalized_return.mean())
    files = {path: path.stat().st_mtime_ns for path in asked[0].rglob("*.*")}
    again = command("candidates", toy, tmp_path, "--counts", "1", "6")
    assert again == rows
    assert {path: path.stat().st_mtime_ns for path in asked[0].rglob("*.*")} == files  # nothing was done twice


def test_hyperparameters(toy: tuple[str, Path], tmp_path: Path) -> None:
    rows = command("hyperparameters", toy, tmp_path, "--etas", "0.5")
    assert {r["variant"] for r in rows} == {"η1 = 0.5, η2 = 0.01", "η1 = 0.1, η2 = 0.5"}
    with (tmp_path / "curves.csv").open(newline="", encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [(p["label"], p["step"]) for p in points[:2]] == [("η1 = 0.5, η2 = 0.01", s) for s in ("10", "20")]
    assert len(points) == 4


def test_zero_shot(toy: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = (toy[0].replace("--tasks ReproduceToy", "--tasks ReproduceToy ReproduceToy"), toy[1])
    rows = command("zero-shot", twice, tmp_path, "--limits", "2", "10", "2", "--algorithms", "qpt", "cdt", "qpt")
    assert {r["episodes"] for r in rows} == {"2"}
    assert [(r["variant"], r["cost_limit"]) for r in rows if r["rule"] == "last"] == [
        *(("QPT", "2.0"), ("QPT", "10.0"), ("CDT", "2.0"), ("CDT", "10.0")),
    ]
    found = collect([tmp_path / "zero-shot-episodes.csv"]).results  # as `qpt report` reads it
    assert {(r.method, r.cost_limit) for r in found} == {(m, k) for m in ("QPT", "CDT") for k in (2.0, 10.0)}
    args = ["reproduce", "zero-shot", *toy[0].split(), "--out", str(tmp_path), "--algorithms", "bc-safe"]
    assert main(args) == 1
    assert "bc-safe is trained for one limit" in capsys.readouterr().err


def test_the_zero_shot_figure_shows_costs_also_at_a_limit_of_0() -> None:
    rows = [
        beside.Row("BallRun", "A", limit, "oracle", 1, 20, 0.5, cost=cost, verdict="safe")
        for limit, cost in ((0.0, 4.0), (10.0, 0.7))  # costs of 3 and 7: at a limit of 0, one is added to both
    ]
    drawn = figures.zero_shot(rows).axes[1].lines[0]
    assert drawn.get_ydata().tolist() == pytest.approx([3.0, 7.0])


def test_augmentation_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["reproduce", "augmentation-figure", "--data", "embedded:ballcircle", "--out", str(tmp_path)]
    assert main(args) == 0
    assert "relabelled episodes from" in capsys.readouterr().out
    assert (tmp_path / "augmentation.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "augmentation.csv").open(newline="", encoding="utf-8") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert rows
    assert all(r["base_cost"] <= r["target_cost"] and r["base_return"] <= r["target_return"] for r in rows)


def test_curves_are_means_and_spreads_over_seeds(tmp_path: Path) -> None:
    jobs = [Job(task="BallRun", algorithm="qpt", seed=s, eval_limits=(10.0,), label="x") for s in (0, 1)]
    for job, values in zip(jobs, ((0.2, 1.0), (0.4, 3.0)), strict=True):
        folder = tmp_path / job.key
        folder.mkdir(parents=True)
        part = {"cost_limit": 10.0, "normalized_return": values[0], "normalized_cost": values[1]}
        (folder / "evaluations.jsonl").write_text(json.dumps({"step": 5, "limits": [part]}) + "\n")
        done: dict[str, Any] = {"key": job.key, "eval_limits": [10.0], "episodes": 20}
        (folder / "done.json").write_text(json.dumps(done))
    (curve,) = reproduce.curves(tmp_path, jobs)
    assert curve == reproduce.Curve(
        "BallRun", "x", [5], *([pytest.approx(v)] for v in (0.3, 0.2 / 2**0.5, 2.0, 2**0.5))
    )


def test_wrong_flags_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, sentence in (
        (["candidates", "--counts", "0"], "at least 1"),
        (["zero-shot", "--limits", "10", "-5"], "at least 0"),
        (["zero-shot", "--limits", "nan"], "finite"),
        (["zero-shot", "--limits"], "at least one"),
        (["main-table", "--tasks", "BallCircle", "--set", "bc-safe.cost_limit=20"], "give it with --limits"),
        (["components", "--tasks", "Nowhere"], "there is no task 'Nowhere'"),
        (["theory", "--problems", "0"], "at least one random problem"),
    ):
        assert main(["reproduce", *args, "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_method_of_the_main_table_on_embedded_data(tmp_path: Path) -> None:
    scale = replace(reproduce.SCALES["smoke"], episodes=1, evaluations=1)
    data = {"BallCircle": "embedded:ballcircle"}
    plan = reproduce.Plan(("BallCircle",), scale, data, overrides={"device": "cpu"})
    jobs = reproduce.main_table_jobs(plan)
    bench = run_jobs(jobs, tmp_path, local_executor(0), show="none")
    assert not bench.failures
    rows = reproduce.main_table(bench.results)
    shown = [r for r in rows if r.rule == "oracle" and r.verdict]
    assert [r.variant for r in shown] == list(paper.METHODS.values())
    assert all(r.paper_reward == paper.main_table()["BallCircle", r.variant].reward for r in shown)
