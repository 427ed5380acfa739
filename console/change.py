"""`headrace set`: change live settings of a run that goes on."""

from __future__ import annotations

import asyncio
import getpass
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import ConfigError
from configs.live import with_live
from configs.loader import parse_value
from configs.schema import BusSettings, Settings
from console.follow import attached
from sample_bus.messages import ChangeSettings, SettingsChanged

_ORIGIN = "set: "


def change(
    bus: BusSettings,
    address: str,
    assignments: Sequence[str],
    *,
    author: str | None,
    expected_revision: int | None,
    timeout_s: float,
) -> int:
    """Ask the trainer at `address` for the change and print what came of it.

    Raises ConfigError (refused here: unknown or fixed key, invalid value), NobodyAnswers, RequestFailed (refused there).
    """
    values = parse(assignments)
    request = ChangeSettings(values=values, author=author or user_at_host(), expected_revision=expected_revision)
    changed = asyncio.run(_ask(bus, address, request, timeout_s))
    known = {item.key for item in changed.changes}
    for item in changed.changes:
        sys.stdout.write(f"{item.key}: {item.old} -> {item.new} (revision {changed.revision}, from the {item.scope})\n")
    for key in values:
        if key not in known:
            sys.stdout.write(f"{key}: unchanged (revision {changed.revision})\n")
    return 0


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Live values from `key=value` texts, checked as far as it can be done without the run's other settings.

    Raises ConfigError, one line per problem.
    """
    values: dict[str, Any] = {}
    for text in assignments:
        key, separator, raw = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"argument {text!r}: expected key=value")
        if key in values:
            raise ConfigError(f"{key}: given twice")
        values[key] = parse_value(key, raw)
    _check(values)
    return values


def user_at_host() -> str:
    """The default author."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what no run would accept; contradictions with other settings are the trainer's to judge, it knows them."""
    try:
        with_live(Settings(), values)
    except ConfigError as error:
        own = [line.removeprefix(_ORIGIN) for line in str(error).splitlines() if line.startswith(_ORIGIN)]
        if own:
            raise ConfigError("\n".join(own)) from None


async def _ask(bus: BusSettings, address: str, request: ChangeSettings, timeout_s: float) -> SettingsChanged:
    async with attached(bus, address, timeout_s=timeout_s) as link:
        return await link.request("settings.set", request, SettingsChanged, timeout_s=timeout_s)
