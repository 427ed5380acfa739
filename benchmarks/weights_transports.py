"""Our transports under the stopwatch: publish, stage with so many receivers, verify, several times; the best counts."""

from __future__ import annotations

import gc
import os
import queue
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.weights_model import Model
from benchmarks.weights_receivers import WAIT_S, Desk, Receivers, begin_peak, proportional_bytes, status_bytes
from configs.schema import WeightSyncSettings
from weight_sync import StageFailure, StageReport, WeightServer
from weight_sync.staging import StagingArea

NUM_WARM = 3
"""Rounds before those that count: they fault the memory in, on both sides."""
Transport = Literal["shared_memory", "tcp", "collective", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    transport: Transport
    num_receivers: int
    verify: Literal["always", "never"] = "always"
    encoding: Literal["full", "delta"] = "full"
    changed: float = 0.0
    """Share of the elements that changes between two versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times are those of the fastest of several rounds."""

    publish_s: float
    """Cast from float32, copy, checksum; the trainer waits for it."""
    stage_s: float
    """From the request until every receiver holds all of the weights; the trainer does not wait for it."""
    total_s: float
    """Both of one round."""
    payload_bytes: int
    """What travelled to one receiver."""
    sender_peak_bytes: int
    """Resident memory of the trainer's process at its peak, beyond what it had before."""
    receiver_peak_bytes: int
    """The same of one receiver (shared pages counted as its own)."""
    all_bytes: int
    """Of all processes together in the end, beyond what they had before; shared pages count once."""
    sender_cpu_s: float
    """Processor time of the trainer's process in a round, publishing included, the least; it hardly depends on what else the
    machine does."""
    receiver_cpu_s: float
    """The same of one receiver."""


def begin(desk: Desk, *, dtype: str) -> None:
    gc.collect()
    desk.area = StagingArea(check_manifest=lambda manifest: None, dtype=dtype)
    desk.resident_started = begin_peak()


def stage(desk: Desk, *, address: str, version: int, cohort: int, verify: Literal["always", "never"]) -> None:
    assert desk.area is not None
    desk.cpu_started = time.process_time()
    desk.area.stage(
        address,
        version,
        engine=f"receiver-{desk.index}",
        nonce=f"v{version}",
        timeout_s=WAIT_S,
        cohort=cohort,
        verify=verify,
    )


def load(desk: Desk, *, version: int, digest: str) -> tuple[float, int]:
    """Take the staged weights over; seconds of processor time since `stage`, and bytes at the peak."""
    assert desk.area is not None
    desk.area.mark_loaded(desk.area.get(version, digest))
    return time.process_time() - desk.cpu_started, status_bytes("VmHWM") - desk.resident_started


def end(desk: Desk) -> None:
    if desk.area is not None:
        desk.area.close()
    desk.area = None


def measure(model: Model, case: Case, fleet: Receivers, *, repetitions: int) -> Figures:
    """Raises RuntimeError with the reason when a receiver cannot stage, WeightSyncError when there is nothing to stage from."""
    num = case.num_receivers
    reports: queue.Queue[StageReport | StageFailure] = queue.Queue()
    settings = WeightSyncSettings(transport=case.transport, encoding=case.encoding, verify=case.verify)
    gc.collect()
    fleet.all(num, begin, dtype="bfloat16")
    pids = [*fleet.pids[:num]]
    before = sum(map(proportional_bytes, pids)) + proportional_bytes(os.getpid())
    resident = begin_peak()
    rounds: list[tuple[float, float]] = []
    senders_cpu: list[float] = []
    receivers_cpu: list[float] = []
    payload_bytes = 0
    with (
        tempfile.TemporaryDirectory(prefix="hr-") as directory,
        WeightServer(
            settings, socket_dir=Path(directory), dtype=torch.bfloat16, on_staged=reports.put, on_failed=reports.put
        ) as server,
    ):
        for version in range(NUM_WARM + repetitions):
            model.step(case.changed)
            started, cpu_started = time.perf_counter(), time.process_time()
            publication = server.publish(model.tensors.items(), policy_version=version)
            published = time.perf_counter()
            for index in range(num):
                fleet.tell(index, stage, address=server.address, version=version, cohort=num, verify=case.verify)
            for _ in range(num):
                report = reports.get(timeout=WAIT_S)
                if isinstance(report, StageFailure):
                    raise RuntimeError(report.reason)
                payload_bytes = report.payload_bytes
            staged, cpu_staged = time.perf_counter(), time.process_time()
            for index in range(num):
                fleet.answer(index)
            loaded = fleet.all(num, load, version=version, digest=publication.manifest_digest)
            if version >= NUM_WARM:
                rounds.append((published - started, staged - published))
                senders_cpu.append(cpu_staged - cpu_started)
                receivers_cpu.append(min(cpu for cpu, _ in loaded))
        sender_peak = status_bytes("VmHWM") - resident
        after = sum(map(proportional_bytes, pids)) + proportional_bytes(os.getpid())
        fleet.all(num, end)
    best = min(rounds, key=sum)
    return Figures(
        publish_s=min(publish for publish, _ in rounds),
        stage_s=min(stage_s for _, stage_s in rounds),
        total_s=sum(best),
        payload_bytes=payload_bytes,
        sender_peak_bytes=sender_peak,
        receiver_peak_bytes=max(peak for _, peak in loaded),
        all_bytes=after - before,
        sender_cpu_s=min(senders_cpu),
        receiver_cpu_s=min(receivers_cpu),
    )
