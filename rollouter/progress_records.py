"""What the progress log says, as bytes: msgpack lists [kind, group_id, seat, …], arrays as raw little-endian bytes.

Invariant: what decodes is consistent: a sampled piece passes `Generation.validate`. Everything else raises JournalError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation
from agent_loop.errors import BadGeneration
from agent_loop.progress import Noted, Piece, Rewound, Sampled, Shown
from sample_bus.errors import JournalError, WireError
from sample_bus.packing import pack, unpack

Place = tuple[str, int]
"""(group_id, seat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """An attempt began; what was recorded of the seat before is void."""

    attempt: int
    incarnation: str
    """Whose versions its tokens bear, and what the engines held: no token of it is older."""
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """So many tokens at most are being generated."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """The attempt's piece number `index`."""

    index: int
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Nothing of the seat is to be continued."""


Entry = Began | Asked | Got | Over
_BEGAN, _ASKED, _SHOWN, _SAMPLED, _NOTED, _OVER, _REWOUND = range(1, 8)
_ENDS = (None, "stop", "length")


def encode_entry(place: Place, entry: Entry) -> bytes:
    match entry:
        case Began():
            return pack([_BEGAN, *place, entry.attempt, entry.incarnation, entry.policy_version])
        case Asked():
            return pack([_ASKED, *place, entry.num_tokens])
        case Over():
            return pack([_OVER, *place])
        case Got(piece=Shown() as shown):
            return pack([_SHOWN, *place, entry.index, _bytes(shown.token_ids, "<i4")])
        case Got(piece=Noted() as noted):
            return pack([_NOTED, *place, entry.index, noted.value])
        case Got(piece=Rewound() as rewound):
            return pack([_REWOUND, *place, entry.index, rewound.num_tokens])
        case Got(piece=Sampled() as sampled):
            part = sampled.generation
            return pack(
                [
                    _SAMPLED,
                    *place,
                    entry.index,
                    _bytes(part.token_ids, "<i4"),
                    _bytes(part.logprobs, "<f4"),
                    _bytes(part.version_starts, "<i4"),
                    _bytes(part.versions, "<i4"),
                    _bytes(part.kept_cache, "u1"),
                    part.stop_reason,
                    sampled.ends_turn,
                ]
            )
    raise AssertionError(f"got {entry!r}, expected an entry of the progress log")


def decode_entry(payload: bytes, where: str) -> tuple[Place, Entry]:
    """Raises JournalError naming `where`."""
    try:
        values = unpack(payload, where)
        match values:
            case [1, str(group), int(seat), int(attempt), str(incarnation), int(version)]:
                return (group, seat), Began(attempt=attempt, incarnation=incarnation, policy_version=version)
            case [2, str(group), int(seat), int(num_tokens)]:
                return (group, seat), Asked(num_tokens=num_tokens)
            case [3, str(group), int(seat), int(index), bytes(tokens)]:
                return (group, seat), Got(index=index, piece=Shown(token_ids=_array(tokens, "<i4")))
            case [4, str(group), int(seat), int(index), *rest]:
                return (group, seat), Got(index=index, piece=_sampled(rest, where))
            case [5, str(group), int(seat), int(index), bytes(value)]:
                return (group, seat), Got(index=index, piece=Noted(value=value))
            case [6, str(group), int(seat)]:
                return (group, seat), Over()
            case [7, str(group), int(seat), int(index), int(num_tokens)]:
                return (group, seat), Got(index=index, piece=Rewound(num_tokens=num_tokens))
    except (WireError, BadGeneration, ValueError) as error:
        raise JournalError(f"{where}: {error}") from error
    raise JournalError(f"{where}: got {repr(values)[:80]}, expected an entry of this version's progress log")


def _sampled(values: list[Any], where: str) -> Sampled:
    tokens, logprobs, starts, versions, kept, stop_reason, ends_turn = values
    if stop_reason not in ("stop", "length", "abort") or ends_turn not in _ENDS:
        raise ValueError(f"got ends {stop_reason!r} and {ends_turn!r}")
    generation = Generation(
        token_ids=_array(tokens, "<i4"),
        logprobs=_array(logprobs, "<f4"),
        version_starts=_array(starts, "<i4"),
        versions=_array(versions, "<i4"),
        kept_cache=_array(kept, "u1"),
        stop_reason=stop_reason,
    )
    generation.validate(where)
    return Sampled(generation=generation, ends_turn=ends_turn)


def _bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _array(data: Any, dtype: str) -> npt.NDArray[Any]:
    if not isinstance(data, bytes):
        raise ValueError(f"got {type(data).__name__}, expected bytes of {dtype}")
    return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="))
