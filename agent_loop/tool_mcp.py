"""The tools of an MCP server, through the official client.

Invariant: a connection lives on a side loop of its own, so a server that hangs keeps no rollout and no other tool from running;
one that was lost is made again at the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.side_loop import SideLoop
from agent_loop.tools import ToolContext


class McpServer:
    """One server: a URL (streamable HTTP), or a command that speaks over its standard input and output."""

    def __init__(self, address: str, *, start_timeout_s: float, timeout_s: float) -> None:
        self.address = address
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._side = SideLoop(f"mcp {address[:40]}")
        self._client: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._opening: asyncio.Lock | None = None

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
        return await self._side.run(
            lambda: self._call(name, dict(arguments)), timeout_s=self._timeout_s + 1, what=f"tool {name} of {self.address}"
        )

    async def close(self) -> None:
        """Disconnect; a process that was started ends."""
        with contextlib.suppress(Exception):
            await self._side.run(self._disconnect, timeout_s=5.0, what=f"the end of MCP server {self.address}")
        self._side.close()

    # ── on the side loop ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _list(self) -> list[Any]:
        client = await self._connected()
        return list((await client.list_tools()).tools)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        try:
            client = await self._connected()
            result = await client.call_tool(name, arguments, read_timeout_seconds=self._timeout_s)
        except MCPError as error:
            if self._keeper is None or self._keeper.done():
                raise ToolUnavailable(f"MCP server {self.address}: {_words(error)}") from error
            raise RuntimeError(str(error)) from error
        except Exception as error:
            await self._disconnect()
            raise ToolUnavailable(f"MCP server {self.address}: {_words(error)}") from error
        text = "\n".join(part.text if hasattr(part, "text") else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def _connected(self) -> Any:
        """The client is opened and closed by one task, as its library asks."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._keeper is None or self._keeper.done():
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._keeper = asyncio.create_task(self._keep(ready))
                async with asyncio.timeout(self._start_timeout_s):
                    self._client = await ready
        return self._client

    async def _keep(self, ready: asyncio.Future[Any]) -> None:
        from mcp import Client, StdioServerParameters

        if self.address.startswith(("http://", "https://")):
            server: Any = self.address
        else:
            command, *arguments = shlex.split(self.address)
            server = StdioServerParameters(command=command, args=arguments)
        try:
            async with Client(server, read_timeout_seconds=self._timeout_s) as client:
                if not ready.done():
                    ready.set_result(client)
                await asyncio.get_running_loop().create_future()
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it
            if not ready.done():
                ready.set_exception(ToolUnavailable(_words(error)))

    async def _disconnect(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait((keeper,), timeout=4.0)


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


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
