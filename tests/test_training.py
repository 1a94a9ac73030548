"""The loop: bit-exact resume after a kill at any moment, atomic checkpoints, clear errors, the selection rule."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import qpt
from dying import PLACES, killed_while_training
from helpers import tiny_data
from qpt import checkpoint, logs
from qpt.algorithms.base import Spec
from qpt.algorithms.bc import BC, BCConfig
from qpt.algorithms.qpt import QPT, QPTConfig
from qpt.data.trajectories import Trajectories
from qpt.envs.toy import stitching
from qpt.errors import QptError
from qpt.policy import Policy
from qpt.session import Session
from qpt.tasks import register_task
from qpt.training import TrainConfig, _load, _memory, best_evaluation, train

TINY = QPTConfig(steps=30, batch_size=4, width=8, layers=1, heads=2, context=3, critic_width=8)


def config(out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "config": TINY,
        "checkpoint_every": 5,
        "log_every": 5,
        "progress": False,
        "threads": 1,
        "device": "cpu",
    }
    return TrainConfig(out=out, **(settings | changes))


def test_what_reading_noticed_is_a_warning(tmp_path: Path) -> None:
    data = tiny_data()
    columns = {n: getattr(data, n) for n in ("observations", "actions", "rewards", "costs", "terminals", "timeouts")}
    columns["timeouts"] = np.where(np.arange(data.steps) < data.offsets[-3], columns["timeouts"], False)
    columns["terminals"] = np.where(np.arange(data.steps) < data.offsets[-3], columns["terminals"], False)
    np.savez(tmp_path / "a.npz", **columns)
    with pytest.warns(UserWarning, match=rf"a\.npz: steps .* were dropped: {data.steps - data.offsets[-3]}"):
        _load(config(tmp_path, data=str(tmp_path / "a.npz")), None)


def test_a_column_that_hardly_varies_is_named(tmp_path: Path) -> None:
    data = tiny_data()
    columns = {n: getattr(data, n) for n in ("observations", "actions", "rewards", "costs", "terminals", "timeouts")}
    seen = data.observations * [0, 1e-12, 1e-5] + [9.8, 0, 0]  # constant, numerical noise, and a signal
    data = Trajectories.from_arrays(**columns | {"observations": seen})
    with pytest.warns(UserWarning, match=r"less than 0.0001 in 1 column\(s\) \(2\)"):
        train(config(tmp_path / "run", config=replace(TINY, steps=5)), data)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.resolve(run) / checkpoint.MODEL)


def hidden(run: Path) -> list[str]:
    """What is written under another name until it is whole."""
    return [path.name for path in run.rglob(".*") if path.suffix != ".lock"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_stopping_and_resuming_gives_the_same_bits(tmp_path: Path) -> None:
    data, even = tiny_data(), replace(TINY, decay=0.0)  # a falling rate knows when it will end
    train(config(tmp_path / "whole", config=even), data)
    train(config(tmp_path / "parts", config=replace(even, steps=10)), data)
    for steps in (15, 20, 30):  # longer each time: only `steps` may change
        train(config(tmp_path / "parts", config=replace(even, steps=steps), resume=True), data)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    whole, parts = (
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("whole", "parts")
    )
    assert [{k: v for k, v in r.items() if k != "steps_per_second"} for r in whole] == [
        {k: v for k, v in r.items() if k != "steps_per_second"} for r in parts
    ]
    other = train(config(tmp_path / "other", config=even, seed=1), data)
    assert not same(weights(tmp_path / "whole"), weights(other.folder))


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from helpers import tiny_data
    from test_training import config
    from qpt.training import train
    out = Path({out!r})
    train(config(out, resume=(out / "run.json").exists()), tiny_data())
"""


def start(out: Path) -> subprocess.Popen[bytes]:
    code = textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out)))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_until_done(out: Path, delays: list[float]) -> int:
    """Kill the run after each delay from its first sign of life, then let it end. Returns the number of kills."""
    kills = 0
    for delay in delays:
        process = start(out)
        begun = time.monotonic()
        seen = len(list(out.glob("checkpoints/*"))) if out.exists() else 0
        while process.poll() is None and time.monotonic() - begun < 60:
            if out.exists() and (
                len(list(out.glob("checkpoints/*"))) != seen or (seen == 0 and (out / "run.json").exists())
            ):
                break
            time.sleep(0.002)
        time.sleep(delay)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    last = start(out)
    text = last.communicate(timeout=120)[0].decode()
    assert last.returncode == 0, text
    return kills


def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    train(config(tmp_path / "whole"), tiny_data())
    assert kill_until_done(tmp_path / "killed", [0.0, 0.01]) >= 1
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert not hidden(tmp_path / "killed")


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path: Path) -> None:
    train(config(tmp_path / "whole"), tiny_data())
    rng = np.random.default_rng(0)
    kills = sum(kill_until_done(tmp_path / f"killed{i}", list(rng.random(4) * 0.1)) for i in range(8))
    assert kills >= 8
    for i in range(8):
        assert same(weights(tmp_path / "whole"), weights(tmp_path / f"killed{i}"))


@pytest.mark.parametrize("moment", PLACES)
def test_a_kill_while_writing_keeps_the_old_checkpoint(tmp_path: Path, moment: str) -> None:
    """The process dies at a chosen point inside a checkpoint's writing; resumed, it still ends with the same bits."""
    data = tiny_data()
    train(config(tmp_path / "whole"), data)
    killed_while_training(moment, 5, config(tmp_path / "cut"))
    assert len(checkpoint.checkpoints(tmp_path / "cut")) >= 1
    assert hidden(tmp_path / "cut")
    train(config(tmp_path / "cut", resume=True), data)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert not hidden(tmp_path / "cut")


@pytest.mark.parametrize("begun", [True, False])
def test_what_kills_left_behind_is_deleted_when_a_run_is_taken_up(tmp_path: Path, begun: bool) -> None:
    """Also where it was killed before its first checkpoint; what others keep there stays."""
    out, data = tmp_path / "run", tiny_data()
    train(config(out, config=replace(TINY, steps=5)), data)
    if not begun:
        shutil.rmtree(out / "checkpoints")
    for name in (".step-000000010.4711", ".best-000000005.4711", ".best-000000005.old"):
        (out / "checkpoints" / name).mkdir(parents=True)
        (out / "checkpoints" / name / checkpoint.MODEL).write_bytes(b"half")
    for name in (".metrics.jsonl.0a1b2c3d.tmp", ".run.json.0a1b2c3d.tmp", ".episodes.csv.0a1b2c3d.tmp", ".notes"):
        (out / name).write_text("half")
    before = hidden(out)
    with pytest.raises(QptError, match="already holds a run"):
        train(config(out), data)
    assert hidden(out) == before
    train(config(out, resume=True), data)
    assert sorted(hidden(out)) == [".episodes.csv.0a1b2c3d.tmp", ".notes"]


def test_a_checkpoint_that_a_kill_left_aside_is_put_back(tmp_path: Path) -> None:
    """One is moved aside while another of its name takes its place; a kill between the two must not cost it."""
    out, data = tmp_path / "run", tiny_data()
    train(config(out, config=replace(TINY, steps=5)), data)
    shutil.copytree(checkpoint.resolve(out), out / "checkpoints" / ".best-000000003.old")
    train(config(out, resume=True), data)
    assert not hidden(out)
    assert checkpoint.resolve(out, "best").name == "best-000000003"
    qpt.load_policy(out, which="best")


def test_a_file_that_is_of_no_run_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("mine")
    for resume, message in ((False, "holds a file metrics.csv that is of no run"), (True, "nothing to resume")):
        with pytest.raises(QptError, match=message):
            train(config(tmp_path, resume=resume), tiny_data())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("metrics.csv", "mine")]


def test_a_folder_that_is_not_the_runs_gets_a_sentence_and_stays(tmp_path: Path) -> None:
    data, out = tiny_data(), tmp_path / "run"
    run = train(config(out, config=replace(TINY, steps=6)), data).folder
    inner = checkpoint.resolve(run)
    for resume in (False, True):
        with pytest.raises(QptError, match="is itself a checkpoint; give the folder of its run"):
            train(config(inner, resume=resume), data)
    with pytest.raises(QptError, match="is one checkpoint; the best is looked for in the folder of its run"):
        checkpoint.resolve(inner, "best")
    before = (out / "metrics.jsonl").read_text()
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    (out / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(QptError, match="is a link to nothing"):
        train(config(out, resume=True), data)
    (out / "checkpoints").unlink()
    with pytest.raises(QptError, match=r"other settings \(--seed 0\)"):  # it has no checkpoint, and is another run
        train(config(out, resume=True, seed=1), data)
    facts = (out / "run.json").read_text()
    (out / "run.json").write_text('{"mine": 1}')
    with pytest.raises(QptError, match=r"holds a file run\.json that is of no run"):
        train(config(out, resume=True), data)
    assert (out / "metrics.jsonl").read_text() == before
    (out / "run.json").write_text(facts)
    with pytest.warns(UserWarning, match="has no checkpoint yet; it begins again"):
        train(config(out, config=replace(TINY, steps=6), resume=True), data)
    with pytest.raises(QptError, match="cannot be a folder"):
        train(config(tmp_path / ("x" * 300)), data)


def test_copies_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    data, out = tiny_data(), tmp_path / "run"
    train(config(out, config=replace(TINY, steps=6)), data)
    kept = [out / "checkpoints" / name for name in ("step-old", "step-000000006-good", "best-mine")]
    for copy in kept:
        shutil.copytree(checkpoint.resolve(out), copy)
    assert checkpoint.resolve(out).name == "step-000000006"
    assert train(config(out, resume=True, keep=1), data).step == 30
    assert checkpoint.resolve(out).name == "step-000000030"
    assert all(copy.exists() for copy in kept)
    with pytest.raises(QptError, match="has no best checkpoint"):
        checkpoint.resolve(out, "best")


def test_a_lock_that_leads_to_a_file_leaves_it_whole(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("all of it")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".training.lock").symlink_to(tmp_path / "precious")
    train(config(tmp_path / "run", config=replace(TINY, steps=5)), tiny_data())
    assert (tmp_path / "precious").read_text() == "all of it"
    (tmp_path / "other" / ".training.lock").mkdir(parents=True)
    with pytest.raises(QptError, match=r"\.training\.lock cannot be written"):
        train(config(tmp_path / "other"), tiny_data())


def test_what_cannot_be_evaluated_is_said_before_the_first_step(tmp_path: Path) -> None:
    toy = stitching(0)
    register_task(replace(toy.task("AtOnce"), horizon=1000))
    looks = {"task": "AtOnce", "eval_every": 5, "workers": 0, "config": replace(TINY, steps=5)}
    with pytest.raises(QptError, match=r"no evaluation during training .* or give --eval-every 0"):
        train(config(tmp_path / "run", horizon=20, **looks), toy.dataset(4))
    assert not (tmp_path / "run").exists()


def test_too_little_memory_gets_a_sentence(tmp_path: Path) -> None:
    for changes in ({"config": replace(TINY, batch_size=10**11)}, {"horizon": 10**12}):
        with pytest.raises(QptError, match="not enough memory for this; give a smaller --batch-size"):
            train(config(tmp_path / "run", **changes), tiny_data())


def test_another_error_that_speaks_of_memory_is_not_too_little_of_it() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"), _memory():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_sums_beyond_any_float_name_the_column() -> None:
    data = tiny_data()
    columns = {n: getattr(data, n) for n in ("observations", "actions", "rewards", "costs", "terminals", "timeouts")}
    for name in ("rewards", "costs"):
        large = Trajectories.from_arrays(**columns | {name: np.full(data.steps, 3e38, np.float32)})
        with pytest.raises(QptError, match=f"the sums of {name} are beyond any float32"):
            Spec.from_data(large)


def test_weights_or_moments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Signed anew, as no accident does; of wrong shapes Adam would read beyond its memory."""
    data, out = tiny_data(), tmp_path / "run"
    train(config(out, config=replace(TINY, steps=5)), data)

    def changed(name: str, file: str, change: Any) -> Path:
        copy = Path(shutil.copytree(out, tmp_path / name))
        folder = checkpoint.resolve(copy)
        tensors = load_file(folder / file)
        save_file({key: change(key, value) for key, value in tensors.items()}, folder / file)
        manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
        manifest["sha256"][file] = checkpoint._digest(folder / file)
        manifest["checksum"] = checkpoint._checksum(manifest)
        (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        return copy

    longer = config(out, config=replace(TINY, steps=10), resume=True)
    short = changed("short", checkpoint.TRAINING, lambda k, v: v.flatten()[:1].clone() if "exp_avg" in k else v)
    with pytest.raises(QptError, match="moments of another shape than its weights"):
        train(replace(longer, out=short), data)
    spoiled = changed("nan", checkpoint.MODEL, lambda k, v: v * np.nan if k.startswith("target_cost") else v)
    for use in (lambda: train(replace(longer, out=spoiled), data), lambda: qpt.load_policy(spoiled)):
        with pytest.raises(QptError, match=r"target_cost_critics.* holds NaN or infinite values"):
            use()
    named = Path(shutil.copytree(out, tmp_path / "named"))
    manifest = json.loads((checkpoint.resolve(named) / checkpoint.MANIFEST).read_text())
    manifest["spec"]["task"] = 5
    manifest["checksum"] = checkpoint._checksum(manifest)
    (checkpoint.resolve(named) / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(QptError, match="does not fit this version of qpt: its task has no name"):
        qpt.load_policy(named)
    other = changed("other", checkpoint.MODEL, lambda k, v: v[:1].clone() if k == "head.weight" else v)
    with pytest.raises(QptError, match=r"does not fit this version of qpt: .*size mismatch for head\.weight"):
        qpt.load_policy(other)


def test_a_config_of_another_kind_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(QptError, match="train takes a TrainConfig, not a QPTConfig"):
        train(TINY, tiny_data())  # type: ignore[arg-type]
    for name, given, message in (
        ("bc-safe", TINY, "bc-safe takes a BCConfig as its config, not a QPTConfig"),
        ("qpt", {"steps": 3}, "qpt takes a QPTConfig as its config, not a dict"),
        ("qpt", {}, "qpt takes a QPTConfig as its config, not a dict"),
    ):
        with pytest.raises(QptError, match=message):
            train(config(tmp_path, algorithm=name, config=given), tiny_data())


def test_an_interrupt_saves_and_stops(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out))).replace(
        "config(out,",
        "config(out, config=__import__('dataclasses').replace(__import__('test_training').TINY, steps=10**6),",
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    begun = time.monotonic()
    while not checkpoint.checkpoints(out) and time.monotonic() - begun < 60:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, text
    rows = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    assert checkpoint.read_manifest(checkpoint.resolve(out))["step"] == rows[-1]["step"]
    assert rows[-1]["steps_per_second"] > 0


def test_damaged_and_foreign_checkpoints_get_a_sentence(tmp_path: Path) -> None:
    data = tiny_data()
    run = train(config(tmp_path / "run", config=replace(TINY, steps=5)), data).folder
    folder = checkpoint.resolve(run)

    def broken(name: str, change: Any) -> Path:
        copy = tmp_path / name
        shutil.copytree(run, copy)
        change(checkpoint.resolve(copy))
        return copy

    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)

    for name, change, message in (
        ("flipped", lambda p: flip(p / checkpoint.MODEL), "does not match its checksum"),
        ("cut", lambda p: (p / checkpoint.TRAINING).write_bytes(b"x"), "does not match its checksum"),
        ("json", lambda p: (p / checkpoint.MANIFEST).write_text("{"), "not valid JSON"),
        ("missing", lambda p: (p / checkpoint.MODEL).unlink(), "cannot be read"),
        ("headless", lambda p: (p / checkpoint.MANIFEST).unlink(), "delete this one"),
        (
            "future",
            lambda p: (p / checkpoint.MANIFEST).write_text(
                (folder / checkpoint.MANIFEST).read_text().replace('"format": 1', '"format": 99')
            ),
            "format 99",
        ),
        ("bare", lambda p: (p / checkpoint.MANIFEST).write_text("{}"), "has no format"),
        ("lacking", lambda p: (p / checkpoint.MANIFEST).write_text('{"format": 1}'), "no usable algorithm, config"),
    ):
        copy = broken(name, change)
        with pytest.raises(QptError, match=message):
            train(config(copy, config=replace(TINY, steps=10), resume=True), data)
    copy = Path(shutil.copytree(run, tmp_path / "last"))
    train(config(copy, config=replace(TINY, steps=10), resume=True), data)
    flip(checkpoint.resolve(copy) / checkpoint.MODEL)
    with pytest.raises(QptError, match="to --resume from it, delete this one"):
        train(config(copy, config=replace(TINY, steps=10), resume=True), data)
    shutil.rmtree(checkpoint.resolve(copy))
    assert train(config(copy, config=replace(TINY, steps=10), resume=True), data).step == 10  # as the sentence says
    with pytest.raises(QptError, match="began with other data"):
        train(config(run, config=replace(TINY, steps=10), resume=True), tiny_data(seed=5))
    with pytest.raises(QptError, match=r"other settings \(--lr 0.0003\)"):
        train(config(run, config=replace(TINY, steps=10, lr=1.0), resume=True), data)
    folder = checkpoint.resolve(shutil.copytree(run, tmp_path / "earlier"))  # of a version that knew no such field
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    del manifest["config"]["careful_costs"], manifest["checksum"]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(QptError, match=r"other settings \(--no-careful-costs\)"):
        train(config(folder.parents[1], config=replace(TINY, steps=10, careful_costs=True), resume=True), data)
    assert train(config(folder.parents[1], config=replace(TINY, steps=10), resume=True), data).step == 10
    with pytest.raises(QptError, match=r"other settings \(--seed 0\)"):
        train(config(run, config=replace(TINY, steps=10), resume=True, seed=3), data)
    with pytest.raises(QptError, match=r"other settings \(--algorithm qpt\)"):  # not all that BC has and QPT has not
        train(config(run, algorithm="bc-safe", config=BCConfig(steps=10), resume=True), data)
    with pytest.raises(QptError, match="began with no --task and a horizon of 20"):
        train(config(run, config=replace(TINY, steps=10), resume=True, horizon=30), data)
    with pytest.raises(QptError, match="already holds a run"):
        train(config(run), data)
    with pytest.raises(QptError, match="nothing to resume"):
        train(config(tmp_path / "empty", resume=True), data)
    with pytest.raises(QptError, match=r"there is no folder .*nowhere"):
        qpt.load_policy(tmp_path / "nowhere")
    with pytest.raises(QptError, match="neither a checkpoint"):
        qpt.load_policy(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("data", None, "does not fit .* it has no 'data'"),
        ("step", None, "does not fit .* it has no 'step'"),
        ("seed", None, "does not fit .* it has no 'seed'"),
        ("spec.horizon", None, "does not fit .* it has no 'horizon'"),
        ("data.fingerprint", None, "does not fit .* it has no 'fingerprint'"),
        ("sha256", "1234", "no usable sha256"),
        ("spec", [20], "no usable spec"),
        ("config", 7, "no usable config"),
        ("step", "five", "no usable step"),
        ("data", ["x"], "no usable data"),
        ("processes", "two", "no usable processes"),
        ("step", 3, None),  # nothing tells this but the checksum
    ],
)
def test_a_changed_manifest_gets_a_sentence(tmp_path: Path, place: str, value: Any, message: str | None) -> None:
    """With the manifest's own checksum, and where there is none, as in checkpoints of earlier versions."""
    data, further = tiny_data(), config(tmp_path / "run", config=replace(TINY, steps=6), resume=True)
    train(replace(further, config=replace(TINY, steps=5), resume=False), data)
    file = checkpoint.resolve(tmp_path / "run") / checkpoint.MANIFEST
    manifest = json.loads(file.read_text())
    *above, name = place.split(".")
    inner = manifest[above[0]] if above else manifest
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(QptError, match=r"is damaged: manifest.json does not match its checksum; use an earlier one"):
        train(further, data)
    if message:
        del manifest["checksum"]
        file.write_text(json.dumps(manifest))
        with pytest.raises(QptError, match=rf"{message}.*; use an earlier one"):
            train(further, data)


def test_a_manifest_without_a_checksum_or_laid_out_anew_is_as_good(tmp_path: Path) -> None:
    data, out = tiny_data(), tmp_path / "run"
    train(config(out, config=replace(TINY, steps=5)), data)
    for steps in (6, 7):
        file = checkpoint.resolve(out) / checkpoint.MANIFEST
        manifest = json.loads(file.read_text())
        if steps == 7:
            del manifest["checksum"]
        file.write_text(json.dumps(manifest, indent=4))
        assert qpt.load_policy(out).checkpoint
        assert train(config(out, config=replace(TINY, steps=steps), resume=True), data).step == steps


def test_divergence_stops_with_step_metric_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = QPT.update

    def diverging(self: QPT, batch: Any) -> dict[str, torch.Tensor]:
        metrics = update(self, batch)
        if int(self.step) >= 7:
            metrics["loss"] = torch.tensor(float("nan"))
        return metrics

    monkeypatch.setattr(QPT, "update", diverging)
    expected = r"training diverged: loss is nan at step 10; the last good checkpoint is .*step-000000005"
    with pytest.raises(QptError, match=expected):
        train(config(tmp_path / "run"), tiny_data())
    for tensor in load_file(checkpoint.resolve(tmp_path / "run") / checkpoint.MODEL).values():
        assert torch.isfinite(tensor.float()).all()


def test_what_has_diverged_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely a row is logged: an evaluation would end with an error of its own."""
    update, evaluated = QPT.update, []

    def diverging(self: QPT, batch: Any) -> dict[str, torch.Tensor]:
        metrics = update(self, batch)
        return metrics | {"loss": torch.tensor(float("inf"))} if int(self.step) >= 7 else metrics

    monkeypatch.setattr(QPT, "update", diverging)
    monkeypatch.setattr("qpt.session.Session._evaluate", lambda self, _: evaluated.append(self.step))
    rarely = config(tmp_path / "run", task="BallCircle", eval_every=3, log_every=30, checkpoint_every=5)
    with pytest.raises(QptError, match=r"loss is inf at step 9; the last good checkpoint is .*step-000000005"):
        train(rarely, tiny_data(observation_dim=8))
    assert evaluated == [3, 6]


def test_a_run_that_has_more_steps_than_it_is_asked_for_is_a_full_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars, progress = [], logs.progress
    monkeypatch.setattr(logs, "progress", lambda *seen: bars.append(seen[2:]) or progress(*seen))
    train(config(tmp_path / "run"), tiny_data())
    assert train(config(tmp_path / "run", config=replace(TINY, steps=7), resume=True), tiny_data()).step == 30
    assert bars == [(0, 30), (30, 30)]


def test_large_rewards_are_no_divergence(tmp_path: Path) -> None:
    """Of the paper's preset, which scales rewards by 0.1 whatever they are."""
    data = tiny_data()
    large = replace(data, rewards=data.rewards * 1e6)
    run = train(config(tmp_path / "run", config=replace(TINY, reward_scale=0.1)), large)
    assert run.metrics["critic/reward_loss"] > 1e8


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_step_that_ruins_the_weights_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Its own metrics are those of the weights before."""
    update = QPT.update

    def ruining(self: QPT, batch: Any) -> dict[str, torch.Tensor]:
        metrics = update(self, batch)
        if int(self.step) == 10:
            next(self.parameters()).data.view(-1)[-1] = value
        return metrics

    monkeypatch.setattr(QPT, "update", ruining)
    with pytest.raises(QptError, match=r"the largest weight is (nan|1e\+30) at step 10; the last .*step-000000005"):
        train(config(tmp_path / "run"), tiny_data())
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run")] == ["step-000000005"]


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data()
    run = train(config(tmp_path / "run", config=replace(TINY, steps=5)), data).folder
    before = weights(run)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_save", full)
    with pytest.raises(QptError, match=r"cannot be written .*No space left.* untouched"):
        train(config(run, config=replace(TINY, steps=10), resume=True), data)
    monkeypatch.undo()
    assert same(before, weights(run))
    assert not hidden(run)


def test_old_checkpoints_are_rotated_out(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", keep=3), tiny_data()).folder
    assert [p.name for p in checkpoint.checkpoints(run)] == [f"step-{n:09d}" for n in (20, 25, 30)]


def test_loaded_policies_act_like_the_trained_one(tmp_path: Path) -> None:
    data = tiny_data()
    run = train(config(tmp_path / "run"), data).folder
    method, manifest = checkpoint.load_algorithm(checkpoint.resolve(run))
    assert manifest["data"]["fingerprint"] == data.fingerprint
    a, b = qpt.load_policy(run), Policy(method)
    fewer = qpt.load_policy(run, candidates=3)
    assert fewer.method.config.candidates == 3
    for p in (a, b):
        p.reset(2, cost_limits=[1, 5], seeds=[3, 4])
    for _ in range(6):
        o = np.random.default_rng(0).normal(size=(2, 3))
        assert np.array_equal(a.act(o), b.act(o))
        a.observe([1, 1], [0, 1])
        b.observe([1, 1], [0, 1])
    with pytest.raises(QptError, match="no such setting"):
        qpt.load_policy(run, candidatse=3)
    with pytest.raises(QptError, match="selection is 'constrained', 'tradeoff' or 'shield', not 'foo'"):
        qpt.load_policy(run, selection="foo")
    with pytest.raises(QptError, match="candidates is a whole number, not 'many'"):
        qpt.load_policy(run, candidates="many")
    with pytest.raises(QptError, match="which is 'last' or 'best', not 'bset'"):
        qpt.load_policy(run, which="bset")  # type: ignore[arg-type]
    with pytest.raises(QptError, match="past_horizon is 'error' or 'clamp', not 'stop'"):
        qpt.load_policy(run, past_horizon="stop")  # type: ignore[arg-type]
    with pytest.raises(QptError, match="was trained with its return_scale, which cannot change now; what can: action"):
        qpt.load_policy(run, return_scale=99.0, candidates=3)


def test_a_policy_of_one_limit_names_the_one_it_cannot_take() -> None:
    method = BC(BCConfig(cost_limit=5.0, width=8), Spec.from_data(tiny_data()))
    policy = Policy(method, trained_limit=5.0)
    policy.reset(2)
    with pytest.raises(QptError, match="trained for a cost limit of 5 and cannot take another; train one for 7"):
        policy.set_cost_limit([5.0, 7.0])


def test_a_policy_without_critics_does_not_choose(tmp_path: Path) -> None:
    alone = replace(TINY, train_with_reward_critic=False, train_with_cost_critic=False, inference_with_candidates=False)
    run = train(config(tmp_path / "run", config=replace(alone, steps=2)), tiny_data()).folder
    policy = qpt.load_policy(run, inference_with_candidates=True)
    policy.reset(1, cost_limits=5)
    with pytest.raises(QptError, match="trained without critics"):
        policy.act(np.zeros((1, 3)))


@pytest.mark.parametrize(("threads", "expected"), [(None, 1), (3, 3)])
def test_one_cpu_thread_unless_more_are_asked_for(tmp_path: Path, threads: int | None, expected: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(config(tmp_path / "run", config=replace(TINY, steps=1), threads=threads), tiny_data())
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_logs_leave_out_a_cut_line_and_take_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert logs.rows(path) == []
    logs.append(path, {"step": 1})
    logs.append(path, {"step": 2})
    with path.open("a") as file:
        file.write('{"step": 3')
    assert logs.rows(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n{"st\xff\n5\n{}\n{"step": 2}\n')  # what comes after a damaged line stays
    with pytest.warns(UserWarning, match="line [234] of .* is damaged and left out") as warned:
        assert logs.rows(path) == [{"step": 1}, {"step": 2}]
    assert len(warned) == 3
    table = tmp_path / "rows.csv"
    logs.append_csv(table, {"step": 1, "a": 5})
    logs.append_csv(table, {"step": 2, "a": 6})
    logs.append_csv(table, {"step": 3, "b": 7})
    assert table.read_text().split() == ["step,a,b", "1,5,", "2,6,", "3,,7"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_shows_everything_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("rich._console", Console(width=width, file=screen))
    monkeypatch.setattr(logs, "time", SimpleNamespace(perf_counter=iter([0.0, 60.0]).__next__))
    losses = {f"critic/{name}_loss": 0.1234 for name in ("reward", "cost", "value")} | {"policy/imitation": 0.5}
    with logs.progress(True, "bcq-lag, 5 seeds", 0, 500_000) as show:
        show(250_000, {**losses, "policy/entropy": 3.0})
    bar, *below = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert re.search(r"bcq-lag, 5 seeds .*━━ +250000/500000 4166.7 steps/s -:--:--", bar)
    assert "reward_loss 0.123 cost_loss 0.123 value_loss 0.123 imitation 0.5" in " ".join(x.strip() for x in below)
    assert "entropy" not in screen.getvalue()


def row(step: int, *parts: tuple[float, float]) -> dict[str, Any]:
    found = [{"cost_limit": 10.0 * i, "return": r, "normalized_cost": c} for i, (r, c) in enumerate(parts, 1)]
    return {"step": step, "limits": found}


def test_the_best_checkpoint_is_the_most_rewarding_safe_one() -> None:
    assert best_evaluation([]) is None
    rows = [row(1, (5, 0.2)), row(2, (9, 1.0)), row(3, (20, 1.1))]
    assert best_evaluation(rows) is rows[1]
    rows = [row(1, (5, 1.5), (9, 3.0)), row(2, (1, 1.2), (1, 1.4))]
    assert best_evaluation(rows) is rows[1]
    # Resumed with other limits: what was reached at those before says nothing.
    rows = [row(1, (99, 0.2)), row(2, (5, 0.2), (9, 0.2)), row(3, (1, 0.1), (1, 0.1))]
    assert best_evaluation(rows) is rows[1]
    assert best_evaluation(rows[:2]) is rows[1]


def test_a_device_is_one_that_is_there_and_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from qpt import training

    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _name: None)
    with pytest.raises(QptError, match="there is no device 'gpu'; use cpu, cuda or auto"):
        training._device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(QptError, match="no CUDA device here"):
        training._device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(QptError, match="there is no device 'cuda:2': this machine has 2"):
        training._device("cuda:2")
    for name in ("cuda", "cuda:1"):
        training._prepare(training._device(name), TrainConfig(task="BallCircle"))
    assert current == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 0}, "--keep is a whole number of at least 1"),
        ({"log_every": 0}, "--log-every is a whole number of at least 1"),
        ({"checkpoint_every": 0}, "--checkpoint-every is a whole number of at least 1"),
        ({"eval_every": -1}, "--eval-every is a whole number of at least 0"),
        ({"eval_limits": (5.0, 5.0)}, "--eval-limits are different numbers"),
        ({"eval_limits": (5.0, -1.0)}, "--eval-limits are different numbers"),
        ({"eval_limits": ()}, "--eval-limits are different numbers"),
        ({"eval_episodes": 0}, "--eval-episodes is a whole number of at least 1"),
        ({"eval_seed": -1}, "--eval-seed is a whole number of at least 0"),
        ({"workers": -1}, "--workers is a whole number of at least 0"),
        ({"horizon": 0}, "--horizon is a whole number of at least 1"),
        ({"threads": 0}, "--threads is a whole number of at least 1"),
        ({"threads": 10**11}, "--threads is at most 4096"),
        ({"seed": 2**63}, "seeds are whole numbers from 0"),
        ({"seeds": (0, -1)}, "seeds are whole numbers from 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QptError, match=message):
        config(tmp_path, **changes)


@pytest.mark.parametrize("reason", [QptError("is broken"), KeyboardInterrupt("again"), ZeroDivisionError("own")])
def test_a_failing_evaluation_costs_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: BaseException
) -> None:
    def broken(*_: Any) -> None:
        raise reason

    settings = {"task": "BallCircle", "eval_every": 3, "checkpoint_every": 10**6}
    monkeypatch.setattr(Session, "_evaluate", broken)
    data = tiny_data(observation_dim=8)
    with pytest.raises(type(reason), match=str(reason)):
        train(config(tmp_path / "cut", **settings), data)
    assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "cut"))["step"] == 3
    monkeypatch.setattr(Session, "_evaluate", lambda *_: None)
    train(config(tmp_path / "cut", **settings, resume=True), data)
    train(config(tmp_path / "whole", **settings), data)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_an_evaluation_that_failed_comes_again_when_the_run_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def evaluate(session: Session, _: Any) -> None:
        asked.append(session.step)
        if len(asked) == 2:
            raise QptError("is broken")
        session.evaluations.append({"step": session.step, "limits": []})
        logs.append(session.config.out / "evaluations.jsonl", session.evaluations[-1])

    monkeypatch.setattr(Session, "_evaluate", evaluate)
    settings, data = {"task": "BallCircle", "eval_every": 15}, tiny_data(observation_dim=8)
    with pytest.raises(QptError, match="is broken"):  # at the last step
        train(config(tmp_path, **settings), data)
    run = train(config(tmp_path, **settings, resume=True), data)
    assert asked == [15, 30, 30]
    assert [row["step"] for row in run.evaluations] == [15, 30]
    train(config(tmp_path, **settings, resume=True), data)  # nothing is missing any more
    assert asked == [15, 30, 30]


def test_an_evaluation_whose_best_checkpoint_could_not_be_kept_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = stitching(0)
    settings: dict[str, Any] = {"task": register_task(toy.task()).name, "eval_episodes": 1, "workers": 0}
    settings, data = settings | {"eval_every": 15}, toy.dataset(20)
    save = Session._save_best

    def full(*_: Any) -> None:
        raise QptError("the disk is full")

    monkeypatch.setattr(Session, "_save_best", full)
    with pytest.raises(QptError, match="the disk is full"):
        train(config(tmp_path, **settings), data)
    monkeypatch.setattr(Session, "_save_best", save)
    run = train(config(tmp_path, **settings, resume=True), data)
    assert [row["step"] for row in run.evaluations] == [15, 30]
    assert checkpoint.resolve(tmp_path, "best")


def test_a_simulator_that_is_missing_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qpt.tasks.SIMULATORS", {"bullet": ("no_such_simulator",)})
    with pytest.raises(QptError, match=r"BallCircle has no simulator here .*; run: qpt sims install bullet, or give"):
        train(config(tmp_path / "run", task="BallCircle", eval_every=15), tiny_data(observation_dim=8))
    assert not (tmp_path / "run").exists()
    train(config(tmp_path / "run", task="BallCircle"), tiny_data(observation_dim=8))


def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    begun, data = config(tmp_path / "run", checkpoint_every=6), tiny_data()
    train(begun, data)
    half_written = tmp_path / "run" / "checkpoints" / ".step-000000018.99"  # by the other process
    half_written.mkdir()
    with (tmp_path / "run" / ".training.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(QptError, match="another process is training in"):
            train(replace(begun, resume=True), data)
    assert half_written.exists()
    train(replace(begun, resume=True), data)
    assert not half_written.exists()


def test_a_run_goes_on_only_in_its_precision(tmp_path: Path) -> None:
    train(config(tmp_path), tiny_data())
    with pytest.raises(QptError, match="began in fp32; resume it with --precision fp32"):
        train(config(tmp_path, config=replace(TINY, steps=10), resume=True, precision="bf16"), tiny_data())


def test_a_run_goes_on_only_on_its_kind_of_device_and_knows_its_metrics(tmp_path: Path) -> None:
    whole = train(config(tmp_path), tiny_data())
    assert train(config(tmp_path, resume=True), tiny_data()).metrics == whole.metrics  # it was finished
    file = checkpoint.resolve(tmp_path) / checkpoint.MANIFEST
    manifest = json.loads(file.read_text()) | {"device": "cuda"}
    del manifest["checksum"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(QptError, match="began on cuda; resume it with --device cuda"):
        train(config(tmp_path, resume=True), tiny_data())
