"""What a tool returned, as text that can be shown, noted and encoded.

Invariant: rendering takes time and room that grow with the text that is asked for, not with what was returned, and raises
nothing. What a value does to become text may be code of users: it is called beside the rollouts' event loop.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import orjson

from agent_loop.session import TextCodec

_CUT = "\n[cut]"
_CHARACTERS_PER_TOKEN = 64
"""No token of a vocabulary is longer, but for runs of blanks."""
_FIRST_GUESS = 4


def is_text(value: Any) -> bool:
    """Whether it is shown as it is, without code of users."""
    return type(value) is str or value is None


def text_of(value: Any, *, max_characters: int) -> str:
    """Text as it is, plain data as JSON, the rest by its `str`; the first `max_characters` of it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value[:max_characters])
    try:
        text = _json_of(value, max_characters)
    except Exception:  # noqa: BLE001 - no plain data, for whatever reason
        try:
            text = str(value)
        except BaseException as error:  # noqa: BLE001 - of code that is not ours
            text = f"something of type {type(value).__name__} that cannot be shown: {type(error).__name__}"
    return clean(text[:max_characters])


def clean(text: str) -> str:
    """Half surrogates, which cannot be encoded, written out."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def cut(text: str, max_tokens: int, codec: TextCodec) -> str:
    """A beginning of `text` that is no longer than `max_tokens` tokens, its mark included where it is shorter: the longest one,
    but for some characters of a thousand. Only as much is encoded as comes near to what fits."""
    end = min(len(text), max_characters(max_tokens))
    high = min(end, _FIRST_GUESS * max_tokens)
    while (num_tokens := len(codec.encode(text[:high]))) <= max_tokens and high < end:
        high = min(end, 2 * high)
    if num_tokens <= max_tokens and high == len(text):
        return text
    mark = _CUT if len(codec.encode(_CUT)) < max_tokens else ""
    low, guess = 0, high * max_tokens // max(num_tokens, max_tokens)
    probes = [guess - guess // 50, guess + guess // 50]
    while high - low > max_tokens // 128:
        middle = probes.pop() if probes else (low + high + 1) // 2
        if not low < middle <= high:
            continue
        if len(codec.encode(text[:middle] + mark)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return text[:low] + mark


def max_characters(max_tokens: int) -> int:
    """Of a text, beyond which none is looked at."""
    return max_tokens * _CHARACTERS_PER_TOKEN


def _json_of(value: Any, max_characters: int) -> str:
    """Its beginning: the encoder goes through the value bit by bit."""
    parts, length = [], 0
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
    for part in encoder.iterencode(value):
        parts.append(part)
        length += len(part)
        if length > max_characters:
            break
    return "".join(parts)


def _plain(value: Any) -> Any:
    """What JSON does not know and can say all the same: dates, numbers of NumPy, models of pydantic."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump: Any = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
