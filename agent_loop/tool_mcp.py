"""The tools of an MCP server, through the official client.

Invariant: a connection lives on a side loop of its own, so a server that hangs keeps no rollout and no other tool from running;
one that was lost is made again at the next call. What a server was asked when it was lost is unavailable, never an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

import structlog

from agent_loop.errors import ToolError, ToolUnavailable, words_of
from agent_loop.side_loop import SideLoop
from agent_loop.tools import ToolContext

log = structlog.get_logger()

_ANSWERS_WITHIN_S = 2.0


class McpServer:
    """One server: a URL (streamable HTTP), or a command that speaks over its standard input and output."""

    def __init__(self, address: str, *, start_timeout_s: float, timeout_s: float) -> None:
        self.address = address
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._side = SideLoop(f"mcp {address[:40]}")
        self._connection: _Connection | None = None
        self._left: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[McpTool]:
        """What the server offers. Raises ToolError naming the server."""
        try:
            listed = await self._side.run(self._list, timeout_s=self._start_timeout_s, what=f"MCP server {self.address}")
        except Exception as error:
            raise ToolError(f"tools.sources: MCP server {self.address} cannot be used: {_words(error)}") from error
        if not listed:
            raise ToolError(f"tools.sources: MCP server {self.address} offers no tool")
        return [McpTool(self, name=one.name, description=one.description or "", parameters=one.input_schema) for one in listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool's text. Raises RuntimeError with the text of a failure, ToolUnavailable when the connection failed."""
        return await self._side.run(  # the deadline is the tool box's; this one only ends what nobody waits for any more
            lambda: self._call(name, dict(arguments)),
            timeout_s=self._timeout_s + 2 * _ANSWERS_WITHIN_S,
            what=f"tool {name} of {self.address}",
        )

    async def is_lost(self) -> bool:
        """Whether a call that got no answer got none for the server's sake: it does not even tell its tools. Then it is let go
        of, and started anew at the next call."""
        try:
            return await self._side.run(self._is_lost, timeout_s=2 * _ANSWERS_WITHIN_S, what=f"MCP server {self.address}")
        except (ToolUnavailable, TimeoutError):
            return True

    async def close(self) -> None:
        """Disconnect; a process that was started ends."""
        with contextlib.suppress(Exception):
            await self._side.run(self._disconnect, timeout_s=6.0, what=f"the end of MCP server {self.address}")
        self._side.close()

    # ── on the side loop ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _list(self) -> list[Any]:
        client = await self._connected().client()
        return list((await client.list_tools()).tools)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        connection = self._connected()
        try:
            client = await connection.client()
            result = await client.call_tool(name, arguments, read_timeout_seconds=2 * self._timeout_s)
        except MCPError as error:
            if await self._answers(connection):
                raise RuntimeError(str(error)) from error
            raise ToolUnavailable(f"MCP server {self.address}: {_words(error)}") from error
        except Exception as error:
            self._let_go(connection)
            raise ToolUnavailable(f"MCP server {self.address}: {_words(error)}") from error
        text = "\n".join(part.text if hasattr(part, "text") else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def _is_lost(self) -> bool:
        connection = self._connection
        if connection is None or not connection.is_of_this_loop or not connection.is_open:
            return True  # or on its way, and the next call waits for it
        return not await self._answers(connection)

    async def _answers(self, connection: _Connection) -> bool:
        """Whether the server does; if not it is let go of. Asked for its tools, as every one of its kind can be; an error is no
        answer: the session may have ended with the server."""
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                await (await connection.client()).session.list_tools()
        except Exception:  # noqa: BLE001 - whatever it was, there is no answer
            self._let_go(connection)
            return False
        return True

    def _connected(self) -> _Connection:
        found = self._connection
        if found is None or not found.is_of_this_loop or found.keeper.done():
            found = self._connection = _Connection(
                self.address, start_timeout_s=self._start_timeout_s, timeout_s=self._timeout_s
            )
        return found

    def _let_go(self, connection: _Connection) -> None:
        """What else was asked over it fails too, so the caller's reason is the same for all."""
        if connection is self._connection:
            self._connection = None
            log.warning("MCP server lost", server=self.address)
        if not connection.keeper.done():
            connection.keeper.cancel()
            self._left.add(connection.keeper)
            connection.keeper.add_done_callback(self._left.discard)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        ending = {*self._left, *([connection.keeper] if connection and connection.is_of_this_loop else [])}
        for keeper in ending:
            keeper.cancel()
        if ending:
            await asyncio.wait(ending, timeout=5.0)


class _Connection:
    """A client, opened and closed by one task, as its library asks."""

    def __init__(self, address: str, *, start_timeout_s: float, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # nobody may be left to hear of it
        self.keeper = asyncio.create_task(self._keep(address, start_timeout_s, timeout_s))

    @property
    def is_of_this_loop(self) -> bool:
        return self._loop is asyncio.get_running_loop()

    @property
    def is_open(self) -> bool:
        """Whether the server was there once."""
        return self._ready.done()

    async def client(self) -> Any:
        """Raises ToolUnavailable."""
        return await asyncio.shield(self._ready)

    async def _keep(self, address: str, start_timeout_s: float, timeout_s: float) -> None:
        from mcp import Client, StdioServerParameters

        try:
            if address.startswith(("http://", "https://")):
                server: Any = address
            else:
                command, *arguments = shlex.split(address)
                server = StdioServerParameters(command=command, args=arguments)
            async with (
                asyncio.timeout(start_timeout_s) as limit,
                Client(server, read_timeout_seconds=max(timeout_s, start_timeout_s)) as client,
            ):
                limit.reschedule(None)
                self._ready.set_result(client)
                await self._loop.create_future()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(ToolUnavailable(_words(error)))
            if not isinstance(error, Exception):
                raise


class McpTool:
    """`Tool` of an MCP server."""

    def __init__(self, server: McpServer, *, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self._server = server
        self.name = name
        self.description = description
        self.parameters = parameters

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """See `McpServer.call`."""
        return await self._server.call(self.name, arguments)

    async def is_lost(self) -> bool:
        """See `McpServer.is_lost`."""
        return await self._server.is_lost()


def _words(error: BaseException) -> str:
    if isinstance(error, ToolUnavailable):
        return str(error)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return words_of(error)
