"""Rewards: a finite number or an error, never a silent 0; blocking functions block nobody."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import RewardError
from agent_loop.rewards import Reward, checked_score, exact_match, load_reward, numeric_match


async def score(function: Any, solution: str = "7", truth: Any = "7") -> float:
    reward = Reward(path="test:function", function=function)
    return (await reward.score(data_source="test", solution_str=solution, ground_truth=truth, extra_info={})).value


@pytest.mark.parametrize(
    ("solution", "expected"),
    [("7", 1.0), (" 7 \n8+1=9", 1.0), ("77", 0.0), ("", 0.0), ("\n7", 0.0), ("7.0", 0.0)],
)
def test_exact_match_takes_the_first_line(solution: str, expected: float) -> None:
    assert exact_match("test", solution, "7") == expected
    assert exact_match("test", solution, 7) == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [("1000", 1.0), ("1,000.0", 1.0), ("1e3", 1.0), ("1001", 0.0), ("NaN", 0.0), ("Infinity", 0.0), ("about 1000", 0.0)],
)
def test_numeric_match_compares_numbers(solution: str, expected: float) -> None:
    assert numeric_match("test", solution, "1000") == expected


def test_numeric_match_without_a_number_to_compare_with_is_an_error() -> None:
    with pytest.raises(RewardError, match="ground truth 'x'"):
        numeric_match("test", "1", "x")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), ({"score": 0.75, "extra": "x"}, 0.75)],
)
def test_numbers_and_dicts_with_a_score_are_scores(value: Any, expected: float) -> None:
    """B102"""
    assert checked_score(value, path="p") == expected


@pytest.mark.parametrize(
    "value", [None, "1.0", b"1", float("nan"), float("inf"), 1e39, -1e13, {}, {"acc": 1.0}, {"score": None}, [1.0], object()]
)
def test_anything_else_is_an_error_and_never_0(value: Any) -> None:
    """B102"""
    with pytest.raises(RewardError, match="reward p"):
        checked_score(value, path="p")


async def test_a_reward_that_raises_is_an_error_with_its_words() -> None:
    def broken(*arguments: Any) -> float:
        raise KeyError("golden")

    with pytest.raises(RewardError, match=r"test:function raised KeyError: 'golden'"):
        await score(broken)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
async def test_a_reward_that_would_end_the_process_is_an_error(end: type[BaseException]) -> None:
    """B102, B160: `sys.exit` in user code."""

    def leaving(*arguments: Any) -> float:
        raise end(3)

    async def leaving_later(*arguments: Any) -> float:
        raise end(3)

    for function in (leaving, leaving_later):
        with pytest.raises(RewardError, match=rf"raised {end.__name__}: 3"):
            await score(function)


async def test_a_blocking_reward_may_raise_what_no_future_takes() -> None:
    def reward(*_: Any) -> float:
        return float(next(iter([])))

    with pytest.raises(RewardError, match="StopIteration"):
        await score(reward)


async def test_async_rewards_are_awaited() -> None:
    async def slow(*arguments: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"score": 0.5}

    assert await score(slow) == 0.5


async def test_a_blocking_reward_stalls_no_other_rollout() -> None:
    """B162, for rewards: one blocks, the event loop goes on and can even let it go."""
    release = threading.Event()

    def blocking(*arguments: Any) -> float:
        assert release.wait(60)
        return 1.0

    blocked = asyncio.create_task(score(blocking))
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert await score(exact_match) == 1.0
    assert not blocked.done()
    release.set()
    async with asyncio.timeout(60):
        assert await blocked == 1.0


async def test_a_reward_that_never_returns_is_left_behind_at_the_deadline() -> None:
    """B161, for rewards"""
    forever = threading.Event()

    def stuck(*arguments: Any) -> float:
        forever.wait()
        return 1.0

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await score(stuck)
    forever.set()


@pytest.mark.parametrize("body", ["1 / 0", "import sys; sys.exit(4)", "def f(:", "import no_such_module"])
def test_a_module_that_fails_to_import_is_named_with_its_words(tmp_path: Path, body: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(body + "\n")
    with pytest.raises(RewardError, match=r"mine\.py does not import: \w+: ") as caught:
        load_reward(f"{file}:f")
    assert "\n" not in str(caught.value)


def test_rewards_load_by_module_and_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n")
    loaded = load_reward(f"{file}:f")
    assert loaded.function("d", "abc", None) == 3
    assert load_reward("agent_loop.rewards:exact_match").function is exact_match


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("exact_match", "expected `module:function`"),
        ("no.such.module:f", "does not import"),
        ("agent_loop.rewards:nothing", "has no function nothing"),
        ("os.path:join", None),
        ("os:getpid", "does not take"),
        ("/no/such/file.py:f", "does not import"),
    ],
)
def test_a_path_that_leads_nowhere_says_so(path: str, words: str | None) -> None:
    if words is None:
        load_reward(path)
        return
    with pytest.raises(RewardError, match=words):
        load_reward(path)


async def test_how_a_function_is_called_is_found_out_once() -> None:
    """B162: looking at a signature takes longer than a cheap reward does."""
    looked = 0

    class Watched:
        @property
        def __signature__(self) -> inspect.Signature:
            nonlocal looked
            looked += 1
            return inspect.signature(exact_match)

        def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
            return 1.0

    reward = Reward(path="test:function", function=Watched())
    before = looked
    for _ in range(3):
        assert (await reward.score(data_source="test", solution_str="7", ground_truth="7", extra_info={})).value == 1.0
    assert looked == before > 0
