"""Stand-ins for both daemons: the real bus, the real settings, real journals, no model and no engine. Run as
`python -m tests.console.stand_ins trainer|rollouter [--config F] [key=value ...]`.

The trainer makes steps of what it leases; the rollouter offers as many samples as the run needs. Misbehavior is asked for in
STAND_IN, words separated by commas: `trainer-dies`, `rollouter-dies`, `slow-start`, `stubborn`, `orphan`, `endless`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import structlog

from configs.command import parse
from configs.live import LiveSettings
from configs.logs import set_up
from configs.paths import bus_address, socket_dir
from configs.schema import Settings
from console.run_dirs import RUN_ID_FILE
from sample_bus.journal import (
    ROLLOUTER_FILE,
    TRAINER_FILE,
    GroupAdmitted,
    Queued,
    RollouterEnded,
    SampleOffered,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    journal_dir,
)
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import (
    Counts,
    EndOfRun,
    EndReason,
    EngineStatus,
    EvaluationResult,
    LiveSettingsState,
    RolloutCounts,
    RollouterState,
    RollouterStatus,
    StepSummary,
    TimeShares,
    TrainerState,
    TrainerStatus,
)
from sample_bus.open import open_hub, open_link
from sample_bus.protocols import Lease, Leased, Link
from sample_bus.sample import NO_VERSION, Sample, SampleId, StopReason
from sample_bus.settings_log import SETTINGS_FILE, SettingsLog
from trainer.live_settings import LiveSettingsTopic, Moment, restore

log = structlog.get_logger()
WISHES = frozenset(filter(None, os.environ.get("STAND_IN", "").split(",")))
DIES_AT_STEP = 2
RUN_ID = "5eed5eed"


async def trainer(settings: Settings) -> None:
    if "slow-start" in WISHES:
        log.info("converting model", percent=40)
        await asyncio.sleep(600)
    (settings.run_dir / RUN_ID_FILE).write_text(RUN_ID)
    journal = JournalWriter(journal_dir(settings.run_dir, RUN_ID) / TRAINER_FILE)
    journal.write(TrainerBegan(at=time.time(), incarnation="s1", step=0, policy_version=0, position=[], counts={}))
    async with open_hub(
        settings.bus,
        address=bus_address(settings),
        run=settings.name,
        run_id=RUN_ID,
        incarnation="s1",
        quarantine_dir=settings.run_dir / "q",
    ) as hub:
        live = LiveSettings(settings)
        step = 0
        settings_log = SettingsLog(journal_dir(settings.run_dir, RUN_ID) / SETTINGS_FILE)
        restore(live, settings_log)
        topic = LiveSettingsTopic(hub, live, settings_log, moment=lambda: Moment(next_step=step + 1, next_version=step + 1))
        await topic.publish()
        received = 0
        shares = TimeShares(waiting=0.25, training=0.5, publishing=0.25)
        status = TrainerStatus(state=TrainerState.STARTING, incarnation="s1", num_steps=settings.num_steps, model_dir="/m")
        status = status.model_copy(update={"evaluations": (_evaluation(0, 0.25),)})
        await hub.publish("trainer", status)
        await hub.wait_rollouter(60)
        await asyncio.sleep(1.5)  # a real run gives the console time to connect
        while "endless" in WISHES or step < settings.num_steps:
            ids = [_note(journal, await hub.lease()) for _ in range(settings.samples_per_step)]
            received += len(ids)
            step += 1
            _note_step(journal, step, ids)
            hub.acknowledge(ids)
            hub.commit(hub.position())
            counts = Counts(
                received=received + hub.consumer_statistics().queued, trained=received, queued=hub.consumer_statistics().queued
            )
            status = status.model_copy(
                update={
                    "state": TrainerState.TRAINING,
                    "step": step,
                    "policy_version": step,
                    "counts": counts,
                    "shares": shares,
                    "last_step": _step(settings, step, live),
                }
            )
            await hub.publish("trainer", status)
            log.info("step", step=step, staleness_threshold=live.settings.staleness_threshold)
            if "trainer-dies" in WISHES and step == DIES_AT_STEP:
                log.error("trainer failed", error="ValueError: the loss is not a number")
                os._exit(1)
            await asyncio.sleep(0.05)
        await hub.publish("end", EndOfRun(reason=EndReason.FINISHED))
        while hub.rollouter is not None:  # noqa: ASYNC110 - the hub tells losses, not a polite goodbye
            await asyncio.sleep(0.02)
        queued = hub.consumer_statistics().queued
        counts = Counts(received=received + queued, trained=received, queued=queued)
        update = {"state": TrainerState.ENDED, "counts": counts, "evaluations": (*status.evaluations, _evaluation(step, 0.75))}
        ended = TrainerEnded(at=time.time(), reason="finished", message="", counts={"trained": received})
        journal.write(ended)
        journal.close()
        await hub.publish("trainer", status.model_copy(update=update))


async def rollouter(settings: Settings) -> None:
    if "orphan" in WISHES:
        _start_orphan(settings)
    journal = JournalWriter(journal_dir(settings.run_dir, RUN_ID) / ROLLOUTER_FILE)
    async with open_link(
        settings.bus,
        address=bus_address(settings),
        name="rollouter",
        role="rollouter",
        spool_dir=settings.run_dir / "spool",
    ) as link:
        await link.wait_connected(60)
        if "rollouter-dies" in WISHES:
            raise RuntimeError("engine-0 ran out of memory")
        over = asyncio.ensure_future(_wait_end(link))
        offered = 0
        wanted = settings.num_steps * settings.samples_per_step
        while not over.done() and ("endless" in WISHES or offered < wanted):
            sample = _sample(settings, offered)
            if sample.seat == 0:
                _note_admission(journal, sample)
            _note_offer(journal, sample, await link.offer(sample))
            offered += 1
            await link.publish("rollouter", _rollouter_status(link, RollouterState.GENERATING, offered))
        await over
        counts = _rollouter_status(link, RollouterState.ENDED, offered).counts
        journal.write(RollouterEnded(at=time.time(), reason="finished", counts=counts.model_dump()))
        journal.close()
        await link.publish("rollouter", _rollouter_status(link, RollouterState.ENDED, offered))


async def _wait_end(link: Link) -> None:
    async for _ in link.watch("end", EndOfRun):
        return


def _rollouter_status(link: Link, state: RollouterState, offered: int) -> RollouterStatus:
    live = link.get("settings", LiveSettingsState)
    return RollouterStatus(
        state=state,
        policy_version=0,
        settings_revision=live.revision if live else 0,
        counts=RolloutCounts(admitted=offered, offered=offered),
        engines=(EngineStatus(name="engine-0", state="serving", policy_version=0, last_pause_ms=12.0),),
        generated_tokens=3 * offered,
        generated_tokens_per_s=90.0,
    )


def _note(journal: JournalWriter, lease: Lease) -> SampleId:
    assert isinstance(lease, Leased)
    sample = lease.sample
    journal.write(
        Queued(
            at=time.time(),
            received_at=lease.received_at,
            id=list(lease.id),
            group_id=sample.group_id,
            seat=sample.seat,
            attempt=sample.attempt,
            closed="",
        )
    )
    return lease.id


def _note_step(journal: JournalWriter, step: int, ids: list[SampleId]) -> None:
    taken = [list(one) for one in ids]
    journal.write(StepBegan(at=time.time(), step=step, policy_version=step - 1, samples=taken, closures=[], options={}))
    journal.write(StepTrained(at=time.time(), step=step, policy_version=step, loss=0.1, grad_norm=1.0, replayed=False))


def _note_admission(journal: JournalWriter, sample: Sample) -> None:
    journal.write(
        GroupAdmitted(
            at=time.time(),
            group_id=sample.group_id,
            task_id=sample.task_id,
            issue=0,
            group_size=sample.group_size,
            policy_version=0,
            incarnation=sample.incarnation,
            settings_revision=0,
            temperature=1.0,
            max_tokens=3,
        )
    )


def _note_offer(journal: JournalWriter, sample: Sample, sample_id: SampleId) -> None:
    journal.write(
        SampleOffered(
            at=time.time(),
            group_id=sample.group_id,
            seat=sample.seat,
            attempt=sample.attempt,
            id=list(sample_id),
            num_tokens=sample.num_tokens,
            reward=sample.reward,
            oldest_version=sample.oldest_version,
        )
    )


def _evaluation(version: int, accuracy: float) -> EvaluationResult:
    return EvaluationResult(
        request_id=version,
        policy_version=version,
        accuracy=accuracy,
        num_samples=8,
        generating_versions=(version,),
        seconds=0.1,
    )


def _step(settings: Settings, step: int, live: LiveSettings) -> StepSummary:
    return StepSummary(
        step=step,
        policy_version=step,
        reward_mean=min(1.0, step / settings.num_steps),
        loss=0.1,
        grad_norm=1.0,
        learning_rate=1e-5,
        staleness_mean=float(live.settings.staleness_threshold),
        staleness_max=1,
        mismatch_mean_abs=0.0,
        mismatch_max_abs=0.0,
        importance_mean=1.0,
        num_samples=settings.samples_per_step,
        num_tokens=5 * settings.samples_per_step,
        num_trained_tokens=3 * settings.samples_per_step,
        step_time_s=0.02,
        finished_at=time.time(),
    )


def _sample(settings: Settings, number: int) -> Sample:
    return Sample(
        task_id="t",
        group_id=f"g{number // settings.group_size}",
        rollout_id=f"r{number}",
        attempt=0,
        seat=number % settings.group_size,
        group_size=settings.group_size,
        data_source="d",
        tokens=np.array([1, 2, 3, 4, 5], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        behavior_logprobs=np.array([0, 0, -1, -1, -1], np.float32),
        version_starts=np.array([0, 2], np.int32),
        versions=np.array([NO_VERSION, 0], np.int32),
        kept_cache=np.zeros(2, np.uint8),
        reward=1.0,
        temperature=1.0,
        stop_reason=StopReason.STOP,
        num_turns=1,
        settings_revision=0,
        incarnation="s1",
        produced_at=time.time(),
    )


def _start_orphan(settings: Settings) -> None:
    """A process in a session of its own that holds a socket of the run and a shared-memory segment, like an engine does."""
    name = f"/dev/shm/headrace-orphan-{secrets.token_hex(4)}"
    (settings.run_dir / "orphan").write_text(name)
    subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "orphan", name, str(socket_dir(settings) / "orphan")], start_new_session=True
    )


def _orphan(segment: str, path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Path(segment).open("w+b") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 4096)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        time.sleep(600)
    held.close()


def main() -> None:
    role, *argv = sys.argv[1:]
    if role == "orphan":
        _orphan(*argv)
        return
    settings = parse(argv, prog=role, description="a stand-in")
    set_up(settings.logging, daemon=role)
    if "stubborn" in WISHES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(trainer(settings) if role == "trainer" else rollouter(settings))


if __name__ == "__main__":
    main()
