"""The seam of agent loops: user code enters here by dotted path.

A loop appends observations to its session and asks it for turns. It returns when the episode is over; what is trained is what
the session recorded, so a loop cannot hand in tokens that were not sampled.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from agent_loop.errors import USER_CODE_FAILURES, LoopError, words_of
from agent_loop.session import Session
from agent_loop.task import Task


class AgentLoop(Protocol):
    """One episode. An instance serves many rollouts at once: it keeps no state of a single one.

    A class attribute `resumable = True` says that an episode may be continued in another process: `run` is called again with a
    session that gives back the recorded turns, and what is done between them must depend on nothing but the task, the turns and
    the results of `session.once`. Without it a rollout that a death of its process cut off starts over.
    """

    async def run(self, task: Task, session: Session) -> None:
        """Play `task` to its end in `session`. Any exception fails this rollout and no other one."""
        ...


def is_resumable(loop: AgentLoop) -> bool:
    """Whether its episodes may be continued from their recorded pieces."""
    return getattr(loop, "resumable", False) is True


def load_agent_loop(path: str) -> AgentLoop:
    """An instance of the class at `module:Class`.

    Raises LoopError naming what is missing.
    """
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise LoopError(f"rollouter.agent_loop: got {path!r}, expected `module:Class`")
    try:
        module = importlib.import_module(module_name)
    except USER_CODE_FAILURES as error:
        raise LoopError(f"rollouter.agent_loop: got {path!r}, and {module_name} does not import: {words_of(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "run", None)):
        raise LoopError(f"rollouter.agent_loop: got {path!r}, expected a class with `async def run(task, session)`")
    try:
        loop: AgentLoop = found()
    except USER_CODE_FAILURES as error:
        raise LoopError(f"rollouter.agent_loop: {path} cannot be made without arguments: {words_of(error)}") from error
    return loop
