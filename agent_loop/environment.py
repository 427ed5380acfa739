"""The agent loop for environments with `reset` and `step`: games, puzzles, reasoning-gym style tasks.

Invariant: the rollout's reward is the sum of the rewards of its steps, each of which also stands at the end of its turn as a
dense reward. An environment is made for each rollout and runs beside the rollouts' event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import structlog

from agent_loop.chat import Conversation
from agent_loop.errors import USER_CODE_FAILURES, LoopError, words_of
from agent_loop.loop import LoopSetup
from agent_loop.session import Session
from agent_loop.side_loop import SideLoop, in_thread
from agent_loop.task import Task
from agent_loop.tool_text import clean
from configs.limits import MAX_REWARD
from configs.schema import ToolSettings

log = structlog.get_logger()


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
    """One episode. Made without arguments; `reset` and `step` may be blocking functions or coroutines. One that holds something
    (a browser, a container) may have `close()` besides: called once when its episode is over, also where it failed."""

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
        self._closing: set[asyncio.Task[None]] = set()

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
        """Once the environments are closed that are to be."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._settings.timeout_s)
        self._side.close()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`. Raises TimeoutError when the environment is slower than `tools.timeout_s`."""
        environment = await self._ask(self._make, "an environment's making")
        try:
            await self._play(environment, task, session)
        finally:
            self._let_go(environment, session.rollout_id)

    async def _play(self, environment: Environment, task: Task, session: Session) -> None:
        shown = await self._ask(lambda: environment.reset(task), "an environment's reset")
        if shown is not None and not isinstance(shown, str):
            raise LoopError(f"rollout {session.rollout_id}: got {_named(shown)} from reset, expected text or None")
        messages = list(task.messages or ({"role": "user", "content": task.prompt_text},))
        num_trusted = len(messages)
        if shown:
            messages.append({"role": "user", "content": clean(shown)})
        chat = Conversation(session, messages, history=self._settings.history, num_trusted=num_trusted)
        chat.open()
        session.reward = 0.0
        for _ in range(self._settings.max_turns):
            turn = await session.generate()
            action = chat.took(turn)
            if turn.stop_reason == "length":
                session.count("truncated_turns")
                return
            found = await self._ask(lambda action=action: environment.step(action), "an environment's step")  # type: ignore[misc]
            try:
                step = checked(found)
                session.reward = _number(session.reward + step.reward, "the sum of an episode's rewards")
                if step.reward:
                    session.reward_turn(step.reward)
            except LoopError as error:
                raise LoopError(f"rollout {session.rollout_id}: {error}") from error
            session.reward_parts.update(step.parts)
            session.count("environment_steps")
            if step.done:
                return
            if not chat.show([{"role": "user", "content": step.observation}]) or session.room < 1:
                session.truncate()
                return

    def _let_go(self, environment: Environment, rollout_id: str) -> None:
        """Close it, however its episode ended; the rollout neither waits for that nor hears of it."""
        end: Any = getattr(environment, "close", None)
        if not callable(end):
            return

        async def close() -> None:
            try:
                await self._ask(end, "an environment's end")
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - of code that is not ours
                log.warning("environment was not closed", rollout_id=rollout_id, error=words_of(error))

        closing = asyncio.create_task(close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _ask(self, function: Callable[[], Any], what: str) -> Any:
        async def work() -> Any:
            found = await in_thread(function, name="environment")
            return await found if inspect.isawaitable(found) else found

        return await self._side.run(work, timeout_s=self._settings.timeout_s, what=what)


def checked(step: Any) -> Step:
    """What an environment returned, as a step whose numbers are numbers and whose text can be encoded. Raises LoopError."""
    if not isinstance(step, Step):
        raise LoopError(f"got {_named(step)} from the environment, expected a Step")
    observation: Any = step.observation
    if observation is None and step.done:
        observation = ""
    if not isinstance(observation, str):
        raise LoopError(f"got {_named(observation)} as an observation, expected text")
    parts: Any = step.parts
    if not isinstance(parts, Mapping):
        raise LoopError(f"got {_named(parts)} as the parts of a step's reward, expected numbers by name")
    return Step(
        observation=clean(observation),
        reward=_number(step.reward, "a step's reward"),
        done=bool(step.done),
        parts={str(name): _number(value, f"the part {str(name)[:80]!r} of a reward") for name, value in parts.items()},
    )


def _number(value: Any, what: str) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise LoopError(f"got {_named(value)} as {what}, expected a number")
    try:
        number = float(value)
    except Exception as error:
        raise LoopError(f"got {_named(value)} as {what}, expected a number: {words_of(error)}") from error
    if not abs(number) <= MAX_REWARD:
        raise LoopError(f"got {number} as {what}, expected a number of at most {MAX_REWARD:g}")
    return number


def _named(value: Any) -> str:
    if value is None or isinstance(value, (bool, float, str)):
        return repr(value)[:200]
    return f"a {type(value).__name__}"
