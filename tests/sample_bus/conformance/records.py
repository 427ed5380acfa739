"""What the tests send: samples and closed seats that say who they are, and what a lease brought."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sample_bus.closed_seat import ClosedSeat
from sample_bus.protocols import Lease, Leased
from sample_bus.sample import Sample
from tests.fakes.samples import make_sample


def sample(number: int, *, producer: str = "rollouter", size: int = 2, **changes: Any) -> Sample:
    """The sample `number` of a producer, whose reply has `size` tokens."""
    rollout = f"{producer}-{number}"
    return make_sample(
        **{
            "reply": [1 + number % 1000] * size,
            "reward": number / 8,
            "task_id": rollout,
            "group_id": f"{rollout}/0",
            "rollout_id": f"{rollout}/0/0",
            **changes,
        }
    )


def closed_seat(number: int, *, producer: str = "rollouter", reason: str = "timeout", **changes: Any) -> ClosedSeat:
    rollout = f"{producer}-{number}"
    fields: dict[str, Any] = {
        "task_id": rollout,
        "group_id": f"{rollout}/0",
        "rollout_id": f"{rollout}/0/0",
        "attempt": 2,
        "seat": 0,
        "group_size": 1,
        "data_source": "test",
        "reason": reason,
        "message": f"rollout {number} took longer than 300 s",
        "settings_revision": 3,
        "incarnation": "first",
        "closed_at": 17.5,
    }
    return ClosedSeat(**{**fields, **changes})


def task_of(lease: Lease) -> str:
    return lease.sample.task_id if isinstance(lease, Leased) else lease.closed.task_id


def tasks(numbers: Iterable[int], *, producer: str = "rollouter") -> list[str]:
    return [f"{producer}-{number}" for number in numbers]
