"""How models write tool calls, read back. Pure.

Invariant: reading never raises. Whatever looks like a call is one of two things: a `Call` with a name and a mapping of
arguments, or `Malformed` with words that the model can act on. Text without a call gives none.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_CALL_CHARACTERS = 1 << 20
"""A longer call is malformed."""
MAX_CALLS = 256
"""Of one reply; what stands behind them is one malformed call."""
_MAX_EXPRESSION_CHARACTERS = 16_384
"""Of a pythonic reply without its strings: Python's parser takes its time, and its callers wait for it."""
_STRING = re.compile(r""""(?:[^"\\]|\\.)*+(?:"|\\?\Z)|\'(?:[^\'\\]|\\.)*+(?:\'|\\?\Z)""", re.DOTALL)
_SPACE = re.compile(r"\s*")
_UNREADABLE = (ValueError, RecursionError)
_QUOTED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that could be read; nobody has looked yet whether there is such a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A call that could not be read."""

    why: str
    """What was got and what was expected, in words for the model."""


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Qwen2.5, Qwen3, Hermes, SmolLM2."""
    LLAMA3 = "llama3"
    """`{"name": …, "parameters": {…}}`, the whole reply; several one after the other, or with `;` between: Llama 3.1 and
    later."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name{…}`, with `[CALL_ID]…` and `[ARGS]` or without."""
    DEEPSEEK = "deepseek"
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fenced block of JSON, `<｜tool▁call▁end｜>`."""
    PYTHONIC = "pythonic"
    """`[name(key=value), …]`, the whole reply: Llama 3.2 and 4, Gemma."""


def format_of_template(template: str) -> ToolFormat:
    """The format that a chat template tells its model to write; hermes where it bears no sign of one."""
    return signed_format(template) or ToolFormat.HERMES


def signed_format(template: str) -> ToolFormat | None:
    """The format that a chat template bears a sign of."""
    for sign, found in (
        ("tool▁call", ToolFormat.DEEPSEEK),
        ("[TOOL_CALLS]", ToolFormat.MISTRAL),
        ("<tool_call>", ToolFormat.HERMES),
        ("<|python_tag|>", ToolFormat.LLAMA3),
        ("ipython", ToolFormat.LLAMA3),
    ):
        if sign in template:
            return found
    return None


def read_calls(text: str, tool_format: ToolFormat) -> list[Call | Malformed]:
    """The calls of one complete reply, in order."""
    if len(text) > MAX_CALL_CHARACTERS:
        return [Malformed(why=f"got a reply of {len(text)} characters, expected at most {MAX_CALL_CHARACTERS}")]
    calls = _READERS[tool_format](text)
    found = list(itertools.islice(calls, MAX_CALLS))
    if len(found) == MAX_CALLS and next(calls, None) is not None:
        found.append(Malformed(why=f"got more than {MAX_CALLS} calls in one reply"))
    return found


def _hermes(text: str) -> Iterator[Call | Malformed]:
    yield from (_from_json(part, "arguments") for part in _between(text, "<tool_call>", "</tool_call>"))


def _llama3(text: str) -> Iterator[Call | Malformed]:
    stripped = text.replace("<|python_tag|>", "", 1).strip()
    stripped = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)$", "", stripped).strip()
    if not stripped.startswith("{") or '"name"' not in stripped:
        return
    decoder, at = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite), 0
    while at < len(stripped):
        try:
            value, at = decoder.raw_decode(stripped, at)
            value = _whole(value, stripped)
        except _UNREADABLE as error:
            yield Malformed(why=f"got {_quoted(stripped[at : at + 2 * _QUOTED])}, which is not JSON: {_words(error)}")
            return
        yield _from_value(value, "parameters")
        at = _behind_space(stripped, at)
        if at < len(stripped) and stripped[at] not in ";{":
            rest = stripped[at : at + 2 * _QUOTED]
            yield Malformed(why=f"got {_quoted(rest)} behind a call, expected nothing or `;` and another call")
            return
        at = _behind_space(stripped, at + (stripped[at : at + 1] == ";"))


def _mistral(text: str) -> Iterator[Call | Malformed]:
    _, sign, rest = text.partition("[TOOL_CALLS]")
    if not sign:
        return
    rest = rest.removesuffix("</s>").strip()
    if rest.startswith("["):
        try:
            calls = _loads(rest)
        except _UNREADABLE as error:
            yield Malformed(why=f"got {_quoted(rest)}, which is not JSON: {_words(error)}")
            return
        yield from (_from_value(value, "arguments") for value in calls)
        return
    for part in rest.split("[TOOL_CALLS]"):
        if part.lstrip().startswith("{"):
            yield _from_json(part, "arguments")
            continue
        name, args, body = part.partition("[ARGS]")
        if not args and "{" in part:
            name, _, body = part.partition("{")
            body = "{" + body
        yield _named(name.partition("[CALL_ID]")[0].strip(), body, shape='`[TOOL_CALLS]name[ARGS]{"key": value}`')


def _deepseek(text: str) -> Iterator[Call | Malformed]:
    for part in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        if isinstance(part, Malformed):
            yield part
            continue
        head, separator, rest = part.partition("<｜tool▁sep｜>")
        name, _, body = rest.partition("\n")
        if not separator:  # the newer form: name<｜tool▁sep｜>{…} is told from it by the missing kind
            yield Malformed(why=f"got {_quoted(part)}, expected a name behind <｜tool▁sep｜>")
        elif head.strip() == "function":
            body = body.strip().removeprefix("```").removeprefix("json").removesuffix("```")
            yield _named(name.strip(), body, shape="a name and a fenced block of JSON")
        else:
            yield _named(head.strip(), rest, shape="a name, <｜tool▁sep｜> and an object")


def _pythonic(text: str) -> Iterator[Call | Malformed]:
    stripped = re.sub(r"(<\|eot_id\|>|<\|eot\|>|<end_of_turn>|```)\s*$", "", text.strip()).strip()
    stripped = re.sub(r"^(```(?:tool_code|python)?|<\|python_start\|>)\s*", "", stripped).strip()
    stripped = stripped.removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", stripped):
        return
    source = re.sub(r"\r\n?", "\n", stripped)
    if len(_STRING.sub("", source)) > _MAX_EXPRESSION_CHARACTERS:
        limit = f"at most {_MAX_EXPRESSION_CHARACTERS} characters beside strings"
        yield Malformed(why=f"got {_quoted(source)}, expected {limit}")
        return
    try:
        tree = ast.parse(source, mode="eval").body
    except _NOT_PYTHON as error:
        yield Malformed(why=f"got {_quoted(source)}, which is no list of calls: {_words(error)}")
        return
    if not isinstance(tree, ast.List):
        yield Malformed(why=f"got {_quoted(source)}, expected `[name(key=value)]`")
        return
    lines = _Lines(source)
    for node in tree.elts:
        name = _dotted(node.func) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or name is None or node.args or any(one.arg is None for one in node.keywords):
            yield Malformed(why=f"got {lines.quoted(node)}, expected `name(key=value)`")
            continue
        try:
            arguments = {str(one.arg): ast.literal_eval(_Constants().visit(one.value)) for one in node.keywords}
            arguments = _loads(json.dumps(arguments, allow_nan=False))
        except (*_NOT_PYTHON, TypeError):
            yield Malformed(why=f"got {lines.quoted(node)}, expected plain values as arguments")
            continue
        yield Call(name=name, arguments=arguments)


_NOT_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError, SystemError)
"""What Python's parser raises; SystemError where it runs out of depth."""


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None: it is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


class _Lines:
    """Where the nodes of a source stand in it."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0, *(match.end() for match in re.finditer(rb"\n", self._data))]

    def quoted(self, node: ast.expr) -> str:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return _quoted(self._data[start : min(end, start + 8 * _QUOTED)].decode(errors="ignore"))


class _Constants(ast.NodeTransformer):
    """JSON's constants among Python's."""

    _MEANT: Mapping[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._MEANT[node.id]) if node.id in self._MEANT else node


_READERS: Mapping[ToolFormat, Callable[[str], Iterator[Call | Malformed]]] = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA3: _llama3,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.DEEPSEEK: _deepseek,
    ToolFormat.PYTHONIC: _pythonic,
}


def _between(text: str, begin: str, end: str) -> Iterator[str | Malformed]:
    """What stands between the signs; a missing end is malformed."""
    at = text.find(begin)
    while at >= 0:
        start = at + len(begin)
        stop = text.find(end, start)
        if stop < 0:
            yield Malformed(why=f"got {begin} without {end}")
            return
        if text.find(begin, start, stop) >= 0:
            yield Malformed(why=f"got {begin} twice before {end}")
        else:
            yield text[start:stop]
        at = text.find(begin, stop + len(end))


def _from_json(text: str | Malformed, key: str) -> Call | Malformed:
    if isinstance(text, Malformed):
        return text
    try:
        value = _loads(text)
    except _UNREADABLE as error:
        return Malformed(why=f"got {_quoted(text.strip())}, which is not JSON: {_words(error)}")
    return _from_value(value, key)


def _named(name: str, body: str, *, shape: str) -> Call | Malformed:
    if not name:
        return Malformed(why=f"got a call without a name, expected {shape}")
    try:
        arguments = _loads(body)
    except _UNREADABLE as error:
        return Malformed(why=f"got {_quoted(body.strip())} as arguments of {name}, which is not JSON: {_words(error)}")
    return _from_value({"name": name, "arguments": arguments}, "arguments")


def _from_value(value: Any, key: str) -> Call | Malformed:
    """`key` is where the arguments are expected; the other spelling is taken too."""
    if not isinstance(value, dict):
        return Malformed(why=f"got {_shown(value)}, expected an object with `name` and `{key}`")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(why=f"got {_shown(value)}, expected `name` with the name of a tool")
    other = "parameters" if key == "arguments" else "arguments"
    arguments = value.get(key, value.get(other, {}))
    if isinstance(arguments, str):  # an object written as text, as OpenAI's interface has it
        try:
            arguments = _loads(arguments)
        except _UNREADABLE as error:
            return Malformed(why=f"got {_quoted(arguments)} as {key} of {name}, which is not JSON: {_words(error)}")
    if not isinstance(arguments, dict):
        return Malformed(why=f"got {_shown(arguments)} as {key} of {name}, expected an object")
    return Call(name=name, arguments=arguments)


def _loads(text: str) -> Any:
    return _whole(json.loads(text, parse_constant=_refuse_constant, parse_float=_finite), text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:_QUOTED]} is too large")
    return value


def _whole(value: Any, text: str) -> Any:
    """`value`, read from `text`. Raises ValueError for half a surrogate in it, which cannot be noted, sent or logged."""
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"\\u{ord(error.object[error.start]):04x} is half a character") from error
    return value


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _shown(value: Any) -> str:
    try:
        return _quoted(json.dumps(value))
    except _UNREADABLE:
        return f"a deep {type(value).__name__}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
