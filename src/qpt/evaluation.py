"""Run a policy in a simulator: all episodes in lock-step, one batched decision for all of them, one row an episode."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qpt.data.trajectories import Trajectories
from qpt.envs import one_per_process
from qpt.envs.vector import IDLE, RESET, STEP, EnvPool, Failure, portable
from qpt.episodes import Episodes, provenance
from qpt.errors import QptError
from qpt.tasks import Task, get_task

__all__ = ["CallablePolicy", "ConstantPolicy", "EpisodePolicy", "Episodes", "RandomPolicy", "evaluate"]

Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ATTEMPTS = 3  # how often an episode may take its worker down before the evaluation gives up
_log = logging.getLogger("qpt")


class EpisodePolicy(Protocol):
    """What `evaluate` asks of a policy: n rows, each in an episode of its own. Noise comes from the row's seed."""

    @property
    def limit_mode(self) -> str:
        """ "live": the limit is obeyed; "trained": it was fixed in training; "ignored": it plays no part."""

    @property
    def observation_dim(self) -> int | None:
        """The length of observations it takes; None: any."""

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:
        """Begin with n rows, each at the start of an episode."""

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:
        """The given rows begin a new episode."""

    def act(self, observations: Float32s, active: Flags) -> Float32s:
        """Actions [n, A] for observations [n, S]; rows that are not active hold zeros and are not used."""

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        """What the rows that were active in the last `act` earned."""

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        """Numbers [n] about each row's running episode, e.g. `fallback_share`."""


# -- policies without learning -------------------------------------------------------------------------------------


class CallablePolicy:
    """Any function of observations [n, S] that gives actions [n, A]; rows without an episode hold zeros."""

    limit_mode = "ignored"
    observation_dim = None

    def __init__(self, function: Callable[[Float32s], npt.ArrayLike], name: str | None = None) -> None:
        self.function = function
        self.algorithm = name or getattr(function, "__name__", "callable")

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:
        pass

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:
        pass

    def act(self, observations: Float32s, active: Flags) -> Float32s:  # noqa: ARG002
        return np.asarray(self.function(observations), np.float32)

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        pass

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}


def ConstantPolicy(action: npt.ArrayLike) -> CallablePolicy:
    """The same action at every step."""
    row = np.asarray(action, np.float32).reshape(1, -1)
    return CallablePolicy(lambda observations: np.repeat(row, len(observations), axis=0), "constant")


class RandomPolicy:
    """Uniform actions in [-1, 1], each episode from its own seed."""

    limit_mode = "ignored"
    observation_dim = None
    algorithm = "random"

    def __init__(self, action_dim: int) -> None:
        self.action_dim = action_dim

    def reset(self, n: int, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        self.rngs = [np.random.default_rng(seed) for seed in seeds.tolist()]

    def restart(self, indices: Ints, *, cost_limits: Floats, seeds: Ints) -> None:  # noqa: ARG002
        for i, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
            self.rngs[i] = np.random.default_rng(seed)

    def act(self, observations: Float32s, active: Flags) -> Float32s:  # noqa: ARG002
        actions = np.zeros((len(active), self.action_dim), np.float32)
        for i in np.flatnonzero(active).tolist():
            actions[i] = self.rngs[i].uniform(-1.0, 1.0, self.action_dim)
        return actions

    def observe(self, rewards: Float32s, costs: Float32s) -> None:
        pass

    def diagnostics(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}


# -- the evaluation ------------------------------------------------------------------------------------------------


def evaluate(
    policy: EpisodePolicy,
    task: Task | str,
    *,
    episodes: int = 20,
    cost_limits: Sequence[float] = (10.0,),
    seed: int = 0,
    workers: int | None = None,
    slots: int | None = None,
    progress: bool = False,
    record: bool = False,
    step_timeout: float = 120.0,
) -> Episodes:
    """Run `episodes` episodes at each cost limit and return one row for each.

    All episodes advance together and one `policy.act` of constant shape [slots, S] serves them. Episode e always runs
    in row e mod slots, its environment is seeded by (seed, number) alike for every limit, and its noise by (seed,
    limit, number): the rows depend neither on the number of workers nor on timing, bit for bit, as long as a row of
    the policy does not depend on what stands in the others. A worker that dies, hangs (`step_timeout` seconds for one
    step) or raises is replaced and its episodes are run again from their start. `workers=None` takes one process a
    core, or none where the task's factory cannot be sent to another process.
    """
    task = get_task(task) if isinstance(task, str) else task
    limits = np.asarray(cost_limits, np.float64).reshape(-1)
    _check(policy, task, episodes, limits, seed, workers, slots)
    total = episodes * len(limits)
    # Fixed numbers, so that results do not depend on the machine; 64 of Bullet's environments take 2 GB of memory.
    slots = min(total, slots or (8 if one_per_process(task) else 64))
    if workers is None:
        workers = min(_cores(), slots) if portable(task) else 0
    began = time.time()
    with EnvPool(task, slots, workers, step_timeout=step_timeout) as pool, _bar(progress, task, total) as show:
        run = _Run(policy, pool, episodes, limits, seed, record)
        while run.tick():
            show(run)
        show(run)
    number = np.tile(np.arange(episodes), len(limits))
    limit = np.repeat(limits, episodes)
    named = {"task": task.name, "algorithm": getattr(policy, "algorithm", type(policy).__name__)}
    named["checkpoint"] = str(getattr(policy, "checkpoint", None) or "")
    return Episodes(
        **{name: np.full(total, text) for name, text in named.items()},
        seed=np.full(total, seed, np.int64),
        cost_limit=limit,
        episode=number,
        returns=run.returns,
        costs=run.costs,
        lengths=run.lengths,
        ended_by=np.where(run.terminal, "terminal", "timeout"),
        fallback_share=run.fallback,
        normalized_return=np.array([task.normalized_return(float(r)) for r in run.returns]),
        normalized_cost=np.array(
            [task.normalized_cost(float(c), float(k)) for c, k in zip(run.costs, limit, strict=True)]
        ),
        provenance={
            **provenance(),
            "task": task.name,
            "seed": seed,
            "limit_mode": policy.limit_mode,
            "trained_limit": getattr(policy, "trained_limit", None),
            "surrogate_data": bool(getattr(getattr(policy, "spec", None), "surrogate", False)),  # never DSRL's own
            "workers": workers,
            "slots": slots,
            "seconds": round(time.time() - began, 3),
            "incidents": run.incidents,
        },
        trajectories=run.trajectories() if record else None,
    )


class _Run:
    """The state of one evaluation. Episode e has limit e // episodes, number e % episodes and row e % slots."""

    def __init__(
        self, policy: EpisodePolicy, pool: EnvPool, episodes: int, limits: Floats, seed: int, record: bool
    ) -> None:
        self.policy, self.pool, self.record = policy, pool, record
        self.total, n = episodes * len(limits), pool.sizes[0]
        self.limits = np.repeat(limits, episodes)  # [total], like the next two
        seeds = [episode_seeds(seed, k, i) for k in range(len(limits)) for i in range(episodes)]
        self.env_seeds, self.noise_seeds = np.array(seeds, np.int64).T.copy()
        self.returns, self.costs, self.fallback = (
            np.zeros(self.total),
            np.zeros(self.total),
            np.full(self.total, np.nan),
        )
        self.lengths, self.terminal = np.zeros(self.total, np.int64), np.zeros(self.total, bool)
        self.attempts = np.zeros(self.total, np.int64)
        self.ticks: list[tuple[Any, ...]] = []  # what was recorded
        self.spans = np.zeros((self.total, 2), np.int64)  # the recorded ticks of each episode
        self.incidents: list[str] = []
        self.finished = self.steps = 0
        self.done = np.zeros(self.total, bool)

        self.episode = np.arange(n)  # [n] of each row, running or next
        self.waiting = np.ones(n, bool)  # the row's episode has yet to begin
        self.starting = np.zeros(n, bool)
        self.running = np.zeros(n, bool)
        policy.reset(n, cost_limits=self.limits[:n].copy(), seeds=self.noise_seeds[:n].copy())
        self._schedule()

    def tick(self) -> bool:
        """One decision and step of every running episode, and the reset of those that begin; False if all are done."""
        shared, n = self.pool.arrays, len(self.episode)
        active, starting = self.running.copy(), self.starting.copy()
        if not (active.any() or starting.any()):
            return False
        observations = np.where(active[:, None], shared.observations, np.float32(0))
        actions = np.zeros(shared.actions.shape, np.float32)
        if active.any():
            actions = self._actions(observations, active)
        commands = np.full(n, IDLE, np.uint8)
        commands[starting], commands[active] = RESET, STEP
        failures = self.pool.exchange(commands, self.env_seeds[self.episode], actions)

        lost = np.zeros(n, bool)
        for failure in failures:
            lost |= self._lose(failure)
        stepped = active & ~lost
        if active.any():
            rewards, costs = np.where(stepped, shared.rewards, 0.0), np.where(stepped, shared.costs, 0.0)
            index = self.episode[stepped]
            self.returns[index] += rewards[stepped]
            self.costs[index] += costs[stepped]
            self.lengths[index] += 1
            self.steps += len(index)
            self.policy.observe(rewards.astype(np.float32), costs.astype(np.float32))
            if self.record:
                terminated = shared.terminated.copy()
                self.ticks.append((observations, actions, rewards, costs, terminated, shared.observations.copy()))
        ended = stepped & (shared.terminated | shared.truncated)
        if starting.any() or lost.any() or ended.any():
            self._turn(starting & ~lost, lost, np.flatnonzero(ended))
        return True

    def _actions(self, observations: Float32s, active: Flags) -> Float32s:
        actions = np.asarray(self.policy.act(observations, active), np.float32)
        name, shape = self.pool.task.name, self.pool.arrays.actions.shape
        if actions.shape != shape:
            raise QptError(
                f"the policy gives actions of shape {list(actions.shape)}, but {name} needs {list(shape)} here"
            )
        bad = active & ~np.isfinite(actions).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            raise QptError(
                f"the policy gave an action that is not finite, at step {self.lengths[self.episode[row]]} of an episode"
            )
        return np.clip(np.where(active[:, None], actions, np.float32(0)), np.float32(-1), np.float32(1))

    def _turn(self, started: Flags, lost: Flags, ended: Ints) -> None:
        """Rows whose episode has begun, was lost or is over."""
        shared = self.pool.arrays
        self.running |= started
        self.starting &= ~started
        self.spans[self.episode[started], 0] = len(self.ticks)
        if len(ended):
            index = self.episode[ended]
            self.terminal[index] = shared.terminated[ended]
            share = self.policy.diagnostics().get("fallback_share")
            if share is not None:
                self.fallback[index] = np.asarray(share)[ended]
            self.spans[index, 1] = len(self.ticks)
            self.done[index] = True
            self.finished += len(index)
            self.running[ended] = False
            self.episode[ended] += len(self.episode)
            more = ended[self.episode[ended] < self.total]
            self.waiting[more] = True
            self.episode[self.episode >= self.total] = 0  # a row that is done; its entry is not used again
            self._restart(more)
        self._restart(np.flatnonzero(lost))
        self._schedule()

    def _restart(self, rows: Ints) -> None:
        if len(rows):
            index = self.episode[rows]
            self.policy.restart(rows, cost_limits=self.limits[index], seeds=self.noise_seeds[index])

    def _schedule(self) -> None:
        """Rows that may begin: all that wait, or one of each block where its slots share one environment."""
        if not self.pool.one_env:
            self.starting |= self.waiting
            self.waiting[:] = False
            return
        for block in self.pool.blocks:
            part = slice(block.start, block.stop)
            if not (self.running[part] | self.starting[part]).any() and self.waiting[part].any():
                row = block.start + int(np.argmax(self.waiting[part]))
                self.waiting[row], self.starting[row] = False, True

    def _lose(self, failure: Failure) -> Flags:
        """Put the episodes of a replaced worker back to their start; gives up on one that brings it down repeatedly."""
        lost = np.zeros(len(self.episode), bool)
        lost[failure.slots.start : failure.slots.stop] = True
        lost &= self.running | self.starting
        row = failure.culprit if failure.culprit is not None else int(np.argmax(lost))
        index = self.episode[row]
        where = f"{self.pool.task.name}, environment seed {self.env_seeds[index]}, step {self.lengths[index]}"
        message = f"a simulator process {failure.reason}\n({where}; {int(lost.sum())} episodes are run again)"
        self.incidents.append(message)
        self.attempts[index] += 1
        if self.attempts[index] >= ATTEMPTS or len(self.incidents) >= ATTEMPTS + 20:
            raise QptError(
                f"a simulator process {failure.reason}\n({where}; given up after {self.attempts[index]} times)"
            )
        _log.warning(message)
        again = self.episode[lost]
        for values in (self.returns, self.costs, self.lengths):
            values[again] = 0
        self.running &= ~lost
        self.starting &= ~lost
        self.waiting |= lost
        return lost

    def trajectories(self) -> Trajectories:
        """The recorded episodes, in the order of the rows of the table."""
        parts: list[list[Any]] = [[], [], [], [], [], []]
        for e, (begin, end) in enumerate(self.spans.tolist()):
            row = e % len(self.episode)
            span = self.ticks[begin:end]
            for k in range(5):
                parts[k].extend(tick[k][row] for tick in span)
            parts[5].append(span[-1][5][row])
        timeouts = np.zeros(len(parts[2]), bool)
        timeouts[np.cumsum(self.lengths) - 1] = ~self.terminal
        observations, actions, rewards, costs, terminals, final = map(np.array, parts)
        info = {"source": f"evaluation in {self.pool.task.name}"}
        return Trajectories.from_arrays(
            observations, actions, rewards, costs, terminals, timeouts, final_observations=final, info=info
        )  # fmt: skip


def _check(
    policy: EpisodePolicy, task: Task, episodes: int, limits: Floats, seed: int, workers: int | None, slots: int | None
) -> None:
    if not task.has_simulator:
        raise QptError(
            f'task {task.name!r} has no simulator; give it an env_factory, or env = "module:function" in its TOML table'
        )
    if episodes < 1 or not len(limits):
        raise QptError("an evaluation needs at least one episode and one cost limit")
    if not (np.isfinite(limits) & (limits >= 0)).all():
        raise QptError(f"cost limits are finite and not negative; these are {limits.tolist()}")
    if seed < 0 or (workers or 0) < 0 or (slots is not None and slots < 1):
        raise QptError("the seed and the number of workers must not be negative, and slots must be at least 1")
    expected, found = policy.observation_dim, task.env_observation_dim
    if expected is not None and found is not None and expected != found:
        raise QptError(
            f"the policy takes observations of length {expected}, but the simulator of {task.name} gives {found}; "
            "evaluate it in the simulator that its data come from, or train on data of this one"
        )
    longest = getattr(getattr(policy, "spec", None), "horizon", None)
    if getattr(policy, "past_horizon", None) == "error" and longest and (task.horizon or 0) > longest:
        raise QptError(
            f"the policy was trained for episodes of {longest} steps, but {task.name} has {task.horizon}; "
            "evaluate it in its own task, or load it with load_policy(..., past_horizon='clamp')"
        )


def episode_seeds(seed: int, limit_index: int, number: int) -> tuple[int, int]:
    """The seeds of an episode's environment, alike for every limit, and of the policy's noise in it."""
    environment = np.random.SeedSequence((seed, 0, number)).generate_state(1, np.uint64)[0]
    noise = np.random.SeedSequence((seed, 1, limit_index, number)).generate_state(1, np.uint64)[0]
    return int(environment % np.uint64(2**31 - 1)), int(noise >> np.uint64(1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _bar(wanted: bool, task: Task, total: int) -> Iterator[Callable[[_Run], None]]:
    """A progress bar on stderr: episodes, steps/s, mean return and cost so far."""
    if not wanted:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(task.name, total=total, text="starting")
        began, last = time.perf_counter(), 0.0

        def show(run: _Run) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last < 0.1 and run.finished < total:
                return
            last = now
            text = f"{run.steps / (now - began):.0f} steps/s"
            if run.finished:
                text += f"  return {run.returns[run.done].mean():.1f}  cost {run.costs[run.done].mean():.1f}"
            bar.update(line, completed=run.finished, text=text)

        yield show
