"""The trainer's side of a round for engines: announces versions and says which stagings are complete."""

from __future__ import annotations

import asyncio

from sample_bus.messages import WeightRound


class FakeRounds:
    """`wait_staged` is what an engine pool is given; `report` what a weight server would call on an engine's behalf."""

    def __init__(self, *, incarnation: str = "a") -> None:
        self.incarnation = incarnation
        self.asked: list[tuple[str, int]] = []
        """(engine, version) of each staging asked for."""
        self.refuses: set[str] = set()
        """Engines whose stagings fail."""
        self.silent = False
        """Whether no staging is ever answered."""
        self._staged: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def round(self, version: int) -> WeightRound:
        return WeightRound(
            policy_version=version,
            incarnation=self.incarnation,
            address="shared_memory:/nowhere",
            manifest_digest=f"digest-{version}",
            num_tensors=1,
            total_bytes=4,
            announced_at=0.0,
        )

    def report(self, engine: str, version: int, nonce: str) -> None:
        """An engine asked for a staging; it is complete at once."""
        self.asked.append((engine, version))
        if not self.silent:
            task = asyncio.get_running_loop().create_task(self._complete(engine, nonce))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _complete(self, engine: str, nonce: str) -> None:
        async with self._changed:
            self._staged[engine] = nonce
            self._changed.notify_all()

    async def wait_staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        if engine in self.refuses:
            raise RuntimeError(f"{engine} was told that its staging failed")
        async with self._changed:
            await self._changed.wait_for(lambda: self._staged.get(engine) == nonce)
