"""`headrace quarantine`: messages that did not decode, and tasks that failed too often; look at them, let them go.

Both lie as files in RUN_DIR/quarantine. A task is issued again once its file is gone, on a run that goes on too; a message's
file only takes up room.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from console.errors import ConsoleError, NotQuarantined
from console.journals import QUARANTINE
from sample_bus.quarantine import RejectedMessage, rejected_messages

_TASKS = "tasks"
_SHOWN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTask:
    """A task as the rollouter wrote it down."""

    path: Path
    task_id: str
    failures: int
    reasons: tuple[str, ...]
    messages: tuple[str, ...]
    prompt_text: str
    at: float
    """Unix seconds."""

    @property
    def name(self) -> str:
        return self.path.stem


Held = HeldTask | RejectedMessage


def list_held(run_dir: Path) -> int:
    """Print a line for each thing in quarantine. Raises nothing for files that cannot be read: they are named."""
    held, problems = _held(run_dir)
    rows = [(one.name, _kind(one), _when(one.at), _summary(one)) for one in held]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        sys.stdout.write("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]) + "\n")
    if not rows and not problems:
        sys.stdout.write(f"nothing is quarantined in {run_dir}\n")
    sys.stderr.writelines(f"headrace quarantine: {problem}\n" for problem in problems)
    return 0


def show(run_dir: Path, name: str) -> int:
    """Print everything about one of them. Raises NotQuarantined."""
    one = _find(run_dir, name)
    rows = _message_rows(one) if isinstance(one, RejectedMessage) else _task_rows(one)
    width = max(len(label) for label, _ in rows) + 2
    sys.stdout.writelines(f"{label:<{width}}{text}\n" for label, text in rows)
    return 0


def release(run_dir: Path, names: Sequence[str], *, everything: bool) -> int:
    """Let them go. Raises NotQuarantined, before any is released, and ConsoleError when a file cannot be removed."""
    held = _held(run_dir)[0] if everything else [_find(run_dir, name) for name in names]
    for one in held:
        try:
            one.path.unlink(missing_ok=True)
        except OSError as error:
            raise ConsoleError(f"{one.path}: cannot be removed: {error.strerror or error}") from None
        what = f"task {one.task_id} may be issued again" if isinstance(one, HeldTask) else f"message {one.name} is removed"
        sys.stdout.write(f"{what}\n")
    if not held:
        sys.stdout.write(f"nothing is quarantined in {run_dir}\n")
    return 0


def _held(run_dir: Path) -> tuple[list[Held], list[str]]:
    """Tasks, then messages; and what cannot be read."""
    held: list[Held] = []
    problems: list[str] = []
    for path in sorted((run_dir / QUARANTINE / _TASKS).glob("*.json")):
        try:
            held.append(_task(path))
        except FileNotFoundError:  # released in between
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            problems.append(f"{path}: no quarantined task: {error}")
    for message in rejected_messages(run_dir / QUARANTINE):
        if isinstance(message, RejectedMessage):
            held.append(message)
        else:
            problems.append(str(message))
    return held, problems


def _task(path: Path) -> HeldTask:
    """Raises OSError, ValueError, TypeError, KeyError."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return HeldTask(
        path=path,
        task_id=str(facts["task_id"]),
        failures=int(facts["failures"]),
        reasons=tuple(map(str, facts["reasons"])),
        messages=tuple(map(str, facts["messages"])),
        prompt_text=str(facts["prompt_text"]),
        at=float(facts["at"]),
    )


def _find(run_dir: Path, name: str) -> Held:
    """By file name, task id, or an unambiguous beginning of either."""
    held, _ = _held(run_dir)
    exact = [one for one in held if name in _names(one)]
    found = exact or [one for one in held if any(known.startswith(name) for known in _names(one))]
    if not found:
        raise NotQuarantined(f"{name}: nothing in quarantine of {run_dir} has this name (see `headrace quarantine list`)")
    if len(found) > 1:
        raise NotQuarantined(f"{name}: {len(found)} things in quarantine begin so: {', '.join(one.name for one in found[:8])}")
    return found[0]


def _names(one: Held) -> tuple[str, ...]:
    return (one.name, one.task_id) if isinstance(one, HeldTask) else (one.name,)


def _kind(one: Held) -> str:
    return "task" if isinstance(one, HeldTask) else "message"


def _summary(one: Held) -> str:
    if isinstance(one, HeldTask):
        return f"{one.task_id}: {one.failures} rollouts given up ({', '.join(sorted(set(one.reasons)))})"
    return f"from {one.source}: {one.error}"


def _task_rows(one: HeldTask) -> list[tuple[str, str]]:
    rows = [
        ("task", one.task_id),
        ("file", str(one.path)),
        ("since", _when(one.at)),
        ("given up", f"{one.failures} rollouts"),
    ]
    rows += [(f"  {reason}", message) for reason, message in zip(one.reasons, one.messages, strict=False)]
    return [*rows, ("prompt", one.prompt_text)]


def _message_rows(one: RejectedMessage) -> list[tuple[str, str]]:
    rows = [
        ("message", one.name),
        ("file", str(one.path)),
        ("received", _when(one.at)),
        ("from", one.source),
        ("refused", one.error),
    ]
    if one.id is not None:
        rows.append(("record", "/".join(str(part) for part in one.id)))
    rows.append(("frames", ", ".join(f"{len(frame):,} bytes" for frame in one.frames) or "none"))
    return rows + [(f"  frame {number}", _bytes(frame)) for number, frame in enumerate(one.frames[:4])]


def _bytes(frame: bytes) -> str:
    return frame[:_SHOWN_BYTES].hex(" ") + (" …" if len(frame) > _SHOWN_BYTES else "")


def _when(at: float) -> str:
    return f"{datetime.fromtimestamp(at, tz=UTC).astimezone():%Y-%m-%d %H:%M:%S}"
