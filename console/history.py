"""`headrace history`: the changes of a run's live settings, from its directory or from the trainer itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from configs.schema import BusSettings
from console.follow import attached
from console.journals import Journals
from sample_bus.messages import AskHistory, SettingChange, SettingsHistory
from sample_bus.settings_log import SETTINGS_FILE, read_settings_log


def history_of(run_dir: Path, *, as_json: bool) -> int:
    """Print the changes of the newest run in `run_dir`, which may be over. Raises NoRun, JournalError."""
    _print(read_settings_log(Journals.of(run_dir).directory / SETTINGS_FILE), as_json=as_json)
    return 0


def history_at(bus: BusSettings, address: str, *, as_json: bool, timeout_s: float) -> int:
    """Print the changes that the trainer at `address` knows. Raises NobodyAnswers, RequestFailed."""
    _print(asyncio.run(_ask(bus, address, timeout_s)).changes, as_json=as_json)
    return 0


def spelled(value: Any) -> str:
    """A value as one would give it to `headrace set`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def since(change: SettingChange) -> str:
    """From when a change holds, as words that follow its values."""
    moment = change.holds_from or change.scope
    if moment.startswith("next "):
        return f"from the {moment}"
    return moment if moment == "at once" else f"from {moment}"


async def _ask(bus: BusSettings, address: str, timeout_s: float) -> SettingsHistory:
    async with attached(bus, address, timeout_s=timeout_s) as link:
        return await link.request("settings.history", AskHistory(), SettingsHistory, timeout_s=timeout_s)


def _print(changes: Sequence[SettingChange], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps([change.model_dump(mode="json") for change in changes]).decode() + "\n")
        return
    if not changes:
        sys.stdout.write("no live setting was changed\n")
    for change in changes:
        at = datetime.fromtimestamp(change.changed_at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        values = f"{spelled(change.old)} -> {spelled(change.new)}"
        sys.stdout.write(f"{change.revision:>4}  {at}  {change.author}  {change.key}: {values}  {since(change)}\n")
