"""The numbers that the paper printed, as they come with the package, and the protocol behind them."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources

COST_LIMIT = 10.0  # of every task
SEEDS, EPISODES = 3, 20
CANDIDATES = (1, 10, 30, 50, 100)
COMPONENT_TASKS = ("harddense", "HopperVelocity")
CANDIDATE_TASKS = ("harddense",)
HYPERPARAMETER_TASKS = ("SwimmerVelocity", "HopperVelocity")
# Of the zero-shot figure's five tasks the text names the last two; the others are ours, safe for both methods there.
ZERO_SHOT_TASKS = ("HopperVelocity", "PointCircle1", "BallRun", "CarButton1", "PointButton1")
ZERO_SHOT_LIMITS = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)

# our name of a method: the paper's
METHODS = {
    "qpt": "QPT",
    "bc-safe": "BC-Safe",
    "cdt": "CDT",
    "bcq-lag": "BCQ-Lag",
    "cpq": "CPQ",
    "coptidice": "COptiDICE",
    "fisor": "FISOR",
    "oasis": "OASIS",
    "caps": "CAPS",
}
SUITES = {"safety-gymnasium": "SafetyGym", "bullet": "BulletGym", "metadrive": "MetaDrive"}


@dataclass(frozen=True)
class Score:
    """A normalised return and cost; the spreads over seeds where they were printed."""

    reward: float
    cost: float
    reward_std: float | None = None
    cost_std: float | None = None


@dataclass(frozen=True)
class Component:
    """One row of the component ablation: which of the four switches are on."""

    number: int
    augmentation: bool
    reward_critic: bool
    cost_critic: bool
    candidates: bool
    scores: dict[str, Score]  # by task

    @property
    def overrides(self) -> dict[str, bool]:
        """The switches as fields of QPTConfig."""
        return {
            "augmentation": self.augmentation,
            "train_with_reward_critic": self.reward_critic,
            "train_with_cost_critic": self.cost_critic,
            "inference_with_candidates": self.candidates,
        }

    @property
    def label(self) -> str:
        names = ("augmentation", "Q^r", "Q^c", "candidates")
        on = (self.augmentation, self.reward_critic, self.cost_critic, self.candidates)
        return f"{self.number}: {' + '.join(n for n, is_on in zip(names, on, strict=True) if is_on) or 'none'}"


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("qpt.experiments").joinpath("published", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@functools.cache
def main_table() -> dict[tuple[str, str], Score]:
    """Table 1 by task and method; a suite's printed average has the suite as its task."""
    table = {}
    for row in _rows("paper_table1.csv"):
        task = row["suite"] if row["task"] == "Average" else row["task"]
        table[task, row["method"]] = Score(float(row["reward"]), float(row["cost"]))
    return table


def main_table_tasks() -> list[str]:
    """The 38 tasks of Table 1, in its order."""
    return [t for t in dict.fromkeys(task for task, _ in main_table()) if t not in SUITES.values()]


@functools.cache
def components() -> tuple[Component, ...]:
    """The component ablation."""
    return tuple(
        Component(
            int(row["exp"]),
            augmentation=row["data_aug"] == "1",
            reward_critic=row["train_with_qr"] == "1",
            cost_critic=row["train_with_qc"] == "1",
            candidates=row["inference_ensemble"] == "1",
            scores={task: _with_spread(row, f"{task}_") for task in COMPONENT_TASKS},
        )
        for row in _rows("paper_ablation.csv")
    )


@functools.cache
def candidates() -> dict[int, Score]:
    """The candidate-count experiment on harddense."""
    return {int(row["n_candidates"]): _with_spread(row) for row in _rows("paper_candidates.csv")}


def hyperparameters() -> dict[str, str]:
    """Every hyper-parameter that the paper gives, and those it does not."""
    return {row["parameter"]: row["value"] for row in _rows("paper_hyperparameters.csv")}


@functools.cache
def other_limits() -> dict[tuple[str, str, float], Score]:
    """CDT and CAPS at other limits by task, method and limit, as the supplement of the CAPS paper has them."""
    names = {"CDT": "CDT", "CAPS(IQL)": "CAPS"}
    return {
        (row["task"], names[row["method"]], float(row["cost_limit"])): Score(float(row["reward"]), float(row["cost"]))
        for row in _rows("caps_supplement_limits.csv")
    }


def _with_spread(row: dict[str, str], prefix: str = "") -> Score:
    names = ("reward_mean", "cost_mean", "reward_std", "cost_std")
    return Score(*(float(row[prefix + name]) for name in names))
