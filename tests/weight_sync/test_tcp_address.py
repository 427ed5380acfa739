"""Addresses of weight servers: what they carry, what of it is shown, and which host is told."""

from __future__ import annotations

import pytest

from weight_sync.errors import WeightSyncError
from weight_sync.tcp_address import NetAddress, advertised_host, without_secrets

TOKEN, KEY = bytes(range(16)), bytes(range(32))


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:5000"),
        ("trainer.lab", "tcp://trainer.lab:5000"),
        ("::1", "tcp://[::1]:5000"),
        ("2001:db8::1", "tcp://[2001:db8::1]:5000"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:5000"),
    ],
)
@pytest.mark.parametrize("scheme", ["tcp", "collective"])
@pytest.mark.parametrize(("key", "num_connections"), [(b"", 1), (KEY, 4)])
def test_an_address_says_all_that_a_receiver_needs(
    host: str, endpoint: str, scheme: str, key: bytes, num_connections: int
) -> None:
    """B176."""
    address = NetAddress(scheme=scheme, host=host, port=5000, token=TOKEN, key=key, num_connections=num_connections)
    assert NetAddress.parse(str(address)) == address
    assert address.endpoint == endpoint


def test_what_is_shown_of_an_address_is_not_enough_to_be_let_in() -> None:
    address = NetAddress(scheme="tcp", host="10.0.0.7", port=5000, token=TOKEN, key=KEY)
    for text in (address.shown, repr(address), without_secrets(str(address))):
        assert TOKEN.hex() not in text
        assert "10.0.0.7" in text
    with pytest.raises(ValueError, match="expected SCHEME") as refused:
        NetAddress.parse(str(address) + "zz")
    assert TOKEN.hex() not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://10.0.0.7:5000",
        f"tcp://10.0.0.7?token={TOKEN.hex()}",
        f"tcp://10.0.0.7:0?token={TOKEN.hex()}",
        f"tcp://10.0.0.7:70000?token={TOKEN.hex()}",
        f"udp://10.0.0.7:5000?token={TOKEN.hex()}",
        f"tcp://10.0.0.7:5000?token={TOKEN.hex()[2:]}",
        f"tcp://10.0.0.7:5000?token={TOKEN.hex()}&key=00",
        f"tcp://10.0.0.7:5000?token={TOKEN.hex()}&connections=99",
        f"tcp://10.0.0.7:5000?token={TOKEN.hex()}&more=1",
    ],
)
def test_any_other_text_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="got weight-sync address"):
        NetAddress.parse(address)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "[::]", "*"])
def test_a_wildcard_is_never_told_to_receivers(bound: str) -> None:
    """B177."""
    assert advertised_host(bound, None, route=lambda ipv6: "10.0.0.7") == "10.0.0.7"
    assert advertised_host(bound, "trainer.lab") == "trainer.lab"
    with pytest.raises(WeightSyncError, match="as the advertised host"):
        advertised_host(bound, "0.0.0.0")


@pytest.mark.parametrize("found", [None, "127.0.1.1", "::1"])
def test_a_host_without_an_address_for_others_must_be_told_one(found: str | None) -> None:
    """B177."""
    with pytest.raises(WeightSyncError, match="name the host to advertise"):
        advertised_host("0.0.0.0", None, route=lambda ipv6: found)


@pytest.mark.parametrize("advertised", ["localhost", "127.0.0.1", "::1"])
def test_loopback_is_not_advertised_for_what_listens_beyond_it(advertised: str) -> None:
    """B177."""
    with pytest.raises(WeightSyncError, match="leads nowhere else"):
        advertised_host("0.0.0.0", advertised)
    assert advertised_host("127.0.0.1", advertised) == advertised
