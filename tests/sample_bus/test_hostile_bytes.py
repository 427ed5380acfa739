"""Whatever reads bytes that others wrote keeps its promise for all of them: it takes them or refuses them as documented, and
uses memory for what is there, not for what a length claims. `tests.fuzz` has the readers and, outside of this suite, a fuzzer.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import JournalDamaged, JournalError, WireError
from sample_bus.frames import Open, decode_control
from sample_bus.journal import decode_record
from sample_bus.packing import pack, unpack
from sample_bus.record_log import MAGIC, MAGIC_RENEWED, RecordLog, read_records
from sample_bus.spool import Spool
from tests.fakes.samples import make_sample
from tests.fuzz.engine import Engine, memory_limit
from tests.fuzz.mutation import MAX_BYTES, mutated
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import PROMISED, TARGETS, Target, control, quarantined, raw_record, sealed, sealed_record
from tests.sample_bus.ends import HANG_S, RawClient, hub_at, link_to, soon

SEEDS = seeds()
BY_NAME = pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=15
)


def _used(target: Target, data: bytes) -> int:
    """Peak of bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        with contextlib.suppress(*PROMISED):
            target.run(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@BY_NAME
@given(data=st.data())
def test_changed_valid_bytes_are_taken_or_refused_as_promised(target: Target, data: st.DataObject) -> None:
    given_bytes = data.draw(st.sampled_from(SEEDS[target.name]))
    changed = mutated(given_bytes, SEEDS[target.name], Random(data.draw(st.integers(0, 2**32))))
    with contextlib.suppress(*PROMISED):
        target.run(changed)


@BY_NAME
@given(data=st.binary(max_size=300))
def test_random_bytes_are_taken_or_refused_as_promised(target: Target, data: bytes) -> None:
    with contextlib.suppress(*PROMISED):
        target.run(data)


@BY_NAME
@pytest.mark.parametrize("seed", range(5))
def test_memory_follows_what_is_there(target: Target, seed: int) -> None:
    random = Random(seed)
    for given_bytes in SEEDS[target.name]:
        data = mutated(given_bytes, SEEDS[target.name], random)
        assert _used(target, data) <= memory_limit(len(data))


CLAIMS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("depth", [1, 500, 5000])
def test_length_that_only_claims_much_costs_nothing(claim: bytes, depth: int) -> None:
    """Nested too: msgpack makes room for each list before it has read one item of it."""
    length = 2000 * depth
    nested = (b"\xdd" + min(length, 60_000).to_bytes(4, "big")) * depth + claim
    for run in (control, raw_record, quarantined):
        data = b"\x00" + nested.ljust(MAX_BYTES, b"\xc0")
        assert _used(Target(name="", run=run), data) < memory_limit(len(data))
    header = nested[:60_000].ljust(60_000, b"\xc0")
    data = struct.pack("<BBH", 1, 0, len(header)) + header
    assert _used(Target(name="", run=sealed_record), data) < memory_limit(len(data))


def test_record_that_claims_4_gib_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(MAGIC + struct.pack("<4sIQ", b"\xf0rec", 2**32 - 1, 0) + b"x" * 100)
    tracemalloc.start()
    try:
        assert list(read_records(path)) == []
        log = RecordLog(path)
        log.close()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == MAGIC


@given(st.integers(0, 60), st.lists(TREES, max_size=12))
def test_any_plain_data_is_a_journal_error_or_a_record_of_the_declared_types(kind: int, values: list[Any]) -> None:
    with contextlib.suppress(JournalError):
        decode_record(pack([kind, *values]), "record")


@given(st.dictionaries(st.sampled_from(["error", "source", "at", "id", "frames"]), TREES))
def test_any_plain_data_in_the_quarantine_can_be_listed(plain: dict[str, Any]) -> None:
    quarantined(pack(plain))


def test_lists_beyond_the_bound_are_refused_with_it() -> None:
    assert len(unpack(pack([0] * 4096), "data")) == 4096
    with pytest.raises(WireError, match=r"4097 exceeds max_array_len\(4096\)"):
        unpack(pack([0] * 4097), "data")
    with pytest.raises(WireError, match=r"exceeds max_array_len\(1024\)"):
        decode_control(pack([0] * 1025))


@pytest.mark.parametrize("text", [b"\x00" * 42, b"5 0", b"%020d %020d\n" % (2**63, 0), b"-%019d %020d\n" % (1, 1), b"\xff" * 9])
def test_damaged_state_of_a_spool_is_told(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(text)
    with pytest.raises(JournalDamaged, match="expected an epoch and a watermark"):
        Spool(tmp_path)


@pytest.mark.parametrize("size", range(8, 16))
def test_log_with_half_a_header_begins_anew(size: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes((MAGIC_RENEWED + bytes(8))[:size])
    log = RecordLog(path)
    offset = log.append(b"kept")
    log.close()
    assert list(read_records(path)) == [(offset, b"kept")]


@pytest.mark.parametrize("seed", range(3))
async def test_peer_that_sends_rubbish_harms_neither_the_hub_nor_others(seed: int, address: str) -> None:
    """Over a socket: changed control messages, samples and closed seats, before and after a proper greeting."""
    random = Random(seed)
    async with hub_at(address) as hub, link_to(address) as link:
        with RawClient(address, name="rubbish") as raw:
            for number in range(300):
                if number == 100:
                    await raw.greet()
                    await raw.say(Open(greeting=1, epoch=1, committed=0, next_seq=0))
                if number % 2:
                    await raw.send([mutated(random.choice(SEEDS["control"])[1:], SEEDS["control"], random)])
                else:
                    await raw.data(
                        number, sealed(mutated(random.choice(SEEDS["sealed_record"]), SEEDS["sealed_record"], random))
                    )
            await link.wait_connected(HANG_S)
            offered = await soon(link.offer(make_sample(task_id="in spite of it")))
            while (leased := await soon(hub.lease())).id != offered:
                hub.acknowledge([leased.id], dropped=True)
            assert hub.rollouter is not None


class _Dead(BaseException):
    """The process, in the middle of it."""


@pytest.mark.parametrize("is_written", [False, True])
def test_death_while_a_spools_file_is_put_aside_leaves_a_spool_that_opens(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, segment_bytes=200)
    for seq in range(20):
        spool.append(seq, [b"x" * 60])
    real = os.pwrite

    def die(descriptor: int, data: bytes, offset: int) -> int:
        if data.startswith(MAGIC_RENEWED):
            if is_written:
                real(descriptor, data, offset)
            raise _Dead
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", die)
    with pytest.raises(_Dead):
        spool.free(10)
    monkeypatch.undo()
    os.close(spool._lock)  # as the kernel does
    again = Spool(tmp_path, segment_bytes=200)
    assert (again.first, again.next_seq) == (10, 20)
    assert bytes(again.read(10)[0]) == b"x" * 60
    again.close()


def test_fuzzer_finds_a_planted_defect(tmp_path: Path) -> None:
    """Else its silence would say nothing."""

    def planted(data: bytes) -> None:
        value = unpack(data, "planted")
        if isinstance(value, list) and len(value) == 3 and value[0] is None:
            raise ZeroDivisionError

    engine = Engine(
        [Target(name="planted", run=planted)], {"planted": [pack([1, 2, 3])]}, seed=1, defects_dir=tmp_path / "defects"
    )
    for _ in engine.run(60):
        if engine.progress[0].defects:
            break
    found = [path for path in (tmp_path / "defects").iterdir() if path.suffix != ".txt"]
    assert unpack(found[0].read_bytes(), "found")[0] is None
    assert "ZeroDivisionError" in found[0].with_suffix(".txt").read_text()
