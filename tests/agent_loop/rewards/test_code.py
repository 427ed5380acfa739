"""The code reward: programs are judged by what they do, within limits, and cannot talk themselves into a pass."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_loop.errors import BadGroundTruth
from agent_loop.rewards import code_tests
from agent_loop.rewards.limited import MAX_OUTPUT_BYTES, run_python
from agent_loop.rewards.time_left import limited_to
from agent_loop.rewards.weighted import Part, Weighted
from configs.schema import RewardSettings


def score(program: str, truth: Any, **arguments: Any) -> float:
    return code_tests("code", f"Here it is:\n```python\n{program}\n```", truth, **arguments)["score"]


ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALL = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


@pytest.mark.parametrize(
    ("program", "truth", "expected"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", ADD, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b, '')", ADD, 1.0),
        ("print(3)", ADD, 0.0),
        ("import sys; print(3); sys.exit(1)", ADD, 0.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALL, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALL, 1.0),
        ("def add(a, b): return 3", CALL, 0.0),
        ("def add(a, b): return '3'", CALL, 0.0),
        ("def other(): pass", CALL, 0.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0),
        ("def add(a, b): return a + b", {"tests": ASSERTS}, 1.0),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("def add(a, b): return 3", ASSERTS, 0.0),
        ("import os; os._exit(0)", ASSERTS, 0.0),
        ("import sys; sys.exit(0)", ASSERTS, 0.0),
        ("raise SystemExit", CALL, 0.0),
        ("def add(", ASSERTS, 0.0),
    ],
)
def test_a_program_passes_all_its_tests_or_none_counts(program: str, truth: Any, expected: float) -> None:
    assert score(program, truth) == expected


def test_partial_credit_is_the_share_passed() -> None:
    assert score("def add(a, b): return 3", CALL, partial=True) == 0.5
    assert code_tests("code", "```\nprint(3)\n```", ADD, partial=True) == {"score": 0.5, "tests_passed": 0.5}
    assert code_tests("code", "``` print(3)", ADD) == {"score": 0.0, "tests_passed": 0.0}


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)", "import os\nwhile True: os.write(1, b'x' * 65536)"],
)
def test_a_program_that_does_not_end_fails_its_test_and_ends(program: str) -> None:
    """B105: too slow is a wrong answer; the others of its tests are not waited for."""
    before = time.monotonic()
    assert score(program, {"inputs": [""] * 20, "outputs": ["3"] * 20}, partial=True, cpu_s=0.5) == 0.0
    assert time.monotonic() - before < 30


def test_tests_that_are_too_slow_together_have_failed_and_those_that_came_in_time_count() -> None:
    """Each within its own limits."""
    truth = {"inputs": [""] * 1000, "outputs": ["3"] * 1000}
    with limited_to(3.0):
        found = code_tests("code", "```\nimport time; time.sleep(0.2); print(3)\n```", truth, partial=True, max_cases=1000)
    assert found["out_of_time"] == 1.0
    assert found["score"] == found["tests_passed"] < 1.0
    with limited_to(1.0):
        assert code_tests("code", "```\nimport time; time.sleep(600)\n```", truth, cpu_s=1000) == {
            "score": 0.0,
            "tests_passed": 0.0,
            "out_of_time": 1.0,
        }


async def test_a_program_that_uses_up_the_rewards_time_scores_nothing_and_is_no_timeout() -> None:
    """A timeout would be tried again, and the group go without a wrong answer."""
    part = Part(function="agent_loop.rewards:code_tests", arguments={"cpu_s": 1000})
    opened = await asyncio.to_thread(Weighted.open, {"": part}, RewardSettings(max_attempts=1, timeout_s=10.0, num_processes=1))
    async with asyncio.timeout(120), opened.running():
        reply = "```python\nimport time; time.sleep(600)\n```"
        found = await opened.score(
            data_source="t", solution_str=reply, ground_truth={"inputs": ["1"], "outputs": ["1"]}, extra_info={}
        )
    assert (found.value, found.parts["out_of_time"]) == (0.0, 1.0)


def test_output_memory_and_files_are_bounded() -> None:
    run = run_python(f"print('x' * {MAX_OUTPUT_BYTES * 2})", cpu_s=5, memory_bytes=1 << 30)
    assert (run.status, len(run.output)) == (0, MAX_OUTPUT_BYTES)
    run = run_python("x = bytearray(2 << 30)", cpu_s=5, memory_bytes=1 << 29)
    assert run.status == 1
    assert "MemoryError" in run.errors
    run = run_python("open('f', 'wb').write(bytes(100 << 20))", cpu_s=5, memory_bytes=1 << 30)
    assert run.status != 0


def test_a_program_sees_no_environment_of_ours_and_leaves_no_group_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    program = f"import os, subprocess, sys\n{child}\nprint(os.environ.get('SECRET'))"
    before = time.monotonic()
    run = run_python(program, cpu_s=10, memory_bytes=1 << 30)
    assert run.output == "None\n"
    assert time.monotonic() - before < 30


@pytest.mark.parametrize("truth", [{}, [], 3, None, {"inputs": ["1"], "outputs": []}, {"tests": ["assert ("]}, "assert ("])
def test_tests_that_are_none_are_the_rows_fault(truth: Any) -> None:
    """B101"""
    with pytest.raises(BadGroundTruth, match="code_tests: got"):
        score("print(3)", truth)
