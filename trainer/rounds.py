"""What became of each announced policy version: a state machine of rounds. Pure: time is an argument.

Invariant: a round has exactly one state, which follows from who has committed, who has failed, and whether time is up.
`committed` is final; every other end can still become better when engines catch up, and none becomes worse. What was said twice
counts once.

state                recovery
announced, staging   goes on
committed            none is needed
partially committed  the engines that are missing catch up before they serve
aborted              engines serve what they held and ask again; the next version is announced all the same
superseded           engines go to the newer version at once
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

from sample_bus.messages import RoundPhase, RoundResult, RoundState, RoundSummary

_OPEN = (RoundState.ANNOUNCED, RoundState.STAGING)


def state_of(
    *, committed: Set[str], failed: Set[str], expected: Set[str], has_begun: bool, is_late: bool, is_superseded: bool
) -> RoundState:
    """`expected`: engines that live; `has_begun`: somebody asked for the version; `is_late`: its deadline has passed."""
    missing = expected - committed
    if committed and not missing:
        return RoundState.COMMITTED
    if is_late or is_superseded or (missing and missing <= failed):
        if committed:
            return RoundState.PARTIALLY_COMMITTED
        return RoundState.SUPERSEDED if is_superseded else RoundState.ABORTED
    return RoundState.STAGING if has_begun or committed or failed else RoundState.ANNOUNCED


def row_of(summary: RoundSummary) -> dict[str, Any]:
    """The row of metrics of a round that has ended."""
    numbers = {
        "policy_version": summary.policy_version,
        "state": summary.state.value,
        "num_committed": len(summary.committed),
        "num_failed": len(summary.failed),
        "num_attempts": summary.num_attempts,
        "seconds": summary.seconds,
        "stage_s": max(summary.stage_ms.values(), default=0.0) / 1e3,
        "total_bytes": summary.total_bytes,
        "transfer_bytes": summary.transfer_bytes,
        "version_spread": summary.version_spread,
    }
    return numbers | {f"pause_ms_{engine}": pause_ms for engine, pause_ms in summary.pause_ms.items()}


def has_ended(summary: RoundSummary) -> bool:
    return summary.state not in _OPEN


@dataclass(slots=True, eq=False)
class Round:
    """One announced version."""

    policy_version: int
    total_bytes: int
    announced_at: float
    expected_since: float | None = None
    """When the first living engine was seen; before, nobody can be late."""
    asked_at: float | None = None
    """When somebody began to stage it, as far as the trainer knows."""
    is_superseded: bool = False
    state: RoundState = RoundState.ANNOUNCED
    results: dict[str, RoundResult] = field(default_factory=dict)
    committed_at: float | None = None
    transfer_bytes: int = 0
    num_attempts: int = 0

    @property
    def committed(self) -> frozenset[str]:
        return frozenset(engine for engine, result in self.results.items() if result.committed)


class Rounds:
    """The newest round and what engines hold. After each call `state` is up to date."""

    def __init__(self, *, announce_timeout_s: float, round_timeout_s: float) -> None:
        self._announce_timeout_s = announce_timeout_s
        self._round_timeout_s = round_timeout_s
        self._expected: frozenset[str] = frozenset()
        self._held: dict[str, int] = {}
        self.newest: Round | None = None

    def announce(self, policy_version: int, *, total_bytes: int, now: float) -> RoundState | None:
        """A version is served from now on; the state in which the round before is left."""
        before = self.newest
        if before is not None:
            before.is_superseded = True
            self._update(before, now)
        self.newest = Round(policy_version=policy_version, total_bytes=total_bytes, announced_at=now)
        self.look(now)
        return None if before is None else before.state

    def expect(self, engines: Iterable[str], now: float) -> None:
        """The engines that live now."""
        self._expected = frozenset(engines)
        self.look(now)

    def note_staging(self, policy_version: int, *, transfer_bytes: int, now: float) -> None:
        """Somebody has staged the version from the trainer, or has tried."""
        current = self.newest
        if current is None or current.policy_version != policy_version:
            return
        current.asked_at = now if current.asked_at is None else current.asked_at
        current.transfer_bytes += transfer_bytes
        self.look(now)

    def take(self, result: RoundResult, now: float) -> bool:
        """How it ended on one engine; False if it was known or is of another round."""
        if result.committed:
            self._held[result.engine] = max(result.policy_version, self._held.get(result.engine, result.policy_version))
        current = self.newest
        if current is None or result.policy_version != current.policy_version:
            return False
        before = current.results.get(result.engine)
        if before is not None and before.attempt >= result.attempt and (before.committed or not result.committed):
            return False
        current.results[result.engine] = result
        current.num_attempts += 1
        if result.committed:
            current.committed_at = now
        self.look(now)
        return True

    def look(self, now: float) -> RoundState | None:
        """The newest round's state, after time has passed."""
        if self.newest is None:
            return None
        self._update(self.newest, now)
        return self.newest.state

    def due_at(self) -> float | None:
        """When the newest round has to be looked at again if nothing is heard; None: it has ended, or nobody can be late."""
        current = self.newest
        if current is None or current.state not in _OPEN or current.expected_since is None:
            return None
        return self._deadline(current)

    def summary(self, now: float) -> RoundSummary | None:
        current = self.newest
        if current is None:
            return None
        failed = {engine: result.message for engine, result in current.results.items() if not result.committed}
        awaited = self._expected - current.results.keys()
        if current.state not in _OPEN:
            failed |= {engine: self._late_words(current) for engine in awaited}
            awaited = frozenset()
        held = [version for engine, version in self._held.items() if engine in self._expected or not self._expected]
        committed = sorted(current.committed)
        return RoundSummary(
            policy_version=current.policy_version,
            state=current.state,
            committed=tuple(committed),
            failed=failed,
            awaited=tuple(sorted(awaited)),
            stage_ms={engine: current.results[engine].stage_ms for engine in committed},
            pause_ms={engine: current.results[engine].pause_ms for engine in committed},
            seconds=0.0 if current.committed_at is None else max(0.0, current.committed_at - current.announced_at),
            total_bytes=current.total_bytes,
            transfer_bytes=current.transfer_bytes,
            version_spread=max(held) - min(held) if held else 0,
            num_attempts=current.num_attempts,
        )

    def _deadline(self, current: Round) -> float:
        assert current.expected_since is not None
        begun = max(current.announced_at, current.expected_since)
        if current.asked_at is None and not current.results:
            return begun + min(self._announce_timeout_s, self._round_timeout_s)
        return begun + self._round_timeout_s

    def _late_words(self, current: Round) -> str:
        if current.asked_at is None and not current.results:
            phase, setting, value = RoundPhase.ANNOUNCE, "announce_timeout_s", self._announce_timeout_s
        else:
            phase, setting, value = RoundPhase.COMMIT, "round_timeout_s", self._round_timeout_s
        if current.is_superseded:
            return f"not committed when a newer version was announced (phase {phase})"
        return f"nothing was heard within weight_sync.{setting}={value:g} s (phase {phase})"

    def _update(self, current: Round, now: float) -> None:
        if self._expected and current.expected_since is None:
            current.expected_since = now
        if current.state is RoundState.COMMITTED:
            return
        is_late = bool(self._expected) and current.expected_since is not None and now >= self._deadline(current)
        found = state_of(
            committed=current.committed,
            failed=current.results.keys() - current.committed,
            expected=self._expected,
            has_begun=current.asked_at is not None,
            is_late=is_late or current.state not in _OPEN,
            is_superseded=current.is_superseded,
        )
        if current.state is not RoundState.PARTIALLY_COMMITTED or found is RoundState.COMMITTED:
            current.state = found
