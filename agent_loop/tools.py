"""Tools: what a model may call, and functions as tools.

Invariant: a tool says its arguments as a JSON schema. Its `call` runs beside the rollouts' event loop (`agent_loop.side_loop`),
so that it stalls none of them, whatever it does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pydantic

from agent_loop.errors import ToolError
from agent_loop.side_loop import in_thread

_MAX_ITEMS = 10_000
"""Of a generator; it may have no end."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """For whom a call is made. A function that asks for it by annotation gets it; models never see it."""

    rollout_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the task's row says for this tool (`tools_kwargs`)."""


class Tool(Protocol):
    """One tool; it serves many rollouts at once."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object."""
        ...

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Do it: text, or plain data that is shown as JSON. The arguments fit the schema.

        An exception is shown to the model; `ToolUnavailable` is tried again, and then fails the rollout. A tool may have
        `async def is_lost(self) -> bool` besides: asked after a call that took too long, it makes that one unavailable too.
        """
        ...


def schema_for_template(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


class FunctionTool:
    """A function as a tool: its name, its docstring, and a JSON schema of its type hints. Any callable is one: a method, an
    object with `__call__`, a `functools.partial`. What it is given has the types of its hints.

    A blocking function runs in a thread of its own, so that one that never returns keeps nothing else from running. What it
    returns is waited for if it can be awaited, and gone through if it is a generator.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ToolError for a function whose parameters cannot be told to a model."""
        self._function = function
        plain: Any = function.func if isinstance(function, functools.partial) else function
        self.name = getattr(plain, "__name__", type(plain).__name__)
        if not _NAME.fullmatch(self.name):
            raise ToolError(f"tool {self.name!r}: expected a name of letters, digits, `_`, `.` and `-`")
        text = inspect.getdoc(plain) or ""
        self.description = re.split(r"\n\s*(?:Args|Returns|Raises):", text)[0].strip()
        target = plain if hasattr(plain, "__globals__") else getattr(plain, "__call__", plain)  # noqa: B004
        self._is_async = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(target)
        self._context_name, self.parameters, self._types = _schema_of(function, target, self.name, _told_of(text))

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """See `Tool.call`."""
        told = {name: self._types[name].validate_python(value) for name, value in arguments.items()}
        if self._context_name is not None:
            told[self._context_name] = context
        if self._is_async:
            value = await self._function(**told)
        else:
            value = await in_thread(lambda: _all_of(self._function(**told)), name=f"tool-{self.name}")
        if inspect.isawaitable(value):  # an asynchronous function in another one's dress
            value = await value
        if inspect.isasyncgen(value):
            return [one async for one in _first(value)]
        return value


def _all_of(value: Any) -> Any:
    return list(itertools.islice(value, _MAX_ITEMS)) if inspect.isgenerator(value) else value


async def _first(values: AsyncIterator[Any]) -> AsyncIterator[Any]:
    number = 0
    async for one in values:
        yield one
        number += 1
        if number == _MAX_ITEMS:
            return


def _schema_of(
    function: Callable[..., Any], target: Any, name: str, told: Mapping[str, str]
) -> tuple[str | None, dict[str, Any], dict[str, pydantic.TypeAdapter[Any]]]:
    """(name of the parameter that takes the context, JSON schema of the others, their types); the hints are `target`'s."""
    target = inspect.unwrap(target)
    hinted = types.SimpleNamespace(
        __annotations__={key: value for key, value in inspect.get_annotations(target).items() if key != "return"}
    )
    try:
        hints = typing.get_type_hints(hinted, globalns=getattr(target, "__globals__", {}), include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolError(f"tool {name}: its type hints cannot be read: {error}") from error
    context_name = None
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ToolError(f"tool {name}: its parameters are not known: {error}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {name}: got the parameter {parameter}, expected ones that can be given by name")
        hint = hints.get(parameter.name)
        if hint is None:
            raise ToolError(f"tool {name}: the parameter {parameter.name} has no type hint")
        if hint is ToolContext:
            context_name = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hint, pydantic.Field(default, description=told.get(parameter.name)))
    try:
        schema = pydantic.create_model(name, **fields).model_json_schema()
        adapters = {one: pydantic.TypeAdapter(hint) for one, (hint, _) in fields.items()}
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        raise ToolError(f"tool {name}: its parameters have no JSON schema: {error}") from error
    return context_name, {**_without_titles(schema), "additionalProperties": False}, adapters


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(one) for name, one in value.items()} if key == "properties" else _without_titles(value)
            for key, value in schema.items()
            if key != "title"
        }
    return [_without_titles(one) for one in schema] if isinstance(schema, list) else schema


def _told_of(text: str) -> dict[str, str]:
    """What a docstring's `Args:` says of each parameter."""
    _, found, rest = text.partition("Args:\n")
    told: dict[str, str] = {}
    for line in rest.splitlines() if found else []:
        if line.strip() and not line.startswith((" ", "\t")):
            break
        match = re.fullmatch(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)", line)
        if match:
            told[match[1]] = match[2].strip()
    return told
