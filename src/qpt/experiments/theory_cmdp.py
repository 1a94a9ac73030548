"""Small tabular CMDPs with binary rewards and costs, in which everything that the theorem names is computed exactly.

Dynamic programming in float64, no sampling. Policies are tables over (step, state, earned so far, spent so far): the
two sums make the conditioning functions consistent, as the paper's footnote proposes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qpt.errors import QptError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Conditioning = Literal["both", "reward", "cost"]


@dataclass(frozen=True)
class CMDP:
    """An episode of `horizon` steps; `outcomes[s, a, s', r, c]` is the probability of what follows an action."""

    outcomes: Floats  # [S, A, S, 2, 2]
    horizon: int
    start: int = 0

    def __post_init__(self) -> None:
        s, a = self.outcomes.shape[:2]
        if self.outcomes.shape != (s, a, s, 2, 2) or self.horizon < 1:
            raise QptError(f"outcomes have the shape [S, A, S, 2, 2], not {list(self.outcomes.shape)}")
        if (self.outcomes < 0).any() or not np.allclose(self.outcomes.sum((2, 3, 4)), 1, atol=1e-12):
            raise QptError("the outcomes of every state and action must be probabilities that add up to 1")

    @property
    def nominal(self) -> tuple[Ints, Ints, Ints]:
        """The functions T, R and C of the theorem: the likeliest outcome of each action, [S, A] each."""
        s, a = self.outcomes.shape[:2]
        return np.unravel_index(self.outcomes.reshape(s, a, -1).argmax(-1), (s, 2, 2))

    @property
    def epsilon(self) -> float:
        """The least ε for which near determinism holds."""
        s, a = self.outcomes.shape[:2]
        return float(1 - self.outcomes.reshape(s, a, -1).max(-1).min())


def near_deterministic(
    next_state: npt.ArrayLike,
    reward: npt.ArrayLike,
    cost: npt.ArrayLike,
    horizon: int,
    epsilon: float = 0.0,
    noise: Floats | None = None,
) -> CMDP:
    """A CMDP of nominal tables [S, A]; with probability ε something else happens: `noise`, or all else alike."""
    to, r, c = (np.asarray(x, np.int64) for x in (next_state, reward, cost))
    s, a = to.shape
    at = (*np.indices((s, a)), to, r, c)
    other = np.ones((s, a, s, 2, 2)) if noise is None else noise.copy()
    other[at] = 0
    outcomes = epsilon * other / other.sum((2, 3, 4), keepdims=True)
    outcomes[at] = 1 - epsilon
    return CMDP(outcomes, horizon)


# -- behaviour and what is conditioned on it ---------------------------------------------------------------------------


def return_distribution(cmdp: CMDP, behaviour: Floats) -> Floats:
    """P_β(reward to come = i, cost to come = j | step, s, a): [H, S, A, H + 1, H + 1]."""
    s, a = behaviour.shape
    n = cmdp.horizon + 1
    found = np.zeros((cmdp.horizon, s, a, n, n))
    ahead = np.zeros((s, n, n))  # of states, at the next step
    ahead[:, 0, 0] = 1
    for t in reversed(range(cmdp.horizon)):
        for r in (0, 1):
            for c in (0, 1):
                moved = np.zeros_like(ahead)
                moved[:, r:, c:] = ahead[:, : n - r, : n - c]
                found[t] += np.einsum("sax,xij->saij", cmdp.outcomes[..., r, c], moved)
        ahead = np.einsum("sa,saij->sij", behaviour, found[t])
    return found


def conditioned_policy(
    distribution: Floats, behaviour: Floats, return_target: int, cost_target: int, on: Conditioning = "both"
) -> Floats:
    """π_DT(a | s, targets left) ∝ β(a | s) P_β(targets left are met | s, a): [H, S, earned, spent, A].

    Where no continuation meets the targets, which happens after an unlikely outcome, it falls back to β.
    """
    horizon, s, a, n, _ = distribution.shape
    policy = np.empty((horizon, s, n, n, a))
    for earned in range(n):
        for spent in range(n):
            i, j = return_target - earned, cost_target - spent
            inside_r, inside_c = 0 <= i < n, 0 <= j < n
            if on == "both":
                met = distribution[..., i, j] if inside_r and inside_c else None
            elif on == "reward":
                met = distribution[..., i, :].sum(-1) if inside_r else None
            else:
                met = distribution[..., :, j].sum(-1) if inside_c else None
            weight = behaviour * met if met is not None else np.zeros((horizon, s, a))
            total = weight.sum(-1, keepdims=True)
            policy[:, :, earned, spent] = np.where(total > 0, weight / np.where(total > 0, total, 1), behaviour)
    return policy


# -- policies ----------------------------------------------------------------------------------------------------------


def _ahead(cmdp: CMDP, value: Floats) -> Floats:
    """E[value(s', earned + r, spent + c) | s, earned, spent, a]: [S, n, n, A]; value [S, n + 1, n + 1]."""
    n = cmdp.horizon + 1
    out = np.zeros((len(value), n, n, cmdp.outcomes.shape[1]))
    for r in (0, 1):
        for c in (0, 1):
            out += np.einsum("sax,xij->sija", cmdp.outcomes[..., r, c], value[:, r : r + n, c : c + n])
    return out


def _backward(cmdp: CMDP, policy: Floats, reward_weight: float, cost_weight: float) -> tuple[Floats, Floats, Floats]:
    """The tilted policy and its own Q^r and Q^c, from the last step to the first; weights of 0 leave `policy` as is."""
    n, s = cmdp.horizon + 1, cmdp.outcomes.shape[0]
    tilted, q_reward, q_cost = (np.empty_like(policy) for _ in range(3))
    reward = np.einsum("saxrc,r->sa", cmdp.outcomes, [0.0, 1.0])[:, None, None]
    cost = np.einsum("saxrc,c->sa", cmdp.outcomes, [0.0, 1.0])[:, None, None]
    value_r, value_c = np.zeros((s, n + 1, n + 1)), np.zeros((s, n + 1, n + 1))
    for t in reversed(range(cmdp.horizon)):
        q_reward[t], q_cost[t] = reward + _ahead(cmdp, value_r), cost + _ahead(cmdp, value_c)
        score = reward_weight * q_reward[t] - cost_weight * q_cost[t]
        score -= np.where(policy[t] > 0, score, -np.inf).max(-1, keepdims=True)
        weight = policy[t] * np.exp(np.minimum(score, 0))
        tilted[t] = weight / weight.sum(-1, keepdims=True)
        value_r[:, :n, :n] = (tilted[t] * q_reward[t]).sum(-1)
        value_c[:, :n, :n] = (tilted[t] * q_cost[t]).sum(-1)
    return tilted, q_reward, q_cost


def penalised_policy(cmdp: CMDP, policy: Floats, reward_weight: float, cost_weight: float) -> Floats:
    """π̂ ∝ π_DT exp(α1 Q^r - α2 Q^c) with the critics of π̂ itself.

    Our reading of the penalised objective for discrete actions: π̂ minimises KL(π̂ || π_DT) - α1 E Q^r + α2 E Q^c.
    """
    return _backward(cmdp, policy, reward_weight, cost_weight)[0]


@dataclass(frozen=True)
class Played:
    """What a policy brings: expected sums, and how often it takes a best action at each step."""

    reward: float
    cost: float
    best_reward: Floats  # [H] P^r_t, the chance of an action of largest R(s, .)
    least_cost: Floats  # [H] P^c_t, the chance of an action of smallest C(s, .)


def play(cmdp: CMDP, policy: Floats) -> Played:
    """Follow the policy forward from the start state."""
    n, s = cmdp.horizon + 1, cmdp.outcomes.shape[0]
    _, reward, cost = cmdp.nominal
    greedy, frugal = reward == reward.max(1, keepdims=True), cost == cost.min(1, keepdims=True)  # [S, A]
    visits = np.zeros((s, n, n))
    visits[cmdp.start, 0, 0] = 1
    best, least = np.empty(cmdp.horizon), np.empty(cmdp.horizon)
    for t in range(cmdp.horizon):
        taken = visits[..., None] * policy[t]  # [S, n, n, A]
        best[t], least[t] = np.einsum("sija,sa->", taken, greedy), np.einsum("sija,sa->", taken, frugal)
        visits = np.zeros((s, n, n))
        for r in (0, 1):
            for c in (0, 1):
                flow = np.einsum("sija,sax->xij", taken, cmdp.outcomes[..., r, c])
                visits[:, r:, c:] += flow[:, : n - r, : n - c]
    sums = np.arange(n)
    total = visits.sum(0)
    return Played(float(total.sum(1) @ sums), float(total.sum(0) @ sums), best, least)


def best_values(cmdp: CMDP, nominal: bool = False) -> tuple[float, float]:
    """The largest expected reward and the smallest expected cost of any policy; `nominal`: as if ε were 0."""
    to, reward, cost = cmdp.nominal
    outcomes = near_deterministic(to, reward, cost, cmdp.horizon).outcomes if nominal else cmdp.outcomes
    most, least = np.zeros(len(outcomes)), np.zeros(len(outcomes))
    for _ in range(cmdp.horizon):
        most = (np.einsum("saxrc,r->sa", outcomes, [0.0, 1.0]) + outcomes.sum((3, 4)) @ most).max(1)
        least = (np.einsum("saxrc,c->sa", outcomes, [0.0, 1.0]) + outcomes.sum((3, 4)) @ least).min(1)
    return float(most[cmdp.start]), float(least[cmdp.start])


# -- the theorem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Everything the theorem speaks about: a CMDP, a behaviour, targets, and the weights of the penalty."""

    cmdp: CMDP
    behaviour: Floats  # [S, A]
    return_target: int  # f^r at the start
    cost_target: int  # f^c at the start
    reward_weight: float = 1.0  # α1
    cost_weight: float = 1.0  # α2
    on: Conditioning = "both"


@dataclass(frozen=True)
class Exact:
    """The theorem's quantities. `gap`: realised; `lemma`, `bound`: as printed; `repaired`: see docs/theory.md."""

    epsilon: float
    alpha_reward: float
    alpha_cost: float
    alpha_joint: float
    sigma_reward: float
    sigma_cost: float
    best_reward: float
    least_cost: float
    plain: Played
    penalised: Played
    horizon: int

    def bound(self, which: Literal["reward", "cost"]) -> float:
        """ε (1 / α_f + 3) H² - H σ, as printed."""
        sigma = self.sigma_reward if which == "reward" else self.sigma_cost
        return self.lemma(which) - self.horizon * sigma

    def lemma(self, which: Literal["reward", "cost"]) -> float:
        """ε (1 / α_f + 3) H², the bound for π_DT as printed."""
        return self._spread(self.alpha_reward if which == "reward" else self.alpha_cost)

    def repaired(self, which: Literal["reward", "cost"]) -> float:
        """The bound with the coverage of both targets together, and 2 ε H for outcomes that are not nominal."""
        sigma = self.sigma_reward if which == "reward" else self.sigma_cost
        return self._spread(self.alpha_joint) + 2 * self.epsilon * self.horizon - self.horizon * sigma

    def gap(self, which: Literal["reward", "cost"], penalised: bool = True) -> float:
        """What a policy loses to the best one for that signal alone."""
        played = self.penalised if penalised else self.plain
        return self.best_reward - played.reward if which == "reward" else played.cost - self.least_cost

    def _spread(self, alpha: float) -> float:
        if self.epsilon == 0:
            return 0.0 if alpha > 0 else float("nan")
        return self.epsilon * (1 / alpha + 3) * self.horizon**2 if alpha > 0 else float("inf")


def solve(problem: Problem) -> Exact:
    """All quantities of the theorem for a problem, exactly."""
    p, cmdp = problem, problem.cmdp
    distribution = return_distribution(cmdp, p.behaviour)
    first = np.einsum("a,aij->ij", p.behaviour[cmdp.start], distribution[0, cmdp.start])
    plain = conditioned_policy(distribution, p.behaviour, p.return_target, p.cost_target, p.on)
    penalised = penalised_policy(cmdp, plain, p.reward_weight, p.cost_weight)
    before, after = play(cmdp, plain), play(cmdp, penalised)
    most, least = best_values(cmdp)
    return Exact(
        cmdp.epsilon,
        float(first[p.return_target].sum()),
        float(first[:, p.cost_target].sum()),
        float(first[p.return_target, p.cost_target]),
        float((after.best_reward - before.best_reward).min()),
        float((after.least_cost - before.least_cost).min()),
        most,
        least,
        before,
        after,
        cmdp.horizon,
    )
