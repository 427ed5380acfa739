"""The agent loop that starts a program for each rollout: any agent that speaks to an OpenAI-compatible URL.

Invariant: the program and its process group end with the rollout, whatever it does. A program that fails fails its rollout: it
never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, Self

import orjson
import structlog

from agent_loop.chat import chat_codec_of
from agent_loop.errors import LoopError, Unscored
from agent_loop.gateway.asks import Refusal
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.http import read_reward
from agent_loop.gateway.program_process import beside_proxies, run_program
from agent_loop.gateway.served import facts_of
from agent_loop.gateway.server import Gateway
from agent_loop.loop import LoopSetup
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.tool_formats import ToolFormat, format_of_template
from configs.schema import GatewaySettings, ToolSettings

log = structlog.get_logger()

_PROGRAMS_PER_CORE = 4
_LEAST_PROGRAMS = 8
_MAX_VARIABLE_BYTES = 100_000
"""Linux takes no variable of more than 128 KiB (execve(2), MAX_ARG_STRLEN)."""


class Program:
    """Starts `gateway.command`; its calls of the model are the rollout's turns."""

    shows = ("system", "user", "tool")

    def __init__(self, settings: GatewaySettings, tools: ToolSettings) -> None:
        self._settings = settings
        self._tools = tools
        self._gateway = Gateway(settings)
        cores = len(os.sched_getaffinity(0))
        self._places = asyncio.Semaphore(settings.max_programs or max(_LEAST_PROGRAMS, _PROGRAMS_PER_CORE * cores))

    @classmethod
    def set_up(cls, setup: LoopSetup) -> Self:
        """Raises LoopError where no command is named."""
        if not setup.gateway.command:
            raise LoopError("gateway.command: got none, and the agent loop program needs one")
        check_command(setup.gateway)
        return cls(setup.gateway, setup.tools)

    async def open(self) -> None:
        """Raises LoopError when nobody can listen."""
        await listen(self._gateway, self._settings)

    async def close(self) -> None:
        await self._gateway.stop()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`. Raises LoopError when the program fails, Unscored when it leaves no reward that was asked of it,
        and what the engine raised."""
        told = task_of(task)
        branches = branches_of(session, self._tools)
        if session.deadline is not None:
            session.deadline.hold()
        async with self._places:
            if session.deadline is not None:
                session.deadline.begin()
            await self._play(told, session, branches)
        check_reward(session, self._settings)

    async def _play(self, told: Any, session: Session, branches: Branches) -> None:
        served = self._gateway.open(session, branches)
        try:
            facts = facts_of(served, self._gateway.url(served))
            variables = {
                "OPENAI_BASE_URL": facts["base_url"],
                "OPENAI_API_KEY": facts["api_key"],
                "HEADRACE_REWARD_URL": facts["reward_url"],
                **beside_proxies(self._gateway.host),
            }
            with _task_in(variables, told):
                ended = await run_program(self._settings.command, variables)
        finally:
            await self._gateway.close(served)
        log.debug("program ended", rollout_id=session.rollout_id, status=ended.status, said=ended.words)
        if served.failure is not None:
            raise served.failure
        if ended.status != 0:
            raise LoopError(f"rollout {session.rollout_id}: the program ended with status {ended.status}: {ended.words!r}")
        if session.reward is None and self._settings.reward == "last_line":
            session.reward, session.reward_parts = _last_line(ended.output, session.rollout_id)


def check_command(settings: GatewaySettings) -> None:
    """Raises LoopError for a program that is not there."""
    name = settings.command[0]
    if name != "python" and shutil.which(name) is None:
        raise LoopError(f"gateway.command: {name} is no program that can be started from here")


async def listen(gateway: Gateway, settings: GatewaySettings) -> None:
    """Raises LoopError when nobody can listen there."""
    try:
        await gateway.start()
    except OSError as error:
        raise LoopError(f"gateway: cannot listen at {settings.host}:{settings.port}: {error.strerror or error}") from error


def branches_of(session: Session, tools: ToolSettings) -> Branches:
    """Raises LoopError where the model has no chat template."""
    template = chat_codec_of(session).chat_template
    tool_format = format_of_template(template) if tools.format == "auto" else ToolFormat(tools.format)
    return Branches(session, tool_format=tool_format, history=tools.history)


def task_of(task: Task) -> Any:
    """As plain data. Raises LoopError for a task that is none."""
    told = {
        "task_id": task.task_id,
        "prompt": task.prompt_text,
        "messages": [dict(message) for message in task.messages] or [{"role": "user", "content": task.prompt_text}],
        "ground_truth": task.ground_truth,
        "data_source": task.data_source,
        "extra_info": dict(task.extra_info),
    }
    try:
        return orjson.loads(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError as error:
        raise LoopError(f"task {task.task_id}: cannot be told to a program as JSON: {error}") from error


@contextlib.contextmanager
def _task_in(variables: dict[str, str], told: Any) -> Iterator[None]:
    """Inside, the program finds its task by `variables`: in one of them, or where it is too long for that in a file."""
    text = orjson.dumps(told)
    if len(text) <= _MAX_VARIABLE_BYTES:
        variables["HEADRACE_TASK"] = text.decode()
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="headrace-task-", suffix=".json") as file:
        file.write(text)
        file.flush()
        variables["HEADRACE_TASK_FILE"] = file.name
        yield


def check_reward(session: Session, settings: GatewaySettings) -> None:
    """Raises Unscored where a reward was to be posted, and none was."""
    if session.reward is None and settings.reward != "function":
        raise Unscored(f"rollout {session.rollout_id}: the program ended and posted no reward")


def _last_line(output: bytes, rollout_id: str) -> tuple[float, dict[str, float]]:
    """Raises Unscored where it is no reward."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        return read_reward(orjson.loads(lines[-1]))
    except (IndexError, orjson.JSONDecodeError, Refusal) as error:
        line = lines[-1][:200] if lines else ""
        raise Unscored(f"rollout {rollout_id}: got {line!r} as the program's last line, expected a reward") from error
