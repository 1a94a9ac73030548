"""`qpt play`: one episode of a policy as a film, with its running return, cost and limit drawn in."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qpt.cli.evaluate import named_policy
from qpt.cli.run import run
from qpt.envs import make_env
from qpt.errors import QptError, require
from qpt.evaluation import EpisodePolicy, episode_seeds
from qpt.tasks import Task, get_task
from qpt.writing import check_file

Picture = npt.NDArray[np.uint8]
PANEL = 76  # height of the strip below the picture
BACK, INK, QUIET, SPENT, OVER, LIMIT = "#161b22", "#f0f3f7", "#9aa6b5", "#58a6ff", "#ff6b4a", "#f2c14e"


@dataclass(frozen=True)
class Moment:
    """What the strip says: the episode so far."""

    title: str
    step: int
    horizon: int | None
    earned: float
    spent: float
    cost_limit: float


def play_command(
    task: str | None = None,
    checkpoint: Path | None = None,
    policy: str | None = None,
    which: Literal["last", "best"] = "last",
    limit: float | None = None,
    seed: int = 0,
    out: Path = Path("episode.gif"),
    frames: int = 250,
    fps: int = 25,
) -> int:
    """Run one episode and write it as a film (.gif or .mp4) that shows its running return, cost and cost limit.

    Example: qpt play --checkpoint runs/ball --task BallCircle --limit 20 --out episode.gif

    Args:
        task: The task; by default the one the checkpoint was trained for.
        checkpoint: A run folder or a checkpoint folder.
        policy: Instead of a checkpoint: random, zero, constant:0.5,-1, or module:function of observations [n, S].
        which: The last checkpoint of a run, or the best of its evaluations.
        limit: Cost limit of the episode; by default the one trained for, or the paper's of the task.
        seed: Seed of the episode; the same as episode 0 of `qpt evaluate` with this seed.
        out: The film: .gif, or .mp4 where imageio-ffmpeg is installed.
        frames: Pictures of the film at most; longer episodes leave some out.
        fps: Pictures a second.
    """
    if (checkpoint is None) == (policy is None):
        raise QptError("give either --checkpoint or --policy (random, zero, constant:X,X or module:function)")
    if frames < 2 or not 1 <= fps <= 50:
        raise QptError(f"a film needs at least 2 --frames and 1 to 50 --fps, not {frames} and {fps}")
    if limit is not None and not (math.isfinite(limit) and limit >= 0):
        raise QptError(f"a cost limit is a number of at least 0, not {limit:g}; change --limit")
    if seed < 0:
        raise QptError(f"a seed is a whole number of at least 0, not {seed}; change --seed")
    check_film(out)  # before the long part
    chosen: Any = None
    if checkpoint is not None:
        chosen = importlib.import_module("qpt.policy").load_policy(checkpoint, which=which)
        task = task or chosen.task
    if task is None:
        raise QptError("give the task to play with --task; `qpt tasks` lists them")
    facts = get_task(task)
    chosen = chosen if chosen is not None else named_policy(str(policy), facts)
    trained = getattr(chosen, "trained_limit", None)
    asked = limit if limit is not None else facts.paper_cost_limit if trained is None else float(trained)
    pictures, last = record(chosen, facts, asked, episode_seeds(seed, 0, 0), frames)
    write_film(pictures, out, fps)
    verdict = "kept" if last.spent <= asked else "broken"
    print(f"{last.title}: {last.step} steps, return {last.earned:.1f}, cost {last.spent:g}, limit {asked:g} {verdict}")
    print(f"wrote {out}")
    return 0


# -- the episode -------------------------------------------------------------------------------------------------------


def record(
    policy: EpisodePolicy, task: Task, cost_limit: float, seeds: tuple[int, int], frames: int
) -> tuple[list[Picture], Moment]:
    """The pictures of one episode with their strips, first and last step always among them, and how it ended."""
    env = make_env(task, render=True)
    try:
        wanted = policy.observation_dim
        if wanted is not None and wanted != env.observation_dim:
            raise QptError(
                f"the policy takes observations of length {wanted}, but {task.name} gives {env.observation_dim}; "
                "play it in the task that it was trained for"
            )
        observation, _ = env.reset(seed=seeds[0])
        policy.reset(1, cost_limits=np.array([cost_limit]), seeds=np.array([seeds[1]], np.int64))
        title = f"{task.name} · {getattr(policy, 'algorithm', 'policy')}"
        now = Moment(title, 0, env.horizon, 0.0, 0.0, cost_limit)
        every = max(1, math.ceil((env.horizon or frames) / max(frames - 2, 1)))
        active, done = np.ones(1, bool), False
        pictures = [annotate(env.render(), now)]
        while not done:
            observation, reward, terminated, truncated, info = env.step(policy.act(observation[None], active)[0])
            policy.observe(np.array([reward], np.float32), np.array([info["cost"]], np.float32))
            now = replace(now, step=now.step + 1, earned=now.earned + reward, spent=now.spent + info["cost"])
            done = terminated or truncated
            if done or now.step % every == 0:
                pictures.append(annotate(env.render(), now))
    finally:
        env.close()
    return pictures, now


def annotate(picture: Picture, now: Moment) -> Picture:
    """The picture with a strip below it: return, cost of limit in words, and the budget as a bar."""
    images, drawing, fonts = (require(f"PIL.{name}", "sims") for name in ("Image", "ImageDraw", "ImageFont"))
    height, width = picture.shape[:2]
    size = (width + width % 2, height + PANEL + (height + PANEL) % 2)  # films want even sizes
    image = images.new("RGB", size, BACK)
    image.paste(images.fromarray(picture[..., :3]), (0, 0))
    draw, font = drawing.Draw(image), fonts.load_default(size=15)
    small, over = fonts.load_default(size=12), now.spent > now.cost_limit
    left, right, top = 12, size[0] - 12, height + 8
    total = f" of {now.horizon}" if now.horizon else ""
    draw.text((left, top), now.title, QUIET, small)
    draw.text((right, top), f"step {now.step}{total}", QUIET, small, anchor="ra")
    draw.text((left, top + 18), f"return {now.earned:.1f}", INK, font)
    cost = f"cost {now.spent:g}, limit {now.cost_limit:g}" + (" (over)" if over else "")
    draw.text((right, top + 18), cost, OVER if over else INK, font, anchor="ra")
    # The bar is full at 1.25 times the limit, so that there is room to show that it was broken.
    scale = (right - left) / (1.25 * now.cost_limit or 1.0)
    bar, mark = (top + 44, top + 56), left + now.cost_limit * scale
    draw.rectangle((left, bar[0], right, bar[1]), fill="#2d3643")
    if now.spent > 0:
        draw.rectangle((left, bar[0], min(left + now.spent * scale, right), bar[1]), fill=OVER if over else SPENT)
    draw.rectangle((mark - 1, bar[0] - 4, mark + 1, bar[1] + 4), fill=LIMIT)
    return np.asarray(image, np.uint8)


# -- the film ----------------------------------------------------------------------------------------------------------


def check_film(path: Path) -> None:
    """Whether a film of this name can be written here."""
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise QptError(f"a film is written as .gif or .mp4, not as {path.name!r}; change the ending of --out")
    require("PIL.Image", "sims")
    if path.suffix.lower() == ".mp4":
        try:
            importlib.import_module("imageio_ffmpeg")
        except ImportError as error:
            raise QptError(
                "an .mp4 needs imageio-ffmpeg, which is not installed; run: pip install imageio-ffmpeg, "
                "or end --out in .gif"
            ) from error
    check_file(path)


def write_film(pictures: Sequence[Picture], path: Path, fps: int) -> None:
    """Written under another name first: an interrupted film leaves no half file."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # the ending says the format
    try:
        if path.suffix.lower() == ".gif":
            images = require("PIL.Image", "sims")
            # One palette for all pictures: smaller, and no flicker. Some of them show its colours well enough.
            some = [pictures[i] for i in np.linspace(0, len(pictures) - 1, 6).astype(int)]
            palette = images.fromarray(np.concatenate(some)).quantize(256, dither=0)
            first, *rest = (images.fromarray(p).quantize(palette=palette, dither=0) for p in pictures)
            first.save(temporary, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
        else:
            require("imageio.v2", "sims").mimwrite(temporary, list(pictures), fps=fps, macro_block_size=2)
        temporary.replace(path)
    except OSError as error:
        raise QptError(f"the film {path} cannot be written: {error}; choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)


def main(args: Sequence[str]) -> int:
    return run(play_command, args, "play")
