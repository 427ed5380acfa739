"""The code reward: a program against unit tests, each run a limited process of its own.

Invariant: expected outputs of input/output tests never reach the program. Assertions do, for they run in its interpreter: a
program bent on it can fool those. A program that is too slow, in one test or in all of them together, or breaks has failed its
test; a host that cannot run one is an infrastructure failure.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.errors import BadGroundTruth
from agent_loop.rewards.limited import run_python
from agent_loop.rewards.time_left import time_left_s

_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_FUNCTION_TAIL = """

def _headrace_call():
    import io, json, os, sys
    asked = json.loads(sys.stdin.buffer.read())
    sys.stdin = io.StringIO()
    told = os.dup(1)
    os.dup2(2, 1)
    names = globals()
    name = asked["function"]
    called = names[name] if name in names else getattr(names["Solution"](), name)
    value = called(*asked["arguments"])
    os.write(told, (asked["key"] + json.dumps(value, default=list)).encode())
_headrace_call()
"""
_ASSERT_TAIL = """

def _headrace_check():
    import io, json, os, sys
    asked = json.loads(sys.stdin.buffer.read())
    sys.stdin = io.StringIO()
    told = os.dup(1)
    os.dup2(2, 1)
    exec(compile(asked["test"], "test.py", "exec"), globals())
    os.write(told, asked["key"].encode())
_headrace_check()
"""


@dataclass(frozen=True, slots=True)
class _Case:
    source_tail: str
    stdin: str
    key: str
    """What a process must say first, where it says a result beside its output."""
    expected: Any


def code_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
    cpu_s: float = 4.0,
    memory_bytes: int = 1 << 30,
    max_cases: int = 20,
) -> dict[str, float]:
    """1.0 if the reply's program (its last fenced block) passes all tests, else 0.0; with `partial` the share that it passes.

    The ground truth, or its JSON text, is one of
    `{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}`: programs that read standard input and print;
    `{"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}`: a function, or a method of class `Solution`;
    `{"tests": ["assert add(1, 2) == 3"]}`, or such a list, or the text of a test: statements that must not raise.
    The first `max_cases` tests count. Each may take `cpu_s` seconds of processor time; the first that takes longer ends it. All
    together may take 0.8 of `reward.timeout_s`; those that did not come by then have failed (`out_of_time` is 1.0).
    """
    cases = _cases(ground_truth, data_source)[:max_cases]
    fenced = _FENCED.findall(solution_str)
    source = fenced[-1] if fenced else solution_str if "```" not in solution_str else ""
    if not source.strip():
        return {"score": 0.0, "tests_passed": 0.0}
    passed = 0
    for case in cases:
        left_s = time_left_s()
        if not left_s:
            break
        limits = {"cpu_s": cpu_s, "wall_s": left_s}
        run = run_python(source + case.source_tail, stdin=case.stdin, memory_bytes=memory_bytes, **limits)
        fits = run.status == 0 and not run.timed_out and _fits(case, run.output)
        passed += fits
        if run.timed_out or (not fits and not partial):
            break
    share = passed / len(cases)
    score = {"score": share if partial else float(passed == len(cases)), "tests_passed": share}
    return score if passed == len(cases) or time_left_s() else score | {"out_of_time": 1.0}


code_tests.self_test = (  # type: ignore[attr-defined]
    ("```python\ndef add(a, b):\n    return a + b\n```", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}),
    ("```python\nprint(sum(map(int, input().split())))\n```", {"inputs": ["1 2\n"], "outputs": ["3\n"]}),
)


def _cases(ground_truth: Any, data_source: str) -> list[_Case]:
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = [truth]
    if isinstance(truth, Mapping) and isinstance(truth.get("inputs"), Sequence) and isinstance(truth.get("outputs"), Sequence):
        pairs = list(zip(truth["inputs"], truth["outputs"], strict=False))
        if not pairs or len(truth["inputs"]) != len(truth["outputs"]):
            raise BadGroundTruth(
                f"code_tests: got {len(truth['inputs'])} inputs and {len(truth['outputs'])} outputs from {data_source}, "
                "expected as many of each, at least 1"
            )
        if truth.get("fn_name"):
            return [_function_case(str(truth["fn_name"]), given, expected) for given, expected in pairs]
        return [_Case("", _text(given), "", _text(expected)) for given, expected in pairs]
    tests = truth.get("tests", truth.get("asserts")) if isinstance(truth, Mapping) else truth
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, Sequence) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise BadGroundTruth(
            f"code_tests: got {str(ground_truth)[:200]!r} from {data_source}, expected inputs and outputs, or tests"
        )
    cases = []
    for test in tests:
        try:
            compile(test, "test.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise BadGroundTruth(f"code_tests: got the test {test[:200]!r} from {data_source}: {error}") from error
        key = secrets.token_hex(8)
        cases.append(_Case(_ASSERT_TAIL, json.dumps({"test": test, "key": key}), key, None))
    return cases


def _function_case(name: str, given: Any, expected: Any) -> _Case:
    if isinstance(given, str):  # one JSON value a line
        given = [_value(line) for line in given.splitlines() if line.strip()]
    arguments = list(given) if isinstance(given, Sequence) else [given]
    key = secrets.token_hex(8)
    asked = json.dumps({"function": name, "arguments": arguments, "key": key})
    return _Case(_FUNCTION_TAIL, asked, key, _value(expected) if isinstance(expected, str) else expected)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(str(line) for line in value)
    return str(value)


def _fits(case: _Case, output: str) -> bool:
    if not case.key:
        return _lines(output) == _lines(case.expected)
    if not output.startswith(case.key):
        return False
    if case.source_tail is _ASSERT_TAIL:
        return True
    try:
        got = json.loads(output[len(case.key) :])
    except ValueError:
        return False
    return _same(got, case.expected) or (isinstance(case.expected, list) and _same([got], case.expected))


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)):
        return got == expected or math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(got, list) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(_same(one, other) for one, other in zip(got, expected, strict=True))
    if isinstance(got, dict) and isinstance(expected, Mapping):
        keys = {str(key): key for key in expected}
        return got.keys() == keys.keys() and all(_same(got[key], expected[keys[key]]) for key in got)
    return bool(got == expected)
