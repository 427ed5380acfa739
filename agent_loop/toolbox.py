"""The tools of a run, and how their calls are made.

Invariant: a call ends by its deadline with text for the model, or fails its rollout because the tool's infrastructure failed.
What the model sees of it never exceeds the limit in tokens. No call runs on the rollouts' event loop.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog

from agent_loop.errors import USER_CODE_FAILURES, ToolError, ToolLost, ToolUnavailable, words_of
from agent_loop.session import TextCodec
from agent_loop.side_loop import SideLoop, in_thread
from agent_loop.tool_formats import Call, Malformed
from agent_loop.tool_mcp import McpServer
from agent_loop.tool_python import PythonTool, SandboxTool
from agent_loop.tool_schema import ArgumentCheck
from agent_loop.tool_text import clean, cut, is_text, max_characters, text_of
from agent_loop.tools import FunctionTool, Tool, ToolContext, schema_for_template
from configs.schema import ToolSettings

log = structlog.get_logger()

_WATCHED_CALLS = 256
_MIN_WATCHED_CALLS = 32
_RETRY_AFTER_S = 0.25


class Outcome(StrEnum):
    """How a call ended; each is counted under its own name."""

    RETURNED = "tool_calls_returned"
    RAISED = "tool_calls_raised"
    TIMED_OUT = "tool_calls_timed_out"
    MALFORMED = "tool_parse_errors"
    """It could not be read, there is no such tool, or its arguments do not fit."""
    REFUSED = "tool_calls_refused"
    """Beyond a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the model is shown of a call."""

    name: str
    text: str
    outcome: Outcome


class ToolBox:
    """Belongs to one event loop; serves all rollouts."""

    def __init__(self, settings: ToolSettings, tools: Sequence[Tool] = ()) -> None:
        """`tools` come beside those of `settings.sources`, which `open` makes."""
        self._settings = settings
        self._tools: dict[str, Tool] = {}
        self._checks: dict[str, ArgumentCheck] = {}
        self._servers: list[McpServer] = []
        self._side = SideLoop("tools", max_stuck=settings.max_concurrent)
        self._places: asyncio.Semaphore | None = None
        self._watched: deque[bool] = deque(maxlen=_WATCHED_CALLS)
        self._is_alarmed = False
        self._add(tools)

    async def open(self) -> None:
        """Load the tools that the settings name. Raises ToolError."""
        for source in self._settings.sources:
            self._add(await self._of_source(source))

    async def close(self) -> None:
        """End servers, and what runs on the side."""
        for server in self._servers:
            await server.close()
        self._side.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [schema_for_template(tool) for tool in self._tools.values()]

    @property
    def parse_error_rate(self) -> float:
        """Share of malformed calls among the last ones; 0 while there was none."""
        return 1 - sum(self._watched) / len(self._watched) if self._watched else 0.0

    async def make(
        self,
        calls: Sequence[Call | Malformed],
        *,
        calls_left: int,
        rollout_id: str,
        tools_kwargs: Mapping[str, Any],
        codec: TextCodec,
    ) -> list[Result]:
        """Make the calls of one turn, at once, and give their results in order; `calls_left` may still be made in the rollout.

        Raises ToolUnavailable.
        """
        made: list[asyncio.Task[Result]] = []
        limit = min(self._settings.max_calls_per_turn, calls_left)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, call in enumerate(calls):
                    work = self._refuse(call, limit) if number >= limit else self._one(call, rollout_id, tools_kwargs, codec)
                    made.append(tasks.create_task(work))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return [task.result() for task in made]

    async def _refuse(self, call: Call | Malformed, limit: int) -> Result:
        text = f"Error: not executed, only {limit} more calls may be made."
        return Result(name=_name_of(call), text=text, outcome=Outcome.REFUSED)

    async def _one(self, call: Call | Malformed, rollout_id: str, tools_kwargs: Mapping[str, Any], codec: TextCodec) -> Result:
        why = await self._problem(call)
        self._watch(why is None)
        if why is not None or isinstance(call, Malformed):
            text = cut(f"Error: {why}", self._settings.max_output_tokens, codec)
            return Result(name=_name_of(call), text=text, outcome=Outcome.MALFORMED)
        kwargs = tools_kwargs.get(call.name, {})
        context = ToolContext(rollout_id=rollout_id, kwargs=kwargs if isinstance(kwargs, Mapping) else {})
        if self._places is None:
            self._places = asyncio.Semaphore(self._settings.max_concurrent)
        async with self._places:
            outcome, text = await self._call(self._tools[call.name], call, context)
        return Result(name=call.name, text=cut(text, self._settings.max_output_tokens, codec), outcome=outcome)

    async def _call(self, tool: Tool, call: Call, context: ToolContext) -> tuple[Outcome, str]:
        timeout_s = self._settings.timeout_s
        for attempt in range(self._settings.retries + 1):
            try:
                return await self._side.run(
                    lambda: self._rendered(tool, call, context), timeout_s=timeout_s, what=f"tool {tool.name}"
                )
            except ToolLost:
                raise
            except ToolUnavailable as error:
                why = error
            except TimeoutError as error:
                log.warning("tool call given up", tool=tool.name, rollout_id=context.rollout_id, error=words_of(error))
                if not await self._is_lost(tool):
                    return Outcome.TIMED_OUT, f"Error: {tool.name} gave no result within {timeout_s:g} s."
                why = ToolUnavailable(f"its server was lost: {words_of(error)}")
            except RuntimeError as error:  # it cancelled itself
                return Outcome.RAISED, f"Error: {words_of(error)}"
            if attempt < self._settings.retries:
                log.warning("tool unavailable, tried again", tool=tool.name, attempt=attempt, error=words_of(why))
                await asyncio.sleep(_RETRY_AFTER_S * 2**attempt)
        raise ToolUnavailable(
            f"rollout {context.rollout_id}: tool {tool.name} was unavailable {self._settings.retries + 1} times: {why}"
        ) from why

    async def _is_lost(self, tool: Tool) -> bool:
        """Whether a call got no answer because nobody is there any more who could give one."""
        ask: Any = getattr(tool, "is_lost", None)
        if ask is None:
            return False
        try:
            return bool(await self._side.run(ask, timeout_s=self._settings.timeout_s, what=f"the state of tool {tool.name}"))
        except (ToolUnavailable, TimeoutError):
            return True

    async def _rendered(self, tool: Tool, call: Call, context: ToolContext) -> tuple[Outcome, str]:
        """On the side: what becomes of the call, as text."""
        longest = max_characters(self._settings.max_output_tokens)
        try:
            value = await tool.call(call.arguments, context)
        except (ToolUnavailable, TimeoutError, asyncio.CancelledError):
            raise
        except BaseException as error:  # noqa: BLE001 - of code that is not ours
            words = await in_thread(functools.partial(words_of, error), name=f"words-{tool.name}")
            return Outcome.RAISED, f"Error: {words[:longest]}"
        if is_text(value):
            return Outcome.RETURNED, text_of(value, max_characters=longest)
        text = await in_thread(lambda: text_of(value, max_characters=longest), name=f"text-{tool.name}")
        return Outcome.RETURNED, text

    async def _problem(self, call: Call | Malformed) -> str | None:
        """Why the call cannot be made, in words for the model. Raises ToolUnavailable."""
        if isinstance(call, Malformed):
            return call.why
        check = self._checks.get(call.name)
        if check is None:
            return f"got the tool name {call.name[:80]!r}, expected one of {', '.join(self.names)}"
        if not check.may_take_long(call.arguments):
            return check.problem(call.arguments)
        work = functools.partial(check.problem, call.arguments)
        try:
            return await self._side.run(
                lambda: in_thread(work, name=f"check-{call.name}"),
                timeout_s=self._settings.timeout_s,
                what=f"the check of the arguments of {call.name}",
            )
        except TimeoutError as error:
            return words_of(error)

    def _watch(self, was_read: bool) -> None:
        self._watched.append(was_read)
        rate, limit = self.parse_error_rate, self._settings.parse_error_alert
        if len(self._watched) < _MIN_WATCHED_CALLS:
            return
        if rate > limit and not self._is_alarmed:
            log.warning("many tool calls are malformed", rate=round(rate, 3), alert=limit, of_calls=len(self._watched))
        self._is_alarmed = rate > limit

    def _add(self, tools: Sequence[Tool]) -> None:
        for tool in tools:
            if tool.name in self._tools:
                raise ToolError(f"tools.sources: got two tools with the name {tool.name!r}")
            check = ArgumentCheck(tool.name, tool.parameters)
            self._tools[tool.name], self._checks[tool.name] = tool, check

    async def _of_source(self, source: str) -> list[Tool]:
        settings = self._settings
        if source == "python":
            return [PythonTool(timeout_s=settings.timeout_s, memory_bytes=settings.python_memory_bytes)]
        if source == "sandbox":
            if settings.sandbox_url is None:
                raise ToolError("tools.sources: got sandbox without tools.sandbox_url")
            return [SandboxTool(settings.sandbox_url, timeout_s=settings.timeout_s)]
        if source.startswith("mcp:"):
            server = McpServer(
                source.removeprefix("mcp:"), start_timeout_s=settings.start_timeout_s, timeout_s=settings.timeout_s
            )
            self._servers.append(server)
            return usable(await server.tools(), server.address)
        return load_tools(source)


def load_tools(path: str) -> list[Tool]:
    """What stands at `module:name`: a function, a tool, or several of them. Raises ToolError."""
    module_name, colon, name = path.partition(":")
    if not colon or not name:
        raise ToolError(f"tools.sources: got {path!r}, expected `python`, `sandbox`, `mcp:…` or `module:name`")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except USER_CODE_FAILURES as error:
        raise ToolError(f"tools.sources: got {path}, which does not import: {words_of(error)}") from error
    return [_tool(one, path) for one in (found if isinstance(found, (list, tuple)) else [found])]


def usable(tools: Sequence[Tool], address: str) -> list[Tool]:
    """Those whose arguments can be checked; nobody here can mend the others. Raises ToolError where there is none."""
    usable: list[Tool] = []
    why = ""
    for tool in tools:
        try:
            ArgumentCheck(tool.name, tool.parameters)
        except ToolError as error:
            why = str(error)
            log.warning("tool of an MCP server left out", tool=tool.name, server=address, error=why)
        else:
            usable.append(tool)
    if not usable:
        raise ToolError(f"tools.sources: MCP server {address} offers no tool that can be used: {why}")
    return usable


def _tool(found: Any, path: str) -> Tool:
    if callable(getattr(found, "call", None)) and isinstance(getattr(found, "parameters", None), Mapping):
        tool: Tool = found
        return tool
    function: Callable[..., Any] = found
    if not callable(function) or isinstance(function, type):
        raise ToolError(f"tools.sources: got {type(found).__name__} at {path}, expected a function or a tool")
    return FunctionTool(function)


def _name_of(call: Call | Malformed) -> str:
    return clean(call.name) if isinstance(call, Call) else "unknown"
