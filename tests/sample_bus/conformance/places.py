"""Where a bus of one transport lives: its address, its settings, its directories. The same tests run at every place.

Invariant: two places share nothing: no socket, no stream, no file. What a test opens at a place it opens through `open_hub` and
`open_link`, as the daemons do.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import redis

from configs.schema import BusSettings
from sample_bus.open import open_hub, open_link
from sample_bus.protocols import Hub, Link
from sample_bus.spool import kept

Transport = Literal["zmq", "redis"]
RUN_ID = "r1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    transport: Transport
    address: str
    directory: str
    """Holds the spool and the quarantine."""
    broker_port: int = 0
    """Of the Redis server."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings of the bus that differ here."""

    def settings(self, **changes: Any) -> BusSettings:
        return BusSettings(
            **{
                "transport": self.transport,
                "heartbeat_interval_s": 0.1,
                "heartbeat_timeout_s": 20.0,
                "connect_timeout_s": 60.0,
                "request_timeout_s": 20.0,
                **self.changes,
                **changes,
            }
        )

    @property
    def spool_dir(self) -> Path:
        return Path(self.directory) / "spool"

    @property
    def quarantine_dir(self) -> Path:
        return Path(self.directory) / "quarantine"

    def hub(self, *, incarnation: str = "first", run_id: str = RUN_ID, **changes: Any) -> AbstractAsyncContextManager[Hub]:
        return open_hub(
            self.settings(**changes),
            address=self.address,
            run="run",
            run_id=run_id,
            incarnation=incarnation,
            quarantine_dir=self.quarantine_dir,
        )

    def link(
        self,
        name: str = "rollouter",
        *,
        role: Literal["rollouter", "console"] = "rollouter",
        spool_dir: Path | None = None,
        **changes: Any,
    ) -> AbstractAsyncContextManager[Link]:
        return open_link(
            self.settings(**changes),
            address=self.address,
            name=name,
            role=role,
            spool_dir=(spool_dir or self.spool_dir) if role == "rollouter" else None,
        )

    def at_port(self, port: int) -> Place:
        """The same, at a port where something else listens."""
        address = f"tcp://127.0.0.1:{port}" if self.transport == "zmq" else f"redis://127.0.0.1:{port}/0#run"
        return replace(self, address=address, broker_port=port)

    def num_kept(self, producer: str = "rollouter") -> int:
        """Records of that producer's stream for which there is still a copy."""
        if self.transport == "zmq":
            found = kept(self.spool_dir / RUN_ID / producer)
            return 0 if found is None else found.next_seq - found.first
        with redis.Redis(port=self.broker_port) as client:
            return int(client.xlen(f"headrace:run:{RUN_ID}:s:{producer}"))

    async def lose_streams(self) -> None:
        """Everything that producers kept is gone. Their links are closed."""
        if self.transport == "zmq":
            shutil.rmtree(self.spool_dir)
        else:
            with redis.Redis(port=self.broker_port) as client:
                await asyncio.to_thread(client.flushall)

    def as_text(self) -> str:
        """For another process' command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Place:
        return cls(**json.loads(text))
