"""What the chaos test's producer makes: everything follows from (group, seat, attempt), so any process makes it again alike."""

from __future__ import annotations

import random

from sample_bus.closed_seat import ClosedSeat
from sample_bus.sample import Sample
from tests.fakes.samples import make_sample

GROUP_SIZE = 4
MAX_ATTEMPTS = 2
FAILURE_SHARE = 0.3
PRODUCER = "rollouter"


def group_name(issue: int) -> str:
    return f"task-{issue}/0"


def issue_of(group_id: str) -> int:
    return int(group_id.removeprefix("task-").removesuffix("/0"))


def fails(issue: int, seat: int, attempt: int) -> bool:
    return random.Random(f"{issue}/{seat}/{attempt}").random() < FAILURE_SHARE


def pause_s(issue: int, seat: int, attempt: int) -> float:
    """How long an attempt takes."""
    return random.Random(f"pause {issue}/{seat}/{attempt}").uniform(0.0, 0.02)


def sample_of(issue: int, seat: int, attempt: int, *, incarnation: str) -> Sample:
    draw = random.Random(f"reply {issue}/{seat}/{attempt}")
    group = group_name(issue)
    return make_sample(
        prompt=[1 + issue % 1000],
        reply=[draw.randrange(1000) for _ in range(draw.randrange(1, 2000))],
        task_id=f"task-{issue}",
        group_id=group,
        rollout_id=f"{group}/{seat}",
        seat=seat,
        attempt=attempt,
        group_size=GROUP_SIZE,
        reward=float(draw.random() < 0.5),
        incarnation=incarnation,
    )


def closure_of(issue: int, seat: int, attempt: int, *, incarnation: str) -> ClosedSeat:
    group = group_name(issue)
    return ClosedSeat(
        task_id=f"task-{issue}",
        group_id=group,
        rollout_id=f"{group}/{seat}",
        attempt=attempt,
        seat=seat,
        group_size=GROUP_SIZE,
        data_source="test",
        reason="timeout",
        message="the engine did not answer",
        settings_revision=0,
        incarnation=incarnation,
        closed_at=0.0,
    )
