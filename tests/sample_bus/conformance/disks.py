"""Disks that refuse: one that is full, a directory that cannot be written, by the means that this user has."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

SIZE_BYTES = 1 << 20


class Disk(Protocol):
    """A place for files that a test fills."""

    @property
    def path(self) -> Path: ...

    def fill(self) -> None:
        """Leave not one byte."""
        ...

    def free(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDisk:
    """A file system of its own."""

    path: Path

    def fill(self) -> None:
        block = bytes(4096)
        with (self.path / "ballast").open("ab", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(block)
            except OSError:
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldDisk:
    """For a user who may not mount: the calls that write to files say that there is no space."""

    path: Path
    monkeypatch: pytest.MonkeyPatch

    def fill(self) -> None:
        def refuse(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for name in ("pwrite", "pwritev", "write", "writev"):
            self.monkeypatch.setattr(os, name, refuse)

    def free(self) -> None:
        self.monkeypatch.undo()


def can_mount() -> bool:
    return (
        os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0
    )


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A tmpfs at `path`. For root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join((f"size={SIZE_BYTES}", *options)), "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def unwritable(path: Path) -> Iterator[Path]:
    """A place where this user, whoever it is, can make no file."""
    if can_mount():
        with mounted(path, "ro"):
            yield path
    elif os.geteuid() == 0:
        path.touch()  # permissions do not bind root, but nobody makes files below a file
        yield path
    else:
        path.mkdir(mode=0o500)
        try:
            yield path
        finally:
            path.chmod(0o700)
