"""`trainer --replay RUN_DIR`: train again from the samples that a run kept, without a bus, a rollouter or engines.

Invariant: everything new lies in a directory of its own, which no other trainer uses at the same time.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from configs.command import remember
from configs.paths import held_alone, make_run_dir
from configs.schema import Settings
from configs.signals import ending_signals
from trainer.comparison import Comparison, report
from trainer.errors import RunDirInUse
from trainer.replay_request import Again, prepare

log = structlog.get_logger()

_LOCK_FILE = ".trainer.lock"


def replay(settings: Settings, *, of: Path, given: Collection[str]) -> tuple[str, Comparison]:
    """Train again from the run in directory `of`; returns the text for its reader, and the comparison.

    given: keys that were set as arguments; those hold for every step instead of what was recorded. A signal that asks to end
    is heeded after the step in progress. Raises ConfigError, ReplayError, JournalError, TrainerError.
    """
    again = prepare(settings, of=of, given=given)
    make_run_dir(settings.run_dir)
    try:
        with held_alone(settings.run_dir / _LOCK_FILE), _ending_asked() as ending:
            remember(settings)
            retraining = importlib.import_module("trainer.retraining")
            comparison: Comparison = retraining.train_again(again, ending)
    except BlockingIOError:
        raise RunDirInUse(f"{settings.run_dir}: another trainer is at work here; give another run_dir") from None
    return "\n".join((_headline(again, comparison, of), report(comparison), f"written to {settings.run_dir}")), comparison


def _headline(again: Again, comparison: Comparison, of: Path) -> str:
    where = f"checkpoint {again.checkpoint.path.name}" if again.checkpoint else "the initial weights"
    if not comparison.steps:
        return f"trained again from {of}: no step, stopped on request"
    first, last = comparison.steps[0].recorded.step, comparison.steps[-1].recorded.step
    stopped = "" if last == again.steps[-1].step else ", stopped on request"
    num_samples = sum(len(pair.recorded.samples) for pair in comparison.steps)
    return f"trained again from {of}: steps {first} to {last} ({num_samples} samples) from {where}{stopped}"


@contextmanager
def _ending_asked() -> Iterator[threading.Event]:
    """Set by the first signal that asks to end; the second one ends the process."""
    asked = threading.Event()
    before: list[tuple[signal.Signals, Any]] = [(number, signal.getsignal(number)) for number in ending_signals()]

    def on_signal(number: int, frame: FrameType | None) -> None:
        log.info("stopping after the step in progress; a second signal stops at once")
        asked.set()
        for other, _ in before:
            signal.signal(other, signal.SIG_DFL)

    for number, _ in before:
        signal.signal(number, on_signal)
    try:
        yield asked
    finally:
        for number, handler in before:
            signal.signal(number, handler)
