"""`qpt play`: a film of one episode, whose strip says what happened."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from qpt.cli import main
from qpt.cli.play import PANEL, Moment, annotate, record, write_film
from qpt.errors import QptError
from qpt.evaluation import CallablePolicy, ConstantPolicy, RandomPolicy, evaluate
from qpt.tasks import get_task

images = pytest.importorskip("PIL.Image")
NOW = Moment("BallCircle · qpt", 10, 200, 12.5, 4.0, 20.0)


def colours(picture: np.ndarray) -> set[tuple[int, ...]]:
    return set(map(tuple, picture.reshape(-1, 3).tolist()))


def bar(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    """The longest row of one colour below the picture."""
    strip = picture[-PANEL:]
    return int((strip == colour).all(-1).sum(1).max())


BLUE, RED, YELLOW = (0x58, 0xA6, 0xFF), (0xFF, 0x6B, 0x4A), (0xF2, 0xC1, 0x4E)


def test_the_strip_shows_the_episode() -> None:
    scene = np.full((120, 160, 3), 7, np.uint8)
    shown = annotate(scene, NOW)
    assert shown.shape == (120 + PANEL, 160, 3)
    np.testing.assert_array_equal(shown[:120], scene)  # nothing covers the picture
    more = annotate(scene, Moment("BallCircle · qpt", 10, 200, 12.5, 8.0, 20.0))
    assert bar(more, BLUE) == pytest.approx(2 * bar(shown, BLUE), abs=2)  # the bar is the cost
    assert RED not in colours(more)
    over = annotate(scene, Moment("BallCircle · qpt", 10, 200, 12.5, 21.0, 20.0))
    assert bar(over, BLUE) == 0
    assert bar(over, RED) > 0
    assert YELLOW in colours(over)  # the limit
    for other in (
        Moment("BallCircle · qpt", 11, 200, 12.5, 4.0, 20.0),
        Moment("BallCircle · qpt", 10, 200, 13.5, 4.0, 20.0),
        Moment("BallCircle · qpt", 10, 200, 12.5, 4.0, 30.0),
        Moment("BallCircle · cdt", 10, 200, 12.5, 4.0, 20.0),
    ):
        assert (annotate(scene, other) != shown).any(), other


def test_odd_sizes_and_a_limit_of_nothing() -> None:
    shown = annotate(np.zeros((33, 81, 4), np.uint8), Moment("x", 0, None, 0.0, 0.0, 0.0))
    assert shown.shape[0] % 2 == shown.shape[1] % 2 == 0
    assert bar(annotate(np.zeros((33, 81, 3), np.uint8), Moment("x", 1, None, 0.0, 1.0, 0.0)), RED) > 0


def test_a_film_is_the_episode_that_evaluate_runs() -> None:
    pytest.importorskip("pybullet")
    from qpt.evaluation import episode_seeds

    task, policy = get_task("BallCircle"), RandomPolicy(2)
    rows = evaluate(policy, task, episodes=1, cost_limits=[20.0], seed=3, workers=0)
    pictures, last = record(policy, task, 20.0, episode_seeds(3, 0, 0), frames=6)
    assert last.earned == pytest.approx(rows.returns[0], rel=1e-6)
    assert (last.spent, last.step) == (rows.costs[0], rows.lengths[0])
    assert len(pictures) == 1 + 200 // 50
    assert len({p.shape for p in pictures}) == 1
    scenes = [p[:-PANEL] for p in pictures]
    assert all((a != b).any() for a, b in pairwise(scenes))  # the ball moves
    strips = [p[-PANEL:] for p in pictures]
    assert all((a != b).any() for a, b in pairwise(strips))


def test_the_command_writes_a_gif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pybullet")
    out = tmp_path / "new" / "film.gif"
    args = ["--policy", "random", "--limit", "20", "--frames", "5", "--fps", "10", "--out", str(out)]
    assert main(["play", "--task", "BallCircle", *args]) == 0
    printed = capsys.readouterr().out
    assert "BallCircle · random: 200 steps, return " in printed
    assert "limit 20 " in printed
    with images.open(out) as film:
        assert film.n_frames == 4
        assert film.info["duration"] == 100
        assert film.info["loop"] == 0
    assert [p.name for p in out.parent.iterdir()] == ["film.gif"]


def test_a_trained_policy_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pybullet")
    tiny = ["--steps", "2", "--batch-size", "4", "--width", "8", "--cost-limit", "30", "--no-progress"]
    source = ["--task", "BallCircle", "--data", "embedded:ballcircle"]
    run, out = str(tmp_path / "run"), str(tmp_path / "film.gif")
    assert main(["train", "--algorithm", "bc-safe", *source, *tiny, "--device", "cpu", "--out", run]) == 0
    assert main(["play", "--checkpoint", run, "--frames", "3", "--out", out]) == 0  # task and limit from training
    assert "BallCircle · bc-safe: 200 steps" in (printed := capsys.readouterr().out)
    assert "limit 30 " in printed
    assert main(["play", "--checkpoint", run, "--limit", "5", "--out", out]) == 1
    assert "trained for a cost limit of 30" in capsys.readouterr().err
    assert main(["play", "--checkpoint", run, "--task", "CarRun", "--out", out]) == 1
    assert "takes observations of length 8, but CarRun gives 7" in capsys.readouterr().err
    assert main(["play", "--checkpoint", run, "--which", "best", "--out", out]) == 1
    assert "no best checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("task", ["PointCircle1", "easysparse"])
def test_the_other_simulators_can_be_filmed(task: str) -> None:
    simulator = "metadrive" if task.startswith("easy") else "safety_gymnasium"
    if importlib.util.find_spec(simulator) is None:
        pytest.skip(f"{simulator} is not installed")
    try:
        pictures, last = record(ConstantPolicy(np.full(2, 0.5)), get_task(task), 10.0, (1, 1), frames=4)
    except QptError as error:
        if "without a screen" not in str(error):  # the machine has no graphics library; all else is ours
            raise
        pytest.skip(str(error))
    assert len(pictures) >= 2
    assert last.step > 0
    assert pictures[0][:-PANEL].std() > 1


def test_colours_survive_the_palette(tmp_path: Path) -> None:
    scene = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    spent = [0.0, 5.0, 10.0, 15.0, 30.0]
    write_film([annotate(scene, Moment("x", i, 4, 0.0, c, 20.0)) for i, c in enumerate(spent)], tmp_path / "f.gif", 20)
    with images.open(tmp_path / "f.gif") as film:
        assert film.n_frames == 5
        film.seek(3)
        row = np.asarray(film.convert("RGB"))[-PANEL + 58, 14:40].astype(int)  # inside of the bar
    assert np.abs(row - BLUE).max() < 40


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--task", "BallCircle"], "either --checkpoint or --policy"),
        (["--task", "BallCircle", "--policy", "random", "--checkpoint", "x"], "either --checkpoint or --policy"),
        (["--policy", "random"], "give the task"),
        (["--policy", "random", "--task", "BallCirle"], "did you mean 'BallCircle'"),
        (["--policy", "nonsense", "--task", "BallCircle"], "there is no policy 'nonsense'"),
        (["--policy", "random", "--task", "BallCircle", "--out", "film.avi"], ".gif or .mp4"),
        (["--policy", "random", "--task", "BallCircle", "--limit", "-1"], "at least 0"),
        (["--policy", "random", "--task", "BallCircle", "--limit", "nan"], "at least 0"),
        (["--policy", "random", "--task", "BallCircle", "--seed", "-1"], "--seed"),
        (["--policy", "random", "--task", "BallCircle", "--frames", "1"], "at least 2 --frames"),
        (["--policy", "random", "--task", "BallCircle", "--fps", "0"], "1 to 50 --fps"),
        (["--checkpoint", "nowhere", "--out", "f.gif"], "there is no folder nowhere"),
    ],
)
def test_bad_inputs_are_one_sentence(
    args: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["play", *args]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert "unexpected" not in error
    assert list(tmp_path.iterdir()) == []


def test_an_mp4_without_its_writer_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert main(["play", "--policy", "random", "--task", "BallCircle", "--out", str(tmp_path / "f.mp4")]) == 1
    assert "pip install imageio-ffmpeg, or end --out in .gif" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="imageio-ffmpeg is not installed")
def test_an_mp4_is_written(tmp_path: Path) -> None:
    from imageio.v2 import get_reader

    scene = np.zeros((91, 121, 3), np.uint8)
    write_film([annotate(scene, Moment("x", i, 9, 0.0, i, 5.0)) for i in range(10)], tmp_path / "f.mp4", 10)
    with get_reader(tmp_path / "f.mp4") as film:
        assert film.count_frames() == 10
        first = film.get_data(0)
    assert first.shape[:2] == annotate(scene, NOW).shape[:2]


def test_a_policy_that_fails_closes_the_simulator() -> None:
    pytest.importorskip("pybullet")

    def fails(_: np.ndarray) -> np.ndarray:
        raise QptError("the policy has no idea")

    with pytest.raises(QptError, match="no idea"):
        record(CallablePolicy(fails), get_task("BallCircle"), 10.0, (0, 0), frames=3)
