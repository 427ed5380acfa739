"""`staleness_threshold=auto`: how it is spelled, who moves the threshold, and who stops that. Pure.

Invariant: while `auto_staleness.enabled` is true, staleness_threshold is what `auto` set last, or what it found. Whoever else
sets it takes it over: the same change turns auto_staleness.enabled off, unless it says something of it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError

AUTHOR = "auto"
"""In whose name changes are made by themselves; nobody else may bear it."""
THRESHOLD = "staleness_threshold"
ENABLED = "auto_staleness.enabled"
WORD = "auto"


def spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by dotted key, `staleness_threshold=auto` as what it is short for. Raises ConfigError for a contradiction."""
    if values.get(THRESHOLD) != WORD:
        return dict(values)
    if values.get(ENABLED, True) is not True:
        raise ConfigError(f"{THRESHOLD}={WORD} and {ENABLED}={values[ENABLED]!r} contradict each other: give one of them")
    return {ENABLED: True, **{key: value for key, value in values.items() if key != THRESHOLD}}


def with_pause(values: Mapping[str, Any], *, author: str, enabled: bool) -> dict[str, Any]:
    """The change `values`, by `author`, and what it implies while staleness_threshold is moved by itself."""
    change = spelled_out(values)
    if enabled and author != AUTHOR and THRESHOLD in change and ENABLED not in change:
        change[ENABLED] = False
    return change
