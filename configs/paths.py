"""Where things stand on disk: the cache of models and environments, and the sockets of a run.

Invariant: a run's sockets lie in a directory that only this user can enter, under a path short enough for a Unix socket.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs import redis_address
from configs.errors import ConfigError
from configs.schema import Settings

MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""
_LONGEST_SOCKET_NAME = 52
"""Bytes: a socket that vLLM names by a UUID, in a directory of its engine."""


def cache_dir() -> Path:
    """Where converted models are kept over runs and checkouts: $HEADRACE_CACHE, else headrace/ in the user's cache."""
    explicit = os.environ.get("HEADRACE_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def make_run_dir(path: Path, key: str = "run_dir") -> None:
    """Make `path` if need be and see that files can be made in it. Raises ConfigError naming `key`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={path}: {(error.strerror or str(error)).lower()}; expected a directory that can be made and written"
        ) from None


def adapter_dir(settings: Settings) -> Path:
    """Where the trainer writes its first adapters for the engines that are given nothing else (`weight_sync.lora=adapter`)."""
    return settings.run_dir.absolute() / "adapter"


def socket_dir(settings: Settings) -> Path:
    """The directory of this run's sockets, made with mode 0700; the same for every process that names the same run_dir.

    Raises ConfigError when it belongs to someone else or cannot be made.
    """
    path = _socket_path(settings)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: the directory for sockets cannot be made: {error.strerror}") from None
    _make_private(path)
    return path


@contextmanager
def sockets_of(settings: Settings) -> Iterator[Path]:
    """`socket_dir` for as long as a daemon lives; whoever leaves last takes the empty directory away."""
    path = socket_dir(settings)
    try:
        yield path
    finally:
        with suppress(OSError):  # not empty: another daemon of the run goes on
            path.rmdir()


@contextmanager
def held_alone(lock_file: Path) -> Iterator[None]:
    """Hold `lock_file` until the block or the process ends, however it ends.

    Raises BlockingIOError if another process holds it.
    """
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def bus_address(settings: Settings) -> str:
    """`bus.address` with `auto` resolved to this run's socket; makes nothing. Raises ConfigError if it is someone else's.

    A Redis server's address gets the run's name, under which everything of the run stands there.
    """
    if settings.bus.transport == "redis":
        address = redis_address.DEFAULT if settings.bus.address == "auto" else settings.bus.address
        return str(redis_address.parse(address).with_run(settings.name))
    if settings.bus.address != "auto":
        return settings.bus.address
    path = _socket_path(settings)
    _make_private(path)
    return f"ipc://{path}/bus"


def _socket_path(settings: Settings) -> Path:
    return _base() / hashlib.sha256(os.fsencode(settings.run_dir.absolute())).hexdigest()[:12]


def _make_private(path: Path) -> None:
    """Raise ConfigError if `path` or its parent is there and belongs to someone else; close them to others."""
    for directory in (path.parent, path):
        try:
            facts = directory.lstat()
        except FileNotFoundError:
            return
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
            raise ConfigError(
                f"{directory}: belongs to user {facts.st_uid}, expected {os.getuid()}: refusing to put sockets there"
            )
        if stat.S_IMODE(facts.st_mode) & 0o077:
            directory.chmod(0o700)


def _base() -> Path:
    """The first of the runtime directory, the temporary directory and /tmp whose sockets stay short enough."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime) / "headrace"] if runtime and os.access(runtime, os.W_OK) else []
    name = f"headrace-{os.getuid()}"
    candidates += [Path(tempfile.gettempdir()) / name, Path("/tmp") / name]
    for candidate in candidates:
        if len(os.fsencode(candidate)) + 1 + 12 + 1 + _LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH:
            return candidate
    return candidates[-1]
