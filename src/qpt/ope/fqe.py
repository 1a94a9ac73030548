"""Fitted Q evaluation of return and cost: learned features, exact least squares, backward in time.

Small networks learn from the log alone what follows an action: the next change of the observation, whether the episode
ends, and rewards and costs summed over several spans. Their last hidden layers, with the plain inputs, are the features
φ(x, a). A policy's values are then linear in them and fitted from the last stage to the first, undiscounted,

    Q_t = argmin Σ (r + V_{t+1}(x') - φ·w)² + ridge,    V_{t+1}(x') = φ(x', π(x'))·w_{t+1},    V = 0 after a terminal,

for the reward and the cost at once. Each fit uses the steps around its stage. Every member of the ensemble has its own
resample of the episodes and its own network; in turn they differ in activation and in how they see the cost spent so
far, on which a policy with a limit depends but the world does not: inside the network, beside it, or not at all. Their
spread is the interval. The networks and the Gram matrices do not depend on the policy, so that judging one more policy
takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qpt.data.trajectories import Trajectories
from qpt.errors import QptError
from qpt.nets.mlp import StackedMLP
from qpt.ope.decisions import before

Floats = npt.NDArray[np.float64]
ACTIVATIONS = ("mish", "tanh", "relu")  # of members in turn
SPANS = (1, 5, 20, 60)  # steps over which rewards and costs are summed, besides the rest of the episode
KEEP = 2**29  # bytes of features that may be kept from one policy to the next
Show = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class FitConfig:
    """Choices of the evaluation; none was found to matter much on the data sets of docs/judge.md."""

    members: int = 9  # fits of the ensemble, each on a resample of the episodes
    width: int = 128  # of the networks' hidden layers
    layers: int = 2
    steps: int = 3000  # gradient steps of the networks
    batch: int = 256
    lr: float = 2e-3
    ridge: float = 1e-4  # per step of data, on features of unit variance
    block: int = 10  # stages that share their data
    margin: int = 5  # steps before and after a block that count too
    slack: float = 0.3  # values are kept within the logged ones of their stage, widened by this share of the range
    max_steps: int = 200_000  # larger logs are thinned by whole episodes

    def check(self) -> None:
        if self.members < 2 or min(self.width, self.layers, self.steps, self.batch, self.block) < 1:
            raise QptError("an ensemble has at least 2 members, and sizes and steps are at least 1")


@dataclass
class _Block:
    """The steps whose data serve one block of stages, for one member."""

    rows: Tensor  # [n]
    weights: Tensor  # [n] how often the step's episode was drawn; 0 where nothing is known of what follows
    factor: Tensor  # [D, D] Cholesky factor of the Gram matrix


class Fits:
    """The part of the evaluation that is the same for all policies: features and Gram matrices of one log."""

    def __init__(
        self,
        data: Trajectories,
        config: FitConfig,
        *,
        seed: int = 0,
        device: str = "cpu",
        show: Show | None = None,
    ) -> None:
        config.check()
        self.data, self.config, self.device = data, config, torch.device(device)
        self.horizon = int(data.lengths.max())
        rng = np.random.default_rng([seed, 11])
        self.counts = np.stack(
            [np.bincount(rng.integers(len(data), size=len(data)), minlength=len(data)) for _ in range(config.members)]
        )  # [E, episodes]
        self._inputs()
        self.groups = self._networks(seed, show or (lambda *_: None))
        ends = np.zeros(data.steps, bool)
        ends[data.offsets[1:] - 1] = True
        self.terminal = self._tensor(data.terminals)
        self.known = self._tensor(~ends | data.terminals)  # the step's successor is logged, or there is none
        self.step = self._tensor(data.step_in_episode)
        self.outcomes = self._tensor(np.stack([data.rewards, data.costs], 1))  # [N, 2]
        self.bounds = self._bounds()
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        kept = values.astype(np.float32) if values.dtype.kind == "f" else values.copy()
        return torch.from_numpy(np.ascontiguousarray(kept)).to(self.device)

    # -- inputs and features -------------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        """What a value may depend on: the observation, the time, the cost spent and the return earned."""
        data = self.data
        earned, spent = before(data)
        clock = data.step_in_episode / max(self.horizon, 1)
        raw = np.column_stack([data.observations, clock, spent]).astype(np.float64)
        mean, std = raw.mean(0), raw.std(0)
        inputs = np.clip((raw - mean) / np.where(std > 1e-6, std, 1.0), -6, 6)  # [N, S + 2]
        gain = (earned - earned.mean()) / (earned.std() or 1.0)
        cost = inputs[:, -1]
        apart = np.column_stack([gain, gain**2, gain * clock, cost, cost**2, cost * clock])  # [N, 6] beside the network
        blind = inputs.copy()
        blind[:, -1] = 0
        self.seen = [  # what the networks see and what stands beside them, by the kind of member
            (self._tensor(inputs), self._tensor(apart)),
            (self._tensor(blind), self._tensor(apart)),
            (self._tensor(blind), self._tensor(np.zeros_like(apart))),
        ]
        self.centre, self.scale = data.actions.mean(0), np.maximum(data.actions.std(0), 1e-3)

    def actions(self, actions: npt.NDArray[np.float32]) -> Tensor:
        return self._tensor((actions - self.centre) / self.scale)

    def _targets(self) -> Tensor:
        """What the networks learn to foretell, [N, S + 11], standardised."""
        data = self.data
        change = data.next_observations() - data.observations
        ends = data.offsets[1:][data.episode_of_step]
        sums = []
        for values in (data.rewards, data.costs):
            total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
            at = np.arange(data.steps)
            sums += [total[np.minimum(at + span, ends)] - total[at] for span in (*SPANS, data.steps)]
        raw = np.column_stack([change, self.data.terminals, *sums])
        std = raw.std(0)
        return self._tensor((raw - raw.mean(0)) / np.where(std > 1e-6, std, 1.0))

    def _networks(self, seed: int, show: Show) -> list[tuple[StackedMLP, list[int]]]:
        """One stack of networks an activation, and the members it serves."""
        c, data = self.config, self.data
        targets, actions = self._targets(), self.actions(data.actions)
        rng = np.random.default_rng([seed, 12])
        chances = self.counts / self.counts.sum(1, keepdims=True)
        lengths, first = data.lengths, data.offsets[:-1]
        groups = []
        kinds = len(ACTIVATIONS)
        for kind, name in enumerate(ACTIVATIONS[: c.members]):
            members = list(range(kind, c.members, kinds))
            logged = torch.cat([self.seen[kind][0], actions], 1)
            with torch.random.fork_rng(devices=[]):  # weights by our seed; the caller's stream is left alone
                torch.manual_seed(seed * kinds + kind)
                sizes = [logged.shape[1], *[c.width] * c.layers, targets.shape[1]]
                net = StackedMLP(len(members), sizes, name).to(self.device)
            optimizer = torch.optim.AdamW(net.parameters(), c.lr, weight_decay=1e-3)
            # Episodes by their length, so that every step is as likely as any other.
            weight = chances[members] * lengths
            cumulated = np.cumsum(weight / weight.sum(1, keepdims=True), axis=1)
            for step in range(c.steps):
                for group in optimizer.param_groups:
                    group["lr"] = c.lr * (1 - step / c.steps) + 1e-5
                drawn = rng.random((len(members), c.batch))
                episode = np.stack([np.searchsorted(row, u) for row, u in zip(cumulated, drawn, strict=True)])
                episode = np.minimum(episode, len(lengths) - 1)
                rows = first[episode] + (rng.random(drawn.shape) * lengths[episode]).astype(np.int64)
                index = torch.from_numpy(rows).to(self.device)
                loss = nn.functional.huber_loss(net.each(logged[index]), targets[index], reduction="none")
                optimizer.zero_grad(set_to_none=True)
                loss.mean((1, 2)).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if step % 50 == 0 or step == c.steps - 1:
                    show("learning features", kind * c.steps + step + 1, min(kinds, c.members) * c.steps)
            groups.append((net.requires_grad_(False), members))
        return groups

    def features(self, member: int, actions: Tensor, chunk: int = 4096) -> Tensor:
        """[N, D]: φ at every logged step with the given actions; the first column is 1."""
        kind = member % len(ACTIVATIONS)
        (net, members), (inputs, apart) = self.groups[kind], self.seen[kind]
        place = members.index(member)
        layers = [(w[place], b[place, 0]) for w, b in zip(net.weights, net.biases, strict=True)][:-1]
        parts = []
        for first in range(0, len(actions), chunk):
            rows = slice(first, first + chunk)
            plain = torch.cat([inputs[rows], actions[rows]], 1)
            hidden = plain
            for weight, bias in layers:
                hidden = net.activation(torch.addmm(bias, hidden, weight))
            parts.append(torch.cat([torch.ones(len(plain), 1, device=self.device), plain, apart[rows], hidden], 1))
        return torch.cat(parts)

    # -- the backward fit ----------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Lowest and highest value at each stage, [H + 1, 2]: the logged ones with some slack; no cost below 0."""
        data, h = self.data, self.horizon
        to_go = np.stack([data.returns_to_go, data.costs_to_go], 1).astype(np.float64)
        low, high = np.full((h + 1, 2), np.inf), np.full((h + 1, 2), -np.inf)
        stage = np.minimum(data.step_in_episode, h)
        np.minimum.at(low, stage, to_go)
        np.maximum.at(high, stage, to_go)
        for t in reversed(range(h)):  # a stage that nobody reached takes the bounds of the next
            if np.isinf(low[t, 0]):
                low[t], high[t] = low[t + 1], high[t + 1]
        low, high = np.where(np.isinf(low), 0.0, low), np.where(np.isinf(high), 0.0, high)
        slack = self.config.slack * (high - low)
        low, high = low - slack, high + slack
        low[:, 1] = 0.0
        return self._tensor(low), self._tensor(high)

    def _block(self, member: int, stage: int, features: Tensor) -> _Block:
        """The data of a stage and their Gram matrix; the last stage stands alone, for nothing follows it."""
        c = self.config
        final = stage == self.horizon - 1
        number = -1 if final else stage // c.block
        if (member, number) in self.blocks:
            return self.blocks[member, number]
        counts = self._tensor(self.counts[member].astype(np.float32)[self.data.episode_of_step])
        low, high = (stage // c.block) * c.block - c.margin, (stage // c.block + 1) * c.block + c.margin
        drawn = (counts > 0) & (self.known | final)
        while True:  # more steps where few episodes last as long as this
            rows = torch.nonzero(drawn & (self.step >= low) & (self.step < high))[:, 0]
            if len(rows) >= 3 * features.shape[1] or (low <= 0 and high >= self.horizon):
                break
            low, high = low - c.block, high + c.block
        if not len(rows):
            raise QptError(
                "a resample of the log holds no step whose successor is known; give more and longer episodes"
            )
        part, weights = features[rows].double(), counts[rows]
        gram = (part * weights[:, None]).T @ part
        gram.diagonal()[1:] += c.ridge * weights.sum()
        gram.diagonal().add_(1e-9 * gram.diagonal().mean())
        self.blocks[member, number] = _Block(rows, weights, torch.linalg.cholesky(gram))
        return self.blocks[member, number]

    def values(self, actions: npt.NDArray[np.float32], show: Show | None = None) -> Floats:
        """Expected return and cost of an episode by each member, [E, 2], for a policy with these actions [N, A]."""
        chosen = self.actions(actions)
        starts = torch.from_numpy(self.data.offsets[:-1].copy()).to(self.device)
        results = []
        for member in range(self.config.members):
            here, mean, std = self._logged(member)
            there = (self.features(member, chosen) - mean) / std
            weights = self._backward(member, here, there)
            drawn = self._tensor(self.counts[member].astype(np.float32))
            start = self._kept(there[starts] @ weights, 0)  # [episodes, 2]
            results.append((start * drawn[:, None]).sum(0) / drawn.sum())
            if show is not None:
                show("fitting", member + 1, self.config.members)
        return torch.stack(results).double().cpu().numpy()

    def _logged(self, member: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features of the logged steps, standardised, with their mean and deviation; kept where memory allows."""
        if member in self.kept:
            return self.kept[member]
        here = self.features(member, self.actions(self.data.actions))
        mean, std = here.mean(0), here.std(0)
        mean[0], std[0] = 0.0, 1.0
        std = torch.where(std > 1e-4, std, 1.0)
        found = (here - mean) / std, mean, std
        if here.nelement() * here.element_size() * self.config.members < KEEP:
            self.kept[member] = found
        return found

    def _backward(self, member: int, here: Tensor, there: Tensor) -> Tensor:
        """The weights of the first stage, [D, 2]."""
        weights, held = torch.zeros(here.shape[1], 2, device=self.device), None
        for stage in reversed(range(self.horizon)):
            block = self._block(member, stage, here)
            if block is not held:
                held = block
                part = here[block.rows] * block.weights[:, None]
                following = there[(block.rows + 1).clamp(max=len(there) - 1)]
                goes_on = ~self.terminal[block.rows][:, None]
                outcomes = self.outcomes[block.rows]
            target = outcomes
            if stage < self.horizon - 1:
                target = outcomes + goes_on * self._kept(following @ weights, stage + 1)
            weights = torch.cholesky_solve((part.T @ target).double(), block.factor).float()
        return weights

    def _kept(self, values: Tensor, stage: int) -> Tensor:
        return torch.minimum(torch.maximum(values, self.bounds[0][stage]), self.bounds[1][stage])


def thin(data: Trajectories, max_steps: int, seed: int) -> Trajectories:
    """At most about `max_steps` steps, by whole episodes drawn at random."""
    if data.steps <= max_steps:
        return data
    order = np.random.default_rng([seed, 13]).permutation(len(data))
    count = max(int(np.searchsorted(np.cumsum(data.lengths[order]), max_steps)), 2)
    return data.select(np.sort(order[:count]))


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t quantile √ν tan θ: the density of the angle is cos^(ν-1) θ, by Simpson's rule and bisection."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)

    def below(angle: float, pieces: int = 400) -> float:
        density = np.cos(np.linspace(0.0, angle, pieces + 1)) ** (freedom - 1)
        weights = np.where(np.arange(pieces + 1) % 2 == 1, 4.0, 2.0)
        weights[[0, -1]] = 1.0
        return 0.5 + math.exp(log_scale) * float(density @ weights) * angle / pieces / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
