"""Disks that refuse: one that is full, a directory that cannot be written, by the means that this user has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A small file system of its own."""

    path: Path

    def fill(self) -> None:
        """Leave not one byte."""
        block = bytes(4096)
        with (self.path / "ballast").open("ab", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(block)
            except OSError:
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink()


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
    """A directory in which nobody, root included, can make a file."""
    if can_mount():
        with mounted(path, "ro"):
            yield path
    else:
        path.mkdir(mode=0o500)
        try:
            yield path
        finally:
            path.chmod(0o700)
