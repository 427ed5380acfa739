"""What fails is counted with its reason, tried again, given up and replaced; it is never a sample and never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rollouter.errors import TooManyFailures
from sample_bus.messages import (
    EvaluationResult,
    Failed,
    RollouterState,
    RollouterStatus,
)
from tests.fakes.fake_engine import Call, generation_of
from tests.rollouter.stand_in import at_limit, engine_of, make_settings, running_rollouter, stand_in_trainer


async def test_failed_attempt_is_tried_again_and_its_seat_is_filled(tmp_path: Path) -> None:
    """B160: the siblings of a failing rollout are untouched."""
    settings = make_settings(tmp_path)

    def fail_first_attempts(call: Call) -> None:
        if call.request_id.split("/")[-1].startswith("2.0"):
            raise ConnectionResetError("the test broke it")

    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer, before_reply=fail_first_attempts)),
    ):
        await trainer.begin()
        await trainer.publish(0)
        samples = await trainer.train(8)
        assert {(sample.seat, sample.attempt) for sample in samples} == {(0, 0), (1, 0), (2, 1), (3, 0)}
        status = await trainer.wait_status(lambda status: status.counts.offered == 8)
        assert (status.counts.retried, status.counts.failed) == (2, {})


def _too_few_logprobs(call: Call, tokens: Any) -> Any:
    good = generation_of(tokens, call.version, call.sampling)
    return type(good)(
        token_ids=good.token_ids,
        logprobs=good.logprobs[:-1],
        version_starts=good.version_starts,
        kept_cache=good.kept_cache,
        versions=good.versions,
        stop_reason=good.stop_reason,
    )


def _odd_logprob(value: float) -> Callable[[Call, Any], Any]:
    def make(call: Call, tokens: Any) -> Any:
        good = generation_of(tokens, call.version, call.sampling)
        good.logprobs[0] = value
        return good

    return make


@pytest.mark.parametrize(
    "broken", [_too_few_logprobs, _odd_logprob(float("nan")), _odd_logprob(float("-inf"))], ids=["missing", "nan", "-inf"]
)
async def test_sample_without_real_logprobs_is_never_offered(tmp_path: Path, broken: Callable[[Call, Any], Any]) -> None:
    """B54, B55: counted as a failed attempt with its reason, the seat given up and replaced, the run goes on."""
    settings = make_settings(tmp_path, rollouter__max_attempts=2)
    spoiled: set[str] = set()

    def spoil_one_seat(call: Call, tokens: Any) -> Any:
        rollout, _attempt = call.request_id.split("-0")[0].rsplit(".", 1)
        spoiled.add(rollout) if not spoiled else None
        return broken(call, tokens) if rollout in spoiled else generation_of(tokens, call.version, call.sampling)

    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer, make_generation=spoil_one_seat)),
    ):
        await trainer.begin()
        await trainer.publish(0)
        samples = await trainer.train(7)
        (lost,) = await trainer.lease_closures(1)
        assert (lost.reason, lost.attempt) == ("bad generation", 1)
        assert all(np.isfinite(sample.behavior_logprobs).all() for sample in samples)
        assert lost.seat not in [s.seat for s in samples if s.group_id == lost.group_id]
        status = await trainer.wait_status(lambda status: status.counts.offered == 7)
        assert status.counts.failed == {"bad generation": 1}
        assert status.counts.retried == 1


async def test_lost_group_is_replaced_so_that_a_synchronous_step_can_fill(tmp_path: Path) -> None:
    """B12, B168: what the trainer gives back of a group that it drops comes again as a whole new one, though no version has."""
    settings = make_settings(tmp_path, rollouter__max_attempts=1)
    failed: list[str] = []

    def fail_one(call: Call) -> None:
        if not failed:
            failed.append(call.request_id)
            raise RuntimeError("the test broke it")

    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer, before_reply=fail_one)):
        await trainer.begin()
        await trainer.publish(0)
        leased = await trainer.lease(7)
        (lost,) = await trainer.lease_closures(1)
        siblings = [item for item in leased if item.sample.group_id == lost.group_id]
        assert len(siblings) == 3
        status = await trainer.wait_status(lambda status: status.state is RollouterState.AT_LIMIT)
        assert (status.counts.admitted, status.counts.offered) == (8, 7)  # its failure by itself gave nothing back
        await trainer.drop_these([*siblings, *trainer.closures])
        replacement = await trainer.lease(4)
        assert len({item.sample.group_id for item in replacement}) == 1
        await at_limit(trainer, 11)


async def test_hanging_rollouts_end_at_their_deadline_and_the_log_says_what_they_did(tmp_path: Path) -> None:
    """B12, B13"""
    settings = make_settings(tmp_path, rollouter__max_attempts=2, rollouter__rollout_timeout_s=0.3)

    def hang(call: Call) -> Any:
        return asyncio.Event().wait() if call.request_id.split("/")[-1].startswith("1.") else None

    async with stand_in_trainer(settings) as trainer:
        with capture_logs() as logs:
            async with running_rollouter(settings, engine_of(trainer, before_reply=hang)):
                await trainer.begin()
                await trainer.publish(0)
                await trainer.train(6)
                lost = await trainer.lease_closures(2)
                assert [(closed.seat, closed.reason, closed.attempt) for closed in lost] == [(1, "timeout", 1)] * 2
        words = [entry["error"] for entry in logs if entry["event"] == "rollout attempt failed"]
        assert len(words) == 4
        assert all("gave up after 0.3 s while turn 1 was played" in text for text in words)


async def test_failures_all_along_stop_the_run_with_the_first_reason(tmp_path: Path) -> None:
    """B108, B168"""
    settings = make_settings(tmp_path, rollouter__max_attempts=1, rollouter__max_consecutive_failures=5)
    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), reward=f"{__name__}:broken_reward") as rollouter,
    ):
        await trainer.begin()
        await trainer.publish(0)
        with pytest.raises(TooManyFailures, match="KeyError"):
            await rollouter.ended()
        (failure,) = await trainer.wait_report(Failed)
        assert "5 rollouts failed in a row" in failure.message
        assert "KeyError" in failure.message


def broken_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    raise KeyError("answer")


async def test_cancellation_inside_an_agent_loop_fails_that_attempt_only(tmp_path: Path) -> None:
    """B09"""
    settings = make_settings(tmp_path)

    def cancel_one(call: Call) -> None:
        if call.request_id.endswith("/3.0-0"):
            raise asyncio.CancelledError

    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer, before_reply=cancel_one)),
    ):
        await trainer.begin()
        await trainer.publish(0)
        samples = await trainer.train(8)
        assert sorted(sample.attempt for sample in samples) == [0] * 6 + [1] * 2


async def test_evaluation_without_a_scored_sample_fails_the_run(tmp_path: Path) -> None:
    """B108"""
    settings = make_settings(tmp_path, evaluation={"at_start": True}, rollouter__max_attempts=1)
    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), reward=f"{__name__}:broken_reward"),
    ):
        await trainer.begin()
        await trainer.evaluate(1, 0)
        await trainer.publish(0)
        (failure,) = await trainer.wait_report(Failed)
        assert "evaluation 1 of version 0: the first 16 attempts all failed; first: rollout" in failure.message
        status = trainer.hub.get("rollouter", RollouterStatus)
        assert status is not None
        assert status.failures[0].is_evaluation
        assert status.failures[0].count >= 1
        assert not [report for report in trainer.reports if isinstance(report, EvaluationResult)]
