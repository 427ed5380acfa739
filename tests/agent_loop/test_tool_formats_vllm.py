"""Calls are read as vLLM's own parsers read them, and each difference has a name and a reason."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.tool_formats import Call, ToolFormat, read_calls
from tests.agent_loop.test_tool_formats import ADD, written

pytestmark = pytest.mark.slow

F = ToolFormat
PARSERS = {
    "hermes": F.HERMES,
    "qwen3_json": F.HERMES,
    "llama3_json": F.LLAMA3,
    "mistral": F.MISTRAL,
    "deepseek_v3": F.DEEPSEEK,
    "deepseek_v31": F.DEEPSEEK,
    "pythonic": F.PYTHONIC,
    "llama4_pythonic": F.PYTHONIC,
}
"""vLLM's, and the format that reads the same replies."""

_HERMES = "<tool_call>{}</tool_call>"
_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_ADD = '{"name": "add", "arguments": {"a": 1}}'
_LLAMA = '{"name": "add", "parameters": {"a": 1}}'

ALIKE = [
    ("hermes", _HERMES.format(_ADD)),
    ("hermes", f"Let me think.\n{_HERMES.format(_ADD)}\n{_HERMES.format(_ADD)}\nDone."),
    ("hermes", _HERMES.format('{"name": "add", "arguments": {"a": "é\\n\\u2603 </tool"}}')),
    ("hermes", "no call at all"),
    ("llama3_json", _LLAMA),
    ("llama3_json", _ADD),
    ("llama3_json", f"<|python_tag|>{_LLAMA}"),
    ("llama3_json", f"{_LLAMA}; {_LLAMA}"),
    ("llama3_json", f"{_LLAMA}\n{_LLAMA}"),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": "1"}}'),
    ("llama3_json", '{"name": "add", "parameters": {"a": {"name": "{"}}}'),
    ("llama3_json", '{"a": 1}'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    ("mistral", '[TOOL_CALLS]add{"a": 1}'),
    ("mistral", 'Let me see. [TOOL_CALLS]add{"a": 1}</s>'),
    ("mistral", '[TOOL_CALLS]add{"a": {"b": [1, "}"]}}[TOOL_CALLS]look_up{"a": 2}'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[ARGS]{"word": "x"}'),
    ("deepseek_v3", _V3.format('{"a": 1}')),
    ("deepseek_v3", f"I see. {_V3.format('{}')}"),
    ("deepseek_v31", _V31.format('{"a": 1}')),
    ("pythonic", "[add(a=1), look_up(word='x')]"),
    ("pythonic", "[add()]"),
    ("pythonic", "[add(a=-1, b=1.5, c=None, d=True, e=[1, {'k': 2}], f=(1, 2))]"),
    ("pythonic", "[add(a=true, b=null)]"),
    ("pythonic", "Text, and [add(a=1)]"),
    ("pythonic", "add(a=1)"),
    ("llama4_pythonic", "[add(a=1)]"),
    ("llama4_pythonic", "<|python_start|>[add(a=1)]<|python_end|>"),
]

MALFORMED = "malformed"
DIFFERENCES: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    # Taken here, refused there: the call is plain to see.
    "parameters for arguments": ("hermes", _HERMES.format(_LLAMA), [["add", {"a": 1}]], []),
    "no arguments at all": ("hermes", _HERMES.format('{"name": "add"}'), [["add", {}]], []),
    "no parameters at all": ("llama3_json", '{"name": "add"}', [["add", {}]], []),
    "arguments over several lines": ("deepseek_v3", _V3.format('{"a":\n 1}'), [["add", {"a": 1}]], []),
    "arguments over several lines, newer form": ("deepseek_v31", _V31.format('{"a":\n 1}'), [["add", {"a": 1}]], []),
    "no sign before the first call": (
        "deepseek_v3",
        _V3.format('{"a": 1}').removeprefix("<｜tool▁calls▁begin｜>"),
        [["add", {"a": 1}]],
        [],
    ),
    "a name with a dot": ("pythonic", "[a.b(c=1)]", [["a.b", {"c": 1}]], []),
    "calls in a fence": ("pythonic", "```tool_code\n[add(a=1)]\n```", [["add", {"a": 1}]], []),
    # Of what vLLM makes something else: an object written as text is an object.
    "arguments as text": (
        "hermes",
        _HERMES.format('{"name": "add", "arguments": "{\\"a\\": 1}"}'),
        [["add", {"a": 1}]],
        [["add", '{"a": 1}']],
    ),
    # vLLM picks one form by the tokenizer (no `[ARGS]` in it: the list), this by the reply.
    "the older list before a newer tokenizer": (
        "mistral",
        f"[TOOL_CALLS][{_ADD}]",
        [["add", {"a": 1}]],
        [["[", {"name": "add", "arguments": {"a": 1}}]],
    ),
    "an id beside the name": (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1}',
        [["add", {"a": 1}]],
        [["add[CALL_ID]abc123456", {"a": 1}]],
    ),
    # Malformed here, so that the model is told; vLLM repairs it, or hands the reply on as content.
    "a call that does not close": ("hermes", f"<tool_call>{_ADD}", [MALFORMED], [["add", {"a": 1}]]),
    "a number that JSON does not have": (
        "hermes",
        _HERMES.format('{"name": "add", "arguments": {"a": Infinity}}'),
        [MALFORMED],
        [["add", {"a": float("inf")}]],
    ),
    "one good call and one bad": ("hermes", _HERMES.format(_ADD) + _HERMES.format("{"), [["add", {"a": 1}], MALFORMED], []),
    "words behind a call": ("llama3_json", f"{_LLAMA} That is it.", [["add", {"a": 1}], MALFORMED], [["add", {"a": 1}]]),
    "half an object": ("llama3_json", _LLAMA[:-1], [MALFORMED], []),
    "arguments that are not JSON": ("deepseek_v3", _V3.format('{"a":'), [MALFORMED], [["add", '{"a":']]),
    "arguments that are no object": ("deepseek_v31", _V31.format("[1]"), [MALFORMED], [["add", [1]]]),
    "an argument without a name": ("pythonic", "[add(1)]", [MALFORMED], []),
    "an argument that is computed": ("pythonic", "[add(a=f(2))]", [MALFORMED], []),
    "a list that does not close": ("pythonic", "[add(a=1)", [MALFORMED], []),
    "a call among other things": ("pythonic", "[add(a=1), 7]", [["add", {"a": 1}], MALFORMED], []),
    "a set": ("pythonic", "[add(a={1})]", [MALFORMED], [["add", {"a": [1]}]]),
    # Not a call here: these formats have a call as the whole reply, and a sentence with an object in it is a sentence.
    "an object behind words": ("llama3_json", f"Sure: {_LLAMA}", [], [["add", {"a": 1}]]),
    "a list of calls as JSON": ("llama3_json", f"[{_LLAMA}]", [], [["add", {"a": 1}]]),
}


def drawn() -> list[tuple[str, str]]:
    """Well-formed replies, as models of each family write them."""
    draw = random.Random(7)

    def value(depth: int = 0) -> Any:
        kind = draw.randrange(7 if depth < 2 else 5)
        match kind:
            case 0:
                return draw.choice([True, False, None])
            case 1:
                return draw.randrange(-(10**9), 10**9)
            case 2:
                return draw.randrange(-1000, 1000) / 8
            case 3 | 4:
                return "".join(draw.choices("abc \"'{}[](),:;=\\<>/éあ", k=draw.randrange(9)))
            case 5:
                return [value(depth + 1) for _ in range(draw.randrange(3))]
            case _:
                return {draw.choice("abc"): value(depth + 1) for _ in range(draw.randrange(3))}

    cases: list[tuple[str, str]] = []
    for parser, tool_format in PARSERS.items():
        for _ in range(25):
            calls = [
                Call(
                    name=draw.choice(["add", "look_up"]),
                    arguments={key: value() for key in draw.sample("pqrs", draw.randrange(4))},
                )
                for _ in range(draw.randrange(1, 4))
            ]
            text = written(calls, tool_format)
            if parser == "mistral":
                text = "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(dict(call.arguments))}" for call in calls)
            elif parser == "deepseek_v31":
                inner = (f"{call.name}<｜tool▁sep｜>{json.dumps(dict(call.arguments))}" for call in calls)
                body = "".join(f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in inner)
                text = f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
            assert read_calls(text, tool_format) == calls
            cases.append((parser, text))
    return cases


@functools.cache
def read_by_vllm() -> dict[tuple[str, str], list[Any]]:
    """Every case of this file, asked in one process: agent_loop imports no vLLM, and neither do these tests."""
    cases = [*ALIKE, *((parser, text) for parser, text, _, _ in DIFFERENCES.values()), *drawn()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent_loop.vllm_parsers"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {case: [[name, _value(text)] for name, text in calls] for case, calls in zip(cases, found, strict=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_here(parser: str, text: str) -> list[Any]:
    found = read_calls(text, PARSERS[parser])
    return [[one.name, dict(one.arguments)] if isinstance(one, Call) else MALFORMED for one in found]


@pytest.mark.parametrize(("parser", "text"), ALIKE)
def test_a_reply_is_read_as_vllm_reads_it(parser: str, text: str) -> None:
    """B157"""
    assert read_here(parser, text) == read_by_vllm()[parser, text]


@pytest.mark.parametrize("parser", PARSERS)
def test_well_formed_replies_are_read_as_vllm_reads_them(parser: str) -> None:
    """B60, B157: 25 of each family, with whatever letters break a parser."""
    texts = [text for name, text in drawn() if name == parser]
    differing = [text for text in texts if read_here(parser, text) != read_by_vllm()[parser, text]]
    assert differing == []


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_is_read_in_another_way_than_vllm_does_is_known(name: str) -> None:
    """B157"""
    parser, text, here, there = DIFFERENCES[name]
    assert read_here(parser, text) == here
    assert read_by_vllm()[parser, text] == there


def test_the_corpus_has_calls_for_each_parser() -> None:
    assert {parser for parser, text in ALIKE if read_here(parser, text)} >= set(PARSERS) - {"qwen3_json"}
    assert read_here("hermes", _HERMES.format(_ADD)) == [["add", {"a": ADD.arguments["a"]}]]
