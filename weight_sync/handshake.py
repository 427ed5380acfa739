"""How a receiver's request and each side's terms travel, on every transport: msgpack of their fields, checked when read.

Invariant: the number of the protocol comes first, so that two sides of different releases name both numbers instead of failing
over a field that one of them does not know.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack

from weight_sync.errors import ProtocolError
from weight_sync.transport import PROTOCOL_VERSION, StageRequest, Terms

MAX_LABEL_BYTES = 64
_MAX_DIGEST_BYTES = 32
_MAX_TERM_BYTES = 32
_MAX_INT = 1 << 62


def encode_terms(terms: Terms) -> bytes:
    encoded: bytes = msgpack.packb([terms.protocol, *_values(terms)])
    return encoded


def decode_terms(data: bytes) -> Terms:
    """Raises `ProtocolError` on anything that `encode_terms` does not write, and names both versions when they differ."""
    return _terms(_unpack(data))


def encode_request(request: StageRequest) -> bytes:
    """Raises `ProtocolError` for a label that is empty, too long or has a NUL."""
    encoded: bytes = msgpack.packb(
        [
            request.terms.protocol,
            request.policy_version,
            _label(request.receiver),
            _label(request.nonce),
            _values(request.terms),
            request.rank,
            request.num_ranks,
            request.cohort,
            request.base_version,
            request.base_digest,
        ]
    )
    return encoded


def decode_request(data: bytes) -> StageRequest:
    """Raises `ProtocolError` on anything that `encode_request` does not write, and names both versions when they differ."""
    protocol, *values = _unpack(data)
    try:
        version, receiver, nonce, terms, rank, num_ranks, cohort, base_version, base_digest = values
        request = StageRequest(
            policy_version=_integer(version, low=-_MAX_INT),
            receiver=_label(receiver),
            nonce=_label(nonce),
            terms=_terms([protocol, *terms]),
            rank=_integer(rank),
            num_ranks=_integer(num_ranks, low=1),
            cohort=_integer(cohort, low=1),
            base_version=None if base_version is None else _integer(base_version, low=-_MAX_INT),
            base_digest=_text(base_digest, _MAX_DIGEST_BYTES),
        )
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"a request of {len(data)} bytes does not decode: {error}") from error
    if not request.rank < request.num_ranks:
        raise ProtocolError(f"got rank {request.rank} of {request.num_ranks}, expected 0 <= rank < num_ranks")
    return request


def _values(terms: Terms) -> list[object]:
    """All fields but the protocol, in the order of their names."""
    return [getattr(terms, name) for name in sorted(field.name for field in fields(terms) if field.name != "protocol")]


def _terms(values: list[Any]) -> Terms:
    protocol, *rest = values
    try:
        backend, bucket_bytes, dtype, transport = rest
        return Terms(
            transport=_text(transport, _MAX_TERM_BYTES),
            protocol=_integer(protocol),
            bucket_bytes=_integer(bucket_bytes),
            dtype=_text(dtype, _MAX_TERM_BYTES),
            backend=_text(backend, _MAX_TERM_BYTES),
        )
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"terms {rest!r} are none: {error}") from error


def _unpack(data: bytes) -> list[Any]:
    try:
        values = msgpack.unpackb(data, raw=False, use_list=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{len(data)} bytes of a handshake do not decode: {error!r}") from error
    if not isinstance(values, list) or not values or type(values[0]) is not int:
        raise ProtocolError(
            f"a handshake of {len(data)} bytes says {str(values)[:80]!r}, expected a list with the protocol first"
        )
    if values[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {values[0]}, this side {PROTOCOL_VERSION}")
    return values


def _integer(value: object, *, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= _MAX_INT:
        raise ValueError(f"got {value!r}, expected an integer from {low}")
    return value


def _text(value: object, limit: int) -> str:
    if type(value) is not str or len(value.encode()) > limit:
        raise ValueError(f"got {value!r}, expected at most {limit} bytes of text")
    return value


def _label(value: object) -> str:
    try:
        text = _text(value, MAX_LABEL_BYTES)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if not text or "\0" in text:
        raise ProtocolError(f"got {text!r}, expected 1 to {MAX_LABEL_BYTES} bytes without NUL")
    return text
