"""PPO with a Lagrange multiplier, in plain numpy: for networks this small a step takes a quarter of torch's time.

One objective for reward and cost: A = (A_r - λ A_c) / (1 + λ), both advantages by GAE from their own critic; λ follows
the episodes' cost by a PID controller. The three networks (policy mean, return critic, cost critic) are stacked, so
that forward, backward and Adam each are a handful of calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qpt.algorithms.fields import check_fields
from qpt.behaviour import WEIGHTS, Actor

Floats = npt.NDArray[np.floating[Any]]
Float32s = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

ACTOR, RETURN, COST = 0, 1, 2  # places in the stack of networks
LOG_STD = (-2.5, 0.5)  # bounds, so that exploration neither dies nor drowns the mean


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of one run; many small updates beat few large ones."""

    batch: int = 2400  # environment steps an update, at least
    epochs: int = 16
    minibatch: int = 160
    learning_rate: float = 1e-3
    last_rate: float = 1.0  # the learning rate at the end of the run, as a share of the first; falls in a straight line
    hidden: int = 64
    gamma: float = 0.99
    gae: float = 0.95
    clip: float = 0.2
    kl_stop: float = 0.04  # an update ends when the policy has moved this far
    entropy: float = 0.0
    log_std: float = -0.5  # to begin with
    kp: float = 0.3
    ki: float = 0.1
    kd: float = 0.05
    multiplier: float = 0.5  # to begin with
    multiplier_max: float = 4.0
    rate: bool = False  # limit the cost a step (times the horizon): else a policy may learn to end episodes early

    def __post_init__(self) -> None:
        check_fields(
            self,
            **dict.fromkeys(("batch", "epochs", "minibatch", "hidden"), "at least 1"),
            **dict.fromkeys(("learning_rate", "clip", "kl_stop"), "above 0"),
            **dict.fromkeys(("last_rate", "entropy", "kp", "ki", "kd", "multiplier", "multiplier_max"), "at least 0"),
            gamma="from 0 to below 1",
            gae="from 0 to 1",
        )


# -- the multiplier ----------------------------------------------------------------------------------------------------


@dataclass
class Multiplier:
    """λ = clip(I + kp e + kd Δe) with I = clip(I + ki e), and e = (cost - limit) in units of cap / 4 + limit / 2."""

    integral: float
    previous: float = 0.0
    value: float = 0.0

    def update(self, cost: float, limit: float, cap: float, settings: Settings) -> float:
        error = min(max((cost - limit) / (0.25 * cap + 0.5 * limit), -1.0), 1.0)
        top = settings.multiplier_max
        self.integral = min(max(self.integral + settings.ki * error, 0.0), top)
        wish = self.integral + settings.kp * error + settings.kd * (error - self.previous)
        self.value, self.previous = min(max(wish, 0.0), top), error
        return self.value


# -- advantages --------------------------------------------------------------------------------------------------------


def gae(
    rewards: Floats, values: Floats, next_values: Floats, terminals: Flags, ends: Flags, gamma: float, decay: float
) -> npt.NDArray[np.float64]:
    """Generalised advantages of whole episodes, one after the other; after a timeout the future still counts."""
    delta = rewards.astype(np.float64) + gamma * np.where(terminals, 0.0, next_values) - values
    carried, advantage = 0.0, np.empty(len(delta))
    factors, deltas = np.where(ends, 0.0, gamma * decay).tolist(), delta.tolist()
    for t in range(len(deltas) - 1, -1, -1):
        carried = deltas[t] + factors[t] * carried
        advantage[t] = carried
    return advantage


def mixed_advantage(reward: Floats, cost: Floats, multiplier: float) -> Float32s:
    """(A_r - λ A_c) / (1 + λ), both of unit spread; the floor keeps noise in a costless batch from being blown up."""
    reward = (reward - reward.mean()) / (reward.std() + 1e-3)
    cost = (cost - cost.mean()) / max(float(cost.std()), 0.004)
    return ((reward - multiplier * cost) / (1.0 + multiplier)).astype(np.float32)


# -- networks ----------------------------------------------------------------------------------------------------------


def shapes(observation_dim: int, action_dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The parameters; critics use the first of the `action_dim` outputs."""
    s, h, a = observation_dim, hidden, action_dim
    layers = {"w1": (3, s, h), "b1": (3, 1, h), "w2": (3, h, h), "b2": (3, 1, h), "w3": (3, h, a), "b3": (3, 1, a)}
    return {**layers, "log_std": (a,)}


def views(flat: Floats, sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The parameters inside one flat vector."""
    parts, start = {}, 0
    for name, shape in sizes.items():
        stop = start + int(np.prod(shape))
        parts[name] = flat[start:stop].reshape(shape)
        start = stop
    return parts


def forward(p: dict[str, Any], x: Floats) -> tuple[Floats, Floats, Floats]:
    """Outputs [3, B, A] and both hidden layers for normalised observations [B, S]."""
    h1 = np.tanh(x @ p["w1"] + p["b1"])
    h2 = np.tanh(h1 @ p["w2"] + p["b2"])
    return h2 @ p["w3"] + p["b3"], h1, h2


def backward(p: dict[str, Any], g: dict[str, Any], x: Floats, h1: Floats, h2: Floats, d: Floats) -> None:
    """Write the gradients for d = dloss/doutputs [3, B, A] into `g`."""

    def back(w: Floats) -> Floats:
        return w.transpose(0, 2, 1)

    np.matmul(back(h2), d, out=g["w3"])
    d.sum(1, keepdims=True, out=g["b3"])
    d = (d @ back(p["w3"])) * (1.0 - h2 * h2)
    np.matmul(back(h1), d, out=g["w2"])
    d.sum(1, keepdims=True, out=g["b2"])
    d = (d @ back(p["w2"])) * (1.0 - h1 * h1)
    np.matmul(x.T, d, out=g["w1"])
    d.sum(1, keepdims=True, out=g["b1"])


def log_prob(actions: Floats, means: Floats, log_std: Floats) -> Floats:
    z = (actions - means) * np.exp(-log_std)
    result: Floats = -0.5 * (z * z).sum(-1) - log_std.sum() - 0.5 * np.log(2 * np.pi) * log_std.size
    return result


def loss_gradient(
    p: dict[str, Any], g: dict[str, Any], x: Floats, actions: Floats, old: Floats, advantage: Floats, targets: Floats,
    settings: Settings,
) -> tuple[float, float]:  # fmt: skip
    """The loss and its gradient (into `g`), and how far the policy is from the one that acted (KL).

    Clipped policy loss - entropy + half the mean squared errors of both critics; targets are [2, B].
    """
    out, h1, h2 = forward(p, x)
    n, log_std = len(x), p["log_std"]
    z = (actions - out[ACTOR]) * np.exp(-log_std)  # [B, A]
    difference = np.clip(log_prob(actions, out[ACTOR], log_std) - old, -10, 10)
    ratio = np.exp(difference)
    clipped = np.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    moves = ratio * advantage <= clipped * advantage  # where the clip holds, nothing pulls
    weight = np.where(moves, -ratio * advantage, 0.0).astype(x.dtype) / n  # dloss/dlog_prob
    error = out[1:, :, 0] - targets  # [2, B]
    d = np.zeros_like(out)
    d[ACTOR] = weight[:, None] * z * np.exp(-log_std)
    d[1:, :, 0] = error / n
    backward(p, g, x, h1, h2, d)
    g["log_std"][:] = (weight[:, None] * (z * z - 1.0)).sum(0) - settings.entropy
    policy = -np.minimum(ratio * advantage, clipped * advantage).mean() - settings.entropy * log_std.sum()
    return float(policy + 0.5 * (error * error).mean(1).sum()), float((ratio - 1.0 - difference).mean())


# -- the learner -------------------------------------------------------------------------------------------------------


@dataclass
class Spread:
    """Running mean and variance, in float64."""

    count: float
    mean: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]

    def add(self, values: Floats) -> None:
        n, mean = len(values), values.mean(0, dtype=np.float64)
        shift, total = mean - self.mean, self.count + n
        self.squares += values.var(0, dtype=np.float64) * n + shift * shift * self.count * n / total
        self.mean += shift * n / total
        self.count = total

    @property
    def std(self) -> npt.NDArray[np.float64]:
        return np.sqrt(self.squares / max(self.count, 1.0))


@dataclass
class Batch:
    """Whole episodes, flat, for one update."""

    observations: Float32s  # [N, S] raw
    actions: Float32s  # [N, A] as drawn, before clipping
    rewards: Floats  # [N]
    costs: Floats
    terminals: Flags
    ends: Flags  # terminal or timeout
    final_observations: Float32s  # [E, S]


@dataclass
class Learner:
    """All that a run has learned. Normalisation lives in here: what comes in and is recorded are raw observations."""

    settings: Settings
    observation_dim: int
    action_dim: int
    cost_scale: float  # of a discounted cost, for the critic
    multiplier: Multiplier = field(init=False)
    seen: Spread = field(init=False)
    returns: Spread = field(init=False)
    updates: int = 0
    pace: float = 1.0  # of the learning rate, at present

    def __post_init__(self) -> None:
        self.sizes = shapes(self.observation_dim, self.action_dim, self.settings.hidden)
        count = sum(int(np.prod(shape)) for shape in self.sizes.values())
        self.flat, self.gradient = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self.momentum, self.squares = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self.parameters, self.gradients = views(self.flat, self.sizes), views(self.gradient, self.sizes)
        self.multiplier = Multiplier(self.settings.multiplier, value=self.settings.multiplier)
        self.seen = Spread(1e-4, np.zeros(self.observation_dim), np.full(self.observation_dim, 1e-4))
        self.returns = Spread(1e-4, np.zeros(1), np.full(1, 1e-4))

    def initialise(self, rng: np.random.Generator) -> None:
        """Orthogonal weights; a small last layer lets the policy begin near zero."""
        for name, gain in (("w1", np.sqrt(2.0)), ("w2", np.sqrt(2.0)), ("w3", 1.0)):
            for place, weights in enumerate(self.parameters[name]):
                rows, columns = weights.shape
                q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
                q = q * np.sign(np.diag(r))
                weights[:] = (0.01 if name == "w3" and place == ACTOR else gain) * (q if rows >= columns else q.T)
        self.parameters["log_std"][:] = self.settings.log_std

    def normalised(self, observations: Floats) -> Float32s:
        scaled = (observations - self.seen.mean) / (self.seen.std + 1e-6)
        return np.clip(scaled, -10, 10).astype(np.float32)

    def actor(self) -> Actor:
        """The present policy, cheap to call."""
        p = {name: self.parameters[name][ACTOR] for name in WEIGHTS}
        inverse = (1.0 / (self.seen.std + 1e-6)).astype(np.float32)
        return Actor(p, self.seen.mean.astype(np.float32), inverse, np.exp(self.parameters["log_std"]))

    def update(
        self, batch: Batch, cost: float, limit: float, cap: float, rng: np.random.Generator, share: float = 0.0
    ) -> dict[str, float]:
        """Move the multiplier by the episodes' mean cost, then the networks; `share` of the run is over."""
        s, n = self.settings, len(batch.rewards)
        self.pace = 1.0 + (s.last_rate - 1.0) * min(share, 1.0)
        weight = self.multiplier.update(cost, limit, cap, s)
        x = self.normalised(batch.observations)
        out, _, _ = forward(self.parameters, x)
        final = forward(self.parameters, self.normalised(batch.final_observations))[0]
        old = log_prob(batch.actions, out[ACTOR], self.parameters["log_std"])
        self.returns.add(_discounted(batch.rewards, batch.ends, s.gamma)[:, None])
        scales = (float(self.returns.std[0]) + 1e-6, self.cost_scale)
        advantages, targets = [], np.empty((2, n), np.float32)
        for place, (values, scale) in enumerate(zip((batch.rewards, batch.costs), scales, strict=True)):
            value = out[1 + place, :, 0]
            following = np.append(value[1:], value[:1])
            following[batch.ends] = final[1 + place, :, 0]
            one = gae(values / scale, value, following, batch.terminals, batch.ends, s.gamma, s.gae)
            advantages.append(one)
            targets[place] = one + value
        advantage = mixed_advantage(advantages[0], advantages[1], weight)
        kl, epochs = self._fit(x, batch.actions, old, advantage, targets, rng)
        self.seen.add(batch.observations)
        return {"kl": kl, "epochs": float(epochs), "multiplier": weight}

    def _fit(
        self, x: Floats, actions: Floats, old: Floats, advantage: Floats, targets: Floats, rng: np.random.Generator
    ) -> tuple[float, int]:
        s, n, kl = self.settings, len(x), 0.0
        for epoch in range(s.epochs):
            order, kls = rng.permutation(n), []
            for start in range(0, n - s.minibatch // 2, s.minibatch):  # a short rest is left out
                rows = order[start : start + s.minibatch]
                kls.append(
                    loss_gradient(
                        self.parameters, self.gradients, x[rows], actions[rows], old[rows], advantage[rows],
                        targets[:, rows], s,
                    )[1]
                )  # fmt: skip
                self._adam()
            kl = float(np.mean(kls)) if kls else 0.0
            if kl > s.kl_stop:
                return kl, epoch + 1
        return kl, s.epochs

    def _adam(self) -> None:
        g, m, v = self.gradient, self.momentum, self.squares
        norm = float(np.sqrt(g @ g))
        if norm > 1.0:
            g *= np.float32(1.0 / norm)
        self.updates += 1
        m *= np.float32(0.9)
        m += np.float32(0.1) * g
        v *= np.float32(0.999)
        v += np.float32(0.001) * g * g
        step = self.pace * self.settings.learning_rate * np.sqrt(1 - 0.999**self.updates) / (1 - 0.9**self.updates)
        self.flat -= np.float32(step) * m / (np.sqrt(v) + np.float32(1e-8))
        np.clip(self.parameters["log_std"], *LOG_STD, out=self.parameters["log_std"])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All state, for a checkpoint."""
        m = self.multiplier
        return {
            "flat": self.flat, "momentum": self.momentum, "squares": self.squares,
            "seen_mean": self.seen.mean, "seen_squares": self.seen.squares,
            "returns_mean": self.returns.mean, "returns_squares": self.returns.squares,
            "scalars": np.array(
                [m.integral, m.previous, m.value, self.seen.count, self.returns.count, self.updates], np.float64
            ),
        }  # fmt: skip

    def load(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        own = self.tensors()
        for name in ("flat", "momentum", "squares", "seen_mean", "seen_squares", "returns_mean", "returns_squares"):
            own[name][:] = tensors[name]
        m = self.multiplier
        m.integral, m.previous, m.value, self.seen.count, self.returns.count, updates = tensors["scalars"].tolist()
        self.updates = int(updates)


def _discounted(values: Floats, ends: Flags, gamma: float) -> npt.NDArray[np.float64]:
    zeros = np.zeros(len(values))
    return gae(values, zeros, zeros, ends, ends, gamma, 1.0)
