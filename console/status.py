"""`headrace status`: one screen about a run, from its retained topics."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from console.errors import NoRun
from console.follow import attached
from console.history import since
from console.journals import Journals
from console.run_dirs import LiveRun
from console.words import awaited, duration, engine_text, evaluation_text, failure_text, number, round_text, shares_text
from sample_bus.ledger import Ledger, by_reason
from sample_bus.messages import (
    Counts,
    EndOfRun,
    LiveSettingsState,
    RollouterStatus,
    SettingChange,
    TrainerStatus,
    WeightRound,
)
from sample_bus.protocols import Control
from weight_sync.tcp_address import without_secrets

_RECENT_CHANGES = 5
_LATE_MS = 250.0
"""Lag of the rollouter's event loop from which on it is said."""


def status(run: LiveRun, *, as_json: bool, timeout_s: float) -> int:
    """Print the state of the run. Raises NobodyAnswers."""
    state = asyncio.run(_ask(run, timeout_s))
    if as_json:
        sys.stdout.write(orjson.dumps(state_as_json(state), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(state_as_text(state, now=time.time()) + "\n")
    return 0


class State:
    """The retained topics of one run at one moment, and the size of its spool."""

    def __init__(self, address: str, control: Control, *, spool_bytes: int | None = None) -> None:
        """`spool_bytes`: None when the copies of what is not committed lie elsewhere."""
        self.address = address
        self.spool_bytes = spool_bytes
        self.trainer = control.get("trainer", TrainerStatus)
        self.rollouter = control.get("rollouter", RollouterStatus)
        self.live = control.get("settings", LiveSettingsState)
        self.round = control.get("round", WeightRound)
        self.end = control.get("end", EndOfRun)

    def ledger(self) -> Ledger | None:
        if self.trainer is None or self.rollouter is None:
            return None
        return Ledger(rollouts=self.rollouter.counts, samples=self.trainer.counts)


def state_as_json(state: State) -> dict[str, Any]:
    """Every topic as it stands, with the ledger's line and what is awaited."""
    ledger = state.ledger()
    topics = {
        "trainer": state.trainer,
        "rollouter": state.rollouter,
        "settings": state.live,
        "round": state.round and state.round.model_copy(update={"address": without_secrets(state.round.address)}),
        "end": state.end,
    }
    return {
        "address": state.address,
        **{name: value.model_dump(mode="json") if value is not None else None for name, value in topics.items()},
        "ledger": {"line": ledger.line(), "closes": ledger.closes} if ledger is not None else None,
        "spool_bytes": state.spool_bytes,
        "awaited": awaited(state.trainer, state.rollouter),
    }


def state_as_text(state: State, *, now: float) -> str:
    """One screen. `now` in Unix seconds."""
    rows: list[tuple[str, str]] = [("address", state.address)]
    if state.end is not None:
        rows.append(("ended", f"{state.end.reason}: {state.end.message}" if state.end.message else str(state.end.reason)))
    rows += _trainer_rows(state, now)
    rows += _rollouter_rows(state)
    rows.append(("waiting for", "; ".join(awaited(state.trainer, state.rollouter)) or "nothing"))
    rows += _settings_rows(state.live, now)
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in rows)


def _trainer_rows(state: State, now: float) -> list[tuple[str, str]]:
    trainer = state.trainer
    if trainer is None:
        return [("trainer", "has said nothing yet")]
    rows = [
        ("trainer", f"{trainer.state}, incarnation {trainer.incarnation}"),
        ("progress", f"step {trainer.step} of {trainer.num_steps}, policy version {trainer.policy_version}"),
    ]
    if trainer.round is not None:
        rows.append(("weight round", round_text(trainer.round)))
    step = trainer.last_step
    if step is not None:
        rows.append(
            (
                "last step",
                f"reward {step.reward_mean:.3f}, loss {step.loss:.4f}, {duration(max(0.0, now - step.finished_at))} ago",
            )
        )
        rows.append(("staleness", f"mean {step.staleness_mean:.2f}, max {step.staleness_max} (last step)"))
        rows.append(("mismatch", f"mean |engine - trainer| {step.mismatch_mean_abs:.2e}, max {step.mismatch_max_abs:.2e} nats"))
    if shares_text(trainer.shares):
        rows.append(("trainer's time", shares_text(trainer.shares)))
    rows += [("held-out", evaluation_text(result)) for result in trainer.evaluations[-2:]]
    rows += [("advice" if index == 0 else "", words) for index, words in enumerate(trainer.advice)]
    return [*rows, *_sample_rows(trainer.counts)]


def _sample_rows(counts: Counts) -> list[tuple[str, str]]:
    dropped = by_reason(counts.dropped, "dropped")
    rows = [("samples", f"received {counts.received}, trained {counts.trained}, {dropped}, queued {counts.queued}")]
    rare = {
        "closed seats": counts.closed,
        "given back to admission": counts.refunded,
        "late results": counts.late_results,
        "trained though a rollback lost their version": counts.rolled_back,
        "came again and refused": counts.duplicates,
        "rejected": counts.rejected,
    }
    if any(rare.values()):
        rows.append(("beside them", ", ".join(f"{what} {count}" for what, count in rare.items() if count)))
    return rows


def _rollouter_rows(state: State) -> list[tuple[str, str]]:
    rollouter = state.rollouter
    if rollouter is None:
        return [("rollouter", "not connected")]
    counts = rollouter.counts
    version = "none" if rollouter.policy_version is None else str(rollouter.policy_version)
    failed = f"{by_reason(counts.failed, 'failed')}, retried {counts.retried}"
    gone = "" if state.trainer is None or state.trainer.rollouter is not None else "not connected; last said: "
    rows = [
        ("rollouter", f"{gone}{rollouter.state}, serving version {version}, settings revision {rollouter.settings_revision}"),
        ("rollouts", f"admitted {counts.admitted}, in flight {counts.in_flight}, offered {counts.offered}, {failed}"),
        ("generation", f"{number(rollouter.generated_tokens_per_s)} tokens/s, {rollouter.generated_tokens:,} tokens so far"),
    ]
    if rollouter.loop_lag_ms >= _LATE_MS:
        rows.append(("", f"its event loop was late by {rollouter.loop_lag_ms:.0f} ms: something blocks it, see its log"))
    recovery = rollouter.recovery
    if recovery is not None:
        replies = f"{recovery.continued} replies went on, {recovery.restarted} began anew"
        tokens = f"{recovery.tokens_kept:,} tokens kept, at most {recovery.tokens_lost_at_most:,} lost"
        rows.append(("after its restart", f"{replies}; {tokens}"))
    rare = {"late results refused": counts.late_results, "tasks in quarantine": counts.quarantined_tasks}
    if any(rare.values()):
        rows.append(("", ", ".join(f"{what} {count}" for what, count in rare.items() if count)))
    rows += [("failures" if index == 0 else "", failure_text(note)) for index, note in enumerate(rollouter.failures)]
    if state.spool_bytes is not None:
        rows.append(("spool", f"{state.spool_bytes:,} bytes of records until a checkpoint covers them"))
    rows += [(engine.name, engine_text(engine)) for engine in rollouter.engines]
    ledger = state.ledger()
    if ledger is not None:
        rows.append(("ledger", ledger.line()))
    return rows


def _settings_rows(live: LiveSettingsState | None, now: float) -> list[tuple[str, str]]:
    if live is None:
        return [("settings", "not known yet")]
    rows = [("settings", f"revision {live.revision}")]
    rows += [(f"  {key}", str(value)) for key, value in live.values.items()]
    if live.changes:
        rows.append(("recent changes", f"{len(live.changes)} in all"))
    rows += [(f"  revision {change.revision}", _change_text(change, now)) for change in live.changes[-_RECENT_CHANGES:]]
    return rows


def _change_text(change: SettingChange, now: float) -> str:
    age = duration(max(0.0, now - change.changed_at))
    return f"{change.key}: {change.old} → {change.new} by {change.author}, {age} ago, {since(change)}"


async def _ask(run: LiveRun, timeout_s: float) -> State:
    async with attached(run.bus, run.address, timeout_s=timeout_s) as link:
        return State(run.address, link, spool_bytes=_spool_bytes(run.run_dir))


def _spool_bytes(run_dir: Path | None) -> int | None:
    if run_dir is None:
        return None
    try:
        return Journals.of(run_dir).spool_bytes()
    except NoRun:
        return None
