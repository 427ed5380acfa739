"""Checkpoints of a run: `step_N/` directories that are whole or do not count.

Invariant: a directory is complete exactly when its marker lists every file with its size. It is written under another name,
synced, marked and renamed; what a crash leaves behind is told, never resumed from, and never a reason to start over.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog
import xxhash
from safetensors import SafetensorError

from trainer.errors import CheckpointError, NoCheckpointError
from trainer.snapshot import fsync

log = structlog.get_logger()

MARKER = "complete.json"
STATE = "state.json"
_POLICY = "policy"
_NAME = re.compile(r"^step_(\d+)$")
_UNFINISHED = ".unfinished_"
_CHUNK_BYTES = 4 << 20


class Saved(Protocol):
    """What a checkpoint holds beside the run's own state."""

    def save(self, directory: Path) -> None:
        """Write everything into an existing empty directory, durably."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies in a directory of checkpoints."""

    complete: tuple[Path, ...]
    """Oldest first, by step."""
    incomplete: Mapping[Path, str]
    """Directory to what is wrong with it."""


def save_checkpoint(root: Path, policy: Saved, *, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write `root/step_N` with the policy and `state` (JSON), then delete all but the newest `keep` complete ones.

    A complete checkpoint of the same step is replaced. On return everything is on disk.
    Raises CheckpointError when it cannot be written; the older ones are as they were.
    """
    unfinished = root / f"{_UNFINISHED}step_{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write(unfinished, policy, step=step, state=state)
        target = root / f"step_{step}"
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        fsync(root)
        for old in find(root).complete[:-keep]:
            shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{root / f'step_{step}'}: cannot be written: {error}") from error
    return target


def _write(directory: Path, policy: Saved, *, step: int, state: Mapping[str, Any]) -> None:
    """A whole checkpoint in `directory`, made anew; the marker comes last."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / _POLICY).mkdir(parents=True)
    policy.save(directory / _POLICY)
    (directory / STATE).write_text(json.dumps(dict(state), indent=1))
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "xxh3": _checksum(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    (directory / MARKER).write_text(json.dumps({"step": step, "files": files}, indent=1))
    for path in (directory / STATE, directory / MARKER, directory / _POLICY, directory):
        fsync(path)


def resume(root: Path, policy: Saved, *, mode: Literal["never", "auto", "must"]) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into `policy` and return its state; None when starting afresh is right.

    `never` starts afresh. `auto` does so only where there is no trace of a checkpoint, `must` not at all: an incomplete one
    alone raises NoCheckpointError, and a damaged one CheckpointError.
    """
    if mode == "never":
        return None
    found = find(root)
    for path, why in found.incomplete.items():
        log.warning("incomplete checkpoint ignored", path=str(path), reason=why)
    if not found.complete:
        if found.incomplete:
            raise NoCheckpointError(
                f"{root}: no complete checkpoint; incomplete: {', '.join(p.name for p in found.incomplete)}; "
                "remove them to start afresh, or set checkpoint.resume=never"
            )
        if mode == "must":
            raise NoCheckpointError(f"{root}: no checkpoint, and checkpoint.resume=must")
        return None
    newest = found.complete[-1]
    verify(newest)
    policy.load(newest / _POLICY)
    state: dict[str, Any] = json.loads((newest / STATE).read_text())
    return state


def find(root: Path) -> Found:
    """Tell complete checkpoints from others, by marker, names and sizes."""
    complete: dict[int, Path] = {}
    incomplete: dict[Path, str] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.match(path.name)
        if path.name.startswith(_UNFINISHED):
            incomplete[path] = "was being written"
        elif match and (why := _lacks(path)):
            incomplete[path] = why
        elif match:
            complete[int(match.group(1))] = path
    return Found(complete=tuple(complete[step] for step in sorted(complete)), incomplete=incomplete)


def verify(checkpoint: Path) -> None:
    """Raise CheckpointError naming the first file whose bytes are not those that were written."""
    for name, facts in json.loads((checkpoint / MARKER).read_text())["files"].items():
        if (got := _checksum(checkpoint / name)) != facts["xxh3"]:
            raise CheckpointError(f"{checkpoint / name}: damaged: checksum {got}, expected {facts['xxh3']}")


def _lacks(path: Path) -> str | None:
    """What keeps a directory from being complete."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        for name, facts in files.items():
            if (size := (path / name).stat().st_size) != facts["bytes"]:
                return f"{name}: {size} bytes, expected {facts['bytes']}"
    except FileNotFoundError as error:
        return f"no {Path(error.filename).relative_to(path)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MARKER} cannot be read: {error}"
    return None


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
