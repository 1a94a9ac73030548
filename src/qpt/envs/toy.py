"""Tiny CMDPs with a known optimum: one that needs stitching, one that trades reward for cost.

Both are deterministic tables over (stage, place, move) with a random start, behind a continuous action: [-1, 1] is
cut into equal bands, one a move. Costs are whole numbers, and dynamic programming over (stage, place, remaining budget)
gives the exact optimum. A limit is meant per episode: the optimum is the best return when every episode stays within
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from qpt.data.trajectories import Trajectories
from qpt.tasks import Task

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# behaviour(rng) starts a logged episode and returns its choice of a move: choose(place) -> move
Behaviour = Callable[[np.random.Generator], Callable[[int], int]]


@dataclass(frozen=True, eq=False)
class Toy:
    """One instance; made by `stitching(seed)` or `tradeoff(seed)`."""

    name: str
    factory: Callable[[], Toy]  # makes this instance again, in another process
    following: Ints  # [H, X, M] the next place
    rewards: Floats  # [H, X, M] never negative
    costs: Ints  # [H, X, M]
    start: Floats  # [X] probabilities
    features: npt.NDArray[np.float32]  # [H + 1, X, S] what is observed; no two rows of a stage are equal
    behaviours: tuple[Behaviour, ...]  # who logged the data, in equal parts
    cost_limits: tuple[float, ...]  # limits that bind

    @property
    def horizon(self) -> int:
        return len(self.rewards)

    @property
    def moves(self) -> int:
        return int(self.rewards.shape[2])

    # -- the continuous action -------------------------------------------------------------------------------------

    def centre(self, move: int) -> float:
        """The action in the middle of a move's band."""
        return -1.0 + (2 * move + 1) / self.moves

    def move_of(self, action: float) -> int:
        """The move that an action stands for."""
        return min(max(int((action + 1) / 2 * self.moves), 0), self.moves - 1)

    def env(self) -> ToyEnv:
        return ToyEnv(self)

    def task(self, name: str | None = None) -> Task:
        """The task to train on and to evaluate in; returns are normalised by the unconstrained optimum."""
        return Task(
            name=name or self.name,
            env_factory=partial(_make, self.factory),
            observation_dim=int(self.features.shape[2]),
            action_dim=1,
            horizon=self.horizon,
            reward_min=0.0,
            reward_max=self.optimal_return(float("inf")),
            cost_max=float(self._most_cost),
            cost_limits=self.cost_limits,
            paper_cost_limit=self.cost_limits[0],
        )

    # -- exact values ----------------------------------------------------------------------------------------------

    @cached_property
    def _most_cost(self) -> int:
        return int(self.costs.max(axis=(1, 2)).sum())

    @cached_property
    def values(self) -> Floats:
        """[H + 1, X, B + 1]: the best return from each place with a whole budget left; -inf where no way is safe."""
        h, x, _ = self.rewards.shape
        budgets = np.arange(self._most_cost + 1)
        values = np.zeros((h + 1, x, len(budgets)))
        for t in reversed(range(h)):
            left = budgets - self.costs[t][..., None]  # [X, M, B]
            after = np.take_along_axis(values[t + 1][self.following[t]], np.maximum(left, 0), axis=2)
            values[t] = np.where(left >= 0, self.rewards[t][..., None] + after, -np.inf).max(axis=1)
        return values

    def optimal_return(self, cost_limit: float) -> float:
        """The best expected return over the random start when no episode may cost more than the limit."""
        return float(self.start @ np.where(self.start > 0, self.values[0, :, self._budget(cost_limit)], 0.0))

    def optimal_move(self, stage: int, place: int, budget: float) -> int:
        """The first step of a best safe way; the cheapest move where no way is safe any more."""
        t, b = stage, self._budget(budget)
        left = b - self.costs[t, place]
        after = self.values[t + 1][self.following[t, place], np.maximum(left, 0)]
        safe = np.where(left >= 0, self.rewards[t, place] + after, -np.inf)
        return int(np.argmax(safe) if np.isfinite(safe).any() else np.argmin(self.costs[t, place]))

    def policy_values(self, probabilities: Floats) -> tuple[Floats, Floats]:
        """Exact expected return and cost to go, [H + 1, X] each, of move probabilities [H, X, M]."""
        h, x, _ = self.rewards.shape
        returns, costs = np.zeros((h + 1, x)), np.zeros((h + 1, x))
        for t in reversed(range(h)):
            for values, step in ((returns, self.rewards[t]), (costs, self.costs[t])):
                values[t] = (probabilities[t] * (step + values[t + 1][self.following[t]])).sum(axis=1)
        return returns, costs

    def _budget(self, limit: float) -> int:
        return int(np.clip(limit, 0, self._most_cost))

    # -- logged episodes -------------------------------------------------------------------------------------------

    def dataset(self, episodes: int = 300, seed: int = 0) -> Trajectories:
        """Episodes of the behaviours in turn, with actions spread around the centres of their moves."""
        rng = np.random.default_rng([seed, 1])
        rows: dict[str, Any] = {k: [] for k in ("observations", "actions", "rewards", "costs", "final_observations")}
        for episode in range(episodes):
            choose = self.behaviours[episode % len(self.behaviours)](rng)
            place = int(rng.choice(len(self.start), p=self.start))
            for t in range(self.horizon):
                noise = np.clip(rng.normal(0, 0.3), -0.9, 0.9) / self.moves  # stays inside the band
                action = np.float32(self.centre(choose(place)) + noise)
                move = self.move_of(float(action))
                rows["observations"].append(self.features[t, place])
                rows["actions"].append([action])
                rows["rewards"].append(self.rewards[t, place, move])
                rows["costs"].append(self.costs[t, place, move])
                place = int(self.following[t, place, move])
            rows["final_observations"].append(self.features[self.horizon, place])
        timeouts = np.arange(1, episodes * self.horizon + 1) % self.horizon == 0
        return Trajectories.from_arrays(
            **rows, terminals=np.zeros(len(timeouts), bool), timeouts=timeouts, info={"source": self.name}
        )


class ToyEnv(gymnasium.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """A Toy as a Gymnasium environment."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, toy.features.shape[2:], np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.stage, self.place = 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.stage = 0
        self.place = int(self.np_random.choice(len(self.toy.start), p=self.toy.start))
        return self.toy.features[0, self.place].copy(), {}

    def step(
        self, action: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        toy, at = self.toy, (self.stage, self.place)
        move = toy.move_of(float(action[0]))
        self.stage, self.place = self.stage + 1, int(toy.following[(*at, move)])
        observation = toy.features[self.stage, self.place].copy()
        info = {"cost": float(toy.costs[(*at, move)])}
        return observation, float(toy.rewards[(*at, move)]), False, self.stage >= toy.horizon, info


class OraclePolicy:
    """The optimal safe policy of a toy, by its dynamic programme: what a learned policy is measured against."""

    limit_mode = "live"
    algorithm = "oracle"

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.observation_dim = int(toy.features.shape[2])

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        self.budgets = np.array(cost_limits, np.float64)
        self.stages = np.zeros(n, np.int64)

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        self.budgets[indices] = cost_limits
        self.stages[indices] = 0

    def act(self, observations: npt.NDArray[np.float32], active: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        actions = np.zeros((len(observations), 1), np.float32)
        self.active = active.copy()
        for i in np.flatnonzero(active):
            t = int(self.stages[i])
            place = int(np.abs(self.toy.features[t] - observations[i]).sum(axis=1).argmin())
            actions[i] = self.toy.centre(self.toy.optimal_move(t, place, self.budgets[i]))
        self.stages[active] += 1
        return actions

    def observe(self, rewards: npt.NDArray[np.float32], costs: npt.NDArray[np.float32]) -> None:  # noqa: ARG002
        self.budgets[self.active] -= costs[self.active]

    def diagnostics(self) -> dict[str, Floats]:
        return {}


def _make(factory: Callable[[], Toy]) -> ToyEnv:
    return factory().env()


def stitching(seed: int = 0) -> Toy:
    """The best safe way joins two halves that no logged episode joins.

        start ──┬── careful: safe ─────┐             ┌── careful: costly, poor ──┐
                ├── bold: costly ──────┴─ halfway ───┴── bold: safe, rewarding ──┴── end
                └── detour: safe, mediocre, passes no gate ──────────────────────── end

    Each half has two stretches with a gate before each. Logged are the careful driver (safe early, costly late), the
    bold one (costly early, rewarding late) and the detour; so every logged safe episode is a detour, worth about half
    of what careful stretches followed by bold ones earn. The careful way out of the start is only ever seen with a
    low return and a high cost: a model that picks actions by the episode's totals has no reason to take it. With a
    limit of a whole stretch's cost one of the early stretches can be driven boldly. Random per seed: the length of a
    stretch, the rewards, and which third of the action means which road; random per episode: the weather, which
    scales the rewards.
    """
    rng = np.random.default_rng([seed, 2])
    stretch = int(rng.integers(3, 6))
    h, halfway = 4 * stretch, 2 * stretch
    weather = np.array([0.9, 1.0, 1.1])
    poor, careful, bold_early = rng.uniform(0.05, 0.15), rng.uniform(0.4, 0.5), rng.uniform(0.55, 0.65)
    detour = rng.uniform(0.3, 0.4)
    band = rng.permutation(3)  # the move that means detour, careful, bold
    keep = rng.permutation(3)  # the move that holds the lane on each of them

    # Places: 0 detour, 1 careful, 2 bold, 3 gate; times the weather.
    following, rewards, costs = np.zeros((h, 12, 3), np.int64), np.zeros((h, 12, 3)), np.zeros((h, 12, 3), np.int64)
    for t in range(h):
        per_road = np.array([detour, careful, bold_early] if t < halfway else [detour, poor, 1.0])
        cost_of = np.array([0, 0, 1] if t < halfway else [0, 1, 0])
        for w, scale in enumerate(weather):
            for place in range(4):
                for move in range(3):
                    road = int(np.argmax(band == move)) if place == 3 else place
                    if place == 3 and road == 0 and t > 0:
                        road = 1  # the detour leaves at the start only
                    # Off the lane, half of the reward is lost; at a gate every road is entered cleanly.
                    share = 1.0 if place == 3 or move == keep[road] else 0.5
                    arrives = 3 if (t + 1) % stretch == 0 and road > 0 else road
                    at = (t, place + 4 * w, move)
                    following[at], rewards[at], costs[at] = (
                        arrives + 4 * w,
                        scale * share * per_road[road],
                        cost_of[road],
                    )

    start = np.zeros(12)
    start[[3, 7, 11]] = 1 / 3
    # Observed: the place, the stretch, the part of it that is done, the weather.
    features = np.zeros((h + 1, 12, 10), np.float32)
    for t, place in np.ndindex(h + 1, 12):
        features[t, place, [place % 4, 4 + min(t // stretch, 3)]] = 1.0
        features[t, place, 8] = t / stretch - min(t // stretch, 3)
        features[t, place, 9] = (weather[place // 4] - 1.0) * 5

    def driver(road: int) -> Behaviour:
        def episode(rng: np.random.Generator) -> Callable[[int], int]:
            def choose(place: int) -> int:
                if place % 4 == 3:
                    return int(band[road])
                return int(keep[road]) if rng.random() < 0.9 else int(rng.integers(3))

            return choose

        return episode

    limits = (float(stretch - 1), float(stretch))
    factory, drivers = partial(stitching, seed), (driver(0), driver(1), driver(2))
    return Toy(f"Stitching-{seed}", factory, following, rewards, costs, start, features, drivers, limits)


def tradeoff(seed: int = 0) -> Toy:
    """Faster earns more and costs more, with falling gains; the optimum rises smoothly with the limit.

    A car laps a ring of 12 places for 24 steps, from a random place. Three speeds earn 0.3, 0.7 and 1 times the gain
    of the place and cost 0, 1 and 3. The gain changes along the ring, so a budget is best spent where it is high. The
    logged drivers differ in how fast they like to go but look neither at the gain nor at a limit: for most limits the
    best logged episode spends its budget in the wrong places. Random per seed: the gains and the direction of the
    action.
    """
    rng = np.random.default_rng([seed, 3])
    h, x = 24, 12
    angle = 2 * np.pi * np.arange(x) / x
    gain = 1.0 + 0.6 * np.sin(angle + rng.uniform(0, 2 * np.pi)) + 0.25 * np.sin(2 * angle + rng.uniform(0, 2 * np.pi))
    speed = np.array([0, 1, 2]) if rng.random() < 0.5 else np.array([2, 1, 0])  # of each move
    following = np.broadcast_to(((np.arange(x) + 1) % x)[None, :, None], (h, x, 3)).copy()
    rewards = np.broadcast_to(gain[None, :, None] * np.array([0.3, 0.7, 1.0])[speed], (h, x, 3)).copy()
    costs = np.broadcast_to(np.array([0, 1, 3])[speed], (h, x, 3)).astype(np.int64)
    features = np.zeros((h + 1, x, 4), np.float32)
    features[..., 0], features[..., 1], features[..., 2] = np.sin(angle), np.cos(angle), gain - 1.0
    features[..., 3] = (np.arange(h + 1) / h)[:, None]

    def driver(rng: np.random.Generator) -> Callable[[int], int]:
        haste = rng.uniform(0, 1)
        shares = np.array([(1 - haste) ** 2, 2 * haste * (1 - haste), haste**2])
        return lambda _: int(np.argmax(speed == rng.choice(3, p=shares)))

    limits, anywhere = (6.0, 12.0, 24.0), np.full(x, 1 / x)
    factory = partial(tradeoff, seed)
    return Toy(f"Tradeoff-{seed}", factory, following, rewards, costs, anywhere, features, (driver,), limits)
