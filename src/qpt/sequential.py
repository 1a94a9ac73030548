"""A sequential test of "at most `risk` of all episodes violate": exact, and valid whenever one looks.

The test is sequential: it may look after every episode and stop when it is sure. For any rate q below r, the product
of likelihood ratios (q/r)^k ((1-q)/(1-r))^(n-k) after k violations in n episodes is a supermartingale when the true
rate is r or more, and so is an average over several q. By Ville's inequality it ever reaches 1/α with a probability of
at most α; when it does, rates of r and above are ruled out. The mirror image rules out rates of r and below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Verdict = Literal["accepted", "rejected", "undecided"]

# The alternatives that the evidence averages over, denser towards 0. Any choice is valid; this one needs few episodes.
SHARES = ((np.arange(50) + 0.5) / 50) ** 2


def log_evidence_below(violations: int, n: int, rate: float) -> float:
    """Log of the evidence against a true rate of `rate` or more; rises with `rate`."""
    return _log_evidence(violations, n, rate, SHARES)


def log_evidence_above(violations: int, n: int, rate: float) -> float:
    """Log of the evidence against a true rate of `rate` or less; falls with `rate`."""
    return _log_evidence(n - violations, n, 1 - rate, 1 - SHARES)


def _log_evidence(k: int, n: int, rate: float, shares: Floats) -> float:
    # The alternatives are q = share * rate. Scaled with the rate, the evidence is monotone in it.
    terms = k * np.log(shares) + (n - k) * (np.log1p(-rate * shares) - math.log1p(-rate))
    return float(np.logaddexp.reduce(terms)) - math.log(len(shares))


def bounds(violations: int, n: int, confidence: float) -> tuple[float, float]:
    """Lower and upper bound of the rate after n episodes: each holds at all n at once with this confidence."""
    if n == 0:
        return 0.0, 1.0
    enough = -math.log1p(-confidence)
    high = 1.0 if violations == n else _cross(lambda r: log_evidence_below(violations, n, r) - enough)
    low = 0.0 if violations == 0 else _cross(lambda r: enough - log_evidence_above(violations, n, r))
    return low, high


def _cross(rising: Callable[[float], float]) -> float:
    low, high = 1e-12, 1 - 1e-12
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


@functools.lru_cache(maxsize=32)
def boundaries(risk: float, confidence: float, max_episodes: int) -> tuple[Ints, Ints]:
    """[N + 1] each: after n episodes, accept at `accept[n]` violations or fewer, reject at `reject[n]` or more.

    -1 and n + 1 stand where no number of violations would do.
    """
    enough = -math.log1p(-confidence)
    n = np.arange(max_episodes + 1)
    # One more episode moves either boundary by at most one violation, so it is followed and not searched for.
    accept, spared = np.full(len(n), -1), np.full(len(n), -1)
    for line, rate, shares in ((accept, risk, SHARES), (spared, 1 - risk, 1 - SHARES)):
        for count in range(1, len(n)):
            k = int(line[count - 1])
            line[count] = k + (k + 1 <= count and _log_evidence(k + 1, count, rate, shares) >= enough)
    reject = n - spared
    for line in (accept, reject):
        line.flags.writeable = False  # they are kept
    return accept, reject


def decide(violated: npt.ArrayLike, risk: float, confidence: float) -> tuple[Verdict, int]:
    """The verdict on a sequence of episodes, and the number of them that it took (all, where it is undecided)."""
    flags = np.asarray(violated, bool)
    accept, reject = boundaries(risk, confidence, _round_up(len(flags)))
    counts = np.cumsum(flags)
    accepts, rejects = counts <= accept[1 : len(flags) + 1], counts >= reject[1 : len(flags) + 1]
    decided = accepts | rejects
    if not decided.any():
        return "undecided", len(flags)
    first = int(np.argmax(decided))
    return "accepted" if accepts[first] else "rejected", first + 1


def _round_up(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()  # few different lengths, so that `boundaries` finds them again


# -- how many episodes it will take --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What the test will do where the true rate of violations is `rate`: exact, not simulated."""

    rate: float
    accepted: float  # probabilities
    rejected: float
    undecided: float
    mean: float  # episodes, with max_episodes where it is undecided
    median: int
    most: int  # enough in 9 of 10 cases


def foretell(rate: float, risk: float, confidence: float, max_episodes: int = 2000) -> Forecast:
    """Follow the distribution of the number of violations, episode by episode, until it has left the boundaries."""
    accept, reject = boundaries(risk, confidence, max_episodes)
    alive = np.zeros(int(reject.max()) + 2)  # by number of violations, where nothing is decided yet
    alive[0] = 1.0
    accepted, rejected = np.zeros(max_episodes + 1), np.zeros(max_episodes + 1)
    for n in range(1, max_episodes + 1):
        alive[1:] = alive[1:] * (1 - rate) + alive[:-1] * rate
        alive[0] *= 1 - rate
        low, high = int(accept[n]) + 1, int(reject[n])
        accepted[n], rejected[n] = alive[:low].sum(), alive[high:].sum()
        alive[:low] = alive[high:] = 0.0
    ends = accepted + rejected
    ends[-1] += alive.sum()
    reached = np.cumsum(ends)
    median, most = (int(np.argmax(reached >= share - 1e-12)) for share in (0.5, 0.9))
    mean = float(ends @ np.arange(max_episodes + 1))
    return Forecast(rate, float(accepted.sum()), float(rejected.sum()), float(alive.sum()), mean, median, most)


def least_episodes(risk: float, confidence: float, max_episodes: int = 100_000) -> int | None:
    """How many episodes without any violation are accepted; None where more than `max_episodes` would be."""
    enough = -math.log1p(-confidence)
    if log_evidence_below(0, max_episodes, risk) < enough:
        return None
    low, high = 0, max_episodes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if log_evidence_below(0, middle, risk) >= enough else (middle, high)
    return high
