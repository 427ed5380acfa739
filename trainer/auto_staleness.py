"""Automatic staleness: how far generation may run ahead, moved by what the trainer measures.

Consumes one observation a step; produces proposals for `staleness_threshold`. Pure: what carries a proposal out is
`trainer.automatic`. Invariant: a proposal lies within [auto_staleness.min, auto_staleness.max] and differs from what is in
force; a window of steps holds steps of one threshold only, and only such as are past what the change before set in motion.

The rule, once a window of `interval_steps` steps:

    importance weights spread too far (ESS < min_effective_sample_size)   threshold * 1/2   at once
    the trainer waits more than target_waiting_share                      threshold + 1/4   after `patience` such windows
    it waits less than half of that                                       threshold - 1/8   after `patience` such windows
    a raise has not shortened the wait                                    back to before    in the first window after it

in a row. Where generation itself is too slow, running further ahead only ages the samples: hence the last rule. Between half
the target and the target nothing moves. A raise also needs an ESS some way above its floor, and does not go back near a
threshold that was left for the first or the last rule within REMEMBERED windows, so that it is seldom undone. Each move
against the one before doubles the patience (up to MAX_PATIENCE windows), each move in the same direction halves it: a run
that oscillates comes to rest, one that has far to go gets there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import IntEnum

from configs.schema import AutoStalenessSettings

RAISE = 0.25
LOWER = 0.125
HALVE = 0.5
LEAST = 0.0625
"""Half of less than twice this is nothing: the multiplicative decrease ends at auto_staleness.min."""
ESS_MARGIN = 0.25
"""A raise needs an ESS above its floor by this share of what lies between the floor and 1."""
BENEFIT = 0.05
"""By this share of itself a raise has to shorten the wait."""
MIN_PATIENCE, MAX_PATIENCE = 1, 8
REMEMBERED = 32
"""Windows for which a threshold counts as too high after it did harm, or no good."""


class Direction(IntEnum):
    DOWN = -1
    NONE = 0
    UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one optimizer step showed."""

    waiting_s: float
    """Of the time since the step before, what the trainer waited for samples."""
    elapsed_s: float
    effective_sample_size: float
    """(sum w)^2 / (n sum w^2) over the step's trained tokens, w = exp(policy - behavior): 1 where all weights are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A proposal."""

    threshold: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Sums over the steps of the present window."""

    num_steps: int = 0
    waiting_s: float = 0.0
    elapsed_s: float = 0.0
    least_ess: float = 1.0
    """The worst step's: a mean would hide the step that does the harm."""

    def with_(self, seen: Observation) -> Window:
        return Window(
            num_steps=self.num_steps + 1,
            waiting_s=self.waiting_s + seen.waiting_s,
            elapsed_s=self.elapsed_s + seen.elapsed_s,
            least_ess=min(self.least_ess, seen.effective_sample_size),
        )

    @property
    def waiting_share(self) -> float:
        return self.waiting_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """A raise whose use has not shown yet."""

    before: float
    to: float
    waiting_share: float
    """Before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the controller remembers."""

    threshold: float | None = None
    """In force when the window began; None: not looked at yet, or not enabled."""
    window: Window = field(default_factory=Window)
    num_to_settle: int = 0
    """Steps that still have samples admitted under another threshold; they are not looked at."""
    patience: int = MIN_PATIENCE
    wanted: Direction = Direction.NONE
    """Where the windows before this one pointed, `num_wanted` of them in a row."""
    num_wanted: int = 0
    last_move: Direction = Direction.NONE
    too_high: float = math.inf
    """The threshold that did harm, or no good; inf once that is REMEMBERED windows ago."""
    num_since: int = 0
    """Windows since then."""
    raised: Raise | None = None
    """The newest move, if it was a raise and its first window is not over."""


def observe(
    state: State, seen: Observation, *, threshold: float, steps_per_period: int, settings: AutoStalenessSettings
) -> tuple[State, Move | None]:
    """Take one step in. Returns the new state and what to set, if anything.

    threshold: in force now, whoever set it. steps_per_period: optimizer steps between two published versions.
    """
    if not settings.enabled:
        return State(), None
    if threshold != state.threshold:
        state = replace(
            state,
            threshold=threshold,
            window=Window(),
            num_to_settle=settling_steps(max(threshold, state.threshold or 0.0), steps_per_period),
        )
    bounded = min(max(threshold, settings.min), settings.max)
    if bounded != threshold:
        return state, Move(threshold=bounded, why=f"{threshold:g} is outside [{settings.min:g}, {settings.max:g}]")
    if state.num_to_settle:
        return replace(state, num_to_settle=state.num_to_settle - 1), None
    window = state.window.with_(seen)
    if window.num_steps < settings.interval_steps:
        return replace(state, window=window), None
    return _judge(replace(state, window=Window()), window, threshold, settings)


def settling_steps(threshold: float, steps_per_period: int) -> int:
    """Steps until what was admitted under `threshold` is consumed: it may run ahead so many periods, and one is in hand."""
    return (math.ceil(threshold) + 1) * steps_per_period


def _judge(state: State, window: Window, threshold: float, settings: AutoStalenessSettings) -> tuple[State, Move | None]:
    """A whole window: where it points, and whether that is reason enough to move."""
    state = replace(state, num_since=state.num_since + 1)
    if state.num_since > REMEMBERED:
        state = replace(state, too_high=math.inf)
    floor, target, share, ess = (
        settings.min_effective_sample_size,
        settings.target_waiting_share,
        window.waiting_share,
        window.least_ess,
    )
    if ess < floor:
        halved = threshold * HALVE
        why = f"effective sample size {ess:.3f} is below {floor:g}"
        state = replace(state, too_high=threshold, num_since=0)
        return _move(state, Direction.DOWN, settings.min if halved < LEAST else halved, why, threshold, settings)
    raised, state = state.raised, replace(state, raised=None)
    if raised is not None and raised.to == threshold and share > max(target, raised.waiting_share * (1 - BENEFIT)):
        why = f"the trainer waits {share:.1%} of its time, {raised.waiting_share:.1%} before the raise: it is of no use"
        state = replace(state, too_high=threshold, num_since=0)
        return _move(state, Direction.DOWN, raised.before, why, threshold, settings)
    if share > target and ess >= floor + ESS_MARGIN * (1 - floor) and threshold + RAISE <= state.too_high - LOWER:
        wanted, to, why = Direction.UP, threshold + RAISE, f"the trainer waits {share:.1%} of its time, more than {target:.1%}"
    elif share < target / 2:
        wanted, to, why = (
            Direction.DOWN,
            threshold - LOWER,
            f"the trainer waits {share:.1%} of its time, less than half of {target:.1%}",
        )
    else:
        return replace(state, wanted=Direction.NONE, num_wanted=0), None
    num_wanted = state.num_wanted + 1 if wanted is state.wanted else 1
    state = replace(state, wanted=wanted, num_wanted=num_wanted)
    if num_wanted < state.patience:
        return state, None
    state, move = _move(state, wanted, to, why, threshold, settings)
    if move is not None and wanted is Direction.UP:
        state = replace(state, raised=Raise(before=threshold, to=move.threshold, waiting_share=share))
    return state, move


def _move(
    state: State, direction: Direction, to: float, why: str, threshold: float, settings: AutoStalenessSettings
) -> tuple[State, Move | None]:
    to = min(max(to, settings.min), settings.max)
    state = replace(state, wanted=Direction.NONE, num_wanted=0)
    if to == threshold:
        return state, None
    if state.last_move is not Direction.NONE:
        turned = direction is not state.last_move
        state = replace(
            state, patience=min(state.patience * 2, MAX_PATIENCE) if turned else max(state.patience // 2, MIN_PATIENCE)
        )
    return replace(state, last_move=direction), Move(threshold=to, why=why)
