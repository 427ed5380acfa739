"""What models write as calls is read, or answered with words; nothing makes the reader fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.tool_formats import MAX_CALL_CHARACTERS, MAX_CALLS, Call, Malformed, ToolFormat, format_of_template, read_calls
from tests.agent_loop.chat_models import FAMILIES

F = ToolFormat
ADD = Call(name="add", arguments={"a": 1, "b": "two"})


def written(calls: list[Call], tool_format: ToolFormat) -> str:
    """As a model of that family writes them."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    match tool_format:
        case F.HERMES:
            return "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>\n" for one in objects)
        case F.LLAMA3:
            return "; ".join(json.dumps({"name": one["name"], "parameters": one["arguments"]}) for one in objects)
        case F.MISTRAL:
            return f"[TOOL_CALLS]{json.dumps(objects)}</s>"
        case F.DEEPSEEK:
            parts = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{one['name']}\n```json\n{json.dumps(one['arguments'])}\n```"
                "<｜tool▁call▁end｜>"
                for one in objects
            ]
            return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"
        case F.PYTHONIC:
            parts = [f"{one.name}({', '.join(f'{key}={value!r}' for key, value in one.arguments.items())})" for one in calls]
            return f"[{', '.join(parts)}]"


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(
    lambda name: name not in ("if", "in", "is", "or", "as", "not", "and")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(
    st.sampled_from(ToolFormat),
    st.lists(st.builds(Call, name=NAMES, arguments=st.dictionaries(NAMES, VALUES)), min_size=1, max_size=3),
)
def test_calls_come_back_as_they_were_written(tool_format: ToolFormat, calls: list[Call]) -> None:
    if tool_format is F.PYTHONIC:
        import keyword

        calls = [one for one in calls if not any(keyword.iskeyword(word) for word in (one.name, *one.arguments))] or [ADD]
    assert read_calls(written(calls, tool_format), tool_format) == calls


SCRAPS = ['{"name": ', '"x"', "}", "{", "<tool_call>", "</tool_call>", "[", "]", "f(", ")", "=1", ";", "[TOOL_CALLS]", "[ARGS]"]
MORE_SCRAPS = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]


@given(st.sampled_from(ToolFormat), st.lists(st.sampled_from([*SCRAPS, *MORE_SCRAPS]) | st.text(max_size=5), max_size=12))
def test_no_text_makes_reading_fail(tool_format: ToolFormat, parts: list[str]) -> None:
    """B157"""
    for found in read_calls("".join(parts), tool_format):
        assert isinstance(found, (Call, Malformed))
        if isinstance(found, Call):
            assert found.name
            assert isinstance(found.arguments, dict)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_an_answer_without_a_call_has_none(tool_format: ToolFormat) -> None:
    for text in ("", "The answer is 4.", "a [list] of {things}", "f(x) = [1, 2]"):
        assert read_calls(text, tool_format) == []


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"name": "add", "arguments": {"a": 1,}}', "not JSON"),
        ("{'name': 'add'}", "not JSON"),
        ('{"arguments": {}}', "expected `name`"),
        ('{"name": "add"}{"name": "add"}', "not JSON"),
        ("[1, 2]", "expected an object"),
        ("7", "expected an object"),
        ("null", "expected an object"),
        ("NaN", "NaN is no number"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no number"),
        ('{"name": "add", "arguments": [1]}', "expected an object"),
        ('{"name": "add", "arguments": "half {"}', "not JSON"),
        ('{"name": 7, "arguments": {}}', "expected `name`"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_malformed_call_says_what_was_expected(inner: str, words: str) -> None:
    """B157"""
    (found,) = read_calls(f"<tool_call>{inner}</tool_call>", F.HERMES)
    assert isinstance(found, Malformed)
    assert words in found.why
    assert len(found.why) < 600


def test_a_megabyte_of_call_is_malformed() -> None:
    """B157"""
    (found,) = read_calls("<tool_call>" + "x" * (MAX_CALL_CHARACTERS + 1), F.HERMES)
    assert isinstance(found, Malformed)


def test_arguments_written_as_text_are_read() -> None:
    """B157: nested JSON in a string."""
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"two\\"}"}</tool_call>'
    assert read_calls(text, F.HERMES) == [ADD]


def test_a_call_that_does_not_close_is_malformed() -> None:
    for text, tool_format in (
        ('<tool_call>{"name": "add"', F.HERMES),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{", F.DEEPSEEK),
        ('[TOOL_CALLS][{"name": "add"', F.MISTRAL),
        ('{"name": "add", "parameters": {', F.LLAMA3),
        ("[add(a=1", F.PYTHONIC),
    ):
        (found,) = read_calls(text, tool_format)
        assert isinstance(found, Malformed), tool_format


def test_other_spellings_are_read() -> None:
    assert read_calls('[TOOL_CALLS]add[ARGS]{"a": 1, "b": "two"}', F.MISTRAL) == [ADD]
    assert read_calls('<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "two"}<｜tool▁call▁end｜>', F.DEEPSEEK) == [ADD]
    assert read_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "two"}}<|eom_id|>', F.LLAMA3) == [ADD]
    assert read_calls("```tool_code\n[add(a=1, b='two')]\n```", F.PYTHONIC) == [ADD]


def test_more_spellings_that_models_were_trained_on_are_read() -> None:
    for text in (
        '[TOOL_CALLS]add{"a": 1, "b": "two"}',
        '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1, "b": "two"}',
        '[TOOL_CALLS]{"name": "add", "arguments": {"a": 1, "b": "two"}}',
        'I see. [TOOL_CALLS]add{"a": 1, "b": "two"}</s>',
    ):
        assert read_calls(text, F.MISTRAL) == [ADD], text
    assert read_calls('[TOOL_CALLS]add{"a": 1, "b": "two"}[TOOL_CALLS]add{"a": 1, "b": "two"}', F.MISTRAL) == [ADD, ADD]
    assert read_calls("<|python_start|>[add(a=1, b='two')]<|python_end|><|eot|>", F.PYTHONIC) == [ADD]
    one = '{"name": "add", "parameters": {"a": 1, "b": "two"}}'
    assert read_calls(f"{one}\n{one};{one} ;\n{one}", F.LLAMA3) == [ADD] * 4


def test_arguments_of_a_pythonic_call_are_what_json_has() -> None:
    """A tuple is no array to a JSON schema."""
    (found,) = read_calls("[add(a=(1, 2), b=true, c=[null, {1: false}])]", F.PYTHONIC)
    assert found == Call(name="add", arguments={"a": [1, 2], "b": True, "c": [None, {"1": False}]})


def test_code_in_a_pythonic_call_is_not_run() -> None:
    (found,) = read_calls("[add(a=__import__('os').getpid())]", F.PYTHONIC)
    assert isinstance(found, Malformed)


def test_the_format_is_the_templates() -> None:
    assert format_of_template(FAMILIES["qwen2.5"].template) is F.HERMES
    assert format_of_template(FAMILIES["llama3"].template) is F.LLAMA3
    assert format_of_template("… <｜tool▁calls▁begin｜> …") is F.DEEPSEEK
    assert format_of_template("… [TOOL_CALLS] …") is F.MISTRAL


_DEGENERATE = {
    "empty calls": (F.HERMES, "<tool_call></tool_call>" * 16_000),
    "calls in calls": (F.HERMES, "<tool_call>" * 60_000),
    "blanks": (F.DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n" + " " * 60_000 + "x<｜tool▁call▁end｜>"),
    "nothing": (F.DEEPSEEK, "<｜tool▁call▁begin｜><｜tool▁call▁end｜>" * 16_000),
    "objects": (F.LLAMA3, '{"name":"a"};' * 30_000),
    "signs": (F.MISTRAL, "[TOOL_CALLS]" * 30_000),
    "many": (F.PYTHONIC, "[a()" + ",a()" * 30_000 + "]"),
    "no end": (F.PYTHONIC, "[a(" + " " * 200_000),
    "a sum": (F.PYTHONIC, "[a(b=" + "1+" * 60_000 + "1)]"),
    "quotes": (F.PYTHONIC, "[a(b=" + "'\\" * 150_000 + ")]"),
}


@pytest.mark.parametrize("name", _DEGENERATE)
def test_a_degenerate_reply_is_read_in_time_that_grows_with_its_length_alone(name: str) -> None:
    """Read on the event loop of all rollouts: without the bounds these take from seconds to hours."""
    tool_format, text = _DEGENERATE[name]
    found = read_calls(text, tool_format)
    assert len(found) <= MAX_CALLS + 1
    if len(found) > MAX_CALLS:
        assert found[-1] == Malformed(why=f"got more than {MAX_CALLS} calls in one reply")


@pytest.mark.parametrize("depth", [50, 300, 900, 5000])
@pytest.mark.parametrize("tool_format", list(F))
def test_depth_is_malformed_and_raises_nothing(tool_format: ToolFormat, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    texts = [
        f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>',
        f"<tool_call>{deep}</tool_call>",
        f'{{"name": "f", "parameters": {{"a": {deep}}}}}',
        f'[TOOL_CALLS][{{"name": "f", "arguments": {deep}}}]',
        f"[TOOL_CALLS]f[ARGS]{deep}",
        *(
            f"[f(a={inner}), f({inner}), {inner}]"
            for inner in (deep, "-" * depth + "1", "1" + "+1" * depth, "x" + ".y" * depth, "x" + "()" * depth)
        ),
    ]
    for text in texts:
        assert all(isinstance(one, (Call, Malformed)) for one in read_calls(text, tool_format))


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (F.HERMES, r'<tool_call>{"name": "f\ud800", "arguments": {"a\udc00": ["\ud83d\ude00", "\ud800"]}}</tool_call>'),
        (F.LLAMA3, r'{"name": "f\ud800", "parameters": {"a\udc00": ["\ud83d\ude00", "\ud800"]}}'),
        (F.MISTRAL, r'[TOOL_CALLS][{"name": "f\ud800", "arguments": {"a\udc00": ["\ud83d\ude00", "\ud800"]}}]'),
    ],
)
def test_half_a_surrogate_is_malformed(tool_format: ToolFormat, text: str) -> None:
    """Nothing that is made of the call could be noted, sent or logged."""
    (found,) = read_calls(text, tool_format)
    assert isinstance(found, Malformed)
    assert r"\ud800 is half a character" in found.why or r"\udc00 is half a character" in found.why
    assert read_calls(r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ude00"}}</tool_call>', F.HERMES) == [
        Call(name="f", arguments={"a": "\U0001f600"})
    ]


def test_a_number_that_is_not_finite_is_malformed() -> None:
    (found,) = read_calls('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', F.HERMES)
    assert isinstance(found, Malformed)
    assert "1e999 is too large" in found.why
