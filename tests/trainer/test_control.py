"""What the trainer says and answers on the control channel: status, rounds, evaluations."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from sample_bus.errors import RequestFailed
from sample_bus.messages import Accepted, Counts, EvaluationResult, RoundResult, TrainerState, TrainerStatus, WeightRound
from tests.fakes.fake_control import FakeControl
from trainer.clock import ActivityClock
from trainer.evaluations import Evaluations
from trainer.publisher import Publisher
from trainer.status import StatusBoard
from trainer.tracking import Tracker
from weight_sync.errors import WeightSyncError

WEIGHTS = [("a", torch.arange(6, dtype=torch.float32)), ("b", torch.ones(2, 3))]


def _board(control: FakeControl) -> StatusBoard:
    return StatusBoard(
        control,
        ActivityClock(),
        incarnation="first",
        num_steps=5,
        agreed={"group_size": 8},
        counts=lambda: Counts(received=3, queued=3),
        rollouter=lambda: "rollouter",
    )


def _result(version: int, digest: str, *, committed: bool = True) -> RoundResult:
    return RoundResult(policy_version=version, engine="engine-0", committed=committed, manifest_digest=digest, message="why")


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def _publisher(control: FakeControl, directory: Path) -> Publisher:
    return Publisher(
        control,
        WeightSyncSettings(),
        incarnation="first",
        socket_dir=directory,
        dtype=torch.float32,
        loop=asyncio.get_running_loop(),
    )


async def test_status_follows_changes_and_tells_the_books() -> None:
    control = FakeControl()
    board = _board(control)
    running = asyncio.ensure_future(board.run())
    board.enter(TrainerState.WAITING, "samples of step 1")
    async with asyncio.timeout(30):
        await control.changed.wait()
    running.cancel()
    status = control.get("trainer", TrainerStatus)
    assert status is not None
    assert (status.state, status.detail, status.counts.received, status.rollouter) == (
        TrainerState.WAITING,
        "samples of step 1",
        3,
        "rollouter",
    )
    assert status.agreed == {"group_size": 8}


async def test_round_is_announced_with_its_digest_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    """B140: an engine that loaded something else is not taken for one that committed."""
    control = FakeControl()
    with _publisher(control, tmp_path) as publisher, ThreadPoolExecutor(1) as executor:
        await publisher.announce(lambda: WEIGHTS, policy_version=3, executor=executor)
        announced = control.get("round", WeightRound)
        assert announced is not None
        assert (announced.policy_version, announced.num_tensors) == (3, 2)
        with pytest.raises(RequestFailed, match=f"expected {announced.manifest_digest}"):
            await control.request("round.result", _result(3, "0" * 32), Accepted)
        with pytest.raises(WeightSyncError, match="no engine committed policy version 3"):
            await publisher.wait_committed(3, timeout_s=0.05)
        await control.request("round.result", _result(3, "", committed=False), Accepted)
        await control.request("round.result", _result(3, announced.manifest_digest), Accepted)
        await publisher.wait_committed(3, timeout_s=30)
    assert _names(tmp_path) == []


async def test_evaluation_is_filed_under_the_version_for_which_it_was_asked() -> None:
    """B173: triggered at version 5, answered when 8 is out."""
    control = FakeControl()
    board = _board(control)
    tracker = Tracker([])
    evaluations = Evaluations(control, board, tracker, incarnation="i1")
    request_id = await evaluations.ask(5)
    board.set(policy_version=8)
    result = EvaluationResult(
        request_id=request_id, policy_version=5, accuracy=0.5, num_samples=4, generating_versions=(5, 6), seconds=1.0
    )
    await control.request("evaluation.result", result, Accepted)
    await control.request("evaluation.result", result, Accepted)
    assert board.status.evaluations == (result,)
    assert await evaluations.wait(request_id, timeout_s=30) == result
    with pytest.raises(RequestFailed, match="never asked for"):
        await control.request("evaluation.result", result.model_copy(update={"request_id": 9}), Accepted)
    assert await evaluations.wait(request_id + 1, timeout_s=0.05) is None
    tracker.close()
