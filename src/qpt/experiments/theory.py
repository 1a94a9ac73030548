"""The paper's theorem made concrete: realised gaps beside its bounds, and small problems where a step of it fails."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qpt import plotting
from qpt.experiments.theory_cmdp import Exact, Floats, Problem, near_deterministic, return_distribution, solve

Signal = Literal["reward", "cost"]
SIGNALS: tuple[Signal, Signal] = ("reward", "cost")
STRONG = 1e3  # a weight at which the penalty decides alone


# -- problems ----------------------------------------------------------------------------------------------------------


def road(horizon: int = 8, epsilon: float = 0.01, skill: float = 0.9, weight: float = 2.0) -> Problem:
    """Drive along a road: pays 1 a step and is free; with probability ε anything else happens, e.g. the ditch.

    States: road, ditch. Actions: drive, rush, wait. In the ditch only the action that pays costs, so the two signals
    pull apart there. In every state some action pays and some action is free. The behaviour drives with probability
    `skill`; the targets are those of the best nominal episode: reward H, cost 0.
    """
    cmdp = near_deterministic(
        next_state=[[0, 0, 0], [1, 0, 1]],
        reward=[[1, 1, 0], [1, 0, 0]],
        cost=[[0, 1, 0], [1, 1, 0]],
        horizon=horizon,
        epsilon=epsilon,
    )
    rest = 1 - skill
    behaviour = np.array([[skill, 0.8 * rest, 0.2 * rest], [0.6, 0.2, 0.2]])  # when in doubt it rushes
    return Problem(cmdp, behaviour, horizon, 0, weight, weight)


def random_problem(seed: int, as_printed: bool) -> Problem | None:
    """A random problem of 3 states and 3 actions; None where it has no target with coverage.

    `as_printed`: targets are any that the behaviour meets often enough, which is all that the theorem asks for. Else
    what the proof needs besides: the targets are the best nominal ones, one and the same action of every state pays
    and is free, so that both can be met together.
    """
    rng = np.random.default_rng(seed)
    s, a, horizon = 3, 3, int(rng.integers(2, 6))
    to, reward, cost = (rng.integers(high, size=(s, a)) for high in (s, 2, 2))
    if not as_printed:
        good = rng.integers(a, size=s)
        reward[np.arange(s), good], cost[np.arange(s), good] = 1, 0
    noise = rng.exponential(size=(s, a, s, 2, 2))
    epsilon = float(10 ** rng.uniform(-4, -1))
    cmdp = near_deterministic(to, reward, cost, horizon, epsilon, noise)
    behaviour = rng.dirichlet(np.ones(a), size=s)
    weights = rng.exponential(3.0, size=2)
    if not as_printed:
        return Problem(cmdp, behaviour, horizon, 0, *weights)
    first = return_distribution(cmdp, behaviour)[0, cmdp.start]
    choices = np.argwhere(np.einsum("a,aij->ij", behaviour[cmdp.start], first) >= 0.05)
    if not len(choices):
        return None
    i, j = choices[rng.integers(len(choices))]
    return Problem(cmdp, behaviour, int(i), int(j), *weights)


# -- counter-examples --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CounterExample:
    """A problem, the statement that fails in it, and both sides of it: `claimed` is an upper bound of `true`."""

    name: str
    statement: str
    problem: Problem
    claimed: Callable[[Exact], float]
    true: Callable[[Exact], float]


def counter_examples() -> list[CounterExample]:
    """Small problems in which a step of the proof, or the theorem as printed, does not hold."""
    sign = near_deterministic([[0, 0]], [[0, 0]], [[0, 1]], 1, 0.1, noise=_flips_cost(1, 2))
    two = np.full((1, 2), 0.5)
    dead_end = near_deterministic(  # start -> dead (nothing pays) or alive
        [[1, 2], [1, 1], [2, 2]], [[1, 0], [0, 0], [1, 0]], [[0, 1], [0, 0], [0, 0]], 3
    )
    trap = near_deterministic(  # the free action leads to where everything costs
        [[1, 2], [1, 1], [2, 2]], [[1, 0], [0, 0], [0, 0]], [[0, 1], [1, 1], [0, 1]], 3
    )
    even = np.full((3, 2), 0.5)
    low = near_deterministic([[0, 0]], [[1, 0]], [[0, 0]], 1)
    apart = near_deterministic([[0, 0]], [[1, 0]], [[1, 0]], 1, 0.03)

    def difference(signal: Signal) -> Callable[[Exact], float]:  # of the proof's second step
        if signal == "reward":
            return lambda e: e.plain.reward - e.penalised.reward
        return lambda e: e.penalised.cost - e.plain.cost

    return [
        CounterExample(
            "cost step: sign",
            "J^c(π̂) - J^c(π) = Σ (P̂^c - P^c) c_t, which is ≥ 0, and ≤ -H σ_c",
            Problem(sign, two, 0, 0, 0.0, STRONG),
            lambda e: -e.horizon * e.sigma_cost,
            difference("cost"),
        ),
        CounterExample(
            "reward step: r_t = 1",
            "J^r(π) - J^r(π̂) ≤ -H σ_r",
            Problem(dead_end, even, 1, 0, 0.0, STRONG, on="reward"),
            lambda e: -e.horizon * e.sigma_reward,
            difference("reward"),
        ),
        CounterExample(
            "negative reward bound",
            "J^r(π*) - J^r(π̂) ≤ ε (1 / α + 3) H² - H σ_r < 0, so π̂ would beat the best policy",
            Problem(dead_end, even, 1, 0, 0.0, STRONG, on="reward"),
            lambda e: e.bound("reward"),
            lambda e: e.gap("reward"),
        ),
        CounterExample(
            "negative cost bound",
            "J^c(π̂) - J^c(π*) ≤ ε (1 / α + 3) H² - H σ_c < 0, so π̂ would cost less than the least",
            Problem(trap, even, 0, 2, STRONG, 0.0, on="cost"),
            lambda e: e.bound("cost"),
            lambda e: e.gap("cost"),
        ),
        CounterExample(
            "lemma: target below V*",
            "J^r(π*) - J^r(π) ≤ ε (1 / α + 3) H² for any covered target",
            Problem(low, two, 0, 0, 0.0, 0.0),
            lambda e: e.lemma("reward"),
            lambda e: e.gap("reward", penalised=False),
        ),
        CounterExample(
            "coverage of each target alone",
            "J^r(π*) - J^r(π̂) ≤ ε (1 / α + 3) H² - H σ_r with α of the reward target alone",
            Problem(apart, two, 1, 0, 0.0, 0.0),
            lambda e: e.bound("reward"),
            lambda e: e.gap("reward"),
        ),
    ]


def _flips_cost(states: int, actions: int) -> Floats:
    """Noise that changes the cost and nothing else, for problems of one state without rewards."""
    noise = np.zeros((states, actions, states, 2, 2))
    noise[:, :, 0, 0, :] = 1
    return noise


# -- sweeps ------------------------------------------------------------------------------------------------------------

Row = dict[str, float | str | int]


def row_of(exact: Exact, **labels: float | str | int) -> Row:
    """One line of the table: what was varied, then the theorem's quantities for both signals."""
    numbers: Row = dict(labels)
    numbers |= {"H": exact.horizon, "epsilon": exact.epsilon}
    numbers |= {"alpha_reward": exact.alpha_reward, "alpha_cost": exact.alpha_cost, "alpha_joint": exact.alpha_joint}
    numbers |= {"sigma_reward": exact.sigma_reward, "sigma_cost": exact.sigma_cost}
    for signal in SIGNALS:
        numbers[f"{signal}_gap_dt"] = exact.gap(signal, penalised=False)
        numbers[f"{signal}_gap_penalised"] = exact.gap(signal)
        numbers[f"{signal}_bound_dt"] = exact.lemma(signal)
        numbers[f"{signal}_bound"] = exact.bound(signal)
        numbers[f"{signal}_bound_repaired"] = exact.repaired(signal)
    return numbers


def sweeps() -> list[Row]:
    """The road with one thing varied at a time: ε, coverage (by the behaviour's skill), H (twice), the penalty."""
    rows: list[Row] = []
    for value in np.geomspace(1e-4, 0.3, 15):
        rows.append(row_of(solve(road(epsilon=float(value))), sweep="epsilon", x=float(value)))
    for value in np.linspace(0.3, 0.99, 15):
        exact = solve(road(skill=float(value)))
        rows.append(row_of(exact, sweep="coverage", x=exact.alpha_joint))
    for horizon in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20):
        rows.append(row_of(solve(road(horizon=horizon)), sweep="H, behaviour fixed", x=horizon))
        rows.append(
            row_of(solve(road(horizon=horizon, skill=0.5 ** (1 / horizon))), sweep="H, coverage fixed", x=horizon)
        )
    for value in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        rows.append(row_of(solve(road(weight=value)), sweep="penalty", x=value))
    return rows


def scatter(count: int = 300) -> list[Row]:
    """Random problems, with the assumptions as printed and with what the proof needs besides."""
    rows = []
    for as_printed in (True, False):
        for seed in range(count):
            problem = random_problem(seed, as_printed)
            if problem is not None:
                label = "as printed" if as_printed else "with what the proof needs"
                rows.append(row_of(solve(problem), sweep=label, x=seed))
    return rows


def violations(rows: Iterable[Row], signal: Signal, bound: str = "bound") -> list[Row]:
    """Rows whose realised gap lies above the bound, by more than rounding."""
    return [r for r in rows if float(r[f"{signal}_gap_penalised"]) > float(r[f"{signal}_{bound}"]) + 1e-9]


# -- pictures ----------------------------------------------------------------------------------------------------------

LINES = {
    "gap_dt": ("π_DT, realised", plotting.EPISODE, "o-"),
    "gap_penalised": ("π̂, realised", plotting.FRONTIER, "o-"),
    "bound_dt": ("bound for π_DT", plotting.EPISODE, "--"),
    "bound": ("bound for π̂", plotting.FRONTIER, "--"),
}


def bounds_figure(rows: list[Row]) -> Any:
    """Realised gaps and bounds over each sweep: reward above, cost below."""
    labels = {
        "epsilon": "ε",
        "coverage": "coverage of both targets, α",
        "H, behaviour fixed": "H (the behaviour stays)",
        "H, coverage fixed": "H (the coverage stays)",
        "penalty": "weights α1 = α2 of the penalty",
    }
    figure, panels = plotting.panels(2, len(labels), 15, 6.2)
    for column, (sweep, label) in enumerate(labels.items()):
        part = sorted((r for r in rows if r["sweep"] == sweep), key=lambda r: float(r["x"]))
        x = [float(r["x"]) for r in part]
        for line, signal in enumerate(SIGNALS):
            axes = panels[line][column]
            for name, (text, colour, style) in LINES.items():
                y = [float(r[f"{signal}_{name}"]) for r in part]
                axes.plot(x, y, style, color=colour, markersize=3, linewidth=1.3, label=text)
            axes.plot(
                x,
                [float(r["H"]) for r in part],
                ":",
                color="#777777",
                linewidth=1.3,
                label="H, the largest gap there is",
            )
            axes.set_yscale("log")
            if sweep in ("epsilon", "coverage"):
                axes.set_xscale("log")
            if sweep == "penalty":
                axes.set_xscale("symlog", linthresh=0.25)
                axes.set_xlim(0, x[-1])
            axes.set_xlabel(label if line else "", color=plotting.INK)
            if column == 0:
                axes.set_ylabel(f"{signal} lost to the best policy", color=plotting.INK)
    handles, texts = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle("The road: realised gaps and the theorem's bounds", x=0.01, ha="left", fontweight="bold")
    return figure


def scatter_figure(rows: list[Row]) -> Any:
    """Every random problem as a point: its bound and its realised gap; above the diagonal the bound fails."""
    figure, panels = plotting.panels(2, 2, 10, 7.4)
    kinds = [("as printed", "bound"), ("with what the proof needs", "bound_repaired")]
    for line, signal in enumerate(SIGNALS):
        for column, (sweep, bound) in enumerate(kinds):
            axes = panels[line][column]
            part = [r for r in rows if r["sweep"] == sweep]
            broken = violations(part, signal, bound)
            for some, colour in (([r for r in part if r not in broken], plotting.EPISODE), (broken, plotting.FRONTIER)):
                x = [float(r[f"{signal}_{bound}"]) for r in some]
                y = [float(r[f"{signal}_gap_penalised"]) for r in some]
                axes.scatter(x, y, s=11, color=colour, alpha=0.7, linewidths=0)
            reach = [-3, 1e3]
            axes.plot(reach, reach, color="#777777", linewidth=1, linestyle=":")
            axes.set_xscale("symlog", linthresh=0.1)
            axes.set_yscale("symlog", linthresh=0.1)
            axes.set_xlim(-3, 1e3)
            axes.set_ylim(-0.03, 10)
            axes.set_title(f"{signal}, {sweep}: {len(broken)} of {len(part)} above the bound", loc="left", fontsize=10)
            axes.set_xlabel("bound" if line else "", color=plotting.INK)
            axes.set_ylabel(f"realised {signal} gap" if column == 0 else "", color=plotting.INK)
    figure.suptitle("Random problems: the bound and what happens", x=0.01, ha="left", fontweight="bold")
    return figure


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TheoryResult:
    """What `run` found: rows of the sweeps and of the random problems, and the counter-examples' two sides."""

    sweeps: list[Row]
    scatter: list[Row]
    counter_examples: list[Row]


def run(out: Path, count: int = 300) -> TheoryResult:
    """Compute everything and write bounds.png, random.png, and one CSV each for the three tables."""
    examples: list[Row] = []
    for example in counter_examples():
        exact = solve(example.problem)
        sides: Row = {"claimed": example.claimed(exact), "true": example.true(exact)}
        examples.append({"name": example.name, "statement": example.statement} | sides | row_of(exact))
    result = TheoryResult(sweeps(), scatter(count), examples)
    plotting.save(bounds_figure(result.sweeps), out / "bounds.png")
    plotting.save(scatter_figure(result.scatter), out / "random.png")
    for name, rows in (("sweeps", result.sweeps), ("random", result.scatter), ("counter-examples", examples)):
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return result
