"""The command line as a user meets it: help, exit codes, errors as one sentence, and `qpt train` from end to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny_data
from qpt import __version__, load_policy
from qpt.cli import COMMANDS, main
from qpt.cli.train import _summary
from qpt.data import write
from qpt.training import Run, TrainConfig

GROUPS = {
    "collect": ("learn", "record"),
    "data": ("info", "convert", "split", "validate", "download", "augment"),
    "sims": ("install",),
    "reproduce": (
        *("main-table", "components", "candidates", "hyperparameters", "zero-shot", "augmentation-figure", "theory"),
    ),
}
# every command that parses flags; a new one is found by itself
LEAVES = [[command, *rest] for command in COMMANDS for rest in ([[name] for name in GROUPS.get(command, ())] or [[]])]
TINY = (
    "--steps 4 --batch-size 8 --width 16 --layers 1 --heads 2 --context 3 --critic-width 16 --no-progress --device cpu"
)


def qpt(*args: str | Path, code: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `qpt` as a program of its own and check its exit code."""
    command = [sys.executable, "-c", "import sys; from qpt.cli import main; sys.exit(main())", *map(str, args)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tiny_data(episodes=8, length=10), tmp_path / "tiny.hdf5")


# -- help and exit codes -----------------------------------------------------------------------------------------------


def test_help_imports_neither_torch_nor_simulators() -> None:
    script = "import sys; from qpt.cli import main; code = main(['--help']); print(code, sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    code, modules = done.stdout.splitlines()[-1].split(" ", 1)
    assert code == "0"
    assert "'qpt.cli'" in modules
    for heavy in ("torch", "numpy", "h5py", "gymnasium", "tyro", "matplotlib", "pybullet"):
        assert f"'{heavy}'" not in modules, heavy


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command, (_, what) in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(what)}$", text, re.MULTILINE)
    assert main([]) == 2  # nothing was asked for
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"qpt {__version__}"


@pytest.mark.parametrize("leaf", LEAVES, ids=" ".join)
def test_help_of_every_command_shows_an_example(leaf: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*leaf, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: qpt {' '.join(leaf)} ")
    example = text.lower().index("example")
    assert f"qpt {' '.join(leaf)} " in text[example:]


@pytest.mark.parametrize("group", list(GROUPS))
def test_groups_list_their_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  ([\w-]+) ", text, re.MULTILINE)
    assert tuple(listed) == GROUPS[group]
    assert main([group]) == 2
    assert main([group, "nonsense"]) == 2
    assert f"`qpt {group} --help` lists them" in capsys.readouterr().err


def test_unknown_commands_and_flags_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian'; `qpt --help` lists them\n"
    for args in (
        ["tasks", "--nonsense"],
        ["train", "--nonsense", "1"],
        ["train", "--steps", "many"],
        ["train", "--algorithm"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(args)
        assert stopped.value.code == 2, args


def test_an_error_is_one_sentence_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    missing = tmp_path / "missing.hdf5"
    done = qpt("data", "info", missing, code=1)
    assert done.stdout == ""
    assert done.stderr == f"error: there is no file {missing}; check the path\n"
    for place in (("--debug", "data", "info", missing), ("data", "info", missing, "--debug")):
        done = qpt(*place, code=1)
        assert "Traceback (most recent call last)" in done.stderr
        assert f"QptError: there is no file {missing}" in done.stderr


def test_a_warning_is_one_sentence(tmp_path: Path) -> None:
    few = ["--steps", "4", "--batch-size", "4", "--no-progress", "--device", "cpu", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "qpt", "train", "--data", "embedded:ballcircle", "--algorithm", "oasis", *few]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
    assert said.startswith("warning: 4 steps leave none for the policy")
    assert ".py" not in said


def test_a_defect_of_ours_is_one_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import qpt.cli.tasks

    def broken(_: list[str]) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(qpt.cli.tasks, "main", broken)
    assert main(["tasks"]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "ZeroDivisionError: division by zero" in text
    assert "--debug" in text
    with pytest.raises(ZeroDivisionError):
        main(["tasks", "--debug"])


# -- qpt train ---------------------------------------------------------------------------------------------------------


def test_train_from_end_to_end(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run = ["train", "--data", str(data), "--out", str(out)]
    done = qpt(*run, *TINY.split())
    assert done.stdout == f"done at step 4: {out}\n"
    assert (out / "checkpoints" / "step-000000004" / "manifest.json").is_file()

    assert main([*run, *TINY.split()]) == 1  # nothing is overwritten
    assert "already holds a run; add --resume" in capsys.readouterr().err
    longer = TINY.replace("--steps 4", "--steps 6").split()
    assert main([*run, *longer, "--resume", "--lr", "0.5"]) == 1
    assert "began with other settings (--lr 0.0003)" in capsys.readouterr().err
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "new"), *longer, "--resume"]) == 1
    assert "nothing to resume" in capsys.readouterr().err

    assert main([*run, *longer, "--resume"]) == 0
    assert capsys.readouterr().out == f"done at step 6: {out}\n"
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, 6]
    policy = load_policy(out)
    policy.reset(2, cost_limits=[1.0, 5.0])
    assert policy.act(np.zeros((2, 3))).shape == (2, 2)


def test_a_resumed_run_equals_an_unbroken_one(data: Path, tmp_path: Path) -> None:
    short = TINY.replace("--steps 4", "--steps 2")
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "whole"), *TINY.split()]) == 0
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "parts"), *short.split()]) == 0
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "parts"), *TINY.split(), "--resume"]) == 0
    files = [tmp_path / run / "checkpoints" / "step-000000004" / "model.safetensors" for run in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_summary_says_of_which_step_its_numbers_are() -> None:
    row = {"step": 20, "limits": [{"cost_limit": 10.0, "return": 5.0, "cost": 1.0}]}
    numbers = "  limit 10: return 5.0, cost 1.0"
    assert _summary(Run(Path("x"), 20, {}, evaluations=[row])).splitlines()[1:] == [numbers]
    later = _summary(Run(Path("x"), 30, {}, evaluations=[row])).splitlines()  # resumed without evaluations
    assert later[1:] == ["  evaluated last at step 20:", numbers]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--task", "easysparse"], 200_000),
        (["--task", "easysparse", "--algorithm", "cdt"], 200_000),
        (["--task", "easysparse", "--algorithm", "fisor"], 1_000_000),
        (["--task", "easysparse", "--steps", "7"], 7),
        (["--task", "BallCircle"], 100_000),
        ([], 100_000),
    ],
)
def test_the_papers_preset_has_the_papers_steps(
    flags: list[str], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def note(config: TrainConfig) -> Run:
        seen.append(config.config.steps)
        return Run(tmp_path, 0, {})

    monkeypatch.setattr("qpt.cli.train.train", note)
    assert main(["train", "--preset", "paper", "--out", str(tmp_path), *flags]) == 0
    assert seen == [steps]


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr("qpt.cli.train.train", lambda config: seen.append(config) or Run(tmp_path, 0, {}))
    file = tmp_path / "c.toml"
    file.write_text('algorithm = "qpt"\npreset = "default"\nsteps = 5\n')
    assert main(["train", "--config", str(file), "--algorithm", "cdt", "--preset", "paper"]) == 0
    assert (seen[0].algorithm, seen[0].config.targets, seen[0].config.steps) == ("cdt", "published", 5)


def test_train_with_a_config_file(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    lines = [
        f'data = "{data}"',
        f'out = "{tmp_path / "run"}"',
        'algorithm = "bc-safe"',
        'device = "cpu"',
        "progress = false",
        "eval_limits = [5, 10.5]",
        'horizon = "None"',
        "steps = 3",
        "batch_size = 8",
        "width = 16",
        "seed = 5",
    ]
    config.write_text("\n".join(lines))
    assert main(["train", "--config", str(config), "--seed", "7"]) == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["algorithm"] == "bc-safe"  # the file's
    assert facts["seed"] == 7  # a flag wins over the file
    assert facts["config"]["steps"] == 3
    assert facts["config"]["width"] == 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps = 3\nstepz = 4\n", "has 'stepz', which qpt does not know"),
        ("steps = \n", "is not valid TOML"),
        ('algorithm = "nonsense"\n', "no algorithm 'nonsense'"),
        ('steps = "many"\n', "has steps = 'many', which does not fit"),
        ('steps = "None"\n', "has steps = None, which does not fit"),
        ("eval_limits = 10\n", "has eval_limits = 10, which does not fit"),
        ('cost_reduction = "median"\n', "which does not fit: it is 'min', 'max' or 'mean'"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_config_file_is_one_sentence(
    text: str | None, sentence: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    if text is not None:
        config.write_text(text)
    assert main(["train", "--config", str(config), "--data", str(data), "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")
    assert "unexpected" not in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give --task NAME or --data FILE"),
        (["--task", "Nowhere"], "Nowhere"),
        (["--algorithm", "nonsense"], "there is no algorithm 'nonsense'; choose one of qpt, bc-safe"),
        (["--preset", "nonsense"], "nonsense"),
        (["--data", "missing.hdf5"], "there is no file missing.hdf5"),
        (["--cost-limit", "10"], "qpt takes its limit when it is used: leave --cost-limit out"),
        (["--algorithm", "fisor", "--cost_limit=10"], "fisor takes no limit"),
        (
            ["--task", "CarRun", "--data", "embedded:ballcircle"],
            "the data have observations of length 8, but those of CarRun have 7; give the data of this task",
        ),
        (["--task", "DroneCircle", "--data", "embedded:ballcircle"], "but those of DroneCircle have 18"),
    ],
)
def test_train_errors_exit_with_1(
    args: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), *args]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert "unexpected" not in error


def test_train_refuses_bad_data(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes(data.read_bytes()[:1000])
    assert main(["train", "--data", str(cut), "--out", str(tmp_path / "run"), *TINY.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "cut.hdf5" in error
    assert not (tmp_path / "run").exists()


def test_train_help_shows_the_flags_of_the_chosen_method(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*args: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["train", *args, "--help"])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    ours, theirs = text(), text("--algorithm", "bcq-lag")
    assert "--candidates INT" in ours
    assert "--vae-width" not in ours
    assert "--vae-width" in theirs
    assert "--eta-cost" not in theirs
    assert "default, paper or (of qpt) transformer" in re.sub(r"[\s│|]+", " ", ours)
    for help_text in (ours, theirs):  # the three that choose the others stand there once each
        for flag in ("--algorithm", "--preset", "--config"):
            assert len(re.findall(rf"^\W*{flag} ", help_text, re.MULTILINE)) == 1, flag


@pytest.mark.parametrize("args", [["train", "--task", ""], ["train", "--config="], ["evaluate", "--out", ""]])
def test_an_empty_argument_is_not_taken_for_none(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "is empty; is a variable of the shell not set?" in capsys.readouterr().err


def test_seeds_need_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", "BallCircle", "--seeds"]) == 1
    assert "--seeds needs numbers" in capsys.readouterr().err
