"""Where a hub may listen.

Invariant: of two live hubs at one address the second is refused; what a crashed hub left behind (its socket file) does not stop
the next one. libzmq itself would unlink a living hub's socket file and bind over it, so an `ipc://` address is guarded by a
lock that the kernel gives up with the process.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from configs.bus_address import MAX_PATH_BYTES, tcp_host, tcp_insecurity
from configs.schema import BusSettings
from sample_bus.errors import AddressInUse, Insecure

log = structlog.get_logger()


def check_secure(bus: BusSettings, address: str) -> None:
    """Raise Insecure if what is at `address` could be reached from other hosts and `bus` has no keys for it."""
    insecurity = tcp_insecurity(address, has_keys=bus.keys_dir is not None)
    if insecurity is None:
        return
    if not bus.allow_insecure:
        raise Insecure(insecurity)
    log.warning("bus without keys beyond this host", address=address)


def needs_ipv6(address: str) -> bool:
    """Whether a socket at `address` needs libzmq's IPV6 option."""
    return address.startswith("tcp://") and ":" in tcp_host(address)


@contextmanager
def guarded(address: str) -> Iterator[None]:
    """Hold the right to bind `address`. Raises AddressInUse."""
    if address.startswith("tcp://"):
        yield
    elif address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise AddressInUse(
                f"{address}: {len(os.fsencode(path))} bytes, expected at most {MAX_PATH_BYTES} in a socket's path"
            )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_path = path.with_name(path.name + ".lock")
        descriptor = _locked(lock_path, address)
        try:
            _check_unused(path)
            path.unlink(missing_ok=True)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
        finally:
            lock_path.unlink(missing_ok=True)
            os.close(descriptor)
    else:
        raise AddressInUse(f"{address}: expected ipc://PATH or tcp://HOST:PORT")


def _locked(lock_path: Path, address: str) -> int:
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressInUse(f"{address}: another trainer of this run listens there (it holds {lock_path})") from error
        try:
            if os.fstat(descriptor).st_ino == lock_path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass  # its holder closed and removed it between our open and our lock
        os.close(descriptor)


def _check_unused(path: Path) -> None:
    """Raise AddressInUse unless there is nothing at `path`, or a socket that nobody serves any more."""
    if not path.exists():
        return
    if not path.is_socket():
        raise AddressInUse(f"ipc://{path}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise AddressInUse(f"ipc://{path}: {error.strerror or error}") from error
    raise AddressInUse(f"ipc://{path}: another process listens there")
