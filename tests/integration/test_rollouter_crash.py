"""kill -9 of the rollouter while a real vLLM server generates long replies: the next one goes on from the recorded tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_loop.slices import FIRST_TOKENS
from configs.loader import load
from sample_bus.journal import AttemptFailed, GroupAdmitted, SampleOffered, read_journal
from sample_bus.ledger import Ledger
from sample_bus.messages import EndOfRun, EndReason, RollouterStatus, TrainerStatus
from sample_bus.protocols import Link
from tests.integration.test_end_to_end import DEADLINE_S, PRESET, console, daemons, ended, start
from trainer.tiny_sort import make_network, make_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["daemons"]

NUM_STEPS = 3


def make_talkative_model(directory: Path) -> Path:
    """Random weights over a vocabulary so wide that the end of the sequence is rarely drawn: replies of hundreds of tokens."""
    config = make_network(seed=0).config
    config.vocab_size, config.max_position_embeddings = 400, 1024
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


async def _until(link: Link, holds: Callable[[RollouterStatus], bool]) -> RollouterStatus:
    async with asyncio.timeout(DEADLINE_S):
        async for status in link.watch("rollouter", RollouterStatus):
            if holds(status):
                return status
    raise AssertionError("the topic ended")


async def test_long_replies_survive_two_deaths_of_the_rollouter(
    tmp_path: Path, daemons: list[Any], record_property: Callable[[str, object], None]
) -> None:
    """B38: every seat is trained once; none begins anew that had recorded a token."""
    run_dir = tmp_path / "run"
    overrides = [
        f"run_dir={run_dir}",
        f"model.source={make_talkative_model(tmp_path / 'model')}",
        f"num_steps={NUM_STEPS}",
        "group_size=4",
        "samples_per_step=8",
        "staleness_threshold=1",
        "sampling.max_tokens=480",
        "engine.max_model_len=512",
        "engine.max_num_seqs=16",
        "rollouter.max_concurrent_rollouts=16",
        "rollouter.progress_interval_s=0.5",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "bus.on_lost=wait",
        f"bus.connect_timeout_s={DEADLINE_S}",
    ]
    settings = load(PRESET, overrides)
    chance = random.Random(5)
    trainer = start("trainer", overrides, tmp_path)
    daemons += [trainer]
    recoveries = []
    async with console(settings) as link:
        for life in range(1, 4):
            rollouter = start("rollouter", overrides, tmp_path)
            daemons += [rollouter]
            if life > 1:
                status = await _until(link, lambda status: status.recovery is not None and status.recovery.process == life)  # noqa: B023
                recoveries.append(status.recovery)
            if life < 3:
                started = status.generated_tokens if life > 1 else 0
                await _until(link, lambda status: status.generated_tokens > started + 16 * FIRST_TOKENS)  # noqa: B023
                await asyncio.sleep(chance.random())
                rollouter.process.kill()
                await asyncio.to_thread(rollouter.process.wait, 30)
        async with asyncio.timeout(DEADLINE_S):
            async for end in link.watch("end", EndOfRun):
                assert end.reason is EndReason.FINISHED, end.message
                break
        final, rollouts = link.get("trainer", TrainerStatus), link.get("rollouter", RollouterStatus)
    codes = (await ended(trainer), await ended(rollouter))
    assert codes == (0, 0), f"{trainer.tail()}\n---\n{rollouter.tail()}"
    assert final is not None
    assert rollouts is not None
    assert final.counts.trained == NUM_STEPS * settings.samples_per_step
    assert Ledger(rollouts=rollouts.counts, samples=final.counts).closes

    (path,) = (run_dir / "journal").glob("*/rollouter.log")
    records = list(read_journal(path))
    groups = {record.group_id for record in records if isinstance(record, GroupAdmitted)}
    seats = Counter((record.group_id, record.seat) for record in records if isinstance(record, SampleOffered))
    assert set(seats.values()) == {1}
    assert {group for group, _ in seats} <= groups
    interrupted = [record for record in records if isinstance(record, AttemptFailed)]
    assert {record.reason for record in interrupted} == {"interrupted"}
    assert sum(record.then == "continue" for record in interrupted) == sum(one.continued for one in recoveries) > 0
    lost = sum(one.tokens_lost_at_most for one in recoveries)
    in_flight = sum(one.continued + one.restarted for one in recoveries)
    # a death within everybody's first slice leaves nothing to keep: the first one comes later than that
    assert recoveries[0].tokens_kept > 0
    record_property("recoveries", [one.model_dump() for one in recoveries])
    record_property("lost_tokens_a_rollout_at_most", lost / in_flight)
