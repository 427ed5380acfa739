"""The samples that every path moves, and what is measured of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil

from sample_bus.sample import NO_VERSION, Sample, StopReason

IN_FLIGHT = 64
"""Offers at a time."""
LATENCY_PAUSE_S = 0.003
"""Between two samples of the latency round: nothing waits behind another."""
BYTES_PER_TOKEN = 9
"""Token id, logprob, mask."""
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one round moves."""

    num_tokens: int
    num_samples: int
    num_paced: int
    """Samples of the latency round, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one path and one size."""

    samples_per_s: float
    producer_cpu_us: float
    """Processor time per sample of the producing process, all threads."""
    consumer_cpu_us: float
    other_cpu_us: float
    """Of servers and brokers."""
    latency_p50_ms: float
    """From the offer to arrays in the consumer's hands, one sample at a time."""
    latency_p99_ms: float
    wire_bytes: float
    """Per sample, framing of the transport left out."""

    @property
    def cpu_us(self) -> float:
        return self.producer_cpu_us + self.consumer_cpu_us + self.other_cpu_us


def sample_of(num_tokens: int) -> Sample:
    """A quarter prompt, then two policy versions."""
    mask = np.zeros(num_tokens, np.uint8)
    mask[num_tokens // 4 :] = 1
    random = np.random.default_rng(0)
    return Sample(
        task_id="task-17",
        group_id="task-17/3",
        rollout_id="task-17/3/5",
        attempt=0,
        seat=5,
        group_size=8,
        data_source="benchmark",
        tokens=random.integers(0, 150_000, num_tokens).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -random.exponential(1.0, num_tokens), 0).astype(np.float32),
        version_starts=np.array([0, num_tokens // 4, num_tokens // 2], np.int32),
        versions=np.array([NO_VERSION, 6, 7], np.int32),
        kept_cache=np.zeros(3, np.uint8),
        reward=1.0,
        temperature=1.0,
        stop_reason=StopReason.STOP,
        num_turns=1,
        settings_revision=0,
        incarnation="benchmark",
        produced_at=time.time(),
    )


def stamped(sample: Sample) -> Sample:
    """The sample, offered now."""
    return replace(sample, produced_at=time.time())


def latency_ms(sample: Sample) -> float:
    return (time.time() - sample.produced_at) * 1e3


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.array(values), percent)) if values else float("nan")


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children so far."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def median_of(results: Sequence[Result]) -> Result:
    """Each figure's median over the rounds."""
    return Result(
        **{name: statistics.median(getattr(result, name) for result in results) for name in Result.__dataclass_fields__}
    )
