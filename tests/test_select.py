"""Choosing among checkpoints from logs: the ranking, the oracle's regret, the command and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from helpers import tiny_data
from qpt import QptError
from qpt.algorithms.base import algorithm_classes
from qpt.cli import main
from qpt.cli.select import table
from qpt.data import write
from qpt.envs.toy import tradeoff
from qpt.evaluation import Episodes, evaluate
from qpt.ope import Candidate, Log, candidates, oracle_report, select
from qpt.ope.judge import Judgement, LimitJudgement
from qpt.ope.select import Ranked, rank
from qpt.policy import load_policy
from qpt.training import TrainConfig, train

QUICK = {"members": 2, "width": 16, "steps": 20, "batch": 32}


def ranked(name: str, value: float, cost: float, bound: float, limit: float, last: bool = False) -> Ranked:
    part = LimitJudgement(limit, value, (value - 1, value + 1), cost, (0.0, bound), 0.0, (0.0,), 0.0, "", ())
    judgement = Judgement("bc-safe", name, 0.95, 10, 100, 10, (part,))
    return Ranked(Candidate("run", name, "bc-safe", 1, last), judgement, limit, bound <= limit)


def test_the_best_return_among_those_whose_bound_meets_the_limit() -> None:
    rows = [ranked("a", 5, 3, 9, 10), ranked("b", 9, 8, 12, 10), ranked("c", 7, 9, 10, 10), ranked("d", 9, 5, 11, 10)]
    found = rank(rows, 10.0)
    assert [r.candidate.checkpoint for r in found.ranking] == ["c", "a", "d", "b"]
    assert found.qualified
    assert found.chosen is rows[2]


def test_without_a_qualified_one_the_lowest_bound_is_first() -> None:
    found = rank([ranked("a", 5, 3, 12, 10), ranked("b", 1, 8, 11, 10)], 10.0)
    assert not found.qualified
    assert found.chosen.candidate.checkpoint == "b"


def test_names_stand_in_the_table_as_they_are() -> None:
    screen = Console(width=200, file=io.StringIO())
    screen.print(table(rank([ranked("run[v1]/a", 5, 3, 9, 10), ranked("run[/v1]/b", 9, 8, 12, 10)], 10.0)))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "run[v1]/a" in text
    assert "run[/v1]/b" in text


def test_the_regret_against_the_oracle_and_the_last_checkpoints() -> None:
    rows = [ranked("a", 5, 3, 9, 10), ranked("b", 4, 3, 9, 10), ranked("c", 9, 8, 20, 10, last=True)]
    real = {"a": (50.0, 4.0), "b": (80.0, 10.0), "c": (90.0, 30.0)}
    report = oracle_report(rank(rows, 10.0), real)
    assert (report.chosen, report.oracle) == ("a", "b")  # c returns more but is not safe
    assert report.regret == 30.0
    assert report.last_regret == -10.0
    assert (report.last_cost, report.last_safe) == (30.0, 0.0)
    with pytest.raises(QptError, match="none of b"):
        oracle_report(rank(rows, 10.0), {"a": (1.0, 1.0)})


@pytest.fixture
def runs(tmp_path: Path) -> tuple[list[Path], Path]:
    """Two runs of different limits with two checkpoints each, and held-out episodes."""
    first, second = tradeoff(0).dataset(60, 0).split(0.5)
    folders = []
    for limit in (20.0, 40.0):
        config = algorithm_classes("bc-safe")[1](steps=20, batch_size=16, width=16, cost_limit=limit)
        out = tmp_path / "runs[v1]" / f"run-{limit:g}"
        kept = {"checkpoint_every": 10, "progress": False, "device": "cpu"}
        train(TrainConfig(algorithm="bc-safe", config=config, out=out, **kept), first)
        folders.append(out)
    write(second, tmp_path / "held_out.npz")
    return folders, tmp_path / "held_out.npz"


def test_all_checkpoints_are_candidates(runs: tuple[list[Path], Path], tmp_path: Path) -> None:
    (a, b), _ = runs
    found = candidates([a, b, a])
    assert [(Path(c.run).name, c.step, c.last) for c in found] == [
        ("run-20", 10, False), ("run-20", 20, True), ("run-40", 10, False), ("run-40", 20, True),
    ]  # fmt: skip
    one = candidates([a / "checkpoints" / "step-000000010"])
    assert [(c.step, c.last) for c in one] == [(10, True)]
    with pytest.raises(QptError, match="there is no folder"):
        candidates([tmp_path / "nothing"])
    with pytest.raises(QptError, match="at least one"):
        candidates([])


def test_a_policy_of_another_limit_is_judged_at_its_own(runs: tuple[list[Path], Path]) -> None:
    folders, data = runs
    from qpt.data import load_dataset

    log = Log(load_dataset(data), **QUICK)
    found = select(folders, log, 30.0)
    assert len(found.ranking) == 4
    assert {r.given_limit for r in found.ranking} == {20.0, 40.0}
    for r in found.ranking:
        assert r.qualifies == (r.judgement.limits[0].cost_interval[1] <= 30.0)


def test_the_command(runs: tuple[list[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders, data = runs
    tables = []
    for candidate in candidates(folders):
        policy = load_policy(candidate.checkpoint)
        limits = (policy.trained_limit,)
        tables.append(evaluate(policy, tradeoff(0).task(), episodes=3, cost_limits=limits, workers=0))
    Episodes.concatenate(tables).save(tmp_path / "episodes.csv")
    common = ["--data", str(data), "--members", "2", "--steps", "20"]
    out = tmp_path / "new[/v1]" / "s.json"
    args = ["select", *map(str, folders), *common, "--out", str(out)]
    assert main([*args, "--limit", "1000", "--oracle", str(tmp_path / "episodes.csv")]) == 0
    printed = capsys.readouterr().out
    content = json.loads(out.read_text())
    assert printed.endswith(f"wrote {out}\n")
    assert f"Chosen: {content['ranking'][0]['checkpoint']}" in printed
    assert content["qualified"]
    values = [row["expected_return"] for row in content["ranking"]]
    assert values == sorted(values, reverse=True)
    means = [float(np.mean(t.returns)) for t in tables]
    assert content["oracle"]["oracle_return"] == pytest.approx(max(means))
    assert content["oracle"]["regret"] >= 0
    assert "a regret of" in printed
    assert main([*args, "--limit", "0"]) == 3
    assert "None qualifies" in capsys.readouterr().out
    for limit in ("-1", "nan"):
        assert main([*args, "--limit", limit]) == 1
        assert "at least 0" in capsys.readouterr().err
    for part in tables:
        part.cost_limit[:] = 7.0
    Episodes.concatenate(tables).save(tmp_path / "others.csv")
    assert main([*args, "--limit", "30", "--oracle", str(tmp_path / "others.csv")]) == 1
    assert "at the limit that it is given, " in capsys.readouterr().err
    tables[0].save(tmp_path / "some.csv")
    assert main([*args, "--limit", "30", "--oracle", str(tmp_path / "some.csv")]) == 1
    assert "some.csv holds no episodes of" in capsys.readouterr().err


def test_what_does_not_fit_is_said_before_the_long_part(
    runs: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qpt.ope.fqe.Fits.__init__", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(QptError, match="judge it on logs of its own task"):
        select(runs[0], tiny_data(observation_dim=99), 30.0)
