"""What a run leaves on the machine, and making sure that it leaves nothing.

Invariant: everything looked at or removed here was made by a process of this run. Processes are known by a mark in their
environment, which children inherit whatever group or session they move to; socket files and shared-memory segments by having
been open in such a process, or by lying in the run's own socket directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "HEADRACE_UP"
"""Environment variable that names the `headrace up` to which a process belongs."""

_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What `clear` found."""

    removed: tuple[str, ...] = ()
    """Processes ended and files removed, in words."""
    left: tuple[str, ...] = ()
    """What could not be removed; empty: nothing of the run is left."""


class Traces:
    """The processes and files of one run."""

    def __init__(self, mark: str, socket_dir: Path) -> None:
        self.mark = mark
        self.socket_dir = socket_dir
        self._files: set[Path] = set()
        self._seen: set[int] = set()

    def processes(self) -> dict[int, str]:
        """Living processes of the run, this one excepted: process id to command line."""
        needle = f"{MARK}={self.mark}".encode()
        found = {}
        for pid in _process_ids():
            if pid == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = _command_line(pid)
        self._seen |= found.keys()
        return found

    def observe(self) -> None:
        """Remember the segments and socket files that the run's processes hold now."""
        bound = _bound_sockets()
        for pid in self.processes():
            self._files |= _segments(pid)
            self._files |= {bound[inode] for inode in _socket_inodes(pid) if inode in bound}

    async def clear(self, *, patience_s: float, kill_s: float = 1.0) -> Cleared:
        """Afterwards no process and no file of the run is left, or `left` says which. Call when the daemons have ended.

        Processes get `patience_s` to end by themselves before SIGKILL.
        """
        removed = []
        if not await self._gone(patience_s):
            for pid, command in self.processes().items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    removed.append(f"process {pid} ({command})")
            await self._gone(kill_s)
        left = [f"process {pid} ({command})" for pid, command in self.processes().items()]
        self._reap()
        for path in sorted(self._files | set(_entries(self.socket_dir))):
            if not path.exists():
                continue
            try:
                path.unlink()
                removed.append(f"file {path}")
            except OSError as error:
                left.append(f"file {path} ({error.strerror})")
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        return Cleared(removed=tuple(removed), left=tuple(left))

    async def _gone(self, timeout_s: float) -> bool:
        """Whether the run's processes ended within `timeout_s`. Not all are children of this one: the kernel tells nobody."""
        deadline = time.monotonic() + timeout_s
        while self.processes():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)
            self._reap()
        return True

    def _reap(self) -> None:
        """Take the exit status of orphans that the kernel gave to this process."""
        for pid in tuple(self._seen):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                self._seen.discard(pid)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """While inside, orphaned descendants become children of this process, so that none stays as a zombie."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command_line(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(words).strip()[:120]


def _segments(pid: int) -> set[Path]:
    """Files below /dev/shm that `pid` has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            at = line.find(f"{_SHARED_MEMORY}/")
            if at >= 0 and not line.endswith(" (deleted)"):
                found.add(Path(line[at:]))
    for target in _open_files(pid):
        if target.startswith(f"{_SHARED_MEMORY}/") and not target.endswith(" (deleted)"):
            found.add(Path(target))
    return found


def _open_files(pid: int) -> list[str]:
    targets = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(entry.readlink()))
    return targets


def _socket_inodes(pid: int) -> list[str]:
    return [target[8:-1] for target in _open_files(pid) if target.startswith("socket:[")]


def _bound_sockets() -> dict[str, Path]:
    """Inode to path of every Unix socket that listens at a file (proc(5), /proc/net/unix)."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
            fields = line.split(None, 7)
            listens = len(fields) == 8 and int(fields[3], 16) & 0x10000
            if listens and fields[7].startswith("/"):
                found[fields[6]] = Path(fields[7])
    return found


def _entries(directory: Path) -> list[Path]:
    """Everything below `directory` but directories."""
    return [path for path in directory.rglob("*") if not path.is_dir()]
