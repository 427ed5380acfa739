"""msgpack with limits: the only place that turns bytes of a peer into Python objects.

Invariant: `unpack` either returns plain data (None, bool, int, float, str, bytes, list, dict with string keys) or raises
WireError; no extension types, no trailing bytes, and no memory for what a length only claims: the claims of nested lists add
up to thousands of times the input, so their lengths have a bound of their own.
"""

from __future__ import annotations

from typing import Any

import msgpack

from sample_bus.errors import WireError

Buffer = bytes | bytearray | memoryview
MAX_ITEMS = 4096
"""Items of a list or map that a peer sends."""


def pack(value: Any) -> bytes:
    """Bytes of plain data. Raises WireError for what msgpack cannot carry."""
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"cannot be packed: {error}") from error
    return packed


def unpack(data: Buffer, what: str, *, max_items: int = MAX_ITEMS) -> Any:
    """Plain data of `data`, whose lists and maps have at most `max_items` items; `what` names it in the WireError."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_no_extension,
            timestamp=0,
            max_array_len=max_items,
            max_map_len=max_items,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{what}: {len(data)} bytes are not valid msgpack: {type(error).__name__} {error}") from error


def _no_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
