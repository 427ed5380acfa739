"""Five hundred rollouts in flight, some of which fail in every way: each failure stays where it happened."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent_loop.errors import EngineUnavailable, ToolUnavailable
from tests.fakes.fake_engine import Call
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

NUM_ROLLOUTS = 500
KINDS = ("agent loop failed", "engine unavailable", "tool unavailable", "timeout", "cancelled")


async def fail(kind: str) -> None:
    match kind:
        case "agent loop failed":
            raise ConnectionResetError("the test broke it")
        case "engine unavailable":
            raise EngineUnavailable("the test broke it")
        case "tool unavailable":
            raise ToolUnavailable("the test broke it")
        case "timeout":
            async with asyncio.timeout(0.05):
                await asyncio.Event().wait()
        case "cancelled":
            raise asyncio.CancelledError


def one_in_a_hundred(number: int) -> bool:
    return number % 100 == 0


def the_first_twenty(number: int) -> bool:
    return number < 20


@pytest.mark.parametrize("is_hit", [one_in_a_hundred, the_first_twenty])
async def test_every_step_is_full_and_each_failure_leaves_one_record(tmp_path: Path, is_hit: Callable[[int], bool]) -> None:
    """B160, B168: no sibling is cancelled, nothing is left behind, and the loop's own traceback is in the log."""
    settings = make_settings(
        tmp_path,
        samples_per_step=NUM_ROLLOUTS,
        rollouter__max_concurrent_rollouts=NUM_ROLLOUTS,
        bus__max_queued_samples=2 * NUM_ROLLOUTS,
    )
    hit: dict[str, str] = {}
    seen: set[str] = set()

    def fail_some(call: Call) -> Any:
        rollout, _, attempt = call.request_id.rsplit("-", 1)[0].rpartition(".")
        if attempt != "0" or rollout in seen:
            return None
        seen.add(rollout)
        if not is_hit(len(seen) - 1):
            return None
        hit[rollout] = KINDS[len(hit) % len(KINDS)]
        return fail(hit[rollout])

    before = asyncio.all_tasks()
    with capture_logs() as logs:
        async with (
            stand_in_trainer(settings) as trainer,
            running_rollouter(settings, engine_of(trainer, before_reply=fail_some)),
        ):
            await trainer.begin()
            await trainer.publish(0)
            for step in range(1, 3):
                samples = await trainer.train(NUM_ROLLOUTS)
                assert {sample.rollout_id: sample.attempt for sample in samples} == {
                    sample.rollout_id: int(sample.rollout_id in hit) for sample in samples
                }
                if step < 2:
                    await trainer.publish(step)
            status = await trainer.wait_status(lambda status: status.counts.offered == 2 * NUM_ROLLOUTS)
            assert (status.counts.retried, status.counts.failed) == (len(hit), {})
    assert asyncio.all_tasks() == before
    reasons = Counter(entry["reason"] for entry in logs if entry["event"] == "rollout attempt failed")
    assert reasons == Counter(kind if kind != "cancelled" else "agent loop failed" for kind in hit.values())
    assert len(hit) >= 10
    raised = [entry["exc_info"] for entry in logs if entry["event"] == "agent loop failed"]
    places = [frame.name for error in raised for frame in traceback.extract_tb((error.__cause__ or error).__traceback__)]
    assert places.count("fail") == len(raised) == reasons["agent loop failed"]
