"""The loop of an evaluation: every batch of episodes decides, steps and observes, at a pace of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qpt.data.trajectories import Trajectories
from qpt.envs.shared import IDLE, RESET, STEP, TERMINATED
from qpt.envs.vector import EnvPool, Failure
from qpt.errors import QptError
from qpt.evaluation.policies import EpisodePolicy, Float32s, Floats

ATTEMPTS = 3  # how often an episode may take its worker down before the evaluation gives up
_log = logging.getLogger("qpt")


class Run:
    """The state of one evaluation. Episode e has limit e // episodes, number e % episodes and row e % slots.

    Each group of the pool is a batch with a policy of its own. A batch keeps its sums by row; the table gets them when
    an episode ends. What changes when an episode begins, ends or is lost is done in `_turn`, so that the many steps
    between cost little: rows without an episode hold zeros everywhere and are told to idle.
    """

    def __init__(
        self,
        policies: Sequence[EpisodePolicy],
        pool: EnvPool,
        episodes: int,
        limits: Floats,
        seed: int,
        record: bool = False,
    ) -> None:
        self.pool, self.record = pool, record
        self.total, self.slots = episodes * len(limits), pool.sizes[0]
        self.limits = np.repeat(limits, episodes)  # [total], like all of the next
        seeds = [episode_seeds(seed, k, i) for k in range(len(limits)) for i in range(episodes)]
        self.env_seeds, self.noise_seeds = np.array(seeds, np.int64).T.copy()
        self.returns, self.costs = np.zeros(self.total), np.zeros(self.total)
        self.fallback = np.full(self.total, np.nan)
        self.lengths, self.attempts = np.zeros(self.total, np.int64), np.zeros(self.total, np.int64)
        self.terminal, self.done = np.zeros(self.total, bool), np.zeros(self.total, bool)
        self.spans = np.zeros((self.total, 2), np.int64)  # the recorded steps of each episode
        self.incidents: list[str] = []
        self.finished = self.steps = 0
        self.batches = [_Batch(g, policy, pool) for g, policy in enumerate(policies)]
        for batch in self.batches:
            index = batch.episode
            batch.policy.reset(len(index), cost_limits=self.limits[index], seeds=self.noise_seeds[index])
            self._turn(batch)
            self._begin(batch)

    def tick(self) -> bool:
        """Finish a step of the batch that is ready first, and begin its next one; False if all are done."""
        group, failures = self.pool.receive()
        for failure in failures:
            self._lose(failure)
        batch = self.batches[group]
        self._finish(batch)
        self._begin(batch)
        return any(batch.busy for batch in self.batches)

    def _begin(self, batch: _Batch) -> None:
        """Decide for the running episodes, and let the simulators begin."""
        if batch.busy:
            batch.decided = batch.active > 0
            if batch.decided:
                batch.seen = batch.observations.copy()
                actions = self._decide(batch)
                np.minimum(np.maximum(actions, batch.low), batch.high, out=batch.actions)
            self.pool.send(batch.group)

    def _decide(self, batch: _Batch) -> Float32s:
        actions = np.asarray(batch.policy.act(batch.seen, batch.running.copy()), np.float32)
        if actions.shape != batch.actions.shape:
            needed = f"{self.pool.task.name} needs {list(batch.actions.shape)} here"
            raise QptError(f"the policy gives actions of shape {list(actions.shape)}, but {needed}")
        if not math.isfinite(np.vdot(actions, actions)):  # a quick look, which large numbers fail as well
            bad = batch.running & ~np.isfinite(actions).all(axis=1)
            if bad.any():
                step = batch.length[np.argmax(bad)]
                raise QptError(f"the policy gave an action that is not finite, at step {step} of an episode")
        return actions

    def _finish(self, batch: _Batch) -> None:
        """Take in what came of the step."""
        if batch.decided:
            batch.gained += batch.rewards
            batch.spent += batch.costs
            batch.length += 1
            self.steps += batch.active
            batch.policy.observe(batch.rewards.astype(np.float32), batch.costs.astype(np.float32))
            if self.record:
                results = (batch.actions, batch.rewards, batch.costs, batch.ended == TERMINATED, batch.observations)
                batch.recorded.append((batch.seen, *(array.copy() for array in results)))
        if batch.starting or batch.lost or np.count_nonzero(batch.ended):
            self._turn(batch)

    def _turn(self, batch: _Batch) -> None:
        """Rows whose episode has begun, is over or was lost; then commands for them until the next turn.

        They are few, so that one by one is faster than all at once.
        """
        for row in batch.starting:
            batch.gained[row] = batch.spent[row] = batch.length[row] = 0
            self.spans[batch.episode[row], 0] = len(batch.recorded)
            batch.running[row], batch.commands[row] = True, STEP
        over = np.flatnonzero(batch.ended).tolist()
        if over:
            self._store(batch, over)
        free = sorted(over + batch.lost)
        for row in free:
            batch.running[row], batch.commands[row], batch.observations[row] = False, IDLE, 0
            batch.rewards[row] = batch.costs[row] = batch.ended[row] = 0
        batch.active += len(batch.starting) - len(over)
        batch.lost = []
        free = [row for row in free if batch.episode[row] < self.total]  # those with an episode to come
        if free:
            index = batch.episode[free]
            batch.policy.restart(np.array(free), cost_limits=self.limits[index], seeds=self.noise_seeds[index])
        batch.waiting += free
        self._choose_starts(batch)
        for row in batch.starting:
            batch.commands[row], batch.seeds[row] = RESET, self.env_seeds[batch.episode[row]]
        batch.busy = batch.active > 0 or bool(batch.starting)

    def _choose_starts(self, batch: _Batch) -> None:
        """Rows that begin next: all that wait, or one of each worker where its slots share one environment."""
        if not self.pool.one_env:
            batch.starting, batch.waiting = batch.waiting, []
            return
        batch.starting = []
        for parts in self.pool.parts:
            mine = [slot - batch.first for slot in parts[batch.group]]
            if not batch.running[mine].any():
                batch.starting += [row for row in mine if row in batch.waiting][:1]
        batch.waiting = [row for row in batch.waiting if row not in batch.starting]

    def _store(self, batch: _Batch, over: list[int]) -> None:
        """Put episodes that are over into the table."""
        share = batch.policy.diagnostics().get("fallback_share")
        for row in over:
            index = batch.episode[row]
            self.returns[index], self.costs[index] = batch.gained[row], batch.spent[row]
            self.lengths[index], self.terminal[index] = batch.length[row], batch.ended[row] == TERMINATED
            if share is not None:
                self.fallback[index] = share[row]
            self.spans[index, 1] = len(batch.recorded)
            self.done[index] = True
            batch.episode[row] += self.slots
        self.finished += len(over)

    def _lose(self, failure: Failure) -> None:
        """Put the episodes of a replaced worker back to their start; gives up on one that brings it down repeatedly.

        Batches that are being stepped meanwhile take notice when they finish.
        """
        lost = [
            (batch, row)
            for batch in self.batches
            for row in range(len(batch.episode))
            if batch.first + row in failure.slots and (batch.running[row] or row in batch.starting)
        ]
        if not lost:  # it had nothing to do
            return
        batch, row = next((at for at in lost if at[0].first + at[1] == failure.culprit), lost[0])
        index, step = batch.episode[row], batch.length[row] if batch.running[row] else 0
        where = f"{self.pool.task.name}, environment seed {self.env_seeds[index]}, step {step}"
        message = f"a simulator process {failure.reason}\n({where}; {len(lost)} episodes are run again)"
        self.incidents.append(message)
        self.attempts[index] += 1
        if self.attempts[index] >= ATTEMPTS or len(self.incidents) >= ATTEMPTS + 20:
            times = self.attempts[index]
            raise QptError(f"a simulator process {failure.reason}\n({where}; given up after {times} times)")
        _log.warning(message)
        for batch, row in lost:
            batch.active -= int(batch.running[row])
            batch.running[row] = False
            if row in batch.starting:
                batch.starting.remove(row)
            batch.lost.append(row)
            batch.rewards[row] = batch.costs[row] = batch.ended[row] = 0

    def trajectories(self) -> Trajectories:
        """The recorded episodes, in the order of the rows of the table."""
        parts: list[list[Any]] = [[], [], [], [], [], []]
        for e, (begin, end) in enumerate(self.spans.tolist()):
            batch = next(b for b in reversed(self.batches) if b.first <= e % self.slots)
            row, span = e % self.slots - batch.first, batch.recorded[begin:end]
            for k in range(5):
                parts[k].extend(step[k][row] for step in span)
            parts[5].append(span[-1][5][row])
        timeouts = np.zeros(len(parts[2]), bool)
        timeouts[np.cumsum(self.lengths) - 1] = ~self.terminal
        observations, actions, rewards, costs, terminals, final = map(np.array, parts)
        info = {"source": f"evaluation in {self.pool.task.name}"}
        return Trajectories.from_arrays(
            observations, actions, rewards, costs, terminals, timeouts, final_observations=final, info=info
        )  # fmt: skip


class _Batch:
    """The rows of one policy, and their part of what is shared with the simulators."""

    def __init__(self, group: int, policy: EpisodePolicy, pool: EnvPool) -> None:
        rows, shared = pool.groups[group], pool.arrays
        self.group, self.policy, self.first = group, policy, rows.start
        self.commands, self.seeds, self.actions = shared.commands[rows], shared.seeds[rows], shared.actions[rows]
        self.observations, self.rewards = shared.observations[rows], shared.rewards[rows]
        self.costs, self.ended = shared.costs[rows], shared.ended[rows]
        self.low, self.high = np.full_like(self.actions, -1), np.full_like(self.actions, 1)  # faster than two numbers
        n = rows.stop - rows.start
        self.episode = np.arange(rows.start, rows.stop)  # of each row, running or next
        self.running = np.zeros(n, bool)
        self.waiting = list(range(n))  # rows whose episode has yet to begin
        self.starting: list[int] = []  # rows that are being reset
        self.lost: list[int] = []  # rows whose episode was lost since the last turn
        self.gained, self.spent, self.length = np.zeros(n), np.zeros(n), np.zeros(n, np.int64)
        self.seen = np.zeros(self.observations.shape, np.float32)  # what the last decision was based on
        self.recorded: list[tuple[Any, ...]] = []
        self.active = 0  # rows that run
        self.decided = False  # some ran when the step began
        self.busy = False  # there is something to do


def episode_seeds(seed: int, limit_index: int, number: int) -> tuple[int, int]:
    """The seeds of an episode's environment, alike for every limit, and of the policy's noise in it."""
    environment = np.random.SeedSequence((seed, 0, number)).generate_state(1, np.uint64)[0]
    noise = np.random.SeedSequence((seed, 1, limit_index, number)).generate_state(1, np.uint64)[0]
    return int(environment % np.uint64(2**31 - 1)), int(noise >> np.uint64(1))
