"""CURVE over real TCP sockets: who gets in, who does not, and what each end says about it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from console.key_files import new_client
from sample_bus import curve
from sample_bus.door import DOMAIN, Notices, judge
from sample_bus.errors import Insecure
from sample_bus.key_file import read_public, read_secret
from tests.sample_bus.keys import HANG_MS, calling, door_threads, made_keys, serving

HANG_S = 30.0


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusals(logs: list[Any]) -> list[dict[str, Any]]:
    return [dict(line) for line in logs if line["event"] == "client refused"]


# ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_listed_client_and_trainer_speak_both_ways(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", clients=("gpu-2",))
    with serving(curve.load_server(keys)) as server:
        for directory in (keys, keys / "for-gpu-2"):
            with calling(curve.load_client(directory), server.address) as client:
                client.socket.send(b"hello")
                assert server.socket.poll(HANG_MS)
                peer, said = server.socket.recv_multipart()
                server.socket.send_multipart([peer, b"welcome " + said])
                assert client.socket.poll(HANG_MS)
                assert client.socket.recv() == b"welcome hello"


def test_client_that_is_not_listed_is_refused_and_both_ends_say_so(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", clients=("gpu-2",))
    stranger = curve.load_client(keys / "for-gpu-2")
    (keys / "clients" / "gpu-2.pub").unlink()
    with capture_logs() as logs, serving(curve.load_server(keys)) as server:
        with calling(stranger, server.address) as client:
            client.socket.send(b"hello")
            problem = client.outcome()
            assert "does not list this client's key" in problem
            assert str(stranger.directory / "client.key") in problem
            until(lambda: refusals(logs))
            assert not server.socket.poll(0)
        said = refusals(logs)[0]
    assert said["host"] == "127.0.0.1"
    assert said["problem"] == "key not listed"
    assert stranger.public.decode().startswith(said["key"].rstrip("…"))
    assert stranger.secret.decode() not in str(logs)


def test_client_of_another_trainer_is_refused_and_both_ends_say_so(tmp_path: Path) -> None:
    keys, others = made_keys(tmp_path / "keys"), made_keys(tmp_path / "others")
    with (
        capture_logs() as logs,
        serving(curve.load_server(keys)) as server,
        calling(curve.load_client(others), server.address) as client,
    ):
        client.socket.send(b"hello")
        assert f"{others}/server.pub" in client.outcome()
        until(lambda: refusals(logs))
        assert not server.socket.poll(0)
    assert refusals(logs)[0]["problem"] == "it expects a trainer with another key"


def test_client_without_keys_is_refused_and_both_ends_say_so(tmp_path: Path) -> None:
    """Either end may be the first to find that they do not fit; the other one then sees a closed connection."""
    with (
        capture_logs() as logs,
        serving(curve.load_server(made_keys(tmp_path / "keys"))) as server,
        calling(None, server.address) as client,
    ):
        client.socket.send(b"hello")
        assert "asks for keys" in client.outcome()
        until(lambda: any("it has no keys" in line.get("problem", "") for line in logs))
        assert not server.socket.poll(0)


def test_client_with_keys_does_not_speak_with_a_trainer_that_has_none(tmp_path: Path) -> None:
    """Nor would it believe one that only pretends to be the trainer."""
    keys = made_keys(tmp_path / "keys")
    with serving(None) as server, calling(curve.load_client(keys), server.address) as client:
        client.socket.send(b"hello")
        assert "asks for no keys" in client.outcome()
        assert not server.socket.poll(0)


def test_stranger_who_knows_only_public_keys_gets_no_byte_in(tmp_path: Path) -> None:
    """The secret counts: a listed public key with another secret is nobody."""
    keys = made_keys(tmp_path / "keys")
    real = curve.load_client(keys)
    _, other_secret = zmq.curve_keypair()
    forged = curve.ClientKeys(
        public=real.public, secret=other_secret, server_public=real.server_public, directory=real.directory
    )
    with serving(curve.load_server(keys)) as server, calling(forged, server.address) as client:
        client.socket.send(b"hello")
        assert client.outcome()
        assert not server.socket.poll(100)


def test_client_is_let_in_or_locked_out_while_the_trainer_runs(tmp_path: Path) -> None:
    """From its next connection on."""
    keys = made_keys(tmp_path / "keys")
    with serving(curve.load_server(keys)) as server:
        new_client(keys, "gpu-2")
        with calling(curve.load_client(keys / "for-gpu-2"), server.address) as client:
            client.socket.send(b"first")
            assert server.next() == b"first"
        listed = keys / "clients" / "gpu-2.pub"
        listed.rename(tmp_path / "gpu-2.pub")
        with calling(curve.load_client(keys / "for-gpu-2"), server.address) as client:
            assert "does not list" in client.outcome()
            shutil.copy(tmp_path / "gpu-2.pub", listed)
            curve.connect_again(client.socket, server.address)
            client.socket.send(b"second")
            assert client.outcome() == ""
            assert server.next() == b"second"


def test_damaged_entry_in_the_list_shuts_out_nobody_else(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    with capture_logs() as logs, serving(curve.load_server(keys)) as server:
        (keys / "clients" / "a.pub").write_bytes(b"\xff" * 100)
        with calling(curve.load_client(keys), server.address) as client:
            client.socket.send(b"hello")
            assert server.next() == b"hello"
    assert any(line["event"] == "key file passed over" and "a.pub" in line["error"] for line in logs)


def test_nothing_is_readable_on_the_way(tmp_path: Path) -> None:
    """An ear on the wire hears neither what is said nor a secret key."""
    keys = made_keys(tmp_path / "keys")
    said, heard = b"the tokens of a sample " * 50, bytearray()
    with (
        serving(curve.load_server(keys)) as server,
        _Ear(server.address, heard) as address,
        calling(curve.load_client(keys), address) as client,
    ):
        client.socket.send(said)
        assert server.next() == said
    assert len(heard) > len(said)
    assert said[:23] not in heard
    for key in (curve.load_server(keys).secret, curve.load_client(keys).secret):
        assert key not in heard


def test_garbage_at_the_port_harms_nobody(tmp_path: Path) -> None:
    """Also a frame that claims 2^62 bytes, an unfinished greeting, and HTTP."""
    keys = made_keys(tmp_path / "keys")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with serving(curve.load_server(keys)) as server:
        host, port = "127.0.0.1", int(server.address.rpartition(":")[2])
        for data in (
            b"",
            b"\x00" * 100,
            os.urandom(5000),
            b"GET / HTTP/1.1\r\n\r\n",
            greeting[:30],
            greeting + b"\x06" + b"\x40" * 8,
        ):
            with socket.create_connection((host, port), timeout=HANG_S) as stranger:
                stranger.sendall(data)
                with calling(curve.load_client(keys), server.address) as client:
                    client.socket.send(b"hello")
                    assert server.next() == b"hello"


def test_door_ends_with_its_context(tmp_path: Path) -> None:
    before = door_threads()
    keys = curve.load_server(made_keys(tmp_path / "keys"))
    with serving(keys):
        assert len(door_threads()) == len(before) + 1
    until(lambda: len(door_threads()) == len(before))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve.apply_server(context.socket(zmq.ROUTER), context, keys)
    context.destroy(linger=0)  # as after an address that is taken
    until(lambda: len(door_threads()) == len(before))


class _Broken(curve.ServerKeys):
    def name_of(self, public: bytes) -> str | None:
        raise RuntimeError("the list cannot be read")


def test_while_the_door_cannot_tell_nobody_gets_in(tmp_path: Path) -> None:
    """If the door's thread dies too: libzmq by itself would let everybody with a key in."""
    keys = made_keys(tmp_path / "keys")
    real = curve.load_server(keys)
    broken = _Broken(public=real.public, secret=real.secret, directory=real.directory)
    before = door_threads()
    with capture_logs() as logs, serving(broken) as server, calling(curve.load_client(keys), server.address) as first:
        first.socket.send(b"hello")
        until(lambda: len(door_threads()) == len(before))
        with calling(curve.load_client(keys), server.address) as second:
            second.socket.send(b"hello")
            assert not server.socket.poll(500)
    assert any(line["log_level"] == "error" and "nobody new can connect" in line["event"] for line in logs)


class _Ear:
    """A TCP relay that keeps what passes."""

    def __init__(self, address: str, heard: bytearray) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._heard = heard
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = [self._listener]

    def __enter__(self) -> str:
        self._start(self._accept)
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(HANG_S)
        for each in self._open:
            each.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, timeout=HANG_S)
            except OSError:
                return
            self._open += [near, far]
            self._start(lambda near=near, far=far: self._relay(near, far))  # type: ignore[misc]
            self._start(lambda near=near, far=far: self._relay(far, near))  # type: ignore[misc]

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._heard += data
                target.sendall(data)
        except OSError:
            pass


# ── key files ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_secret_that_others_may_read_is_refused_with_the_remedy(mode: int, tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    for path, load in ((keys / "server.key", curve.load_server), (keys / "client.key", curve.load_client)):
        path.chmod(mode)
        with pytest.raises(Insecure, match=f"others may read it .mode {mode:04o}., expected 0600; `chmod 600 {path}`"):
            load(keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no key file"),
        ("[]", "is no key file"),
        ("[" * 4000, "is no key file"),
        ("{}", "public is no key of 40 characters"),
        ('{"public": 7}', "public is no key"),
        ('{"public": "' + "~" * 40 + '"}', "public is no key"),
        ('{"public": "' + "#" * 40 + '"}', "public is no key"),
        ('{"public": "' + "ü" * 40 + '"}', "public is no key"),
        ("x" * 5000, "is no key file"),
    ],
)
def test_file_that_is_no_key_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(Insecure, match=message):
        read_secret(path)
    with pytest.raises(Insecure, match=message):
        read_public(path)


def test_keys_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    fields = json.loads((keys / "client.key").read_text())
    fields["public"] = json.loads((keys / "server.key").read_text())["public"]
    (keys / "client.key").write_text(json.dumps(fields))
    with pytest.raises(Insecure, match="does not belong to its secret key"):
        curve.load_client(keys)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, message in (("directory", "is no regular file"), ("pipe", "is no regular file"), ("none", "cannot be read")):
        with pytest.raises(Insecure, match=message):
            read_secret(tmp_path / name)


def test_server_without_any_client_is_refused(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    shutil.rmtree(keys / "clients")
    with pytest.raises(Insecure, match=r"nobody could connect; `headrace keys new .* --client NAME`"):
        curve.load_server(keys)


def test_keys_do_not_show_their_secret() -> None:
    public, secret = zmq.curve_keypair()
    server = curve.ServerKeys(public=public, secret=secret, directory=Path("/keys"))
    client = curve.ClientKeys(public=public, secret=secret, server_public=public, directory=Path("/keys"))
    for keys in (server, client):
        assert repr(secret) not in repr(keys)
        assert secret.decode() not in str(keys)


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────

PUBLIC, _ = zmq.curve_keypair()
RAW = zmq.utils.z85.decode(PUBLIC)
GOOD = [b"1.0", b"7", DOMAIN, b"10.0.0.5", b"", b"CURVE", RAW]


def test_only_a_listed_key_of_our_domain_is_let_in() -> None:
    verdict = judge(GOOD, {PUBLIC: "gpu-2"}.get)
    assert (verdict.status, verdict.name, verdict.host, verdict.public) == (b"200", "gpu-2", "10.0.0.5", PUBLIC)
    assert judge(GOOD, lambda public: None).status == b"400"


@given(st.lists(st.binary(max_size=40) | st.sampled_from(GOOD), max_size=9))
def test_any_other_request_is_refused(request: list[bytes]) -> None:
    """Not even when every key is listed."""
    verdict = judge(request, lambda public: "anyone")
    proper = (
        len(request) == 7 and request[0] == b"1.0" and request[2] == DOMAIN and request[5] == b"CURVE" and len(request[6]) == 32
    )
    assert (verdict.status == b"200") == proper


def test_same_refusal_is_told_once_in_a_while() -> None:
    """A refused client tries again every second or so; nor can many of them fill the memory."""
    notices = Notices(every_s=10.0, max_kept=3)
    assert [notices.worth_a_line("a", "p", now) for now in (0.0, 1.0, 9.9, 10.0, 11.0)] == [True, False, False, True, False]
    assert notices.worth_a_line("b", "p", 11.0)
    for number in range(100):
        notices.worth_a_line(str(number), "p", 12.0)
    assert len(notices._said_at) <= 3


@pytest.mark.parametrize("event", [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECTED])
def test_events_of_a_healthy_connection_are_no_problem(event: int) -> None:
    assert curve.handshake_problem(event, 0, None) is None
