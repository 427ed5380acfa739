"""Memory stays flat however many samples pass through bus, intake and settlement."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from configs.schema import BusSettings
from sample_bus.journal_writer import JournalWriter
from sample_bus.open import open_hub, open_link
from tests.fakes.samples import make_sample
from trainer.age_gate import AgeGate
from trainer.aged import AgeRule, Lineage
from trainer.groups import GroupAssembler
from trainer.intake import Intake

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 32_768
GROUP_SIZE = 8
SAMPLES_PER_STEP = 64
BUS = BusSettings(max_queued_samples=256)


async def produce(address: str, num_samples: int) -> None:
    """Offer `num_samples` long samples, as a rollouter does."""
    sample_of = {
        seat: make_sample(
            prompt=range(1, 1025), reply=np.arange(NUM_TOKENS - 1024) % 50_000, seat=seat, group_size=GROUP_SIZE, group_id="g"
        )
        for seat in range(GROUP_SIZE)
    }
    spool = Path(address.removeprefix("ipc://")).parent / "spool"
    async with open_link(BUS, address=address, name="rollouter", role="rollouter", spool_dir=spool) as link:
        await link.wait_connected(60)
        for number in range(num_samples):
            group, seat = divmod(number, GROUP_SIZE)
            template = sample_of[seat]
            fields = {name: getattr(template, name) for name in template.__slots__}
            await link.offer(type(template)(**{**fields, "group_id": f"g{group}", "rollout_id": f"g{group}/{seat}"}))
        while link.producer_statistics().unsettled:  # noqa: ASYNC110 - settlement has no event of its own
            await asyncio.sleep(0.05)


def start_producer(address: str, num_samples: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.integration.test_memory", address, str(num_samples)])


async def test_memory_is_flat_over_twenty_thousand_long_samples(tmp_path: Path) -> None:
    """B124: 20,000 samples of 32k tokens; payloads are let go once trained, on both sides and on the producer's disk."""
    num_samples = 20_000
    address = f"ipc://{tmp_path}/bus"
    async with open_hub(
        BUS,
        address=address,
        run="memory",
        run_id="1234abcd",
        incarnation="first",
        quarantine_dir=tmp_path / "quarantine",
    ) as hub:
        producer = start_producer(address, num_samples)
        try:
            intake = Intake(
                hub,
                groups_per_step=lambda: SAMPLES_PER_STEP // GROUP_SIZE,
                gate=AgeGate(rule=AgeRule, lineage=Lineage(incarnation="first")),
                assembler=GroupAssembler(),
                journal=JournalWriter(tmp_path / "trainer.log"),
            )
            running = asyncio.ensure_future(intake.run())
            mine, theirs = psutil.Process(), psutil.Process(producer.pid)
            sizes: list[tuple[int, int]] = []
            for step in range(num_samples // SAMPLES_PER_STEP):
                async with asyncio.timeout(120):
                    batch = await intake.next_batch(lambda: 0)
                intake.settle_trained(batch)
                del batch
                hub.commit(hub.position())
                if step % 10 == 0:
                    sizes.append((mine.memory_info().rss, theirs.memory_info().rss))
            running.cancel()
            spooled = sum(path.stat().st_size for path in (tmp_path / "spool").rglob("*") if path.is_file()) / 2**20
            assert spooled < num_samples * NUM_TOKENS * 9 / 2**20 / 4, f"{spooled:.0f} MiB stay in the spool"
            assert intake.counts().trained == num_samples // SAMPLES_PER_STEP * SAMPLES_PER_STEP
        finally:
            producer.kill()
            producer.wait(30)
    warm = np.array(sizes[len(sizes) // 3 :], dtype=float) / 2**20
    payload = NUM_TOKENS * 9 / 2**20
    for name, column in (("trainer's side", warm[:, 0]), ("rollouter's side", warm[:, 1])):
        half = len(column) // 2
        growth = float(np.median(column[half:]) - np.median(column[:half]))
        assert growth < BUS.max_queued_samples * payload / 2, f"{name}: grew by {growth:.0f} MiB"


if __name__ == "__main__":
    asyncio.run(produce(sys.argv[1], int(sys.argv[2])))
