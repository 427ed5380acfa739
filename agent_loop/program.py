"""The agent loop that starts a program for each rollout: any agent that speaks to an OpenAI-compatible URL.

Invariant: the program and its process group end with the rollout, whatever it does. A program that fails fails its rollout: it
never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Self

import orjson
import structlog

from agent_loop.chat import chat_codec_of
from agent_loop.errors import LoopError, Unscored
from agent_loop.gateway.asks import Refusal
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.server import Gateway, read_reward
from agent_loop.loop import LoopSetup
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.tool_formats import ToolFormat, format_of_template
from configs.schema import GatewaySettings, ToolSettings

log = structlog.get_logger()

_KEPT_BYTES = 1 << 16


class Program:
    """Starts `gateway.command`; its calls of the model are the rollout's turns."""

    shows = ("system", "user", "tool")

    def __init__(self, settings: GatewaySettings, tools: ToolSettings) -> None:
        self._settings = settings
        self._tools = tools
        self._gateway = Gateway(settings)

    @classmethod
    def set_up(cls, setup: LoopSetup) -> Self:
        """Raises LoopError where no command is named."""
        if not setup.gateway.command:
            raise LoopError("gateway.command: got none, and the agent loop program needs one")
        return cls(setup.gateway, setup.tools)

    async def open(self) -> None:
        """Raises LoopError when nobody can listen."""
        try:
            await self._gateway.start()
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise LoopError(f"gateway: cannot listen at {where}: {error.strerror or error}") from error

    async def close(self) -> None:
        await self._gateway.stop()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`. Raises LoopError when the program fails, Unscored when it leaves no reward that was asked of it,
        and what the engine raised."""
        tool_format = self._tools.format
        template = chat_codec_of(session).chat_template
        branches = Branches(
            session,
            tool_format=format_of_template(template) if tool_format == "auto" else ToolFormat(tool_format),
            history=self._tools.history,
        )
        served = self._gateway.open(session, branches)
        try:
            url = self._gateway.url(served)
            status, output = await self._play(
                {
                    "OPENAI_BASE_URL": f"{url}/v1",
                    "OPENAI_API_KEY": served.token,
                    "HEADRACE_REWARD_URL": f"{url}/reward",
                    "HEADRACE_TASK": _task(task),
                },
                session.rollout_id,
            )
        finally:
            await self._gateway.close(served)
        if served.failure is not None:
            raise served.failure
        if status != 0:
            raise LoopError(f"rollout {session.rollout_id}: the program ended with status {status}: {_end_of(output)!r}")
        if session.reward is None and self._settings.reward == "last_line":
            session.reward, session.reward_parts = _last_line(output, session.rollout_id)
        if session.reward is None and self._settings.reward == "posted":
            raise Unscored(f"rollout {session.rollout_id}: the program ended and posted no reward")

    async def _play(self, variables: dict[str, str], rollout_id: str) -> tuple[int, bytes]:
        """(exit status, the end of its output)."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._settings.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            why = error.strerror or error
            raise LoopError(f"gateway.command: {self._settings.command[0]} cannot be started: {why}") from error
        assert process.stdout is not None, "a pipe was asked for"
        kept = bytearray()
        reading = asyncio.create_task(_keep_end(process.stdout, kept))
        try:
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Whoever left the group may hold the pipe open: what is there by now is read, and no more.
            await asyncio.wait((reading,), timeout=1.0)
            reading.cancel()
        log.debug("program ended", rollout_id=rollout_id, status=status, output=_end_of(bytes(kept)))
        return status, bytes(kept)


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        kept += chunk
        if len(kept) > _KEPT_BYTES:
            del kept[:-_KEPT_BYTES]


def _task(task: Task) -> str:
    """Raises LoopError for a task that is no plain data."""
    told = {
        "task_id": task.task_id,
        "prompt": task.prompt_text,
        "messages": [dict(message) for message in task.messages],
        "ground_truth": task.ground_truth,
        "data_source": task.data_source,
        "extra_info": dict(task.extra_info),
    }
    try:
        return orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError as error:
        raise LoopError(f"task {task.task_id}: cannot be told to a program as JSON: {error}") from error


def _last_line(output: bytes, rollout_id: str) -> tuple[float, dict[str, float]]:
    """Raises Unscored where it is no reward."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        return read_reward(orjson.loads(lines[-1]))
    except (IndexError, orjson.JSONDecodeError, Refusal) as error:
        line = lines[-1][:200] if lines else ""
        raise Unscored(f"rollout {rollout_id}: got {line!r} as the program's last line, expected a reward") from error


def _end_of(output: bytes) -> str:
    return output[-500:].decode("utf-8", "replace").strip()
