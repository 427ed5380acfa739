"""Samples for tests: valid by construction, every field open to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sample_bus.closed_seat import ClosedSeat
from sample_bus.protocols import Leased, LeasedClosure
from sample_bus.sample import NO_VERSION, Sample, SampleId, StopReason


def make_sample(
    *,
    prompt: Sequence[int] = (5, 6, 7),
    reply: Sequence[int] = (8, 9),
    logprobs: Sequence[float] | None = None,
    policy_version: int = 0,
    reward: float = 0.0,
    group_id: str = "task-0/0",
    seat: int = 0,
    group_size: int = 1,
    temperature: float = 1.0,
    **changes: Any,
) -> Sample:
    """A single-turn sample: `prompt` untrained, `reply` trained, all of one policy version."""
    num_prompt, length = len(prompt), len(prompt) + len(reply)
    behavior = np.zeros(length, np.float32)
    behavior[num_prompt:] = -0.5 if logprobs is None else logprobs
    mask = np.zeros(length, np.uint8)
    mask[num_prompt:] = 1
    runs = [(0, NO_VERSION), (num_prompt, policy_version)] if num_prompt else [(0, policy_version)]
    if not len(reply):
        runs = runs[:1]
    fields: dict[str, Any] = {
        "task_id": "task-0",
        "group_id": group_id,
        "rollout_id": f"{group_id}/{seat}",
        "attempt": 0,
        "seat": seat,
        "group_size": group_size,
        "data_source": "test",
        "tokens": np.array([*prompt, *reply], np.int32),
        "loss_mask": mask,
        "behavior_logprobs": behavior,
        "version_starts": np.array([start for start, _ in runs], np.int32),
        "versions": np.array([version for _, version in runs], np.int32),
        "kept_cache": np.zeros(len(changes.get("versions", runs)), np.uint8),
        "reward": reward,
        "temperature": temperature,
        "stop_reason": StopReason.STOP,
        "num_turns": 1,
        "settings_revision": 0,
        "incarnation": "first",
        "produced_at": 0.0,
    }
    return Sample(**{**fields, **changes})


def end_to_end(samples: Sequence[Sample], **changes: Any) -> Sample:
    """One sample with the sequences of `samples` as its segments; its scalars are the first one's."""
    starts = np.cumsum([0, *(one.num_tokens for one in samples[:-1])])
    joined = {
        name: np.concatenate([getattr(one, name) for one in samples])
        for name in ("tokens", "loss_mask", "behavior_logprobs", "versions", "kept_cache")
    }
    shifted = [one.version_starts + start for one, start in zip(samples, starts, strict=True)]
    fields: dict[str, Any] = {
        **joined,
        "version_starts": np.concatenate(shifted).astype(np.int32),
        "segment_starts": starts.astype(np.int32),
    }
    return replace(samples[0], **{**fields, **changes})


def lease(sample: Sample, seq: int, *, producer: str = "rollouter", epoch: int = 1) -> Leased:
    """A sample as it comes from the bus."""
    return Leased(id=SampleId(producer, epoch, seq), sample=sample, nbytes=sample.nbytes)


def make_closed(
    *, group_id: str = "task-0/0", seat: int = 0, group_size: int = 1, reason: str = "timeout", **changes: Any
) -> ClosedSeat:
    """A seat that stays empty."""
    fields: dict[str, Any] = {
        "task_id": "task-0",
        "group_id": group_id,
        "rollout_id": f"{group_id}/{seat}",
        "attempt": 2,
        "seat": seat,
        "group_size": group_size,
        "data_source": "test",
        "reason": reason,
        "message": "it took too long",
        "settings_revision": 0,
        "incarnation": "first",
        "closed_at": 0.0,
    }
    return ClosedSeat(**{**fields, **changes})


def lease_closed(closed: ClosedSeat, seq: int, *, producer: str = "rollouter", epoch: int = 1) -> LeasedClosure:
    """A closed seat as it comes from the bus."""
    return LeasedClosure(id=SampleId(producer, epoch, seq), closed=closed, nbytes=100)
