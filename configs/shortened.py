"""Long words in few: what an error says first and what it says last, since a traceback's reason stands at its end. Pure."""

from __future__ import annotations

_GAP = " … "
_HEAD_SHARE = 0.3


def shortened(words: str, limit: int) -> str:
    """`words` in at most `limit` characters (at least 8): its beginning and, longer, its end, where it does not fit."""
    if len(words) <= limit:
        return words
    head = int((limit - len(_GAP)) * _HEAD_SHARE)
    return words[:head] + _GAP + words[len(words) - (limit - len(_GAP) - head) :]


def in_a_line(words: str, limit: int) -> str:
    """The same in one line: line breaks and runs of blanks become one blank."""
    return shortened(" ".join(words.split()), limit)
