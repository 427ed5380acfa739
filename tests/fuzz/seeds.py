"""Valid inputs for every target: what the mutations start from."""

from __future__ import annotations

import json
import struct
import tempfile
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import zmq

from sample_bus import frames, messages, wire
from sample_bus.closed_seat import ClosedSeat
from sample_bus.door import DOMAIN
from sample_bus.journal import Record, encode_record
from sample_bus.packing import pack
from sample_bus.quarantine import Quarantine
from sample_bus.record_log import MAGIC
from sample_bus.redis_keys import letter
from sample_bus.sample import SampleId
from tests.fakes.samples import make_sample
from tests.fuzz.targets import BODIES, LARGE, record

ID = SampleId("rollouter", 1, 2)
CLOSED = ClosedSeat(
    task_id="task-0",
    group_id="task-0/0",
    rollout_id="task-0/0/1",
    attempt=1,
    seat=1,
    group_size=4,
    data_source="test",
    reason="timeout",
    message="no answer within 300 s",
    settings_revision=3,
    incarnation="first",
    closed_at=1.5,
)


def seeds() -> dict[str, list[bytes]]:
    """Inputs by the name of their target."""
    records = [encode_record(_filled(kind)) for kind in get_args(Record)]
    closed = wire.encode_closed(CLOSED, ID)
    whole = MAGIC + b"".join(map(record, records[:3]))
    return {
        "sealed_record": [_sealed(closed), *(_sealed(wire.encode(sample, ID)) for sample in _samples())],
        "raw_record": [_joined(closed), _joined(wire.encode(make_sample(), ID))],
        "control": [
            bytes([1 if kind is frames.Data else 0]) + frames.encode_control(_filled(kind)) for kind in get_args(frames.Control)
        ],
        "body": [bytes([number]) + pack(_body(kind)) for number, kind in enumerate(BODIES)],
        "plain": [pack({"a": [1, -2.5, None, True, "text", b"bytes", {"b": []}]}), pack(list(range(200)))],
        "broker": [
            letter(b"client-1", b"\x91\x09"),
            b"\xff".join([b"17-3", b"f0", b"HDR1", b"f1", b"body"]),
            b"9" * 5000 + b"-1",
        ],
        "door": [b"\xff".join([b"1.0", b"7", DOMAIN, b"10.0.0.5", b"", b"CURVE", bytes(32)])],
        "journal_record": records,
        "record_log": [MAGIC, whole, MAGIC[:4], whole[:-9]],
        "sealed_records": [bytes(4) + _apart(records[:4]), b"\x03\x20\x00\x01" + _apart([b"ab", b"", b"c"])],
        "spool": [_spool(5, 0, 3), _spool(5, 2, 3), _spool(6, 0, 2), b""],
        "quarantined": [_quarantined()],
        "key_file": [_key_file(), b"{}"],
    }


def _apart(payloads: list[bytes]) -> bytes:
    return b"".join(bytes([len(one)]) + one for one in payloads)


def _samples() -> list[Any]:
    large = len(LARGE) // 4
    return [
        make_sample(),
        make_sample(reply=[1] * 100),
        make_sample(prompt=(), reply=[0] * large, logprobs=[0.0] * large),
    ]


def _sealed(parts: list[bytes | memoryview]) -> bytes:
    head, *rest = (bytes(part) for part in parts)
    header = head[wire.PREFIX_BYTES :]
    kind = wire.KIND_SAMPLE if rest else wire.KIND_CLOSED
    return struct.pack("<BBH", kind, max(0, len(rest) - 1), len(header)) + header + (rest[0] if rest else b"")


def _joined(parts: list[bytes | memoryview]) -> bytes:
    return bytes([len(parts)]) + b"".join(struct.pack("<H", len(part)) + bytes(part) for part in parts)


def _filled(kind: type[Any]) -> Any:
    hints = get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name]) for field in fields(kind)})


def _value(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is list and get_args(annotation) == (Any,):
        return ["rollouter", 1, 2]
    if origin is list:
        return [_value(get_args(annotation)[0])]
    if origin is dict:
        return {"reason": 1}
    if annotation in _VALUES:
        return _VALUES[annotation]
    return _filled(annotation)


_VALUES: dict[Any, Any] = {int: 7, float: 0.5, str: "word", bytes: b"\x81\xa1a\x01", bool: True}


def _body(kind: type[messages.Message]) -> dict[str, Any]:
    """A message's fields that must be given."""
    return {name: _plain(field.annotation) for name, field in kind.model_fields.items() if field.is_required()}


def _plain(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return next(iter(annotation)).value
    if isinstance(annotation, type) and issubclass(annotation, messages.Message):
        return _body(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return None
    return _VALUES.get(annotation, [] if get_origin(annotation) in (list, tuple) else {})


def _spool(epoch: int, committed: int, count: int) -> bytes:
    state = b"%020d %020d\n" % (epoch, committed)
    payloads = [struct.pack("<QIII", seq, 2, 1, 3) + b"abcd" for seq in range(count)]
    return bytes([len(state)]) + state + _apart(payloads)


def _quarantined() -> bytes:
    with tempfile.TemporaryDirectory(prefix="hr-fuzz-") as name:
        path = Quarantine(Path(name)).keep([b"frame", b"more"], "checksum", "rollouter", sample_id=ID)
        return b"" if path is None else path.read_bytes()


def _key_file() -> bytes:
    public, secret = zmq.curve_keypair()
    return json.dumps({"name": "trainer", "public": public.decode(), "secret": secret.decode()}).encode()
