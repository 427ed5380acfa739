"""A run is one model's: a trainer that comes again with another one is refused, and one of another type says so."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loader import load
from configs.schema import Settings
from sample_bus.journal import ModelTaken, VersionPublished
from sample_bus.messages import EndReason, TrainerState
from tests.trainer.daemons import daemon, end_of, journal, offer_group, rollouter, settings_for, status_where
from trainer.errors import CheckpointError
from trainer.taken_up import settings_of_run

pytestmark = pytest.mark.integration


async def _begun_and_drained(settings: Settings) -> None:
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await status_where(link, lambda status: status.state is TrainerState.WAITING)
            os.kill(os.getpid(), signal.SIGTERM)
        await task


async def test_a_run_that_was_begun_with_another_model_is_not_gone_on_with(tmp_path: Path) -> None:
    """Its spooled samples are tokens of the first model, though nothing was saved yet."""
    settings = settings_for(tmp_path / "run", **{"checkpoint.at_end": False, "checkpoint.resume": "auto"})
    await _begun_and_drained(settings)
    (taken,) = journal(tmp_path / "run", ModelTaken)
    other = settings_for(tmp_path / "run", **{"seed": 1, "checkpoint.resume": "auto"})
    with pytest.raises(ConfigError, match=r"is another model than the one .* not the same: weights\); begin afresh"):
        async with daemon(other) as task:
            await task
    await _begun_and_drained(settings)
    assert journal(tmp_path / "run", ModelTaken) == [taken]


async def test_the_same_model_in_another_directory_is_gone_on_with(tmp_path: Path) -> None:
    first = settings_for(tmp_path / "run", **{"checkpoint.at_end": False, "checkpoint.resume": "auto"})
    await _begun_and_drained(first)
    (made,) = (path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir())
    moved = shutil.copytree(made, tmp_path / "moved")
    await _begun_and_drained(first.model_copy(update={"model": first.model.model_copy(update={"source": str(moved)})}))
    assert len(journal(tmp_path / "run", ModelTaken)) == 1


async def test_a_version_that_is_published_again_with_other_bytes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"checkpoint.at_end": False, "checkpoint.resume": "auto"}
    await _begun_and_drained(settings_for(tmp_path / "run", **values))
    await _begun_and_drained(settings_for(tmp_path / "run", **values))
    words = "a policy version is published again with other weights"
    assert words not in capsys.readouterr().out
    await _begun_and_drained(settings_for(tmp_path / "run", **values, **{"model.dtype": "bfloat16"}))
    assert words in capsys.readouterr().out
    digests = [record.digest for record in journal(tmp_path / "run", VersionPublished)]
    assert digests[0] == digests[1] != digests[2]


async def test_a_refused_start_leaves_no_settings_for_replay_or_for_the_next_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    values = {"checkpoint.at_end": True, "checkpoint.resume": "auto"}
    assert settings_of_run(run_dir) == run_dir / "settings.yaml"
    settings = settings_for(run_dir, **values, num_steps=1)
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await offer_group(link, 0)
            await offer_group(link, 1)
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task
    with pytest.raises(CheckpointError, match=r"trainer\.lora_rank: got 4, expected 0"):
        async with daemon(settings_for(run_dir, **values, **{"trainer.lora_rank": 4})) as task:
            await task
    assert load(settings_of_run(run_dir), environment={}).trainer.lora_rank == 0
    with pytest.raises(ConfigError, match="group_size: got 2, expected 4"):
        async with daemon(settings_for(run_dir, **values, group_size=2)) as task:
            await task
