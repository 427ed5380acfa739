"""Rewards in processes: whatever one does ends at its deadline, alone, and the next ones are scored as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.errors import RewardError, RewardTimeout, RewardUnavailable, Unscored
from agent_loop.rewards import Score
from agent_loop.rewards.score import MAX_PART_NAME, MAX_PARTS
from agent_loop.rewards.weighted import Part, Weighted
from configs.schema import RewardSettings
from tests.fakes.living import is_alive, living_children

HERE = "tests.agent_loop.rewards.misbehaving"
DEADLINE_S = 120.0
"""Against hangs only."""


@asynccontextmanager
async def rewards(function: str = "by_word", **settings: Any) -> AsyncIterator[Weighted]:
    """One function in processes of its own; nothing of them is left afterwards."""
    before = living_children("rewards.worker")
    values = {"num_processes": 1, "timeout_s": 20.0, "max_attempts": 1, "retry_delay_s": 0.01, **settings}
    opened = await asyncio.to_thread(Weighted.open, {"": Part(function=f"{HERE}:{function}")}, RewardSettings(**values))
    async with asyncio.timeout(DEADLINE_S):
        async with opened.running():
            yield opened
    assert set(living_children("rewards.worker")) <= set(before)


async def score(reward: Weighted, says: str, truth: Any = "", **extra_info: Any) -> Score:
    return await reward.score(data_source="test", solution_str=says, ground_truth=truth, extra_info=extra_info)


@pytest.mark.parametrize("word", ["spin-in-c", "spin-in-python", "ignore-signals"])
async def test_what_never_returns_is_killed_at_its_deadline_and_the_pool_is_as_fast_as_before(word: str) -> None:
    """B99: three times as many as there are processes, then a hundred that are scored."""
    async with rewards(num_processes=2, timeout_s=0.5) as reward:
        stuck = [score(reward, word) for _ in range(6)]
        for result in await asyncio.gather(*stuck, return_exceptions=True):
            assert isinstance(result, RewardTimeout)
            assert "by_word took longer than reward.timeout_s=0.5" in str(result)
        started = [one.num_started for one in reward.pools[0].processes]
        scores = await asyncio.gather(*(score(reward, "x") for _ in range(100)))
        assert [one.value for one in scores] == [1.0] * 100
        assert sum(started) == 6 or sum(started) == 8  # the last ones may be replaced when they are next needed


async def test_what_a_killed_reward_started_is_killed_with_it_even_in_another_session(tmp_path: Path) -> None:
    """B99: a reward that forks."""
    note = tmp_path / "pids"
    async with rewards(timeout_s=2.0) as reward:
        with pytest.raises(RewardTimeout):
            await score(reward, "children", str(note))
    assert not any(is_alive(int(pid)) for pid in note.read_text().split())


@pytest.mark.parametrize(
    ("word", "words"),
    [("die", "ended with exit status 7"), ("crash", "was killed by signal 11")],
)
async def test_a_process_that_dies_is_infrastructure_and_is_replaced(word: str, words: str) -> None:
    """B105"""
    async with rewards() as reward:
        with pytest.raises(RewardUnavailable, match=words):
            await score(reward, word)
        assert (await score(reward, "x")).value == 1.0


@pytest.mark.parametrize(
    ("word", "kind", "words"),
    [
        ("raise", RewardError, r"by_word raised KeyError: 'golden' \(data source test\), misbehaving.py:\d+ in by_word"),
        ("exit", RewardError, "raised SystemExit: 3"),
        ("none", Unscored, "got None"),
        ("down", RewardUnavailable, "the judge is down"),
        ("connection", RewardUnavailable, "nobody listens"),
        ("timed-out", RewardError, r"raised TimedOut: took long .*misbehaving.py:\d+ in by_word"),
        ("says-cancelled", RewardError, r"raised CancelledError: .*misbehaving.py:\d+ in by_word"),
        ("leaves", RewardError, r"raised GeneratorExit: .*misbehaving.py:\d+ in by_word"),
        ("group", RewardError, r"raised BaseExceptionGroup: two .*misbehaving.py:\d+ in by_word"),
        ("group-down", RewardUnavailable, "raised ExceptionGroup: two"),
        ("odd-words", RewardError, r"raised ValueError: a\\ud800bxxx"),
        ("no-words", RewardError, "raised Wordless: its words raise RuntimeError"),
        ("own-words", RewardError, "its words raise RuntimeError"),
        ("odd-score", RewardError, "raised RuntimeError: cannot be converted to a scalar"),
    ],
)
async def test_each_failure_has_its_class_and_none_is_a_score(word: str, kind: type[RewardError], words: str) -> None:
    """B102, B105, B106, B108"""
    async with rewards() as reward:
        with pytest.raises(RewardError, match=words) as caught:
            await score(reward, word)
        assert type(caught.value) is kind
        assert reward.pools[0].processes[0].num_started == 1


async def test_what_stands_beside_a_score_and_is_no_number_is_left_out() -> None:
    async with rewards() as reward:
        found = await score(reward, "odd-parts")
    assert found.value == 1.0
    assert {name: found.parts[name] for name in ("a\\ud800", "None", "n" * MAX_PART_NAME)} == {
        "a\\ud800": 2.0,
        "None": 3.0,
        "n" * MAX_PART_NAME: 4.0,
    }
    assert not {"tensor", "nan"} & set(found.parts)
    assert len(found.parts) == MAX_PARTS


async def test_a_batch_whose_scores_are_made_lazily_fails_where_they_fail() -> None:
    async with rewards("lazy_batch", batch_wait_s=0.2) as reward:
        good, bad = await asyncio.gather(score(reward, "x"), score(reward, ""), return_exceptions=True)
        assert isinstance(good, Score)
        assert type(bad) is RewardError
        assert "raised ZeroDivisionError: division by zero" in str(bad)
        assert reward.pools[0].processes[0].num_started == 1


async def test_a_process_that_died_is_noticed_while_its_fork_holds_its_pipes() -> None:
    async with rewards(timeout_s=1e6) as reward:  # at the deadline it would be noticed anyway
        with pytest.raises(RewardUnavailable, match="was killed by signal 9"):
            await score(reward, "fork-and-die")
        assert (await score(reward, "x")).value == 1.0


@pytest.mark.parametrize(
    ("word", "kind", "words"),
    [
        ("timed-out", RewardError, "raised TimedOut: took long"),
        ("says-cancelled", RewardError, "raised CancelledError"),
        ("exit-in-a-task", RewardError, "raised SystemExit: 3"),
        ("group-down", RewardUnavailable, "raised ExceptionGroup"),
    ],
)
async def test_what_an_async_reward_or_a_task_of_it_raises_is_its_own(word: str, kind: type[RewardError], words: str) -> None:
    async with rewards("by_word_async") as reward:
        beside = [asyncio.create_task(score(reward, "x")) for _ in range(20)]
        with pytest.raises(RewardError, match=words) as caught:
            await score(reward, word)
        assert type(caught.value) is kind
        assert [one.value for one in await asyncio.gather(*beside)] == [1.0] * 20
        assert reward.pools[0].processes[0].num_started == 1


@pytest.mark.parametrize("word", ["fork-and-return", "fork-and-go-on"])
async def test_the_fork_of_an_async_reward_answers_nobody(word: str) -> None:
    async with rewards("by_word_async") as reward:
        replies = [score(reward, one) for one in (*["x"] * 10, word, *["x"] * 10)]
        assert [one.value for one in await asyncio.gather(*replies)] == [1.0] * 21
        again = await asyncio.gather(*(score(reward, "pid") for _ in range(50)))
        assert len({one.parts["pid"] for one in again}) == 1
        assert reward.pools[0].processes[0].num_started == 1


async def test_what_a_reward_prints_or_forks_disturbs_no_answer() -> None:
    async with rewards() as reward:
        for word in ("print", "fork", "alarm", "x"):
            assert (await score(reward, word)).value == 1.0
        assert reward.pools[0].processes[0].num_started == 1


async def test_a_reward_that_leaks_runs_into_its_limit_and_not_into_the_machines() -> None:
    """B99: replaced before the limit where it grows slowly, told as infrastructure where it bursts."""
    async with rewards(max_memory_bytes=1 << 30, max_attempts=3) as reward:
        results = [await score(reward, "leak") for _ in range(8)]
        assert [one.value for one in results] == [1.0] * 8
        assert reward.pools[0].processes[0].num_started > 1


async def test_infrastructure_is_asked_again_and_a_wrong_answer_is_not(tmp_path: Path) -> None:
    """B105"""
    async with rewards(max_attempts=3) as reward:
        assert (await score(reward, "down-once", str(tmp_path / "flag"))).value == 1.0
        with pytest.raises(RewardUnavailable, match=r"down \(3 times in a row, reward.max_attempts\)"):
            await score(reward, "down")


async def test_a_row_arrives_as_it_is() -> None:
    """Bytes, large integers, NumPy values, integer keys and nesting go through the pipe."""
    import numpy as np

    truth = {"big": 1 << 200, "neg": -(1 << 70), "bytes": b"\x00\xff", "floats": [0.1, float("inf")], 3: None}
    async with rewards("echo") as reward:
        with pytest.raises(RewardError, match="ValueError") as caught:
            await score(reward, "x", truth, array=np.arange(3), scalar=np.float32(0.5), text="é\ud83d"[:1])
        assert repr(truth) in str(caught.value)
        assert "{'array': [0, 1, 2], 'scalar': 0.5, 'text': 'é'}" in str(caught.value)
        with pytest.raises(RewardError, match="got a object, expected plain data"):
            await score(reward, "x", object())


async def test_async_rewards_share_a_process_and_an_overdue_one_leaves_the_others_alone() -> None:
    async with rewards("by_word_async", timeout_s=2.0) as reward:
        slow = [asyncio.create_task(score(reward, "sleep")) for _ in range(3)]
        first = await score(reward, "pid")
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(result, RewardTimeout) for result in results)
        scores = await asyncio.gather(*(score(reward, "pid") for _ in range(50)))
        assert {one.parts["pid"] for one in scores} == {first.parts["pid"]}


@pytest.mark.parametrize("word", ["block", "stubborn"])
async def test_an_async_reward_that_cannot_be_taken_back_costs_its_process(word: str) -> None:
    async with rewards("by_word_async", timeout_s=0.5, max_attempts=4) as reward:
        with pytest.raises(RewardTimeout):
            await score(reward, word)
        assert (await score(reward, "x")).value == 1.0
        assert reward.pools[0].processes[0].num_started == 2


async def test_batched_rewards_get_what_waits_and_no_more_than_the_largest_batch() -> None:
    async with rewards("batch", max_batch=4, batch_wait_s=0.2) as reward:
        scores = await asyncio.gather(*(score(reward, "x") for _ in range(10)))
        sizes = [one.parts["size"] for one in scores]
        assert sum(1 / size for size in sizes) == pytest.approx(3)
        assert max(sizes) == 4


@pytest.mark.parametrize(("word", "got"), [("short", 3), ("long", 5)])
async def test_a_batch_of_another_length_is_an_error_for_all_of_it(word: str, got: int) -> None:
    """B104"""
    async with rewards("batch", max_batch=4, batch_wait_s=0.5) as reward:
        calls = [score(reward, says) for says in ("x", "y", word, "z")]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [RewardError] * 4
    assert all(f"got {got} scores for a batch, expected 4" in str(result) for result in results)


@pytest.mark.parametrize(("word", "kind"), [("raise", RewardError), ("sleep", RewardTimeout)])
async def test_of_a_batch_that_fails_only_the_culprit_has_no_score(word: str, kind: type[RewardError]) -> None:
    """B101: one exception costs one reward, and every reply has one outcome."""
    async with rewards("batch", max_batch=4, batch_wait_s=0.5, timeout_s=1.0) as reward:
        calls = [score(reward, says) for says in ("x", "y", word, "z")]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [Score, Score, kind, Score]


async def test_the_event_loop_goes_on_while_rewards_spin_and_are_killed() -> None:
    """B99, B162"""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    async with rewards(num_processes=1, timeout_s=0.5) as reward:
        await score(reward, "x")
        stuck = asyncio.create_task(score(reward, "spin-in-c"))
        beating = asyncio.create_task(beat())
        with pytest.raises(RewardTimeout):
            await stuck
        beating.cancel()
    assert beats > 100


async def test_a_caller_that_goes_away_keeps_nobody_waiting() -> None:
    async with rewards(timeout_s=1.0) as reward:
        await score(reward, "x")
        running = asyncio.create_task(score(reward, "sleep"))
        await asyncio.sleep(0.1)
        queued = asyncio.create_task(score(reward, "spin-in-c"))
        await asyncio.sleep(0.1)
        running.cancel()
        queued.cancel()
        assert (await score(reward, "x")).value == 1.0
        assert reward.pools[0].processes[0].num_started == 2


async def test_parts_are_weighed_summed_and_told() -> None:
    parts = {
        "exact": Part(function="agent_loop.rewards:exact_match", weight=2.0),
        "length": Part(function=f"{HERE}:length", weight=0.5),
        "logged": Part(function=f"{HERE}:by_word", weight=0.0),
        "later": Part(function=f"{HERE}:by_word_async"),
    }
    opened = await asyncio.to_thread(Weighted.open, parts, RewardSettings(num_processes=1))
    async with asyncio.timeout(DEADLINE_S), opened.running():
        got = await score(opened, "pid", "pid")
        assert got.value == 2.0 + 0.5 * 3 + 1.0
        pid = got.parts["logged/pid"]
        assert dict(got.parts) == {
            "exact": 1.0, "length": 3.0, "logged": 1.0, "logged/pid": pid, "later": 1.0, "later/pid": got.parts["later/pid"]
        }  # fmt: skip
        assert pid != os.getpid()
        with pytest.raises(RewardError, match="KeyError"):
            await score(opened, "raise", "raise")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (f"{HERE}:nothing", {}, "has no function nothing"),
        ("no_such_module_here:f", {}, "no_such_module_here does not import"),
        (f"{HERE}:length", {"factor": 2}, "does not take"),
        (f"{HERE}:not_a_number", {}, "the self test got a score of 0 for 'right'"),
        (f"{HERE}:wrong_later", {}, "the self test got a score of 0 for 'right'"),
        (f"{HERE}:wrong_together", {}, "the self test got a score of 0 for 'almost'"),
    ],
)
def test_what_does_not_load_or_fails_its_self_test_is_refused_at_start(
    function: str, arguments: dict[str, Any], words: str
) -> None:
    """B98"""
    with pytest.raises(RewardError, match=words):
        Weighted.open({"": Part(function=function, arguments=arguments)}, RewardSettings())


def test_a_self_test_is_told_what_every_reward_is_told() -> None:
    Weighted.open({"": Part(function=f"{HERE}:of_turns")}, RewardSettings())


def test_a_module_that_ends_the_process_or_hangs_at_import_is_refused_at_start(tmp_path: Path) -> None:
    for body, words in (("import os; os._exit(4)", "exit status 4"), ("import time; time.sleep(600)", "longer to load")):
        file = tmp_path / "mine.py"
        file.write_text(body + "\n\ndef f(a, b, c, d): ...\n")
        with pytest.raises(RewardError, match=words):
            Weighted.open({"": Part(function=f"{file}:f")}, RewardSettings(start_timeout_s=2.0))


_KEEPER = """
import asyncio, sys
from agent_loop.rewards.weighted import Part, Weighted
from configs.schema import RewardSettings

async def main():
    reward = Weighted.open({"": Part(function="tests.agent_loop.rewards.misbehaving:by_word")}, RewardSettings(num_processes=1))
    async with reward.running():
        await reward.score(data_source="d", solution_str="x", ground_truth="", extra_info={})
        spinning = asyncio.create_task(reward.score(data_source="d", solution_str="spin-in-c", ground_truth="", extra_info={}))
        await asyncio.sleep(0.2)
        sys.stdout.write(f"{reward.pools[0].processes[0].pid}\\n")
        sys.stdout.flush()
        await spinning

asyncio.run(main())
"""


def test_reward_processes_end_with_the_process_that_started_them() -> None:
    """Killed, it can end nothing any more; and a reward that spins in C notices nothing by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _KEEPER], stdout=subprocess.PIPE, env=environment, text=True) as keeper:
        assert keeper.stdout is not None
        worker = psutil.Process(int(keeper.stdout.readline()))
        assert worker.status() != psutil.STATUS_ZOMBIE
        keeper.kill()
    deadline = time.monotonic() + DEADLINE_S
    while is_alive(worker.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(worker.pid)
