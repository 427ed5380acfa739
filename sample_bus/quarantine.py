"""Where messages that did not decode are kept, for whoever looks for the reason.

Invariant: a bounded number of files and bytes, each file complete; what no longer fits is counted by the hub all the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sample_bus.errors import WireError
from sample_bus.packing import pack, unpack
from sample_bus.sample import SampleId

log = structlog.get_logger()

MAX_FILES = 64
MAX_BYTES = 256 << 20
_SUFFIX = ".msgpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedMessage:
    """A message as it was kept."""

    path: Path
    error: str
    """Why it was refused."""
    source: str
    """Who sent it."""
    at: float
    """Unix seconds."""
    id: SampleId | None
    """Its place in a stream; None when that is not known."""
    frames: tuple[bytes, ...]

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(_SUFFIX)


class Quarantine:
    def __init__(self, directory: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
        """`directory` is made when the first message comes; what an earlier process left there counts."""
        self._directory = directory
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._problem = ""
        self._full_since: int | None = None

    def keep(self, frames: Sequence[bytes], error: str, source: str, *, sample_id: SampleId | None = None) -> Path | None:
        """Write the frames, the reason and the sender as one msgpack map; None if that is not possible."""
        content = pack(
            {
                "error": error,
                "source": source,
                "at": time.time(),
                "id": list(sample_id) if sample_id is not None else None,
                "frames": [bytes(frame) for frame in frames],
            }
        )
        try:
            path = self._write(content)
        except OSError as problem:
            if self._problem != str(problem):
                self._problem = str(problem)
                log.warning("rejected messages are not kept", directory=str(self._directory), problem=str(problem))
            return None
        self._problem = ""
        return path

    def kept(self) -> Iterator[RejectedMessage | WireError]:
        """As `rejected_messages`."""
        return rejected_messages(self._directory)

    def _write(self, content: bytes) -> Path | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        changed_at = self._directory.stat().st_mtime_ns
        if changed_at == self._full_since:  # a flood of messages looks no further; a release changes the directory
            return None
        kept = [path.stat().st_size for path in _paths(self._directory)]
        self._full_since = changed_at if len(kept) >= self._max_files else None
        if self._full_since is not None or sum(kept) + len(content) > self._max_bytes:
            return None
        number = len(kept)
        while (path := self._directory / f"rejected-{number:04d}{_SUFFIX}").exists():
            number += 1
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(path)
        return path


def rejected_messages(directory: Path) -> Iterator[RejectedMessage | WireError]:
    """What is kept in `directory`, oldest name first; an error names a file that cannot be read."""
    for path in _paths(directory):
        try:
            yield _decode(path)
        except OSError as error:
            yield WireError(f"{path}: cannot be read: {error.strerror or error}")
        except WireError as error:
            yield error


def _paths(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{_SUFFIX}")) if directory.is_dir() else []


def _decode(path: Path) -> RejectedMessage:
    """Raises OSError, WireError."""
    plain = unpack(path.read_bytes(), str(path))
    try:
        place = plain.get("id")
        return RejectedMessage(
            path=path,
            error=str(plain["error"]),
            source=str(plain["source"]),
            at=float(plain.get("at", path.stat().st_mtime)),
            id=_id_of(place) if place is not None else None,
            frames=tuple(_bytes_of(frame) for frame in plain["frames"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"{path}: no rejected message: {type(error).__name__} {error}") from error


def _id_of(plain: Any) -> SampleId:
    producer, epoch, seq = plain
    return SampleId(str(producer), int(epoch), int(seq))


def _bytes_of(frame: Any) -> bytes:
    if not isinstance(frame, bytes):
        raise TypeError(f"got a frame of {type(frame).__name__}, expected bytes")
    return frame
