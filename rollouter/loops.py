"""Which agent loop plays a task.

Invariant: a name that no loop answers to is an error before anything is generated, as far as the rows are known by then; no
row silently plays another loop than it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from agent_loop.chat import ChatCodec
from agent_loop.errors import USER_CODE_FAILURES, AgentLoopError, LoopError, words_of
from agent_loop.loop import OTHER_NAMES, SHIPPED, AgentLoop, LoopSetup, load_agent_loop, path_of
from agent_loop.task import Task
from agent_loop.template_check import Finding, Usage, check_template
from agent_loop.tool_formats import ToolFormat
from configs.errors import ConfigError
from configs.schema import Settings, ToolSettings
from rollouter.data.framing import Framing

log = structlog.get_logger()


def setup_of(settings: Settings) -> LoopSetup:
    return LoopSetup(
        tools=settings.tools,
        environment=settings.rollouter.environment,
        gateway=settings.gateway,
        run_dir=settings.run_dir,
    )


class Loops:
    """By name; each is made once."""

    def __init__(self, default: AgentLoop, *, default_path: str, names: Sequence[str], setup: LoopSetup) -> None:
        """`names` are `NAME=module:Class`. Raises ConfigError."""
        self._default = default
        self._setup = setup
        self._default_path = path_of(default_path)
        self._loops: dict[str, AgentLoop] = {self._default_path: default}
        self._paths: dict[str, str] = {}
        self._opened: set[str] = set()
        self._told: set[Finding] = set()
        self._is_open = False
        for entry in names:
            name, equals, path = entry.partition("=")
            if not equals or not name or not path:
                raise ConfigError(f"rollouter.agent_loops: got {entry!r}, expected NAME=module:Class")
            self._paths[name] = path

    def of(self, task: Task) -> AgentLoop:
        """The loop that plays `task`. Raises LoopError, ToolError."""
        return self._find(task, may_be_late=False)

    def _find(self, task: Task, *, may_be_late: bool) -> AgentLoop:
        """`may_be_late`: whoever asks will open what is made here."""
        if not task.agent_name:
            return self._default
        path = path_of(self._paths.get(task.agent_name, task.agent_name))
        if path not in self._loops:
            if ":" not in path:
                known = ", ".join([*SHIPPED, *self._paths])
                raise LoopError(f"agent_name: got {task.agent_name!r}, expected one of {known}, or module:Class")
            loop = load_agent_loop(path, self._setup)
            if self._is_open and not may_be_late and hasattr(loop, "open"):
                raise LoopError(
                    f"agent_name: got {task.agent_name!r}, whose loop must prepare before the first rollout: name it in "
                    "rollouter.agent_loops (NAME=module:Class)"
                )
            self._loops[path] = loop
        return self._loops[path]

    def make_named(self) -> None:
        """Make the loops that the settings name or are about, before any row is known. Raises ConfigError."""
        about = {"tool_calling": bool(self._setup.tools.sources), "environment": self._setup.environment is not None}
        paths = [*self._paths.values(), *(name for name, is_meant in about.items() if is_meant)]
        for path in map(path_of, paths):
            if path not in self._loops:
                try:
                    self._loops[path] = load_agent_loop(path, self._setup)
                except AgentLoopError as error:
                    raise ConfigError(f"agent loop {path}: {error}") from error

    def check(self, tasks: Iterable[Task]) -> None:
        """Make the loops that `tasks` name. Raises ConfigError naming the first task whose loop is not there.

        Warns when tools are named and no row plays a loop that calls them.
        """
        seen: dict[str, Task] = {}
        for task in tasks:
            seen.setdefault(task.agent_name, task)
        for task in seen.values():
            try:
                self._find(task, may_be_late=True)
            except AgentLoopError as error:
                raise ConfigError(f"task {task.task_id}: {error}") from error
        if seen and self._setup.tools.sources and not any(calls_tools(self.of(task)) for task in seen.values()):
            log.warning("tools are set, and no row plays an agent loop that calls them", tools=list(self._setup.tools.sources))

    def check_template(self, codec: ChatCodec) -> None:
        """See what the model's chat template does to conversations of the loops made so far: a warning for each thing found,
        once.

        Raises ConfigError where no rollout of a loop could work.
        """
        for found, path in self.template_findings(codec).items():
            if found.is_error:
                raise ConfigError(f"agent loop {path}: {found}")
            if found in self._told:
                continue
            self._told.add(found)
            log.warning("chat template", agent_loop=path, trait=found.trait.value, found=found.found, follows=found.follows)

    def template_findings(self, codec: ChatCodec) -> dict[Finding, str]:
        """Each with the path of the first loop that it concerns."""
        findings: dict[Finding, str] = {}
        for path, loop in self._loops.items():
            usage = usage_of(loop, self._setup.tools)
            for found in check_template(codec, usage) if usage is not None else ():
                findings.setdefault(found, path)
        return findings

    async def open_tools(self) -> None:
        """Let those that tell tools prepare: what they tell is asked for before prompts are measured. Raises ConfigError."""
        await self._open({path: loop for path, loop in self._loops.items() if hasattr(loop, "schemas")})

    async def open(self) -> None:
        """Let those that ask for it prepare, each once: the first rollout is about to be played. Raises ConfigError."""
        self._is_open = True
        await self._open(self._loops)

    async def _open(self, loops: Mapping[str, AgentLoop]) -> None:
        for path, loop in loops.items():
            begin: Any = getattr(loop, "open", None)
            if begin is None or path in self._opened:
                continue
            self._opened.add(path)
            try:
                await begin()
            except AgentLoopError as error:
                raise ConfigError(f"agent loop {path}: {error}") from error

    def framing(self) -> Framing:
        """What the loops made so far put around a row's prompt, by the names that a row may call them. Raises ConfigError."""
        paths = {name: name for name in (*SHIPPED, *OTHER_NAMES, *self._loops)} | self._paths | {"": self._default_path}
        found: dict[str, list[dict[str, Any]]] = {}
        for name, path in paths.items():
            loop = self._loops.get(path_of(path))
            usage = None if loop is None else usage_of(loop, self._setup.tools)
            if loop is not None and usage is not None and not usage.gives_calls:
                found[name] = _schemas_of(loop, path)
        return Framing(tools=found)

    async def close(self) -> None:
        """Once, whoever comes first."""
        loops, self._loops = self._loops, {}
        for loop in loops.values():
            end: Any = getattr(loop, "close", None)
            if end is not None:
                await end()


def usage_of(loop: AgentLoop, tools: ToolSettings) -> Usage | None:
    """What it wants of the chat template; None: nothing that is known."""
    shows: tuple[str, ...] = getattr(loop, "shows", ("tool",) if calls_tools(loop) else ())
    if not shows:
        return None
    return Usage(
        shows=tuple(shows),
        calls_tools=calls_tools(loop),
        gives_calls="tool" in shows and not calls_tools(loop),
        tool_format="auto" if tools.format == "auto" else ToolFormat(tools.format),
        history=tools.history,
    )


def _schemas_of(loop: AgentLoop, path: str) -> list[dict[str, Any]]:
    schemas: Any = getattr(loop, "schemas", None)
    try:
        return [] if schemas is None else [dict(schema) for schema in schemas()]
    except USER_CODE_FAILURES as error:
        raise ConfigError(f"agent loop {path}: its schemas() raised {words_of(error)}") from error


def calls_tools(loop: AgentLoop) -> bool:
    return getattr(loop, "calls_tools", False) is True
