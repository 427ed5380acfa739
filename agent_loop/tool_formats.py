"""How models write tool calls, read back. Pure.

Invariant: reading never raises. Whatever looks like a call is one of two things: a `Call` with a name and a mapping of
arguments, or `Malformed` with words that the model can act on. Text without a call gives none.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_CALL_CHARACTERS = 1 << 20
"""A longer call is malformed."""
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
    return list(_READERS[tool_format](text))


def _hermes(text: str) -> Iterator[Call | Malformed]:
    yield from (_from_json(part, "arguments") for part in _between(text, "<tool_call>", "</tool_call>"))


def _llama3(text: str) -> Iterator[Call | Malformed]:
    stripped = text.replace("<|python_tag|>", "", 1).strip()
    stripped = re.sub(r"(<\|eot_id\|>|<\|eom_id\|>)$", "", stripped).strip()
    if not stripped.startswith("{") or '"name"' not in stripped:
        return
    decoder, at = json.JSONDecoder(parse_constant=_refuse_constant), 0
    while at < len(stripped):
        try:
            value, at = decoder.raw_decode(stripped, at)
        except (ValueError, RecursionError) as error:
            yield Malformed(why=f"got {_quoted(stripped[at:])}, which is not JSON: {_words(error)}")
            return
        yield _from_value(value, "parameters")
        rest = stripped[at:].lstrip()
        if rest and not rest.startswith((";", "{")):
            yield Malformed(why=f"got {_quoted(rest)} behind a call, expected nothing or `;` and another call")
            return
        at = len(stripped) - len(rest.removeprefix(";").lstrip())


def _mistral(text: str) -> Iterator[Call | Malformed]:
    _, sign, rest = text.partition("[TOOL_CALLS]")
    if not sign:
        return
    rest = rest.removesuffix("</s>").strip()
    if rest.startswith("["):
        try:
            calls = _loads(rest)
        except (ValueError, RecursionError) as error:
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
            body = re.sub(r"^\s*```(?:json)?\s*|\s*```\s*$", "", body)
            yield _named(name.strip(), body, shape="a name and a fenced block of JSON")
        else:
            yield _named(head.strip(), rest, shape="a name, <｜tool▁sep｜> and an object")


def _pythonic(text: str) -> Iterator[Call | Malformed]:
    stripped = re.sub(r"(<\|eot_id\|>|<\|eot\|>|<end_of_turn>|```)\s*$", "", text.strip()).strip()
    stripped = re.sub(r"^(```(?:tool_code|python)?|<\|python_start\|>)\s*", "", stripped).strip()
    stripped = stripped.removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", stripped):
        return
    try:
        tree = ast.parse(stripped, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield Malformed(why=f"got {_quoted(stripped)}, which is no list of calls: {_words(error)}")
        return
    if not isinstance(tree, ast.List):
        yield Malformed(why=f"got {_quoted(stripped)}, expected `[name(key=value)]`")
        return
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            yield Malformed(why=f"got {_quoted(ast.unparse(node))}, expected `name(key=value)`")
            continue
        try:
            arguments = {str(keyword.arg): ast.literal_eval(_Constants().visit(keyword.value)) for keyword in node.keywords}
            arguments = json.loads(json.dumps(arguments, allow_nan=False))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            yield Malformed(why=f"got {_quoted(ast.unparse(node))}, expected plain values as arguments")
            continue
        yield Call(name=ast.unparse(node.func), arguments=arguments)


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
    rest = text
    while begin in rest:
        part, closed, after = rest.split(begin, 1)[1].partition(end)
        if not closed:
            yield Malformed(why=f"got {begin} without {end}")
            return
        if begin in part:
            yield Malformed(why=f"got {begin} twice before {end}")
        else:
            yield part
        rest = after


def _from_json(text: str | Malformed, key: str) -> Call | Malformed:
    if isinstance(text, Malformed):
        return text
    try:
        value = _loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(why=f"got {_quoted(text.strip())}, which is not JSON: {_words(error)}")
    return _from_value(value, key)


def _named(name: str, body: str, *, shape: str) -> Call | Malformed:
    if not name:
        return Malformed(why=f"got a call without a name, expected {shape}")
    try:
        arguments = _loads(body)
    except (ValueError, RecursionError) as error:
        return Malformed(why=f"got {_quoted(body.strip())} as arguments of {name}, which is not JSON: {_words(error)}")
    return _from_value({"name": name, "arguments": arguments}, "arguments")


def _from_value(value: Any, key: str) -> Call | Malformed:
    """`key` is where the arguments are expected; the other spelling is taken too."""
    if not isinstance(value, dict):
        return Malformed(why=f"got {_quoted(json.dumps(value))}, expected an object with `name` and `{key}`")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(why=f"got {_quoted(json.dumps(value))}, expected `name` with the name of a tool")
    other = "parameters" if key == "arguments" else "arguments"
    arguments = value.get(key, value.get(other, {}))
    if isinstance(arguments, str):  # an object written as text, as OpenAI's interface has it
        try:
            arguments = _loads(arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(why=f"got {_quoted(arguments)} as {key} of {name}, which is not JSON: {_words(error)}")
    if not isinstance(arguments, dict):
        return Malformed(why=f"got {_quoted(json.dumps(arguments))} as {key} of {name}, expected an object")
    return Call(name=name, arguments=arguments)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
