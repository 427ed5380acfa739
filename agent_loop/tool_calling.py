"""The agent loop that lets a model call tools, turn after turn.

Invariant: a call that the token limit cut is never executed; results of calls are noted in the session, so that a rollout that
is continued by another process does not make them again. A malformed call is answered, not punished: the reward decides.
"""

from __future__ import annotations

from typing import Any, Self

from agent_loop.chat import Conversation, chat_codec_of
from agent_loop.errors import ToolError
from agent_loop.loop import LoopSetup
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.tool_formats import ToolFormat, format_of_template, read_calls
from agent_loop.toolbox import Outcome, Result, ToolBox
from configs.schema import ToolSettings


class ToolCalling:
    """Plays until a reply without a call, the last turn, or the end of the room."""

    resumable = True
    calls_tools = True
    shows = ("tool",)

    def __init__(self, tools: ToolBox, settings: ToolSettings) -> None:
        self._tools = tools
        self._settings = settings

    @classmethod
    def set_up(cls, setup: LoopSetup) -> Self:
        """Raises ToolError where no tool is named."""
        if not setup.tools.sources:
            raise ToolError("tools.sources: got none, and the agent loop tool_calling needs at least one")
        return cls(ToolBox(setup.tools), setup.tools)

    async def open(self) -> None:
        """Load the tools. Raises ToolError."""
        await self._tools.open()

    async def close(self) -> None:
        await self._tools.close()

    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools, once they are loaded, as chat templates take them."""
        return self._tools.schemas()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`."""
        messages = task.messages or ({"role": "user", "content": task.prompt_text},)
        chat = Conversation(session, messages, tools=self._tools.schemas(), history=self._settings.history)
        tool_format = self._format(session)
        chat.open()
        num_made = 0
        for number in range(1, self._settings.max_turns + 1):
            turn = await session.generate()
            text = chat.took(turn)
            if turn.stop_reason == "length":
                session.count("truncated_turns")
                return
            calls = read_calls(text, tool_format)
            if not calls:
                return
            session.count("tool_calls", len(calls))
            if number == self._settings.max_turns:
                session.count("tool_calls_refused", len(calls))
                return

            async def make(calls: Any = calls, left: int = self._settings.max_calls - num_made) -> list[list[str]]:
                results = await self._tools.make(
                    calls,
                    calls_left=left,
                    rollout_id=session.rollout_id,
                    tools_kwargs=task.tools_kwargs,
                    codec=session.codec,
                )
                return [[result.name, result.text, result.outcome.value] for result in results]

            results = [Result(name=a, text=b, outcome=Outcome(c)) for a, b, c in await session.once(make)]
            for result in results:
                session.count(result.outcome.value)
            num_made += sum(result.outcome is not Outcome.REFUSED for result in results)
            shown = [
                {"role": "tool", "name": result.name, "content": result.text, "tool_call_id": f"call{number:02}{index:03}"}
                for index, result in enumerate(results)
            ]
            if not chat.show(shown) or session.room < 1:
                session.truncate()
                return

    def _format(self, session: Session) -> ToolFormat:
        if self._settings.format == "auto":
            return format_of_template(chat_codec_of(session).chat_template)
        return ToolFormat(self._settings.format)
