"""Weights over TCP: whole, bounded, only for who was invited, and with an end that both sides learn of when one dies."""

from __future__ import annotations

import gc
import itertools
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zmq.utils import z85

from tests.weight_sync import net_peers
from tests.weight_sync.net_peers import Serving, is_same, line_of, process, receive, request, settings_for, weights
from weight_sync import tcp_sessions
from weight_sync.channel import BucketKind
from weight_sync.errors import AddressTaken, PeerFailed, PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.stream import receive_weights
from weight_sync.tcp import MESSAGE_BYTES, TcpListener, open_receiver
from weight_sync.tcp_address import NetAddress
from weight_sync.tcp_gate import Quiet, judge
from weight_sync.transport import Cut, Incoming, Receiving, Terms


@pytest.mark.parametrize("num_connections", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 16, 4 << 20])
def test_weights_arrive_as_they_were(num_connections: int, bucket_bytes: int) -> None:
    """B140, B144: sizes around a bucket, and nothing."""
    tensors = {
        f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8)
        for size in (0, 1, bucket_bytes - 1, bucket_bytes, bucket_bytes + 1, 4 * bucket_bytes)
    }
    with Serving(settings_for("tcp", num_connections=num_connections, bucket_bytes=bucket_bytes), tensors) as serving:
        assert is_same(receive(serving.address), tensors)
        assert isinstance(serving.outcome(), int)
        assert is_same(receive(serving.address), tensors), "a second time, over memory that was used"


def test_several_receivers_are_served_at_a_time() -> None:
    names = [f"engine-{index}" for index in range(4)]
    with Serving(settings_for("tcp")) as serving:
        results = net_peers.receive_in_threads(serving.address, names, cohort=1)
    assert all(is_same(results[name], weights()) for name in names)


def test_an_ipv6_address_is_served_and_reached() -> None:
    """B176."""
    with Serving(settings_for("tcp", listen_host="::1")) as serving:
        assert serving.address.startswith("tcp://[::1]:")
        assert is_same(receive(serving.address), weights())


def test_no_more_than_two_buckets_are_out_at_a_time() -> None:
    """B22's other half: a receiver that takes nothing holds up the sender, not its memory."""
    bucket_bytes = 2 * MESSAGE_BYTES
    waiting: queue.Queue[int] = queue.Queue()
    listener = TcpListener(settings_for("tcp", bucket_bytes=bucket_bytes), terms=Terms(transport="tcp"))

    def serve(incoming: Incoming) -> None:
        sender = incoming.open()
        assert sender.bucket_bytes == MESSAGE_BYTES
        num_out = 0
        try:
            while True:
                sender.next_bucket()[0] = num_out
                waiting.put(num_out)
                sender.send_bucket(BucketKind.WEIGHTS, num_out, payload_bytes=sender.bucket_bytes, header=b"")
                num_out += 1
        except WeightSyncError:
            waiting.put(-1)
        finally:
            incoming.close()

    listener.start(serve)
    try:
        channel = open_receiver(listener.address, request(listener.address), timeout_s=60)
        with channel:
            assert [waiting.get(timeout=60) for _ in range(4)] == [0, 1, 2, 3]
            channel.receive()
            with pytest.raises(queue.Empty):
                waiting.get(timeout=0.3)
            channel.release()
            assert waiting.get(timeout=60) == 4
        remaining = []
        while (number := waiting.get(timeout=60)) >= 0:
            remaining.append(number)
        assert len(remaining) <= 1
    finally:
        listener.close()


def test_a_stranger_with_another_token_is_refused() -> None:
    with Serving(settings_for("tcp")) as serving:
        address = replace(NetAddress.parse(serving.address), token=bytes(16))
        with pytest.raises(PeerFailed, match="token is not this server's"):
            receive(str(address))
        assert is_same(receive(serving.address), weights())


def zmtp(address: NetAddress, mechanism: bytes, *commands: bytes) -> socket.socket:
    """A connection of ZMTP 3.1 that has greeted, and given the handshake's `commands`."""
    stranger = socket.create_connection((address.host, address.port), timeout=net_peers.WAIT_S)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)
    stranger.sendall(greeting + b"".join(b"\x04" + bytes([len(command)]) + command for command in commands))
    return stranger


def send_for_ever(stranger: socket.socket, frame: bytes) -> None:
    for _ in range(10_000):  # 650 MB
        stranger.sendall(frame)


READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.mark.parametrize(
    ("mechanism", "command"),
    [(b"NULL", READY), (b"PLAIN", b"\x05HELLO\x08receiver\x20" + b"0" * 32), (b"PLAIN", b"\x05HELLO\x00\x00")],
)
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x03" + struct.pack(">Q", 65_000) + bytes(65_000), id="one message that never ends"),
        pytest.param(b"\0\x07garbage" * 8_000, id="messages without end"),
    ],
)
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_stranger_is_cut_off_in_the_handshake_whatever_it_sends(
    mechanism: bytes, command: bytes, frame: bytes, encrypt: bool
) -> None:
    """Nothing of it reaches the listener: neither its thread nor its memory."""
    listener = TcpListener(settings_for("tcp"), terms=Terms(transport="tcp"), encrypt=encrypt)
    came: list[Incoming] = []
    listener.start(came.append)
    try:
        with (
            zmtp(NetAddress.parse(listener.address), mechanism, command) as stranger,
            pytest.raises(OSError, match=r"reset|pipe"),
        ):
            send_for_ever(stranger, frame)
    finally:
        listener.close()
    assert not came


def test_whoever_asks_with_another_token_again_and_again_is_a_line_in_ten_seconds() -> None:
    quiet = Quiet(every_s=10.0)
    assert [quiet.is_over(now) for now in (0.0, 1.0, 9.9, 10.0, 11.0)] == [True, False, False, True, False]
    assert (quiet.take(), quiet.take()) == (3, 0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, True), ({0: b"2.0"}, False), ({2: b"other"}, False), ({5: b"NULL"}, False), ({6: b"root"}, False), ({7: b""}, False)],
)
def test_only_the_listeners_token_opens_its_gate(changed: dict[int, bytes], expected: bool) -> None:
    request = [b"1.0", b"1", b"headrace-weights", b"127.0.0.1", b"", b"PLAIN", b"receiver", b"secret"]
    assert judge([changed.get(index, value) for index, value in enumerate(request)], b"secret") == expected
    assert not judge(request[:5], b"secret")


def test_the_limit_is_of_receivers_not_of_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sessions, "MAX_TRANSFERS", 3)
    names = [f"engine-{index}" for index in range(3)]
    all_in = threading.Barrier(4)

    def wait_for_all(incoming: Incoming) -> None:
        all_in.wait(net_peers.WAIT_S)
        all_in.wait(net_peers.WAIT_S)

    with Serving(settings_for("tcp", num_connections=4), before_send=wait_for_all) as serving:
        results: dict[str, net_peers.Weights | Exception] = {}
        three = threading.Thread(
            target=lambda: results.update(net_peers.receive_in_threads(serving.address, names, cohort=1)), daemon=True
        )
        three.start()
        all_in.wait(net_peers.WAIT_S)
        with pytest.raises(PeerFailed, match="3 transfers are under way"):
            receive(serving.address, name="engine-3")
        all_in.wait(net_peers.WAIT_S)
        three.join(net_peers.WAIT_S)
    assert all(is_same(results[name], weights()) for name in names)


def test_what_is_no_receiver_disturbs_nobody() -> None:
    with Serving(settings_for("tcp")) as serving:
        address = NetAddress.parse(serving.address)
        strangers = [socket.create_connection((address.host, address.port)) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(bytes(1 << 16))
        assert is_same(receive(serving.address), weights())
        for stranger in strangers:
            stranger.close()


def test_an_encrypted_server_is_known_by_its_key() -> None:
    serving = Serving(settings_for("tcp"))
    serving.listener = TcpListener(settings_for("tcp"), terms=Terms(transport="tcp"), encrypt=True)
    with serving:
        address = NetAddress.parse(serving.address)
        assert is_same(receive(serving.address), weights())
        for key in (b"", z85.decode(b"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7")):
            with pytest.raises(PeerLost, match=r"other keys|closed the connection"):
                receive(str(replace(address, key=key)), timeout_s=30)
        assert is_same(receive(serving.address), weights())


def test_what_listens_beyond_loopback_is_encrypted_and_advertised_by_name() -> None:
    """B177."""
    settings = settings_for("tcp", listen_host="0.0.0.0", listen_port=5000, advertised_host="trainer.lab")
    listener = TcpListener(settings, terms=Terms(transport="tcp"))
    address = NetAddress.parse(listener.address)
    assert (address.host, len(address.key)) == ("trainer.lab", 32)
    listener.close()


def test_terms_that_differ_are_named_at_once() -> None:
    with Serving(settings_for("tcp"), dtype="bfloat16") as serving:
        for terms, both in (
            ({"dtype": "float16"}, r"dtype: float16 here, bfloat16"),
            ({"bucket_bytes": 1 << 20}, r"bucket_bytes: 1048576 here, 65536"),
            ({"transport": "file"}, r"transport: file here, tcp"),
        ):
            with pytest.raises(ProtocolError, match=both):
                receive(serving.address, **terms)
            assert isinstance(serving.outcome(), WeightSyncError)
        with pytest.raises(PeerFailed, match="protocol version 1, this side"):
            receive(serving.address, protocol=1)


def test_where_nobody_serves_the_receiver_learns_it() -> None:
    with Serving(settings_for("tcp")) as serving:
        address = serving.address
    with pytest.raises(PeerLost, match="does not answer"):
        receive(address)


def test_a_second_server_on_a_port_is_refused() -> None:
    with Serving(settings_for("tcp")) as serving:
        port = NetAddress.parse(serving.address).port
        with pytest.raises(AddressTaken, match=str(port)), Serving(settings_for("tcp", listen_port=port)):
            pass


def test_a_receivers_error_reaches_the_sender() -> None:
    """B22."""
    with Serving(settings_for("tcp")) as serving:
        with (
            pytest.raises(RuntimeError, match="no room"),
            open_receiver(serving.address, request(serving.address), timeout_s=60) as channel,
        ):
            _fail_at_first_tensor(channel)
        outcome = serving.outcome()
        assert isinstance(outcome, PeerFailed)
        assert "no room for layer.0.weight" in str(outcome)
        assert "engine-0" in str(outcome)
        assert is_same(receive(serving.address), weights())


def test_a_servers_refusal_reaches_the_receiver() -> None:
    """B02."""

    def refuse(incoming: Incoming) -> None:
        raise WeightSyncError(f"version {incoming.requests[0].policy_version} is not served")

    with (
        Serving(settings_for("tcp"), before_send=refuse) as serving,
        pytest.raises(PeerFailed, match="version 1 is not served"),
    ):
        receive(serving.address)


def test_a_receiver_that_takes_nothing_is_given_up_at_the_deadline() -> None:
    """B22."""
    with (
        Serving(settings_for("tcp", bucket_timeout_s=0.5, bucket_bytes=1 << 12)) as serving,
        open_receiver(serving.address, request(serving.address), timeout_s=60) as channel,
    ):
        outcome = serving.outcome()
        assert isinstance(outcome, TransferTimeout)
        assert "waiting for bucket 0" in str(outcome)
        with pytest.raises(PeerFailed, match=r"was silent for 0\.5 s"):
            dict(receive_weights(channel))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_transfer_is_cut_from_another_thread(side: str) -> None:
    incoming_of: queue.Queue[Incoming] = queue.Queue()
    settings = settings_for("tcp", bucket_bytes=1 << 12)
    cuts: list[Cut] = []
    with Serving(settings, before_send=incoming_of.put) as serving:
        channel = open_receiver(serving.address, request(serving.address), timeout_s=60, on_open=cuts.append)
        if side == "sender":
            incoming_of.get(timeout=60).cut("a newer version takes its place")
        else:
            threading.Timer(0.1, cuts[0], ("a newer version takes its place",)).start()
        with pytest.raises(PeerFailed if side == "sender" else TransferTimeout, match="a newer version"), channel:
            _take_all(channel, pause_s=0.05)
        assert isinstance(serving.outcome(), TransferTimeout if side == "sender" else PeerFailed)
        cuts[0]("after its end a cut does nothing")


def test_a_receiver_killed_in_a_transfer_is_noticed_and_the_next_one_served() -> None:
    """B03."""
    with Serving(settings_for("tcp", bucket_bytes=1 << 12, bucket_timeout_s=60.0)) as serving:
        with process("receive", serving.address, "engine-7", "1", "stall") as child:
            assert line_of(child) == "stalled"
            child.kill()
            outcome = serving.outcome()
        assert isinstance(outcome, PeerLost)
        assert "engine-7" in str(outcome)
        assert is_same(receive(serving.address), weights())


def test_a_killed_server_is_noticed_and_its_successor_serves() -> None:
    """B04."""
    for _ in range(2):
        with process("serve", "tcp") as child:
            address = line_of(child)
            with (
                pytest.raises(PeerLost, match="closed the connection"),
                open_receiver(address, request(address), timeout_s=60) as channel,
            ):
                _take_all(channel, after_first=child.kill)
    with Serving(settings_for("tcp")) as serving:
        assert is_same(receive(serving.address), weights())


def test_a_closed_listener_leaves_nothing_behind() -> None:
    with Serving(settings_for("tcp")) as serving:  # what pyzmq makes once in a process
        receive(serving.address)
    before = _left()
    for _ in range(3):
        with Serving(settings_for("tcp", bucket_bytes=1 << 12)) as serving:
            receive(serving.address)
            channel = open_receiver(serving.address, request(serving.address), timeout_s=60)
        with pytest.raises(PeerFailed, match="the weight server closes"), channel:
            _take_all(channel)
    assert _left() == before


def _left() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    gc.collect()  # of what failed in the tests before
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def _take_all(channel: Receiving, *, pause_s: float = 0.0, after_first: Callable[[], None] = lambda: None) -> None:
    for index in itertools.count():
        channel.receive()
        time.sleep(pause_s)
        if index == 0:
            after_first()
        channel.release()


def _fail_at_first_tensor(channel: Receiving) -> None:
    for name, _ in receive_weights(channel):
        raise RuntimeError(f"no room for {name}")
