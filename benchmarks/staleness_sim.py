"""A rollouter and a trainer in simulated time: real admission, invented lengths. Pure; the same seed gives the same result.

`num_slots` sequences are decoded at once, each a token every `token_s`; lengths are log-normal with a cut. A group is whole
when its longest member has ended. The trainer takes the oldest whole groups, a step takes time in proportion to its tokens, and
each sync stops generation for `pause_s`. Requests in flight go on over a sync (partial_rollout=keep), so a sample is as old as
its first token. With `max_staleness` a group that is too old when a step would take it is dropped and its seats are refunded;
one that can no longer come in time is given up in flight.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollouter.admission import Admission, Conditions, HeldVersion
from sample_bus.protocols import Resumption
from trainer.demand import StepAccount, next_sync_step

ENDLESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What is simulated, but for the staleness settings."""

    group_size: int = 8
    samples_per_step: int = 256
    trigger_parameter_sync_step: int = 1
    num_slots: int = 128
    median_tokens: float = 400.0
    sigma: float = 1.0
    """Of the logarithm of the length: 0.5 is even, 1 heavy-tailed, 1.5 very."""
    max_tokens: int = 16384
    token_s: float = 0.02
    balance: float = 1.0
    """Tokens per second that all slots generate over tokens per second that the trainer takes."""
    pause_s: float = 0.5
    num_steps: int = 400
    warmup_steps: int = 20
    """Steps left out of all figures."""
    seed: int = 0

    @property
    def mean_tokens(self) -> float:
        """Of the lengths as they are drawn, cut included."""
        lengths = self.lengths(np.random.default_rng(12345), 200_000)
        return float(lengths.mean())

    @property
    def train_token_s(self) -> float:
        """Seconds of a step per token of it."""
        return self.token_s / self.num_slots * self.balance

    def lengths(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """[count] tokens."""
        drawn = generator.lognormal(math.log(self.median_tokens), self.sigma, count)
        return np.clip(drawn, 1, self.max_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting's figures, over all steps but the first ones. Ages in versions, of samples as a step takes them."""

    staleness_threshold: float
    max_staleness: int | None
    samples_per_s: float
    tokens_per_s: float
    """Trained ones."""
    trainer_idle_share: float
    slots_idle_share: float
    staleness_mean: float
    staleness_p95: float
    staleness_max: int
    token_staleness_mean: float
    above_bound_share: float
    """Of trained samples: older than the threshold, rounded up."""
    dropped_share: float
    """Of the samples that a group was begun for."""
    discarded_token_share: float
    """Of the generated tokens: of samples that were dropped."""
    trained_tokens_mean: float
    """Length of trained samples; the drawn mean is `drawn_tokens_mean`: a gap is the bias of dropping."""
    drawn_tokens_mean: float


@dataclass(slots=True, kw_only=True)
class _Group:
    number: int
    version: int
    lengths: npt.NDArray[np.int64]
    left: int
    begun_at: float
    """On the clock of generation, which stands still in pauses."""


class Simulation:
    """One setting of `plant`."""

    def __init__(self, plant: Plant, *, staleness_threshold: float, max_staleness: int | None) -> None:
        self._plant = plant
        self._threshold = staleness_threshold
        self._max_staleness = max_staleness
        self._generator = np.random.default_rng(plant.seed)
        self._admission = Admission()
        self._account = StepAccount(begun_step=0, sync_step=self._next_sync(0))
        self._step = self._version = self._held = self._admitted = self._refunded = self._in_flight = 0
        self._paused_s = 0.0
        self._ends: list[tuple[float, int, int]] = []
        """(generation clock, group, seat) of the seats in flight."""
        self._groups: dict[int, _Group] = {}
        self._whole: deque[_Group] = deque()
        self._commits: list[tuple[int, float]] = [(0, 0.0)]
        """(version, generation clock) of each commit."""
        self._idle_s = self._busy_slot_s = self._trained_s = 0.0
        self._ages: list[npt.NDArray[np.int64]] = []
        self._token_ages: list[float] = []
        self._trained_lengths: list[npt.NDArray[np.int64]] = []
        self._num_dropped = self._num_trained = 0
        self._discarded_tokens = 0
        self._admission.rebase(Resumption(origin_version=0, accounted=0, incarnation="0"), in_flight=0)

    def run(self) -> Point:
        plant, now = self._plant, 0.0
        self._commit(now)
        started = now
        for step in range(plant.num_steps):
            if step == plant.warmup_steps:
                started = now
                self._forget()
            batch, ready_at = self._wait(now)
            self._idle_s += ready_at - now
            self._take(batch)
            tokens = int(sum(group.lengths.sum() for group in batch))
            now = ready_at + tokens * plant.train_token_s
            self._play_until(now)
            if self._account.is_due:
                self._publish()
                self._play_until(now)
                self._commit(now)
        return self._point(now - started)

    # ── rollouter ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, clock: float) -> None:
        plant = self._plant
        conditions = Conditions(
            group_size=plant.group_size,
            staleness_threshold=self._threshold,
            max_concurrent_rollouts=plant.num_slots,
            max_staleness=self._max_staleness,
            num_samples_needed=None,
            num_in_flight=0,
            num_unsettled=0,
            num_open_seats=0,
            samples_per_step=plant.samples_per_step,
            samples_per_period=plant.samples_per_step * plant.trigger_parameter_sync_step,
            max_queued_samples=ENDLESS,
            journal_blocked=False,
            evaluating=False,
            draining=False,
        )
        while self._admission.hold(replace(conditions, num_in_flight=self._in_flight)) is None:
            self._begin_group(clock)

    def _begin_group(self, clock: float) -> None:
        plant = self._plant
        self._admission.admit(plant.group_size)
        lengths = plant.lengths(self._generator, plant.group_size)
        group = _Group(number=self._admitted, version=self._held, lengths=lengths, left=plant.group_size, begun_at=clock)
        self._groups[group.number] = group
        for seat, tokens in enumerate(lengths.tolist()):
            heapq.heappush(self._ends, (clock + tokens * plant.token_s, group.number, seat))
        self._admitted += 1
        self._in_flight += plant.group_size

    def _play_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] + self._paused_s <= now:
            self._end_one()

    def _end_one(self) -> float:
        """The next seat in flight ends; the time at which it does."""
        clock, number, _ = heapq.heappop(self._ends)
        group = self._groups.get(number)
        if group is not None:
            self._in_flight -= 1
            group.left -= 1
            if not group.left:
                self._whole.append(self._groups.pop(number))
            self._admit(clock)
        return clock + self._paused_s

    def _commit(self, now: float) -> None:
        """The engines stop for a moment and hold the newest version."""
        if self._version:
            self._paused_s += self._plant.pause_s
        clock = now + (self._plant.pause_s if self._version else 0.0) - self._paused_s
        self._held = self._version
        self._commits.append((self._held, clock))
        self._admission.take_held(HeldVersion(incarnation="0", policy_version=self._held))
        self._tell()
        self._give_up_hopeless(clock)
        self._admit(clock)

    def _give_up_hopeless(self, clock: float) -> None:
        if self._max_staleness is None:
            return
        for group in list(self._groups.values()):
            if self._version - group.version > self._max_staleness:
                del self._groups[group.number]
                generated = np.minimum(group.lengths, (clock - group.begun_at) / self._plant.token_s)
                self._in_flight -= group.left
                self._drop(group, int(generated.sum()))
        self._ends = [end for end in self._ends if end[1] in self._groups]
        heapq.heapify(self._ends)

    # ── trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wait(self, now: float) -> tuple[list[_Group], float]:
        """The next batch and when it is there."""
        groups_per_step = self._plant.samples_per_step // self._plant.group_size
        while True:
            self._drop_stale()
            if len(self._whole) >= groups_per_step:
                return [self._whole.popleft() for _ in range(groups_per_step)], now
            self._admit(now - self._paused_s)
            assert self._ends, f"wedged at step {self._step}"
            now = max(now, self._end_one())

    def _drop_stale(self) -> None:
        if self._max_staleness is None:
            return
        fresh: deque[_Group] = deque()
        for group in self._whole:
            if self._version - group.version > self._max_staleness:
                self._drop(group, int(group.lengths.sum()))
            else:
                fresh.append(group)
        self._whole = fresh

    def _drop(self, group: _Group, generated: int) -> None:
        self._refunded += self._plant.group_size
        self._num_dropped += self._plant.group_size
        self._discarded_tokens += generated
        self._tell()

    def _take(self, batch: list[_Group]) -> None:
        self._step += 1
        self._account.begin(self._step, len(batch) * self._plant.group_size)
        self._num_trained += len(batch) * self._plant.group_size
        self._tell()
        for group in batch:
            self._ages.append(np.full(len(group.lengths), self._version - group.version))
            self._trained_lengths.append(group.lengths)
            self._token_ages.append(self._token_age(group))

    def _token_age(self, group: _Group) -> float:
        """Sum over the group's tokens."""
        token_s, total = self._plant.token_s, 0.0
        commits = [(version, clock) for version, clock in self._commits if version > group.version]
        for tokens in group.lengths.tolist():
            newer = sum(max(0.0, tokens - max(0.0, clock - group.begun_at) / token_s) for _, clock in commits)
            total += tokens * (self._version - group.version) - newer
        return total

    def _publish(self) -> None:
        self._version += 1
        self._account.publish(next_sync_step=self._next_sync(self._step))
        self._tell()

    def _next_sync(self, step: int) -> int:
        every = self._plant.trigger_parameter_sync_step
        return next_sync_step(step, trigger_parameter_sync_step=every, num_steps=ENDLESS)

    def _tell(self) -> None:
        self._admission.take_trainer(
            incarnation="0",
            origin_version=0,
            policy_version=self._version,
            num_refunded=self._refunded,
            **self._account.said(),
        )

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forget(self) -> None:
        """What came before is not measured."""
        self._idle_s = 0.0
        self._ages.clear()
        self._token_ages.clear()
        self._trained_lengths.clear()
        self._num_dropped = self._num_trained = self._discarded_tokens = 0

    def _point(self, seconds: float) -> Point:
        plant = self._plant
        ages, lengths = np.concatenate(self._ages), np.concatenate(self._trained_lengths)
        tokens = int(lengths.sum())
        generated = tokens + self._discarded_tokens
        return Point(
            staleness_threshold=self._threshold,
            max_staleness=self._max_staleness,
            samples_per_s=self._num_trained / seconds,
            tokens_per_s=tokens / seconds,
            trainer_idle_share=self._idle_s / seconds,
            slots_idle_share=max(0.0, 1 - generated * plant.token_s / (seconds * plant.num_slots)),
            staleness_mean=float(ages.mean()),
            staleness_p95=float(np.percentile(ages, 95)),
            staleness_max=int(ages.max()),
            token_staleness_mean=sum(self._token_ages) / tokens,
            above_bound_share=float((ages > math.ceil(self._threshold)).mean()),
            dropped_share=self._num_dropped / (self._num_dropped + self._num_trained),
            discarded_token_share=self._discarded_tokens / generated,
            trained_tokens_mean=float(lengths.mean()),
            drawn_tokens_mean=plant.mean_tokens,
        )


def simulate(plant: Plant, *, staleness_threshold: float, max_staleness: int | None = None) -> Point:
    """Figures of one setting."""
    return Simulation(plant, staleness_threshold=staleness_threshold, max_staleness=max_staleness).run()
