"""Following a run over the control channel: every retained topic flows into the picture as it changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import structlog

from configs.schema import BusSettings
from console.errors import NobodyAnswers
from console.picture import Picture
from sample_bus.errors import BusError
from sample_bus.messages import EndOfRun, LiveSettingsState, Message, RollouterStatus, TrainerStatus
from sample_bus.open import open_link
from sample_bus.protocols import Control, Link

log = structlog.get_logger()
M = TypeVar("M", bound=Message)

_RETRY_S = 0.5


async def follow(bus: BusSettings, address: str, picture: Picture, changed: Callable[[], None]) -> None:
    """Keep `picture` up to date until cancelled; a trainer that is not there yet, or is gone, is waited for."""
    while True:
        try:
            async with open_link(bus, address=address, name=_name(), role="console") as link:
                await link.wait_connected(bus.connect_timeout_s)
                picture.see_connected(time.time())
                changed()
                await _watch_all(link, picture, changed)
        except* BusError as error:
            log.warning("console lost the trainer", address=address, error=str(error.exceptions[0]))
        await asyncio.sleep(_RETRY_S)


@contextlib.asynccontextmanager
async def attached(bus: BusSettings, address: str, *, timeout_s: float) -> AsyncIterator[Link]:
    """A link to the trainer at `address` for one command. Raises NobodyAnswers."""
    async with open_link(bus, address=address, name=_name(), role="console") as link:
        try:
            await link.wait_connected(timeout_s)
        except BusError as error:
            raise NobodyAnswers(str(error)) from None
        yield link


async def _watch_all(link: Control, picture: Picture, changed: Callable[[], None]) -> None:
    def see_live(state: LiveSettingsState, now: float) -> None:
        picture.live = state

    def see_end(end: EndOfRun, now: float) -> None:
        picture.end = end

    async def watch(topic: str, kind: type[M], see: Callable[[M, float], None]) -> None:
        async for value in link.watch(topic, kind):
            see(value, time.time())
            changed()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch("trainer", TrainerStatus, picture.see_trainer))
        tasks.create_task(watch("rollouter", RollouterStatus, picture.see_rollouter))
        tasks.create_task(watch("settings", LiveSettingsState, see_live))
        tasks.create_task(watch("end", EndOfRun, see_end))


def _name() -> str:
    return f"console-{os.getpid()}"
