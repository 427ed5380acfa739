"""Changing inputs blindly, and with what the formats care about. Pure: the randomness is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

MAX_BYTES = 70_000
_MSGPACK = (
    "c0 c2 c3 90 80 a0 c400 c4ff c6ffffffff d9ff dbffffffff dcffff dd000fffff ddffffffff de7fff dfffffffff c7ff01 d40100 c1 "
    "ce3fffffff cfffffffffffffffff d38000000000000000 cb7ff8000000000000 cb7ff0000000000000 caffc00000 9191919191 81a16101"
)
"""Nil, lengths that claim much, extensions, big integers, NaN and infinity, nested lists."""
_FIXED_WIDTH = "00000000 01000000 ffffffff 00000080 ffffff7f 0000000000000080 ffffffffffffffff"
_MARKS = "f0726563 4844524c4f47310a 48445231"
_TOKENS = tuple(bytes.fromhex(text) for text in f"{_MSGPACK} {_FIXED_WIDTH} {_MARKS}".split())


def mutated(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """`data` after one to eight changes, at most `MAX_BYTES` long; `others` are inputs to take pieces from."""
    changed = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        random.choice(_CHANGES)(changed, others, random)
    return bytes(changed[:MAX_BYTES])


def _at(data: bytearray, random: Random) -> int:
    """A place in `data`; half of the time near the beginning, where headers are."""
    if not data:
        return 0
    return random.randrange(len(data) if random.random() < 0.5 else min(len(data), 64))


def _flip(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    if data:
        data[_at(data, random)] ^= 1 << random.randrange(8)


def _replace(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    if data:
        data[_at(data, random)] = random.randrange(256)


def _step(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    if data:
        at = _at(data, random)
        data[at] = (data[at] + random.choice((-1, 1))) % 256


def _token(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    token, at = random.choice(_TOKENS), _at(data, random)
    data[at : at + (len(token) if random.random() < 0.5 else 0)] = token


def _remove(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    at = _at(data, random)
    del data[at : at + random.choice((1, 2, 4, 8, random.randrange(1, len(data) + 2)))]


def _repeat(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    at, length = _at(data, random), random.randrange(1, 33)
    data[at:at] = data[at : at + length] * random.choice((1, 1, 2, 50))


def _insert(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    at = _at(data, random)
    data[at:at] = random.randbytes(random.choice((1, 2, 4, 16)))


def _splice(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    other = random.choice(others)
    begin = random.randrange(len(other) + 1)
    at = _at(data, random)
    data[at : at + random.choice((0, 64, len(data)))] = other[begin : begin + random.choice((16, 256, len(other)))]


_CHANGES: tuple[Callable[[bytearray, Sequence[bytes], Random], None], ...] = (
    _flip,
    _replace,
    _step,
    _token,
    _remove,
    _repeat,
    _insert,
    _splice,
)
