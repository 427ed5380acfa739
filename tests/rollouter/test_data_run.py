"""A run that reads rows as their turn comes: a bad one that comes late is passed over, a changed file ends it by name."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from configs.schema import DataSettings
from rollouter.data.sources import open_rows
from rollouter.errors import DataChanged
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

DEADLINE_S = 100.0
"""Against hangs only."""
NUM_ROWS = 400
BAD_AT = 300
"""Behind those that are made at the start."""


async def _run(path: Path, *, is_edited: bool = False) -> None:
    """One step of almost all rows; raises what ends the rollouter before. `is_edited`: before any row is played."""
    data = DataSettings(source=str(path), filter="lazy", shuffle=False, held_out_fraction=0)
    settings = make_settings(path.parent, data=data.model_dump(), bus__max_queued_samples=2048, samples_per_step=NUM_ROWS * 4)
    async with (
        asyncio.timeout(DEADLINE_S),
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), rows=open_rows(data)) as running,
    ):
        await trainer.begin()
        await trainer.wait_status(lambda _: True)
        if is_edited:
            os.utime(path, ns=(1, 1))
        await trainer.publish(0)
        training = asyncio.create_task(trainer.train((NUM_ROWS - 10) * 4))
        done, _ = await asyncio.wait((training, running.task), return_when=asyncio.FIRST_COMPLETED)
        training.cancel()
        if running.task in done:
            await running.task


def _write(path: Path, bad: bytes | None = None) -> Path:
    lines = [json.dumps({"prompt": f"1+{n}=", "ground_truth": str(n + 1)}).encode() + b"\n" for n in range(NUM_ROWS)]
    if bad is not None:
        lines[BAD_AT] = bad
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(
    "bad",
    [
        b'{"prompt":"1+1=","ground_truth":' + b"9" * 6000 + b"}\n",
        b'{"prompt":"1+1=","ground_truth":"2","task_id":"\\ud800"}\n',
        b'{"prompt":"1+1=","ground_truth":"2","task_id":"' + b"t" * 100_000 + b'"}\n',
    ],
    ids=["integer", "half a surrogate pair", "long name"],
)
async def test_a_bad_row_is_passed_over_and_the_run_goes_on(tmp_path: Path, bad: bytes) -> None:
    await _run(_write(tmp_path / "rows.jsonl", bad))


async def test_a_file_that_is_edited_in_place_ends_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataChanged, match=r"rows\.jsonl: was changed while a run reads it"):
        await _run(_write(tmp_path / "rows.jsonl"), is_edited=True)
