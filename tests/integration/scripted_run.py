"""A run whose rollouter is a script over a real link, and whose trainer is the real one, which dies by appointment."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.loader import load
from configs.paths import bus_address
from configs.schema import Settings
from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import Ended, PeerLost
from sample_bus.journal import TRAINER_FILE, Record, journal_dir, read_journal
from sample_bus.messages import EndOfRun
from sample_bus.open import open_link
from sample_bus.sample import Sample
from tests.fakes.samples import make_sample
from trainer.recording import Recording, recording_of
from trainer.tiny_sort import NUM_DIGITS, VOCABULARY

REPOSITORY = Path(__file__).resolve().parents[2]
HANG_S = 240.0
GROUP_SIZE = 4
SAMPLES_PER_STEP = 16
NUM_STEPS = 10
SAVED_EVERY = 3
CLOSED_EVERY, DROPPED_EVERY = 3, 7
"""Of each so many groups one has a closed seat, and one has too many of them to be trained."""
KILLED = -9


def overrides(run_dir: Path, **values: object) -> list[str]:
    """What the trainer is started with: one thread, so that the same calls give the same bits."""
    settings = {
        "name": "scripted",
        "run_dir": run_dir,
        "model.source": "tiny-sort",
        "model.dtype": "float32",
        "num_steps": NUM_STEPS,
        "group_size": GROUP_SIZE,
        "samples_per_step": SAMPLES_PER_STEP,
        "trainer.learning_rate": 5e-4,
        "trainer.num_threads": 1,
        "checkpoint.every_steps": SAVED_EVERY,
        "checkpoint.at_end": True,
        "checkpoint.resume": "auto",
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "bus.on_lost": "wait",
        "bus.retain": True,
        "bus.max_queued_samples": 64,
        "tracking.backends": "[jsonl]",
        **values,
    }
    return [f"{key}={value}" for key, value in settings.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one producer offers, in order; more than the run takes."""

    producer: str
    records: tuple[Sample | ClosedSeat, ...]

    @classmethod
    def of(cls, producer: str, *, num_groups: int, seed: int = 0) -> Script:
        draw = np.random.default_rng(seed)
        records: list[Sample | ClosedSeat] = []
        for group in range(num_groups):
            records += _group(f"{producer}-{group}/{group}", group, draw)
        return cls(producer=producer, records=tuple(records))


def _group(group_id: str, number: int, draw: np.random.Generator) -> list[Sample | ClosedSeat]:
    """Siblings that sort the same digits, mostly wrong; seats come in any order."""
    digits = draw.integers(0, 10, NUM_DIGITS)
    prompt = [VOCABULARY.index("s"), *(VOCABULARY.index(str(digit)) for digit in digits), VOCABULARY.index("=")]
    closed = 1 if number % CLOSED_EVERY == 1 else GROUP_SIZE - 1 if number % DROPPED_EVERY == 3 else 0
    records: list[Sample | ClosedSeat] = []
    for seat in draw.permutation(GROUP_SIZE).tolist():
        if seat < closed:
            records.append(_closed(group_id, seat))
            continue
        reply = [VOCABULARY.index(str(digit)) for digit in draw.permutation(digits)] + [VOCABULARY.index("<eos>")]
        records.append(
            make_sample(
                prompt=prompt,
                reply=reply,
                logprobs=(-draw.random(len(reply)) * 2).tolist(),
                reward=float(draw.integers(0, 2)),
                group_id=group_id,
                seat=seat,
                group_size=GROUP_SIZE,
            )
        )
    return records


def _closed(group_id: str, seat: int) -> ClosedSeat:
    return ClosedSeat(
        task_id="task-0",
        group_id=group_id,
        rollout_id=f"{group_id}/{seat}",
        attempt=2,
        seat=seat,
        group_size=GROUP_SIZE,
        data_source="test",
        reason="timeout",
        message="",
        settings_revision=0,
        incarnation="first",
        closed_at=0.0,
    )


async def produce(script: Script, settings: Settings) -> EndOfRun:
    """Offer the script until the run ends, whatever happens to the trainer; returns how it ended."""
    bus = settings.bus.model_copy(update={"connect_timeout_s": HANG_S})
    async with open_link(
        bus, address=bus_address(settings), name=script.producer, role="rollouter", spool_dir=settings.run_dir / "spool"
    ) as link:
        await link.wait_connected(HANG_S)

        async def offer_all() -> None:
            with suppress(Ended, PeerLost):
                for record in script.records:
                    await (link.offer(record) if isinstance(record, Sample) else link.close_seat(record))

        offering = asyncio.ensure_future(offer_all())
        try:
            async for end in link.watch("end", EndOfRun):
                return end
        finally:
            offering.cancel()
    raise AssertionError("the topic ended")


async def run_trainer(death: str, arguments: Sequence[str], log: Path) -> int:
    """One life of the trainer; returns its exit code."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.mortal_trainer",
            death,
            *arguments,
            cwd=REPOSITORY,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(HANG_S):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def run_to_the_end(run_dir: Path, scripts: Sequence[Script], deaths: Sequence[str], **values: object) -> list[int]:
    """Start the trainer again after each death, and once without one; returns the exit codes."""
    arguments = overrides(run_dir, **values)
    settings = load(None, arguments, environment={})
    log = run_dir.with_name(f"{run_dir.name}.log")
    producing = [asyncio.ensure_future(produce(script, settings)) for script in scripts]
    codes: list[int] = []
    try:
        for death in (*deaths, "never"):
            codes.append(await run_trainer(death, arguments, log))
            if codes[-1] not in (0, KILLED):
                raise AssertionError(f"the trainer failed after {death}: {tail(log)}")
            if codes[-1] == 0:
                break
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*producing)
    finally:
        for one in producing:
            one.cancel()
        await asyncio.wait(producing)
    return codes


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-30:])


def journal_of(run_dir: Path) -> list[Record]:
    run_id = (run_dir / "run_id").read_text().strip()
    return list(read_journal(journal_dir(run_dir, run_id) / TRAINER_FILE))


def recording(run_dir: Path) -> Recording:
    return recording_of(journal_of(run_dir))


def weights(run_dir: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Every file of the policy and of the random generators in the checkpoint of `step`."""
    root = run_dir / "checkpoints" / f"step_{step}"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for part in ("policy", "random")
        for path in sorted((root / part).rglob("*"))
        if path.is_file()
    }
