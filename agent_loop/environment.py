"""The agent loop for environments with `reset` and `step`: games, puzzles, reasoning-gym style tasks.

Invariant: the rollout's reward is the sum of the rewards of its steps, each of which also stands at the end of its turn as a
dense reward. An environment is made for each rollout and runs beside the rollouts' event loop.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from agent_loop.chat import Conversation
from agent_loop.errors import USER_CODE_FAILURES, LoopError, words_of
from agent_loop.loop import LoopSetup
from agent_loop.session import Session
from agent_loop.side_loop import SideLoop, in_thread
from agent_loop.task import Task
from configs.schema import ToolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an action led to."""

    observation: str
    """Shown to the model as the user's next message, unless the episode is over."""
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, by name; the last step's count."""


class Environment(Protocol):
    """One episode. Made without arguments; `reset` and `step` may be blocking functions or coroutines."""

    def reset(self, task: Task) -> Any:
        """What the model is shown behind the task's messages, as text; None or empty: nothing."""
        ...

    def step(self, action: str) -> Any:
        """A `Step`. `action` is the text of the model's turn."""
        ...


class EnvironmentLoop:
    """Plays until the environment says that it is over, `tools.max_turns`, or the end of the room. An episode that its process
    did not survive starts over: an environment's state is not recorded."""

    shows = ("user",)

    def __init__(self, make: Callable[[], Environment], settings: ToolSettings) -> None:
        self._make = make
        self._settings = settings
        self._side = SideLoop("environments", max_stuck=settings.max_concurrent)

    @classmethod
    def set_up(cls, setup: LoopSetup) -> Self:
        """Raises LoopError where no environment is named, or it does not import."""
        path = setup.environment
        module_name, colon, name = (path or "").partition(":")
        if not colon or not name:
            raise LoopError(f"rollouter.environment: got {path!r}, expected `module:Class`")
        try:
            found = getattr(importlib.import_module(module_name), name)
        except USER_CODE_FAILURES as error:
            raise LoopError(f"rollouter.environment: got {path}, which does not import: {words_of(error)}") from error
        if not all(callable(getattr(found, method, None)) for method in ("reset", "step")):
            raise LoopError(f"rollouter.environment: got {path}, expected a class with `reset` and `step`")
        return cls(found, setup.tools)

    async def close(self) -> None:
        self._side.close()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`. Raises TimeoutError when the environment is slower than `tools.timeout_s`."""
        environment = await self._ask(self._make, "an environment's making")
        shown = await self._ask(lambda: environment.reset(task), "an environment's reset")
        messages = list(task.messages or ({"role": "user", "content": task.prompt_text},))
        num_trusted = len(messages)
        if shown:
            messages.append({"role": "user", "content": str(shown)})
        chat = Conversation(session, messages, history=self._settings.history, num_trusted=num_trusted)
        chat.open()
        session.reward = 0.0
        for _ in range(self._settings.max_turns):
            turn = await session.generate()
            action = chat.took(turn)
            if turn.stop_reason == "length":
                session.count("truncated_turns")
                return
            step = await self._ask(lambda action=action: environment.step(action), "an environment's step")  # type: ignore[misc]
            if not isinstance(step, Step) or not math.isfinite(step.reward):
                raise LoopError(f"rollout {session.rollout_id}: got {step!r} from the environment, expected a Step")
            session.reward += step.reward
            session.reward_parts.update(step.parts)
            session.count("environment_steps")
            if step.reward:
                session.reward_turn(step.reward)
            if step.done:
                return
            if not chat.show([{"role": "user", "content": step.observation}]) or session.room < 1:
                session.truncate()
                return

    async def _ask(self, function: Callable[[], Any], what: str) -> Any:
        async def work() -> Any:
            found = await in_thread(function, name="environment")
            return await found if inspect.isawaitable(found) else found

        return await self._side.run(work, timeout_s=self._settings.timeout_s, what=what)
