"""TensorBoard and Weights & Biases: what they are told at which steps, and what is said where they are not there.

Neither is installed with the tests; small modules stand in for them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import tiny_data
from qpt import logs
from qpt.algorithms.bc import BCConfig
from qpt.envs.toy import tradeoff
from qpt.errors import QptError
from qpt.tasks import register_task
from qpt.training import TrainConfig, train


@dataclass
class Told:
    """What the trackers heard: how each was opened, its (step, name, value) rows, and whether it was ended."""

    opened: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[int, str, float]] = field(default_factory=list)
    ended: int = 0

    def steps(self, name: str) -> list[int]:
        return [step for step, told, _ in self.rows if told == name]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            told.opened.append({"log_dir": log_dir, "purge_step": purge_step})

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.rows.append((step, name, value))

        def close(self) -> None:
            told.ended += 1

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    return told


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()

    def log(metrics: dict[str, float], step: int) -> None:
        told.rows += [(step, name, value) for name, value in metrics.items()]

    def finish() -> None:
        told.ended += 1

    def init(**settings: Any) -> Any:
        told.opened.append(settings)
        if settings["project"] == "forbidden":
            raise PermissionError("not logged in")
        new = f"run{len(told.opened)}"
        return SimpleNamespace(id=settings["id"] or new, log=log, finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=PermissionError))
    return told


def config(out: Path, steps: int = 6, **changes: Any) -> TrainConfig:
    method = BCConfig(steps=steps, batch_size=4, width=8, cost_limit=6.0)
    settings: dict[str, Any] = {"log_every": 2, "checkpoint_every": 3, "progress": False, "device": "cpu"} | changes
    return TrainConfig(out=out, algorithm="bc-safe", config=method, threads=1, **settings)


@pytest.mark.parametrize("flags", [{"tensorboard": True}, {"wandb": "project"}], ids=lambda flags: next(iter(flags)))
def test_the_rows_of_the_log_and_the_evaluations_are_told(
    flags: dict[str, Any], board: Told, wandb: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qpt.tasks._registered", {})
    task = register_task(tradeoff(0).task("TrackedToy"))
    evaluations: dict[str, Any] = {"eval_every": 4, "eval_episodes": 2, "workers": 0}
    run = train(config(tmp_path / "run", task=task.name, **evaluations, **flags), tradeoff(0).dataset(40))
    told, other = (board, wandb) if "tensorboard" in flags else (wandb, board)
    assert other == Told()  # only the one that was asked for
    rows = logs.rows(run.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 3, 4, 6]
    logged = {(row["step"], k, v) for row in rows for k, v in row.items() if k not in ("step", "steps_per_second")}
    assert {row for row in told.rows if not row[1].startswith("eval/")} == logged
    for kind in ("return", "cost"):
        seen = [(row["step"], f"eval/{kind}@6", row["limits"][0][kind]) for row in run.evaluations]
        assert [row for row in told.rows if row[1].startswith(f"eval/{kind}")] == seen
    assert told.steps("eval/return@6") == [4, 6]
    told_steps = [step for step, _, _ in told.rows]
    assert told_steps == sorted(told_steps)  # W&B takes no row of an earlier step
    assert told.ended == 1


def test_a_resumed_run_goes_on_where_it_was(board: Told, wandb: Told, tmp_path: Path) -> None:
    both: dict[str, Any] = {"tensorboard": True, "wandb": "project"}
    for steps, resume in ((4, False), (8, True)):
        train(config(tmp_path / "run", steps, resume=resume, **both), tiny_data())
    first, second = wandb.opened
    assert (first["id"], second["id"]) == (None, "run1")
    assert first["project"] == second["project"] == "project"
    assert first["resume"] == second["resume"] == "allow"
    assert [opened["purge_step"] for opened in board.opened] == [1, 5]  # rows after the checkpoint come again
    for told in (board, wandb):
        assert told.steps("loss") == [2, 3, 4, 6, 8]
        assert told.ended == 2
    train(config(tmp_path / "other", 2, wandb="project"), tiny_data())
    assert wandb.opened[2]["id"] is None


def test_a_run_that_begins_again_is_a_new_one(wandb: Told, tmp_path: Path) -> None:
    """Started at step 0 in a folder where only the id is left, it would log steps that W&B has seen."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb.id").write_text("old\n")
    train(config(tmp_path / "run", 2, wandb="project"), tiny_data())
    assert wandb.opened[0]["id"] is None


def test_trackers_are_ended_when_a_run_fails(
    board: Told, wandb: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise QptError("training diverged")

    monkeypatch.setattr("qpt.session.Session._log", fails)
    with pytest.raises(QptError, match="diverged"):
        train(config(tmp_path / "run", tensorboard=True, wandb="project"), tiny_data())
    assert (board.ended, wandb.ended) == (1, 1)


@pytest.mark.parametrize(
    ("flag", "value", "module"), [("tensorboard", True, "tensorboard"), ("wandb", "project", "wandb")]
)
def test_a_missing_package_is_told_before_anything_is_written(
    flag: str, value: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # cannot be imported
    out = tmp_path / "run"
    with pytest.raises(QptError, match=rf"^{module} is needed .*pip install 'qpt\[trackers\]'$"):
        train(config(out, **{flag: value}), tiny_data())
    assert not out.exists()
    train(config(out, 2), tiny_data())  # the next try is not told that there is a run


def test_what_wandb_refuses_gets_a_sentence_and_can_be_taken_up(board: Told, wandb: Told, tmp_path: Path) -> None:
    with pytest.raises(QptError, match=r"cannot log this run \(not logged in\); run wandb login and add --resume"):
        train(config(tmp_path / "run", 2, wandb="forbidden", tensorboard=True), tiny_data())
    assert board.ended == 1
    train(config(tmp_path / "run", 2, wandb="project", resume=True), tiny_data())
    assert wandb.ended == 1
