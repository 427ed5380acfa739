"""An address lets its holder have the weights: what errors, logs and the status say of it stops before the token."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from console.status import State, state_as_json
from sample_bus.messages import WeightRound
from tests.fakes.fake_control import FakeControl
from weight_sync.cache_link import decode_command
from weight_sync.errors import ProtocolError
from weight_sync.listeners import transport_of
from weight_sync.staging import StagingArea
from weight_sync.tcp_address import NetAddress

SECRET = "5ec2e7" * 5 + "55"
QUERY = f"?token={SECRET}&key={SECRET * 2}"


def stage(address: str) -> None:
    area = StagingArea(check_manifest=lambda manifest: None)
    try:
        area.stage(address, 1, engine="e", nonce="n", timeout_s=1.0)
        while area.status()["state"] == "staging":
            time.sleep(0.01)
        raise ValueError(str(area.status()["error"]))
    finally:
        area.close()


@pytest.mark.parametrize(
    ("say", "address"),
    [
        (transport_of, "http://10.0.0.1:1" + QUERY),
        (stage, "http://10.0.0.1:1" + QUERY),
        (stage, "tcp://127.0.0.1:1" + QUERY + "0"),
        (stage, "tcp://127.0.0.1:1" + QUERY),
        (stage, "file://127.0.0.1:1" + QUERY),
        (NetAddress.parse, "tcp://10.0.0.1:x" + QUERY),
        (lambda address: decode_command(f'{{"kind": "stage", "address": "{address}"}}'.encode()), "tcp://10.0.0.1:1" + QUERY),
    ],
)
def test_no_error_shows_a_token_or_a_key(say: Callable[[str], object], address: str) -> None:
    with pytest.raises((ValueError, ProtocolError)) as caught:
        say(address)
    assert str(caught.value)
    assert SECRET[:12] not in str(caught.value)


async def test_the_status_of_a_run_shows_where_weights_are_served_without_what_lets_one_in() -> None:
    hub = FakeControl()
    address = "tcp://10.0.0.1:6100" + QUERY
    announced = WeightRound(
        policy_version=1,
        incarnation="a",
        address=address,
        manifest_digest="0" * 32,
        num_tensors=1,
        total_bytes=4,
        announced_at=0.0,
    )
    await hub.publish("round", announced)
    assert state_as_json(State("ipc:///x", hub))["round"]["address"] == "tcp://10.0.0.1:6100"
