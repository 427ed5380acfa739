"""`headrace set` and `headrace revert`: change live settings of a run that goes on."""

from __future__ import annotations

import asyncio
import getpass
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.auto import spelled_out
from configs.errors import ConfigError
from configs.live import with_live
from configs.loader import parse_value
from configs.schema import BusSettings, Settings
from console.follow import attached
from console.history import since, spelled
from sample_bus.messages import ChangeSettings, RevertSettings, SettingsChanged
from sample_bus.protocols import Link

_ORIGIN = "set: "


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What is said along with a change."""

    author: str | None
    """None: user@host."""
    expected_revision: int | None
    dry_run: bool
    timeout_s: float


def change(bus: BusSettings, address: str, assignments: Sequence[str], how: How) -> int:
    """Ask the trainer at `address` for the change and print what came of it.

    Raises ConfigError (unknown or fixed key, invalid value, a contradiction with another setting), NobodyAnswers, RequestFailed
    (someone else changed the settings meanwhile, or the change could not be kept).
    """
    values = parse(assignments)
    request = ChangeSettings(
        values=values,
        author=how.author or user_at_host(),
        expected_revision=how.expected_revision,
        dry_run=how.dry_run,
    )
    changed = asyncio.run(_ask(bus, address, "settings.set", request, how.timeout_s))
    _print(changed, values, dry_run=how.dry_run)
    return 0


def revert(bus: BusSettings, address: str, to_revision: int, how: How) -> int:
    """Ask the trainer at `address` for the values of an earlier revision. Prints and raises as `change`."""
    request = RevertSettings(
        to_revision=to_revision,
        author=how.author or user_at_host(),
        expected_revision=how.expected_revision,
        dry_run=how.dry_run,
    )
    changed = asyncio.run(_ask(bus, address, "settings.revert", request, how.timeout_s))
    if not changed.changes:
        sys.stdout.write(f"the values of revision {to_revision} are in force (revision {changed.revision})\n")
    _print(changed, (), dry_run=how.dry_run)
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
    values = spelled_out(values)
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


async def _ask(
    bus: BusSettings, address: str, name: str, request: ChangeSettings | RevertSettings, timeout_s: float
) -> SettingsChanged:
    async with attached(bus, address, timeout_s=timeout_s) as link:
        return await ask(link, name, request, timeout_s=timeout_s)


async def ask(
    link: Link, name: str, request: ChangeSettings | RevertSettings, *, timeout_s: float | None = None
) -> SettingsChanged:
    """What changed, or would. Raises ConfigError when it was refused as wrong, RequestFailed when for another reason."""
    changed = await link.request(name, request, SettingsChanged, timeout_s=timeout_s)
    if changed.refused:
        raise ConfigError("\n".join(line.removeprefix(_ORIGIN) for line in changed.refused))
    return changed


def _print(changed: SettingsChanged, asked: Iterable[str], *, dry_run: bool) -> None:
    for item in changed.changes:
        revision = f"would be revision {item.revision}" if dry_run else f"revision {item.revision}"
        sys.stdout.write(f"{item.key}: {spelled(item.old)} -> {spelled(item.new)} ({revision}, {since(item)})\n")
    known = {item.key for item in changed.changes}
    for key in asked:
        if key not in known:
            sys.stdout.write(f"{key}: unchanged (revision {changed.revision})\n")
