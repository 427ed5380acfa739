"""The trainer daemon over a real bus: what it writes down, what it commits, how it ends and how it goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Settings
from sample_bus.journal import (
    ModelTaken,
    Queued,
    RecordsDropped,
    Saved,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    VersionPublished,
)
from sample_bus.messages import Accepted, ChangeSettings, Counts, EndReason, Failed, SettingsChanged
from sample_bus.protocols import Link
from tests.sample_bus.ends import until
from tests.trainer.daemons import daemon, end_of, journal, offer_group, opened_file, rollouter, settings_for, status_where
from trainer.checkpoint import find, read_state
from trainer.daemon import RolloutFailed

pytestmark = pytest.mark.integration


async def _offer(link: Link, *numbers: int) -> None:
    for number in numbers:
        await offer_group(link, number)


async def _whole_run(settings: Settings, groups: range) -> None:
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, *groups)
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task


def _steps(run_dir: Path) -> dict[int, tuple[list[int], float, str]]:
    """Step to sequence numbers, loss, published digest, of the newest time it was taken."""
    began = {record.step: [seq for _, _, seq in record.samples] for record in journal(run_dir, StepBegan)}
    losses = {record.step: record.loss for record in journal(run_dir, StepTrained)}
    digests = {record.step: record.digest for record in journal(run_dir, VersionPublished)}
    return {step: (began[step], losses[step], digests[step]) for step in losses}


async def test_a_run_is_written_down_and_committed_with_its_checkpoints(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, **{"checkpoint.every_steps": 2, "num_steps": 4})
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 0, 1)
            await offer_group(link, 2, closed=(1,))
            await status_where(link, lambda status: status.step == 1)
            assert link.producer_statistics().committed == 0
            await _offer(link, 3)
            await until(lambda: link.producer_statistics().committed == 16)
            await _offer(link, 4, 5, 6, 7, 8)
            assert (await end_of(link)).reason is EndReason.FINISHED
            await until(lambda: link.producer_statistics().committed == 32)
        await task
    kinds = [type(record) for record in journal(tmp_path) if not isinstance(record, Queued)]
    step = [StepBegan, StepTrained, VersionPublished]
    start = [TrainerBegan, ModelTaken, VersionPublished]
    assert kinds == [*start, *step, *step, Saved, *step, *step, Saved, RecordsDropped, TrainerEnded]
    assert len(journal(tmp_path, Queued)) == 36
    assert [len(record.samples) for record in journal(tmp_path, StepBegan)] == [8, 7, 8, 8]
    assert [[seq for _, _, seq in record.closures] for record in journal(tmp_path, StepBegan)] == [[], [9], [], []]
    (ended,) = journal(tmp_path, TrainerEnded)
    counts = Counts.model_validate(ended.counts)
    assert (counts.received, counts.trained, counts.closed, counts.dropped) == (35, 31, 1, {"run ended": 4})
    saved = read_state(find(tmp_path / "checkpoints").complete[-1])
    assert (saved.step, saved.policy_version, saved.counts.trained, saved.counts.closed) == (4, 4, 31, 1)
    assert saved.run_id == (tmp_path / "run_id").read_text().strip()


async def test_a_drained_run_goes_on_where_it_was_and_trains_what_was_queued(tmp_path: Path) -> None:
    """B88: the first batch after the restart is the next unseen one; batches, losses and weights as straight on."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    await _whole_run(settings_for(straight), range(8))
    settings = settings_for(broken, **{"checkpoint.at_end": True, "checkpoint.resume": "auto"})
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 0, 1, 2, 3, 4)
            await status_where(link, lambda status: status.step == 2 and status.counts.queued == 4)
            os.kill(os.getpid(), signal.SIGTERM)
            end = await end_of(link)
            assert (end.reason, end.message) == (EndReason.DRAINED, "drained on request")
        await task
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 5, 6, 7)
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task
    assert _steps(broken) == _steps(straight)
    ended = [Counts.model_validate(record.counts) for record in journal(broken, TrainerEnded)]
    assert [(counts.trained, counts.dropped) for counts in ended] == [(16, {"run ended": 4}), (32, {})]
    assert [record.step for record in journal(broken, TrainerBegan)] == [0, 2]
    assert len({path.name for path in (broken / "journal").iterdir()}) == 1


async def test_a_stopped_run_takes_the_same_steps_again_with_the_recorded_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 3 was taken after the checkpoint, under a learning rate that was changed live."""
    settings = settings_for(tmp_path, **{"checkpoint.every_steps": 2, "checkpoint.resume": "auto", "num_steps": 5})
    async with daemon(settings) as task, rollouter(settings) as link:
        await _offer(link, 0, 1, 2, 3)
        await status_where(link, lambda status: status.step == 2)
        change = ChangeSettings(values={"trainer.learning_rate": 5e-3}, author="test")
        await link.request("settings.set", change, SettingsChanged)
        await _offer(link, 4, 5)
        await status_where(link, lambda status: status.step == 3 and status.policy_version == 3)
        task.cancel()
    before = _steps(tmp_path)
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 6, 7, 8, 9)
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task
    after = _steps(tmp_path)
    assert {step: after[step] for step in before} == before
    trained = [(record.step, record.replayed) for record in journal(tmp_path, StepTrained)]
    assert trained == [(1, False), (2, False), (3, False), (3, True), (4, False), (5, False)]
    rates = [record.options["trainer.learning_rate"] for record in journal(tmp_path, StepBegan)]
    assert rates == [1e-3, 1e-3, 5e-3, 5e-3, 5e-3, 5e-3]
    assert "a setting given at the start loses against a live change" in capsys.readouterr().out


async def test_a_checkpoint_that_cannot_be_written_is_told_and_nothing_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(tmp_path, **{"checkpoint.every_steps": 1, "num_steps": 3})
    blocker = tmp_path / "checkpoints"
    blocker.write_text("in the way")
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 0, 1)
            await status_where(link, lambda status: status.policy_version == 1 and "step 2" in status.detail)
            assert link.producer_statistics().committed == 0
            blocker.unlink()
            await _offer(link, 2, 3)
            await until(lambda: link.producer_statistics().committed == 16)
            await _offer(link, 4, 5)
            await end_of(link)
        await task
    assert "checkpoint not saved, the run goes on" in capsys.readouterr().out
    assert [record.step for record in journal(tmp_path, Saved)] == [2, 3]


async def test_the_checkpoint_at_the_end_must_be_written(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, **{"checkpoint.at_end": True, "num_steps": 1})
    (tmp_path / "checkpoints").write_text("in the way")
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 0, 1)
            end = await end_of(link)
        assert end.reason is EndReason.FAILED
        assert "step_1: cannot be written" in end.message
        with pytest.raises(Exception, match="cannot be written"):
            await task


async def test_a_step_waits_while_the_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(tmp_path, num_steps=1)
    write = os.pwritev
    full = asyncio.Event()
    full.set()

    def pwritev(descriptor: int, *rest: Any) -> int:
        if full.is_set() and opened_file(descriptor).endswith("trainer.log"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, *rest)

    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            monkeypatch.setattr(os, "pwritev", pwritev)
            await _offer(link, 0, 1)
            waiting = await status_where(link, lambda status: "cannot be written before step 1" in status.detail)
            assert "No space left on device" in waiting.detail
            assert waiting.counts.trained == 0
            full.clear()
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task
    assert len(journal(tmp_path, Queued)) == 8
    assert [record.step for record in journal(tmp_path, StepTrained)] == [1]


async def test_a_failed_run_says_why_and_writes_no_last_checkpoint(tmp_path: Path) -> None:
    """B15: the end carries its reason."""
    settings = settings_for(tmp_path, **{"checkpoint.at_end": True})
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await _offer(link, 0, 1)
            await status_where(link, lambda status: status.step == 1)
            await link.request("run.failed", Failed(message="the generator raised ValueError: 7"), Accepted)
            end = await end_of(link)
        assert (end.reason, "the generator raised ValueError: 7" in end.message) == (EndReason.FAILED, True)
        with pytest.raises(RolloutFailed):
            await task
    assert not (tmp_path / "checkpoints").exists()
    (ended,) = journal(tmp_path, TrainerEnded)
    assert (ended.reason, ended.counts["trained"]) == ("failed", 8)


async def test_a_run_that_begins_afresh_never_sees_the_samples_of_the_run_before(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, num_steps=1)
    for first in (0, 4):
        async with daemon(settings) as task:
            async with rollouter(settings) as link:
                await _offer(link, first, first + 1, first + 2)
                await end_of(link)
            await task
        assert {record.group_id for record in journal(tmp_path, Queued)} <= {f"g{first + number}" for number in range(3)}
    assert len(list((tmp_path / "journal").iterdir())) == 2
