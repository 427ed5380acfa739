"""Values of rows as plain Python, whatever gave them. Pure.

Invariant: what is plain can be written as JSON and as msgpack, in bounded depth; half surrogate pairs, which JSON lets through
and UTF-8 does not, are for `half_a_pair` to find.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_INT_BITS = 10_000
"""Beyond, no integer can be written in decimals."""
MAX_DEPTH = 100
"""Lists and mappings inside each other."""


def plain(value: Any, *, depth: int = 0) -> Any:
    """`value` as plain Python (None, bool, int, float, str, list, dict with text keys), NumPy taken apart recursively; bytes
    that are UTF-8 as text, dates in ISO format.

    Raises TypeError naming what has no plain form.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"values nested in more than {MAX_DEPTH} levels have no plain form")
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case int():
            return _int(value)
        case float():
            return float(value)
        case np.generic() | np.ndarray():
            return plain(value.tolist(), depth=depth + 1)
        case Mapping():
            return {str(key): plain(item, depth=depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth=depth + 1) for item in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            is_whole = value.is_finite() and value.adjusted() < MAX_INT_BITS // 4 and value == value.to_integral_value()
            return _int(int(value)) if is_whole else float(value)
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise TypeError("bytes that are not UTF-8 text have no plain form") from None
        case _:
            raise TypeError(f"{type(value).__name__} has no plain form")


def half_a_pair(value: Any) -> str | None:
    """The first text within a plain value that has half a surrogate pair; None: all of it is Unicode."""
    match value:
        case str():
            return None if value.isascii() or _is_unicode(value) else value
        case Mapping():
            found = (half_a_pair(part) for item in value.items() for part in item)
        case list() | tuple():
            found = (half_a_pair(item) for item in value)
        case _:
            return None
    return next((text for text in found if text is not None), None)


def _int(value: int) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise TypeError(f"an integer of {value.bit_length()} bits has no plain form")
    return int(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
