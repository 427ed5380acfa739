"""Whether steps that were trained again came out as they did before, and why not. Pure.

Invariant: "identical" means bit for bit, of every step and every published version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.recording import PublishedVersion, RecordedStep

SHOWN_STEPS = 5
"""Steps of the curves' ends."""
_UNEXPECTED = "no setting differs: another processor, number of threads or version of a library changes the last bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPair:
    recorded: RecordedStep
    loss: float
    grad_norm: float

    @property
    def is_identical(self) -> bool:
        return _same(self.loss, self.recorded.loss) and _same(self.grad_norm, self.recorded.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPair:
    step: int
    recorded: PublishedVersion
    digest: str


@dataclass(slots=True)
class Comparison:
    """Filled step by step."""

    reasons: tuple[str, ...] = ()
    """Why the two may differ, one sentence each."""
    steps: list[StepPair] = field(default_factory=list)
    versions: list[VersionPair] = field(default_factory=list)

    def first_step_apart(self) -> StepPair | None:
        return next((pair for pair in self.steps if not pair.is_identical), None)

    def first_version_apart(self) -> VersionPair | None:
        return next((pair for pair in self.versions if pair.digest != pair.recorded.digest), None)

    @property
    def is_identical(self) -> bool:
        return self.first_step_apart() is None and self.first_version_apart() is None

    @property
    def is_explained(self) -> bool:
        return self.is_identical or bool(self.reasons)


def reasons_to_differ(
    run: Mapping[str, Any], mine: Mapping[str, Any], *, overridden: Mapping[str, Any], steps: Sequence[RecordedStep]
) -> tuple[str, ...]:
    """What of the settings that bear on the arithmetic is another than in the run, one line a key.

    run, mine: all settings by dotted key. overridden: those that hold here for every step instead of the recorded ones.
    """
    recorded_keys = {key for step in steps for key in step.options}
    lines = [
        f"{key}: {mine[key]!r} here, {run[key]!r} in the run"
        for key in mine
        if (key.startswith("trainer.") or key == "model.dtype") and key not in recorded_keys and mine[key] != run.get(key)
    ]
    for key in sorted(recorded_keys & overridden.keys()):
        apart = [step for step in steps if key in step.options and step.options[key] != overridden[key]]
        if apart:
            span = f"step {apart[0].step}" if len(apart) == 1 else f"steps {apart[0].step} to {apart[-1].step}"
            lines.append(f"{key}: {overridden[key]!r} here, {apart[0].options[key]!r} in the run ({span})")
    return tuple(lines)


def report(comparison: Comparison) -> str:
    """What a person reads at the end, several lines."""
    lines = [_losses(comparison), _weights(comparison)]
    if not comparison.is_identical:
        lines += [f"expected  {reason}" for reason in comparison.reasons] or [f"NOT EXPECTED  {_UNEXPECTED}"]
    elif comparison.reasons:
        lines += [f"although  {reason}" for reason in comparison.reasons]
    return "\n".join(lines + _curves(comparison.steps[-SHOWN_STEPS:]))


def _losses(comparison: Comparison) -> str:
    apart = comparison.first_step_apart()
    if apart is None:
        return f"losses    identical in all {len(comparison.steps)} steps"
    what, here, there = (
        ("gradient norm", apart.grad_norm, apart.recorded.grad_norm)
        if _same(apart.loss, apart.recorded.loss)
        else ("loss", apart.loss, apart.recorded.loss)
    )
    return f"losses    first apart at step {apart.recorded.step}: {what} {here!r} here, {there!r} in the run"


def _weights(comparison: Comparison) -> str:
    apart = comparison.first_version_apart()
    if apart is None:
        return f"weights   identical in all {len(comparison.versions)} published versions"
    return (
        f"weights   first apart at policy version {apart.recorded.policy_version}, after step {apart.step}: "
        f"{apart.digest[:12]} here, {apart.recorded.digest[:12]} in the run"
    )


def _curves(pairs: Sequence[StepPair]) -> list[str]:
    def row(name: str, value: Callable[[StepPair], str]) -> str:
        return f"{name:<18}" + "".join(f"{value(pair):>13}" for pair in pairs)

    if not pairs:
        return []
    return [
        row("step", lambda pair: str(pair.recorded.step)),
        row("loss, run", lambda pair: f"{pair.recorded.loss:.6g}"),
        row("loss, here", lambda pair: f"{pair.loss:.6g}"),
        row("grad norm, run", lambda pair: f"{pair.recorded.grad_norm:.6g}"),
        row("grad norm, here", lambda pair: f"{pair.grad_norm:.6g}"),
    ]


def _same(left: float, right: float) -> bool:
    return left == right or (left != left and right != right)
