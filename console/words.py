"""Numbers and states as a person reads them; shared by the live view, the plain lines, the summary and the status."""

from __future__ import annotations

from configs.shortened import in_a_line
from console.picture import Picture, whole_percents
from sample_bus.messages import (
    EngineStatus,
    EvaluationResult,
    FailureNote,
    RollouterStatus,
    RoundSummary,
    TimeShares,
    TrainerStatus,
)

_FAILURE_WORDS = 240
"""Characters of what a failure said."""


def duration(seconds: float) -> str:
    """`8.2 s`, `2 min 05 s`, `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float) -> str:
    """Three figures or so: `4.92`, `31.4`, `1,204`."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"


def share_percents(shares: TimeShares) -> dict[str, int]:
    """Whole percents that sum to 100, the largest first."""
    percents = whole_percents(shares.model_dump())
    return dict(sorted(percents.items(), key=lambda item: -item[1]))


def shares_text(shares: TimeShares) -> str:
    """`training 62 %, waiting 33 %, publishing 5 %`; empty before the trainer's clock runs."""
    return ", ".join(f"{name} {percent} %" for name, percent in share_percents(shares).items() if percent)


def trainer_text(picture: Picture) -> str:
    """What the trainer is doing."""
    if picture.trainer is not None:
        return _doing(picture.trainer.state, picture.trainer.detail)
    return picture.notes.get("trainer", "starting")


def rollouter_text(picture: Picture) -> str:
    """What the rollouter is doing."""
    if picture.rollouter is not None:
        return _doing(picture.rollouter.state, picture.rollouter.detail)
    return picture.notes.get("rollouter", "starting")


def engine_text(engine: EngineStatus) -> str:
    parts = [engine.state]
    if engine.policy_version is not None:
        parts.append(f"version {engine.policy_version}")
    if engine.num_running:
        parts.append(f"{engine.num_running} running")
    if engine.last_pause_ms is not None:
        parts.append(f"last pause {engine.last_pause_ms:.0f} ms")
    return ", ".join(parts)


def round_text(summary: RoundSummary) -> str:
    """How far the newest transfer of weights is."""
    num_engines = len(summary.committed) + len(summary.failed) + len(summary.awaited)
    parts = [f"version {summary.policy_version} {summary.state.value}"]
    if num_engines:
        parts.append(f"on {len(summary.committed)} of {num_engines} engines")
    if summary.committed:
        stage_s, pause_ms = max(summary.stage_ms.values()) / 1e3, max(summary.pause_ms.values())
        parts.append(f"after {summary.seconds:.2f} s (staged in {stage_s:.2f} s, longest pause {pause_ms:.0f} ms)")
    if summary.version_spread:
        parts.append(f"versions {summary.version_spread} apart")
    parts += [f"{engine}: {why}" for engine, why in sorted(summary.failed.items())]
    return ", ".join(parts)


def evaluation_text(result: EvaluationResult) -> str:
    failed = f", {result.num_failed} more failed" if result.num_failed else ""
    return f"{result.accuracy:.3f} (version {result.policy_version}, {result.num_samples} samples{failed})"


def failure_text(note: FailureNote) -> str:
    """`3 rollout attempts failed (reward failed), first: RewardError: …`."""
    return f"{failure_count(note)}, first: {in_a_line(note.first, _FAILURE_WORDS)}"


def failure_count(note: FailureNote) -> str:
    """`3 rollout attempts failed (reward failed)`."""
    whose = "evaluation" if note.is_evaluation else "rollout"
    return f"{note.count} {whose} {'attempt' if note.count == 1 else 'attempts'} failed ({note.reason})"


def awaited(trainer: TrainerStatus | None, rollouter: RollouterStatus | None) -> list[str]:
    """What is being waited for, one line a daemon that waits."""
    lines = []
    if trainer is None:
        lines.append("the trainer's first word")
    elif trainer.detail:
        lines.append(f"trainer: {trainer.detail}")
    if rollouter is None:
        lines.append("the rollouter to connect")
    elif rollouter.detail:
        lines.append(f"rollouter: {rollouter.detail}")
    return lines


def _doing(state: str, detail: str) -> str:
    return f"{state}: {detail}" if detail else str(state)
