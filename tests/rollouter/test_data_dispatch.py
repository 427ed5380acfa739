"""Dispatch over data of which much is left out: rollouts start all the same, none twice, and deaths change nothing."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rewards import load_reward
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from configs.schema import DataSettings
from rollouter.admission import Hold
from rollouter.daemon import UserCode
from rollouter.data import lazy
from rollouter.data.encoding import Refusal, task_of
from rollouter.data.sources import Rows, open_rows
from rollouter.errors import DataError
from sample_bus.group_id import parse
from sample_bus.journal import GroupAdmitted, IssueSkipped, read_journal
from tests.fakes.fake_producer import FakeProducer, Stream
from tests.rollouter.desk import desk_settings, open_desk
from tests.rollouter.playing import engine_at
from tests.rollouter.stand_in import Running, engine_of, make_settings, stand_in_trainer
from tests.rollouter.test_dispatch import wait_until

LONG = "1+1=\n" * 40


def _rows(path: Path, is_long: list[bool]) -> tuple[DataSettings, Rows]:
    file = path / "rows.jsonl"
    rows = [{"prompt": f"{LONG if long else ''}1+{n}=", "ground_truth": str(n + 1)} for n, long in enumerate(is_long)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(source=str(file), filter="lazy", shuffle=False, held_out_fraction=0)
    return data, open_rows(data)


async def test_hundreds_of_rows_that_are_left_out_in_a_row_do_not_stop_admission(tmp_path: Path) -> None:
    """B113: they are passed over a piece at a time, each noted."""
    data, rows = _rows(tmp_path, [True] * 300 + [False] * 20)
    settings = desk_settings(tmp_path / "run", data=data.model_dump())
    producer = FakeProducer(Stream(), credit=10**6)
    async with open_desk(settings, producer, await engine_at(0), rows=rows, num_samples_needed=4 * 20) as desk:
        desk.start()
        await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.ENOUGH and not desk.books.open_groups)
        desk.drain()
        await desk.ended()
    records = list(read_journal(tmp_path / "run" / "journal" / "run-1" / "rollouter.log"))
    assert [record.issue for record in records if isinstance(record, IssueSkipped)] == list(range(300))
    assert [record.issue for record in records if isinstance(record, GroupAdmitted)] == list(range(300, 320))


@pytest.mark.parametrize("seed", range(3))
async def test_deaths_over_lazy_data_lose_no_task_and_repeat_none(tmp_path: Path, seed: int) -> None:
    """B38, B88"""
    chance = random.Random(seed)
    is_long = [chance.random() < 0.6 for _ in range(120)]
    data, rows = _rows(tmp_path, is_long)
    good = [number for number, long in enumerate(is_long) if not long]
    settings = desk_settings(tmp_path / "run", data=data.model_dump())
    stream, lives, needed = Stream(), 0, 4 * len(good)
    while True:
        producer = FakeProducer(stream, credit=10**6)
        async with open_desk(
            settings, producer, await engine_at(0), rows=rows, num_samples_needed=needed, process=f"p{lives}"
        ) as desk:
            lives += 1
            desk.start()
            if lives <= 6:
                enough = len(stream.records) + chance.randrange(1, 30)
                await wait_until(desk, lambda enough=enough: len(stream.records) >= min(enough, needed))
                await desk.cut_off()
                continue
            await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.ENOUGH and not desk.books.open_groups)
            desk.drain()
            await desk.ended()
            break
    names = {name for record in stream.records if (name := parse(record.group_id)) is not None}
    assert sorted(name.issue for name in names) == good
    assert all(name.task_id.endswith(f"/{name.issue}") for name in names)


async def test_data_of_which_no_row_is_a_task_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    """B114"""
    data, rows = _rows(tmp_path, [True] * 10)
    settings = desk_settings(tmp_path / "run", data=data.model_dump())
    async with open_desk(settings, FakeProducer(Stream(), credit=10), await engine_at(0), rows=rows) as desk:
        desk.start()
        with pytest.raises((DataError, ExceptionGroup)) as caught:
            await desk.ended()
    words = str(caught.value.exceptions[0]) if isinstance(caught.value, ExceptionGroup) else str(caught.value)
    assert "of 10 rows of an epoch, 0 are left (10 prompt too long): raise data.max_prompt_tokens" in words


@pytest.fixture
def made_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread of each row that was rendered."""
    made: list[int] = []

    def watched(*arguments: Any, **named: Any) -> Task | Refusal:
        made.append(threading.get_ident())
        return task_of(*arguments, **named)

    monkeypatch.setattr(lazy, "task_of", watched)
    return made


async def test_no_row_is_rendered_on_the_event_loop_of_a_rollouter(tmp_path: Path, made_in: list[int]) -> None:
    """From its start on."""
    data, rows = _rows(tmp_path, [number % 2 > 0 for number in range(600)])
    settings = make_settings(tmp_path / "run", data=data.model_dump(), engine={"max_model_len": 64})
    async with stand_in_trainer(settings) as trainer:
        user = UserCode(rows=rows, loop=SingleTurn(), reward=load_reward("agent_loop.rewards:exact_match"))
        running = Running(settings, engine_of(trainer), user)
        await trainer.begin()
        await trainer.publish(0)
        for version in range(1, 4):
            await trainer.train(8)
            await trainer.publish(version)
        running.task.cancel()
        await asyncio.wait((running.task,))
    assert len(made_in) > 256
    assert threading.get_ident() not in made_in


async def test_no_row_is_rendered_on_the_event_loop(tmp_path: Path, made_in: list[int]) -> None:
    """Rows that are left out, rows that are played, and after a death those of the open groups."""
    data, rows = _rows(tmp_path, [number % 5 < 3 for number in range(200)])
    settings = desk_settings(tmp_path / "run", data=data.model_dump())
    stream, never = Stream(), asyncio.Event()
    held = await engine_at(0, before_reply=lambda call: never.wait())
    async with open_desk(settings, FakeProducer(stream, credit=10**6), held, rows=rows, num_samples_needed=4 * 40) as desk:
        desk.start()
        await wait_until(desk, lambda: len(desk.books.open_groups) == 40)
    num_made = len(made_in)
    assert num_made >= 90
    free = await engine_at(0)
    async with open_desk(
        settings, FakeProducer(stream, credit=10**6), free, rows=rows, num_samples_needed=4 * 80, process="q"
    ) as desk:
        desk.start()
        await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.ENOUGH and not desk.books.open_groups)
        desk.drain()
        await desk.ended()
    assert len(made_in) > num_made
    assert threading.get_ident() not in made_in


async def test_a_row_that_is_an_error_ends_the_run_though_a_thread_met_it(tmp_path: Path) -> None:
    data, rows = _rows(tmp_path, [number == 7 for number in range(20)])
    settings = desk_settings(tmp_path / "run", data={**data.model_dump(), "on_overlong": "error"})
    async with open_desk(settings, FakeProducer(Stream(), credit=10**6), await engine_at(0), rows=rows) as desk:
        desk.start()
        with pytest.raises(ExceptionGroup) as caught:
            await desk.ended()
    (error,) = caught.value.exceptions
    assert isinstance(error, DataError)
    assert "rows.jsonl row 8: prompt: got 204 tokens, expected at most 100" in str(error)
