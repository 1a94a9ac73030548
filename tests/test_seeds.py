"""Several seeds in one process: each run is, bit for bit, the run that it would be alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dying import killed_while_training
from helpers import tiny_data
from qpt import checkpoint, logs
from qpt.algorithms.base import Spec, algorithm_classes
from qpt.algorithms.qpt import QPTConfig
from qpt.cli import main
from qpt.errors import QptError
from qpt.session import Session
from qpt.training import TrainConfig, _share_tables, train, train_seeds

SEEDS = (0, 1, 7)
TINY = QPTConfig(steps=12, batch_size=4, width=8, layers=1, heads=2, context=3, critic_width=8, dropout=0.2)


def config(out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "config": TINY,
        "checkpoint_every": 4,
        "log_every": 3,
        "progress": False,
        "threads": 1,
        "device": "cpu",
    }
    return TrainConfig(out=out, **(settings | changes))


def left_behind(run: Path) -> dict[str, Any]:
    """All that a run leaves: weights, optimisers, generators, log rows (but for their speed)."""
    folder = checkpoint.resolve(run)
    tensors = {**load_file(folder / checkpoint.MODEL), **load_file(folder / checkpoint.TRAINING)}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "steps_per_second"} for row in rows]
    return {**{k: v.tolist() for k, v in tensors.items()}, "rows": kept}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What each seed leaves behind when it is trained in a run of its own."""
    out = tmp_path_factory.mktemp("alone")
    return {s: left_behind(train(config(out / str(s), seed=s), tiny_data()).folder) for s in SEEDS}


def test_together_equals_alone(tmp_path: Path, alone: dict[int, dict[str, Any]]) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(99)
    runs = train_seeds(config(tmp_path, seeds=SEEDS), tiny_data())
    assert [run.folder for run in runs] == [tmp_path / f"seed{s}" for s in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        assert left_behind(run.folder) == alone[seed]
        assert (run.step, run.interrupted) == (12, False)
        assert json.loads((run.folder / "run.json").read_text())["seed"] == seed
    assert alone[0] != alone[1]
    torch.set_rng_state(before)


@pytest.mark.parametrize("name", ["bcq-lag", "oasis"])
def test_methods_that_draw_noise_of_their_own(name: str, tmp_path: Path) -> None:
    method = replace(algorithm_classes(name)[1](), steps=6, batch_size=8)
    if name == "oasis":
        method = replace(method, width=16, window=8, kept=4, sequences=7, diffusion_steps=2)
        method = replace(method, generator_share=0.3, labeler_share=0.3, stage_min=1)
    both = config(tmp_path, algorithm=name, config=method, log_every=1)
    train_seeds(replace(both, seeds=(3, 4)), tiny_data())
    for seed in (3, 4):
        single = train(replace(both, seed=seed, out=tmp_path / f"alone{seed}"), tiny_data())
        assert left_behind(tmp_path / f"seed{seed}") == left_behind(single.folder)


def test_killed_and_resumed(tmp_path: Path, alone: dict[int, dict[str, Any]]) -> None:
    """Killed in the middle of a write, one seed lost altogether: the runs still end with the same bits."""
    # Two files a checkpoint: the ninth is the first one of the second seed's second checkpoint.
    killed_while_training("model", 9, config(tmp_path, seeds=SEEDS))
    reached = [checkpoint.read_manifest(checkpoint.resolve(tmp_path / f"seed{s}"))["step"] for s in SEEDS]
    assert len(set(reached)) == 2  # they stand at different steps
    shutil.rmtree(tmp_path / "seed7")
    train_seeds(config(tmp_path, seeds=SEEDS, resume=True), tiny_data())
    for seed in SEEDS:
        assert left_behind(tmp_path / f"seed{seed}") == alone[seed]


def test_asked_to_stop_all_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, dict[str, Any]]
) -> None:
    @contextmanager
    def soon() -> Iterator[Callable[[], bool]]:
        calls = {"n": 0}

        def stopped() -> bool:
            calls["n"] += 1
            return calls["n"] > 4

        yield stopped

    monkeypatch.setattr(logs, "stop_flag", soon)
    runs = train_seeds(config(tmp_path, seeds=SEEDS, log_every=2), tiny_data())
    assert all(run.interrupted for run in runs)
    for run in runs:
        assert checkpoint.read_manifest(checkpoint.resolve(run.folder))["step"] == run.step > 0
        steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps))
    monkeypatch.undo()
    train_seeds(config(tmp_path, seeds=SEEDS, resume=True), tiny_data())
    for seed in SEEDS:
        mine, whole = left_behind(tmp_path / f"seed{seed}"), alone[seed]
        assert {**mine, "rows": []} == {**whole, "rows": []}


def test_a_seed_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, dict[str, Any]]
) -> None:
    log = Session._log

    def diverging(self: Session) -> None:
        if self.config.seed == 1 and self.step >= 6:
            raise QptError("training diverged: loss is nan at step 6")
        log(self)

    monkeypatch.setattr(Session, "_log", diverging)
    with pytest.raises(QptError, match="1 of 3 seeds failed, the others are saved; seed 1: training diverged"):
        train_seeds(config(tmp_path, seeds=SEEDS), tiny_data())
    assert [left_behind(tmp_path / f"seed{s}") == alone[s] for s in SEEDS] == [True, False, True]


def test_the_data_are_held_once() -> None:
    data = tiny_data()
    method = algorithm_classes("qpt")[0](TINY, Spec.from_data(data))
    first, second, apart = (method.make_sampler(data, torch.device("cpu"), seed) for seed in (0, 1, 1))
    _share_tables(second, first)
    assert second._table is first._table
    assert second.generator is not first.generator
    for a, b in zip(second.sample(), apart.sample(), strict=True):  # relabelled by its own seed
        assert torch.equal(a, b)


def test_what_does_not_go_together_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QptError, match="use train_seeds"):
        train(config(tmp_path, seeds=(0, 1)), tiny_data())
    with pytest.raises(QptError, match=r"nothing to resume in .*leave out --resume"):
        train_seeds(config(tmp_path, seeds=(0, 1), resume=True), tiny_data())
    with pytest.raises(QptError, match="each only once"):
        train_seeds(config(tmp_path, seeds=(0, 0)), tiny_data())
    with pytest.raises(QptError, match="--wandb logs one run"):
        train_seeds(config(tmp_path, seeds=(0, 1), wandb="project"), tiny_data())
    assert main(["train", "--seed", "1", "--seeds", "0", "1"]) == 1
    assert "--seed and --seeds exclude each other" in capsys.readouterr().err
    file = tmp_path / "both.toml"
    file.write_text("seed = 1\nseeds = [0, 1]\n")
    assert main(["train", "--config", str(file)]) == 1
    assert "has both seed and seeds" in capsys.readouterr().err


def test_the_command_line_trains_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag wins over the file, also where it is the other of the two."""
    file = tmp_path / "some.toml"
    small = (
        "steps = 1\nbatch_size = 2\nwidth = 8\nlayers = 1\nheads = 2\ncontext = 2\ncritic_width = 8\nprogress = false\n"
    )
    file.write_text(small + "seeds = [5, 6]\n")
    args = ["train", "--data", "embedded:ballcircle", "--config", str(file), "--device", "cpu", "--out"]
    assert main([*args, str(tmp_path / "several"), "--seeds", "2", "3"]) == 0
    assert sorted(p.name for p in (tmp_path / "several").iterdir()) == ["seed2", "seed3"]
    assert main([*args, str(tmp_path / "one"), "--seed", "4"]) == 0
    assert json.loads((tmp_path / "one" / "run.json").read_text())["seed"] == 4
    assert capsys.readouterr().out.count("done at step 1") == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_seed_whose_disk_is_full_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, dict[str, Any]]
) -> None:
    first, *others = SEEDS
    start = Session._start_files

    def full(self: Session) -> None:
        start(self)
        if self.config.seed == first:
            (self.config.out / "metrics.jsonl").symlink_to("/dev/full")

    monkeypatch.setattr(Session, "_start_files", full)
    with pytest.raises(QptError, match=r"1 of 3 seeds failed.*No space left"):
        train_seeds(config(tmp_path, seeds=SEEDS), tiny_data())
    for seed in others:
        assert left_behind(tmp_path / f"seed{seed}") == alone[seed]
