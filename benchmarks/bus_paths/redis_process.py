"""A Redis server of this benchmark's own, with the persistence that a durable bus asks for."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

START_S = 30.0


class NoRedis(Exception):
    """Raised when there is no redis-server on this machine."""


@contextmanager
def redis_server(directory: Path, *, durable: bool = True) -> Iterator[tuple[str, psutil.Process]]:
    """Its URL and its process, until the block ends. Raises NoRedis."""
    program = shutil.which("redis-server")
    if program is None:
        raise NoRedis("redis-server is not installed (Debian: apt-get install redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--appendonly", "yes", "--appendfsync", "everysec"] if durable else ["--appendonly", "no"]
    server = subprocess.Popen(
        [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", "", *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise NoRedis("redis-server did not start") from None
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0", psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()
