"""Checkpoints of a run: `step_N/` directories that are whole or do not count. Light: no torch.

Invariant: a directory is complete exactly when its marker lists every file with its size. It is written under another name,
synced, marked and renamed; whatever is removed is renamed first. What a crash leaves behind is told, never resumed from, and
never a reason to start over. One process at a time writes (the trainer holds a lock on the run directory).
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

from trainer.durable import fsync
from trainer.errors import CheckpointError, NoCheckpointError
from trainer.run_state import RunState

log = structlog.get_logger()

DIRECTORY = "checkpoints"
"""Below the run directory."""
MARKER = "complete.json"
STATE = "state.json"
_NAME = re.compile(r"^step_(\d+)$")
_UNFINISHED = ".unfinished_"
_DISCARDED = ".discarded_"
_CHUNK_BYTES = 4 << 20


class Part(Protocol):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One to go on from; its files are not verified yet."""

    path: Path
    state: RunState


def save_checkpoint(root: Path, parts: Mapping[str, Part], *, state: RunState, keep: int) -> Path:
    """Write `root/step_N` with `parts` (name to content) and `state`; then all but the run's newest `keep` are deleted.

    A checkpoint of the same step is replaced. On return everything is on disk.
    Raises CheckpointError when it cannot be written; the older ones are as they were.
    """
    target = root / f"step_{state.step}"
    unfinished = root / f"{_UNFINISHED}{target.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        _write(unfinished, parts, state)
        if target.exists():
            target.rename(root / f"{_DISCARDED}{target.name}")
        unfinished.rename(target)
        fsync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    try:
        _prune(root, run_id=state.run_id, keep=keep)
    except OSError as error:
        log.warning("older checkpoints cannot be removed", path=str(root), error=str(error))
    return target


def choose(root: Path, *, mode: Literal["never", "auto", "must"], run_id: str) -> Checkpoint | None:
    """The checkpoint to go on from: the newest complete one of this run, else of an earlier run here. None when starting afresh
    is right.

    `never` starts afresh. `auto` does so only where no checkpoint was ever finished (a death while the first one was written is
    no reason to stop: nothing was committed), `must` not at all: an incomplete one alone raises NoCheckpointError, and one
    whose state cannot be read CheckpointError.
    """
    if mode == "never":
        return None
    found = find(root)
    for path, why in found.incomplete.items():
        log.warning("incomplete checkpoint ignored", path=str(path), reason=why)
    if not found.complete:
        incomplete = [path.name for path in found.incomplete if not path.name.startswith(_UNFINISHED)]
        incomplete += [path.name for path in root.glob(f"{_DISCARDED}*")]
        if incomplete:
            raise NoCheckpointError(
                f"{root}: no complete checkpoint; incomplete: {', '.join(incomplete)}; "
                "remove them to start afresh, or set checkpoint.resume=never"
            )
        if mode == "must":
            raise NoCheckpointError(f"{root}: no checkpoint, and checkpoint.resume=must")
        return None
    newest = [Checkpoint(path=path, state=read_state(path)) for path in reversed(found.complete)]
    for checkpoint in newest:
        if checkpoint.state.run_id == run_id:
            return checkpoint
    log.warning(
        "checkpoint of an earlier run in this directory: its weights are taken, its samples are not this run's",
        path=str(newest[0].path),
        run_id=run_id,
        its_run_id=newest[0].state.run_id,
    )
    return newest[0]


def load(checkpoint: Checkpoint, parts: Mapping[str, Part]) -> None:
    """Verify every file, then restore `parts`. Raises CheckpointError."""
    verify(checkpoint.path)
    files = _listed(checkpoint.path)
    for name in parts:
        if not any(file.startswith(f"{name}/") for file in files):
            raise CheckpointError(f"{checkpoint.path / MARKER}: lists no file of {name}")
    for name, part in parts.items():
        part.load(checkpoint.path / name)


def read_state(checkpoint: Path) -> RunState:
    """Raises CheckpointError naming the file."""
    path = checkpoint / STATE
    try:
        plain: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return RunState.from_plain(plain, str(path))


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
    for name, facts in _listed(checkpoint).items():
        if (got := _checksum(checkpoint / name)) != facts["xxh3"]:
            raise CheckpointError(f"{checkpoint / name}: damaged: checksum {got}, expected {facts['xxh3']}")


def _write(directory: Path, parts: Mapping[str, Part], state: RunState) -> None:
    """A whole checkpoint in `directory`, made anew; the marker comes last."""
    directory.mkdir()
    for name, part in parts.items():
        (directory / name).mkdir()
        part.save(directory / name)
    (directory / STATE).write_text(json.dumps(state.as_plain(), indent=1))
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "xxh3": _checksum(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    fsync(directory / STATE)
    (directory / MARKER).write_text(json.dumps({"step": state.step, "files": files}, indent=1))
    for path in (directory / MARKER, *(directory / name for name in parts), directory):
        fsync(path)


def _sweep(root: Path) -> None:
    """Remove what an earlier process left behind while it wrote or removed."""
    for path in root.iterdir():
        if path.name.startswith((_UNFINISHED, _DISCARDED)):
            shutil.rmtree(path)


def _prune(root: Path, *, run_id: str, keep: int) -> None:
    """Remove all but the run's newest complete checkpoints; those of earlier runs stay."""
    own = [path for path in find(root).complete if read_state(path).run_id == run_id]
    for old in own[:-keep]:
        old.rename(root / f"{_DISCARDED}{old.name}")
    _sweep(root)


def _lacks(path: Path) -> str | None:
    """What keeps a directory from being complete."""
    try:
        files = _listed(path)
        if STATE not in files:
            return f"{MARKER} lists no {STATE}"
        for name, facts in files.items():
            if (size := (path / name).stat().st_size) != facts["bytes"]:
                return f"{name}: {size} bytes, expected {facts['bytes']}"
    except FileNotFoundError as error:
        return f"no {Path(error.filename).relative_to(path)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MARKER} cannot be read: {error}"
    return None


def _listed(checkpoint: Path) -> dict[str, Any]:
    """The marker's files, by name."""
    files: dict[str, Any] = json.loads((checkpoint / MARKER).read_text())["files"]
    return files


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
