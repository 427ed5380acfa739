"""A real redis-server for tests: killed and restarted on what it left, with memory limits, users and TLS."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

SERVER = shutil.which("redis-server", path="/usr/bin:/usr/local/bin:" + os.environ.get("PATH", ""))
ABSENT = "redis-server is not installed (Debian: apt-get install redis-server)"
START_S = 30.0
RUN = "run"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class RedisServer:
    def __init__(self, directory: Path, *options: str, durable: bool = True, tls: Certificates | None = None) -> None:
        self.port = free_port()
        self.directory = directory
        self.tls = tls
        self._options = [*_persistence(durable=durable), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Of the run that the tests' hubs host."""
        scheme = "rediss" if self.tls is not None else "redis"
        return f"{scheme}://127.0.0.1:{self.port}/0#{RUN}"

    def start(self) -> None:
        """Start it on what its directory holds, and wait until it answers. Where there is no Redis its tests are skipped, but
        not in CI, which installs it."""
        if SERVER is None:
            assert "CI" not in os.environ, ABSENT
            pytest.skip(ABSENT)
        port = ["--port", "0", "--tls-port", str(self.port)] if self.tls is not None else ["--port", str(self.port)]
        self._process = subprocess.Popen(
            [SERVER, "--bind", "127.0.0.1", *port, "--dir", str(self.directory), "--save", "", *self._options],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.command("PING", patient=False):
                    return
            except redis.AuthenticationError:
                return
            except (redis.ConnectionError, redis.TimeoutError):
                assert self._process.poll() is None, "redis-server ended at its start"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def forget(self) -> None:
        """Take its data away while it is down."""
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def command(self, *words: Any, patient: bool = True) -> Any:
        with self.client(patient=patient) as client:
            return client.execute_command(*words)

    def client(self, *, patient: bool = True, **more: Any) -> redis.Redis:
        options: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "socket_timeout": START_S if patient else 1.0,
            "protocol": 2,
            **more,
        }
        if self.tls is not None:
            options |= {"ssl": True, "ssl_ca_certs": str(self.tls.authority)}
        if not patient:
            options["retry"] = None
        return redis.Redis(**options)


def _persistence(*, durable: bool) -> Sequence[str]:
    return ("--appendonly", "yes", "--appendfsync", "everysec") if durable else ("--appendonly", "no")


@contextmanager
def redis_server(*options: str, durable: bool = True, tls: Certificates | None = None) -> Iterator[RedisServer]:
    """A running server in a directory of its own; its end does not outlive the block."""
    directory = Path(tempfile.mkdtemp(prefix="hr-redis-"))
    server = RedisServer(directory, *options, durable=durable, tls=tls)
    try:
        server.start()
        yield server
    finally:
        if server._process is not None:
            server._process.send_signal(signal.SIGCONT)
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


class Certificates:
    """A certificate authority and a certificate of 127.0.0.1, made with openssl."""

    def __init__(self, directory: Path) -> None:
        self.authority = directory / "ca.crt"
        self.certificate = directory / "server.crt"
        self.key = directory / "server.key"
        authority_key = directory / "ca.key"
        names = directory / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        request = directory / "server.csr"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", "-x509", *new_key, "-keyout", authority_key, "-out", self.authority, "-subj", "/CN=test", "-days", "2")
        _openssl("req", *new_key, "-keyout", self.key, "-out", request, "-subj", "/CN=redis")
        signing = ("-CA", self.authority, "-CAkey", authority_key, "-CAcreateserial", "-days", "2", "-extfile", names)
        _openssl("x509", "-req", "-in", request, "-out", self.certificate, *signing)

    def options(self) -> tuple[str, ...]:
        """For a server that asks its clients for no certificate."""
        files = ("--tls-cert-file", self.certificate, "--tls-key-file", self.key, "--tls-ca-cert-file", self.authority)
        return (*map(str, files), "--tls-auth-clients", "no")


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
