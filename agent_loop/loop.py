"""The seam of agent loops: user code enters here by dotted path.

A loop appends observations to its session and asks it for turns. It returns when the episode is over; what is trained is what
the session recorded, so a loop cannot hand in tokens that were not sampled.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent_loop.errors import USER_CODE_FAILURES, AgentLoopError, LoopError, words_of
from agent_loop.session import Session
from agent_loop.task import Task
from configs.schema import GatewaySettings, ToolSettings


class AgentLoop(Protocol):
    """One episode. An instance serves many rollouts at once: it keeps no state of a single one.

    A class attribute `resumable = True` says that an episode may be continued in another process: `run` is called again with a
    session that gives back the recorded turns, and what is done between them must depend on nothing but the task, the turns and
    the results of `session.once`. Without it a rollout that a death of its process cut off starts over.

    Optional beside `run`: a class method `set_up(setup: LoopSetup)` that makes the instance; `async open()` before the first
    rollout and `async close()` after the last; class attributes `calls_tools = True`, and `shows` with the roles of what
    it shows in a `Conversation` (`("tool",)`), so that the model's chat template is checked for them; a method `schemas()`
    with the JSON schemas of the tools that it tells with the task's messages, which count against the prompt's limit.
    """

    async def run(self, task: Task, session: Session) -> None:
        """Play `task` to its end in `session`. Any exception fails this rollout and no other one."""
        ...


def is_resumable(loop: AgentLoop) -> bool:
    """Whether its episodes may be continued from their recorded pieces."""
    return getattr(loop, "resumable", False) is True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """What a loop's class may ask for when it is made, by a class method `set_up(setup)`."""

    tools: ToolSettings
    environment: str | None
    """Dotted path (`rollouter.environment`)."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    run_dir: Path | None = None


SHIPPED = {
    "single_turn": "agent_loop.single_turn:SingleTurn",
    "tool_calling": "agent_loop.tool_calling:ToolCalling",
    "environment": "agent_loop.environment:EnvironmentLoop",
    "program": "agent_loop.program:Program",
    "external": "agent_loop.external:External",
}
"""Agent loops by name."""
OTHER_NAMES = {"single_turn_agent": "single_turn", "tool_agent": "tool_calling"}
"""What verl's rows say."""


def path_of(name: str) -> str:
    """The dotted path that `name` stands for: a shipped loop's, or itself."""
    return SHIPPED.get(OTHER_NAMES.get(name, name), name)


def load_agent_loop(path: str, setup: LoopSetup | None = None) -> AgentLoop:
    """An instance of the class at `module:Class`, or of a shipped one by its name; made by its class method `set_up`, if it has
    one, else without arguments.

    Raises LoopError naming what is missing, ToolError.
    """
    path = path_of(path)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        known = ", ".join(SHIPPED)
        raise LoopError(f"rollouter.agent_loop: got {path!r}, expected one of {known}, or `module:Class`")
    try:
        module = importlib.import_module(module_name)
    except USER_CODE_FAILURES as error:
        raise LoopError(f"rollouter.agent_loop: got {path!r}, and {module_name} does not import: {words_of(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "run", None)):
        raise LoopError(f"rollouter.agent_loop: got {path!r}, expected a class with `async def run(task, session)`")
    set_up = getattr(found, "set_up", None)
    try:
        loop: AgentLoop = found() if set_up is None else set_up(setup or LoopSetup(tools=ToolSettings(), environment=None))
    except AgentLoopError:
        raise
    except USER_CODE_FAILURES as error:
        how = "without arguments" if set_up is None else "by its set_up"
        raise LoopError(f"rollouter.agent_loop: {path} cannot be made {how}: {words_of(error)}") from error
    return loop
