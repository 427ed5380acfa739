"""Ends of the bus for tests: real sockets, short heartbeats, and a client that speaks raw frames."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import zmq
import zmq.asyncio

from configs.schema import BusSettings
from sample_bus.frames import PROTOCOL, Control, Data, Hello, Open, Opened, decode_control, encode_control
from sample_bus.open import open_hub, open_link
from sample_bus.protocols import Hub, Leased, Link

T = TypeVar("T")
C = TypeVar("C", bound=Control)
HANG_S = 30.0
"""Deadline against hangs; nothing is measured with it."""
ROOT = Path(__file__).parents[2]


def bus_settings(**changes: Any) -> BusSettings:
    return BusSettings(
        **{
            "heartbeat_interval_s": 0.1,
            "heartbeat_timeout_s": 20.0,
            "connect_timeout_s": 30.0,
            "request_timeout_s": 20.0,
            **changes,
        }
    )


def hub_at(
    address: str, *, incarnation: str = "first", run_id: str = "run-1", **changes: Any
) -> AbstractAsyncContextManager[Hub]:
    directory = Path(address.removeprefix("ipc://")).parent if address.startswith("ipc://") else Path("/nonexistent")
    return open_hub(
        bus_settings(**changes),
        address=address,
        run="run",
        run_id=run_id,
        incarnation=incarnation,
        quarantine_dir=directory / "quarantine",
    )


def link_to(
    address: str,
    *,
    name: str = "rollouter",
    role: Literal["rollouter", "console"] = "rollouter",
    spool_dir: Path | None = None,
    **changes: Any,
) -> AbstractAsyncContextManager[Link]:
    """A rollouter's spool lies beside the socket, so that a link of the same name goes on with it."""
    if spool_dir is None and address.startswith("ipc://"):
        spool_dir = Path(address.removeprefix("ipc://")).parent / "spool"
    return open_link(bus_settings(**changes), address=address, name=name, role=role, spool_dir=spool_dir)


@asynccontextmanager
async def pair(address: str, **changes: Any) -> AsyncIterator[tuple[Hub, Link]]:
    """A hub and a rollouter's link that is connected to it."""
    async with hub_at(address, **changes) as hub, link_to(address, **changes) as link:
        await link.wait_connected(HANG_S)
        yield hub, link


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or process brings about."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(HANG_S):
        return await awaitable


async def lease(hub: Hub) -> Leased:
    """The next record, which must be a sample."""
    leased = await soon(hub.lease())
    assert isinstance(leased, Leased)
    return leased


class RawClient:
    """Speaks the protocol by hand, so that it can break it."""

    def __init__(self, address: str, *, name: str = "raw", epoch: int = 7) -> None:
        self.name = name
        self.epoch = epoch
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def send(self, frames: Sequence[bytes | memoryview]) -> None:
        await soon(self._socket.send_multipart(frames))

    async def say(self, message: Control) -> None:
        await self.send([encode_control(message)])

    async def greet(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "greeting": 1,
            "name": self.name,
            "role": "rollouter",
            "process": self.epoch,
        }
        await self.say(Hello(**{**fields, **changes}))

    async def open(self, *, committed: int = 0, next_seq: int = 0) -> Opened:
        """Say that a stream stands there, and return the answer."""
        await self.say(Open(greeting=1, epoch=self.epoch, committed=committed, next_seq=next_seq))
        return await self.next(Opened)

    async def data(self, seq: int, frames: Sequence[bytes | memoryview]) -> None:
        await self.send([encode_control(Data(seq=seq)), *frames])

    async def next(self, kind: type[C]) -> C:
        """The next message of a kind; others are passed over."""
        async with asyncio.timeout(HANG_S):
            while True:
                message = decode_control((await self._socket.recv_multipart())[0])
                if isinstance(message, kind):
                    return message


class Child:
    """A process of `tests.sample_bus.child`, which says what it does in JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *words: str) -> Child:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.sample_bus.child", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
        )

    async def heard(self, what: str) -> dict[str, Any]:
        """The child's next line that is about `what`."""
        assert self._process.stdout is not None
        async with asyncio.timeout(HANG_S):
            while line := await self._process.stdout.readline():
                said: dict[str, Any] = json.loads(line)
                if said["what"] == what:
                    return said
        raise AssertionError(f"the child ended without saying {what!r}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def end(self) -> int:
        """Wait for its end."""
        return await soon(self._process.wait())

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self.end()
