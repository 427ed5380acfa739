"""What changed between two versions of a tensor, as bytes: exact, compared bit by bit, never larger than it must be.

Invariant: a delta applied to the bytes that it was made from gives the new bytes, whatever they mean (NaN, -0.0, integers);
one that is no delta of such a tensor is refused with an error and leaves the target undefined, so its checksum must be looked
at by whoever applies it.

A tensor is taken as words of its element size, in blocks of 2^20. Each block is a header and up to three parts, every one
padded to 8 bytes:

- where: nothing (no word changed, or all of them are given), gaps (a byte for each changed word: unchanged words before it;
  255 skips 255 words and names none), or a mask (one bit for each word);
- what: the new words, or steps (signed byte: new minus old, as integers; -128 takes the next of the third part's words).

Most weights that an optimizer moves at all move by one unit in the last place of bfloat16, so gaps and steps take two bytes
for each changed element.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import ProtocolError

BLOCK_WORDS = 1 << 20
_PAD = 8
_SKIP = 255
_OUTLIER = -128
_HEADER = struct.Struct("<BBxxIII")
"""Where, what, number of changed words, bytes of `where`, words in the third part."""

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]

_WORDS: dict[int, np.dtype] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_SIGNED: dict[int, np.dtype] = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}


class Where(IntEnum):
    NOWHERE = 0
    GAPS = 1
    MASK = 2
    EVERYWHERE = 3


class What(IntEnum):
    WORDS = 0
    STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """What changed in one tensor."""

    payload: Bytes | None
    """None: all of the tensor is smaller than what changed. Empty: nothing changed."""
    num_changed: int
    """Words that differ; of a tensor that is not encoded, those found before that was clear."""


def encode_delta(base: Bytes, new: Bytes, word_bytes: int) -> EncodedDelta:
    """Encode the change from `base` to `new`, uint8[N] each, of elements of 1, 2, 4 or 8 bytes."""
    if len(base) != len(new) or len(new) % word_bytes:
        raise ValueError(
            f"got {len(base)} and {len(new)} bytes in words of {word_bytes}, expected the same whole number of words"
        )
    old_words, new_words = base.view(_WORDS[word_bytes]), new.view(_WORDS[word_bytes])
    parts: list[Bytes] = []
    size = num_changed = 0
    for start in range(0, len(new_words), BLOCK_WORDS):
        block, changed = _encode_block(old_words[start : start + BLOCK_WORDS], new_words[start : start + BLOCK_WORDS])
        parts += block
        size += sum(map(len, block))
        num_changed += changed
        if num_changed and size >= len(new):
            return EncodedDelta(payload=None, num_changed=num_changed)
    return EncodedDelta(payload=np.concatenate(parts) if num_changed else np.empty(0, np.uint8), num_changed=num_changed)


def apply_delta(
    payload: Bytes, base: Bytes, target: Bytes, word_bytes: int, *, on_block: Callable[[Bytes], object] | None = None
) -> None:
    """Write to `target` the tensor that `base` becomes by the delta; an empty delta changes nothing.

    Args:
        on_block: called with each block of `target` as it is done, in order, while a processor's cache still holds it.

    Raises:
        ProtocolError: `payload` is no delta of a tensor of this size; what `target` holds then is undefined.
    """
    old, words = base.view(_WORDS[word_bytes]), target.view(_WORDS[word_bytes])
    reader = _Reader(payload)
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        np.copyto(block, old[start : start + BLOCK_WORDS])
        if len(payload):
            _apply_block(reader, block)
        if on_block is not None:
            on_block(block.view(np.uint8))
    if reader.at != len(payload):
        raise ProtocolError(f"a delta of {len(payload)} bytes ends after {reader.at}")


# ── one block ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _encode_block(old: Words, new: Words) -> tuple[list[Bytes], int]:
    differs = old != new
    positions = np.flatnonzero(differs)
    changed = len(positions)
    if changed == 0:
        return [_header(Where.NOWHERE, What.WORDS, 0, 0, 0)], 0
    what, values, rest = _encode_values(old, new, positions)
    value_bytes = values.nbytes + rest.nbytes
    mask_bytes = -(-len(new) // 8)
    if min(changed, mask_bytes) + value_bytes >= new.nbytes:
        return [_header(Where.EVERYWHERE, What.WORDS, changed, 0, 0), *_padded(new)], changed
    where, places = Where.MASK, np.packbits(differs)
    if changed < mask_bytes:
        gaps = _encode_gaps(positions)
        if len(gaps) < mask_bytes:
            where, places = Where.GAPS, gaps
    parts = [_header(where, what, changed, len(places), len(rest)), *_padded(places), *_padded(values), *_padded(rest)]
    return parts, changed


def _encode_values(old: Words, new: Words, positions: NDArray[np.intp]) -> tuple[What, NDArray[Any], Words]:
    """(what, a value for each position, further words)."""
    words = new[positions]
    none = words[:0]
    if words.itemsize == 1:
        return What.WORDS, words, none
    steps = (words - old[positions]).view(_SIGNED[words.itemsize])
    is_small = (steps > _OUTLIER) & (steps <= 127)
    rest = words[~is_small]
    if len(words) + rest.nbytes >= words.nbytes:
        return What.WORDS, words, none
    small = steps.astype(np.int8)
    small[~is_small] = _OUTLIER
    return What.STEPS, small, rest


def _encode_gaps(positions: NDArray[np.intp]) -> Bytes:
    before = np.diff(positions, prepend=-1) - 1
    if int(before.max()) < _SKIP:
        return before.astype(np.uint8)
    skips, left = np.divmod(before, _SKIP)
    ends = np.cumsum(skips + 1)
    gaps = np.full(int(ends[-1]), _SKIP, np.uint8)
    gaps[ends - 1] = left
    return gaps


def _apply_block(reader: _Reader, words: Words) -> None:
    where, what, changed, place_bytes, num_rest = reader.header()
    if where is Where.NOWHERE:
        positions = np.empty(0, np.intp)
    elif where is Where.EVERYWHERE:
        words[:] = reader.take(words.nbytes).view(words.dtype)
        return
    elif where is Where.GAPS:
        positions = _decode_gaps(reader.take(place_bytes))
    else:
        positions = np.flatnonzero(np.unpackbits(reader.take(place_bytes)))
    if len(positions) != changed or (changed and positions[-1] >= len(words)):
        raise ProtocolError(f"a delta names {len(positions)} words of {len(words)}, its header {changed}")
    if what is What.WORDS:
        words[positions] = reader.take(changed * words.itemsize).view(words.dtype)
        return
    steps = reader.take(changed).view(np.int8)
    values = words[positions] + steps.astype(_SIGNED[words.itemsize]).view(words.dtype)
    is_rest = steps == _OUTLIER
    if np.count_nonzero(is_rest) != num_rest:
        raise ProtocolError(f"a delta has {np.count_nonzero(is_rest)} places for {num_rest} words")
    values[is_rest] = reader.take(num_rest * words.itemsize).view(words.dtype)
    words[positions] = values


def _decode_gaps(gaps: Bytes) -> NDArray[np.intp]:
    names_one = gaps != _SKIP
    ends = np.cumsum(gaps, dtype=np.intp)
    ends += np.cumsum(names_one, dtype=np.intp)
    named: NDArray[np.intp] = ends[names_one] - 1
    return named


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _header(where: Where, what: What, changed: int, place_bytes: int, num_rest: int) -> Bytes:
    return np.frombuffer(_HEADER.pack(where, what, changed, place_bytes, num_rest), np.uint8)


def _padded(part: NDArray[Any]) -> Iterator[Bytes]:
    yield part.view(np.uint8)
    if missing := -part.nbytes % _PAD:
        yield np.zeros(missing, np.uint8)


class _Reader:
    """Takes the parts of a payload one after the other."""

    def __init__(self, payload: Bytes) -> None:
        self._payload = payload
        self.at = 0

    def header(self) -> tuple[Where, What, int, int, int]:
        where, what, changed, place_bytes, num_rest = _HEADER.unpack(self.take(_HEADER.size).data)
        try:
            return Where(where), What(what), changed, place_bytes, num_rest
        except ValueError as error:
            raise ProtocolError(f"a delta has a block of kind {where}, {what} at byte {self.at}, which is unknown") from error

    def take(self, num_bytes: int) -> Bytes:
        end = self.at + num_bytes
        if end > len(self._payload):
            raise ProtocolError(f"a delta of {len(self._payload)} bytes has no {num_bytes} bytes at {self.at}")
        part = self._payload[self.at : end]
        self.at = -(-end // _PAD) * _PAD
        return part
