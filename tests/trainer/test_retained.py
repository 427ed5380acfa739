"""What was leased is kept as it was, over restarts of the trainer, and while the disk takes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import JournalDamaged
from sample_bus.protocols import LeasedClosure
from sample_bus.sample import SampleId
from tests.fakes.samples import lease, make_sample
from trainer.retained import Kept, Retained, _decode, retained_dir

HANG_S = 30.0


def closure(seq: int) -> LeasedClosure:
    closed = ClosedSeat(
        task_id="task-0",
        group_id="task-0/0",
        rollout_id="task-0/0/1",
        attempt=2,
        seat=1,
        group_size=2,
        data_source="test",
        reason="timeout",
        message="300 s",
        settings_revision=0,
        incarnation="first",
        closed_at=1.0,
    )
    return LeasedClosure(id=SampleId("rollouter", 1, seq), closed=closed, nbytes=1)


def keep(directory: Path, *seqs: int, segment_bytes: int = 1 << 20) -> None:
    retained = Retained(directory, segment_bytes=segment_bytes)
    for seq in seqs:
        retained.keep(lease(make_sample(reply=[seq] * 3, reward=seq / 7, group_id=f"task/{seq}"), seq))
    retained.close()


def seqs(kept: Kept) -> list[int]:
    return [sample_id.seq for sample_id in kept.ids]


def test_a_sample_is_read_back_bit_for_bit_also_one_with_large_columns(tmp_path: Path) -> None:
    directory = retained_dir(tmp_path, "abc")
    retained = Retained(directory)
    large = make_sample(reply=list(range(100_000)), logprobs=np.linspace(-3, 0, 100_000).tolist(), reward=1 / 3)
    retained.keep(lease(large, 5))
    retained.keep(closure(6))
    retained.close()
    kept = Kept(directory)
    assert list(kept.ids) == [SampleId("rollouter", 1, 5)]
    got = kept.sample(SampleId("rollouter", 1, 5))
    for name in ("tokens", "loss_mask", "behavior_logprobs", "version_starts", "versions", "kept_cache"):
        np.testing.assert_array_equal(getattr(got, name), getattr(large, name))
    assert (got.reward, got.rollout_id, got.stop_reason) == (large.reward, large.rollout_id, large.stop_reason)


def test_each_process_begins_a_segment_and_a_full_one_is_followed_by_another(tmp_path: Path) -> None:
    keep(tmp_path, 0, 1, 2, segment_bytes=10)
    keep(tmp_path, 3, 4)
    keep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"00000{number}.log" for number in (1, 2, 3, 4)]
    assert seqs(Kept(tmp_path)) == [0, 1, 2, 3, 4]


def test_a_record_that_comes_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    keep(tmp_path, 0, 1, 2)
    keep(tmp_path, 1, 2, 3)
    assert seqs(Kept(tmp_path)) == [0, 1, 2, 3]


def test_a_record_cut_off_by_a_death_is_passed_over_and_damage_before_others_is_told(tmp_path: Path) -> None:
    keep(tmp_path, 0, 1, 2)
    path = tmp_path / "000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert seqs(Kept(tmp_path)) == [0, 1]
    path.write_bytes(whole[:100] + b"\xff" + whole[101:])
    with pytest.raises(JournalDamaged, match=r"000001\.log: the record at byte 8 is damaged"):
        Kept(tmp_path)


def test_nothing_kept_is_no_error_for_the_reader(tmp_path: Path) -> None:
    assert not Kept(tmp_path / "none").ids


async def test_a_disk_that_takes_nothing_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cause gone, what waited is written, in order."""
    directory = tmp_path / "retained"
    directory.write_text("a file where the directory should be")
    retained = Retained(directory)
    for seq in range(3):
        retained.keep(lease(make_sample(group_id=f"task/{seq}"), seq))
    assert retained.is_blocked
    flushing = asyncio.ensure_future(retained.flush())
    await asyncio.sleep(0)
    assert not flushing.done()
    directory.unlink()
    async with asyncio.timeout(HANG_S):
        await flushing
    assert not retained.is_blocked
    retained.close()
    assert seqs(Kept(directory)) == [0, 1, 2]
    said = capsys.readouterr().out
    assert "records cannot be kept, waiting" in said
    assert "records can be kept again" in said


@given(payload=st.binary(max_size=300))
def test_no_bytes_do_anything_but_raise(payload: bytes) -> None:
    with pytest.raises(JournalDamaged, match="here: no record of the bus"):
        _decode(payload, "here")
