"""Which tokens a request's messages stand for: a session's branches, each a conversation that was told so far.

Invariant: messages that go on from what a branch was told and answered are appended to that branch's tokens. Any other history
begins a branch of its own, in a segment of its own; so does a request that comes while its branch is taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_loop.chat import Conversation, chat_codec_of
from agent_loop.engine import Generation
from agent_loop.errors import AgentLoopError, NoRoom
from agent_loop.gateway.asks import Ask, Refusal
from agent_loop.session import Session
from agent_loop.tool_formats import Call, ToolFormat, read_calls

_SIGNS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.MISTRAL: "[TOOL_CALLS]", ToolFormat.DEEPSEEK: "<｜tool▁calls▁begin｜>"}
"""What stands before the first call; in other formats a call is the whole reply."""


@dataclass(slots=True, eq=False)
class _Branch:
    session: Session
    tools: tuple[Mapping[str, Any], ...]
    chat: Conversation
    told: list[Mapping[str, Any]] = field(default_factory=list)
    """What it was told and what it answered, as the program has it."""
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """One turn, as the program is told it."""

    content: str
    calls: tuple[Mapping[str, Any], ...]
    """`id`, `type` and `function` with `name` and `arguments` (an object)."""
    turn: Generation
    num_prompt_tokens: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_texts: tuple[str, ...]


class Branches:
    """Of one rollout."""

    def __init__(self, session: Session, *, tool_format: ToolFormat, history: Literal["template", "append"]) -> None:
        self._root = session
        self._format = tool_format
        self._history = history
        self._branches: list[_Branch] = []
        self._root_taken = False

    async def answer(self, ask: Ask) -> Answer:
        """Sample the assistant's next turn. Raises Refusal (400) where it does not fit, and what the engine raises: the rollout
        cannot go on then, since the turn was begun."""
        branch = self._of(ask)
        branch.busy = True
        try:
            session = branch.session
            num_prompt_tokens = session.num_tokens
            limit = session.sampling.max_tokens
            try:
                turn = await session.generate(max_tokens=min(limit, ask.max_tokens or limit))
            except NoRoom as error:
                self._forget(branch)
                raise _too_long(str(error)) from error
            text = branch.chat.took(turn)
            content, calls = self._read(text, turn, bool(ask.tools))
            said: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                said["tool_calls"] = list(calls)
            branch.told = [*ask.messages, said]
        finally:
            branch.busy = False
        ended = "length" if turn.stop_reason == "length" else "tool_calls" if calls else "stop"
        codec = chat_codec_of(session)
        return Answer(
            content=content,
            calls=calls,
            turn=turn,
            num_prompt_tokens=num_prompt_tokens,
            finish_reason=ended,  # type: ignore[arg-type]
            token_texts=tuple(codec.decode_whole([token]) for token in turn.token_ids.tolist()) if ask.logprobs else (),
        )

    def _of(self, ask: Ask) -> _Branch:
        going_on = [branch for branch in self._branches if not branch.busy and _goes_on(branch, ask)]
        for branch in sorted(going_on, key=lambda one: len(one.told), reverse=True):
            try:
                if not branch.chat.show(ask.messages[len(branch.told) :]):
                    raise _too_long("the messages do not fit into engine.max_model_len")
            except AgentLoopError as error:
                raise Refusal(400, str(error), code="invalid_messages", param="messages") from error
            return branch
        return self._new(ask)

    def _new(self, ask: Ask) -> _Branch:
        if self._root_taken:
            session = self._root.fork()
        else:
            session, self._root_taken = self._root, True
        session.rewind(0)
        chat = Conversation(session, ask.messages, tools=ask.tools, history=self._history)
        branch = _Branch(session=session, tools=ask.tools, chat=chat)
        self._branches.append(branch)
        try:
            chat.open()
        except AgentLoopError as error:
            self._forget(branch)
            raise Refusal(400, str(error), code="invalid_messages", param="messages") from error
        if session.room < 1:
            self._forget(branch)
            raise _too_long(
                f"the messages have {session.num_tokens} tokens, and engine.max_model_len is {session.max_model_len}"
            )
        if session is not self._root:
            self._root.count("branches")
        return branch

    def _forget(self, branch: _Branch) -> None:
        self._branches.remove(branch)
        if branch.session is self._root and not self._root.num_turns:
            self._root_taken = False

    def _read(self, text: str, turn: Generation, has_tools: bool) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """(content, calls). A reply with a call that cannot be read, or that the token limit cut, is content."""
        found = read_calls(text, self._format) if has_tools and turn.stop_reason == "stop" else []
        if any(not isinstance(call, Call) for call in found):
            self._root.count("tool_parse_errors")
            return text, ()
        calls = tuple(
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in found
            if isinstance(call, Call)
        )
        if not calls:
            return text, ()
        self._root.count("tool_calls", len(calls))
        sign = {
            ToolFormat.HERMES: "<tool_call>",
            ToolFormat.MISTRAL: "[TOOL_CALLS]",
            ToolFormat.DEEPSEEK: "<｜tool▁calls▁begin｜>",
        }
        before, found_sign, _ = text.partition(sign.get(self._format, "\0"))
        return before.strip() if found_sign else "", calls


def _goes_on(branch: _Branch, ask: Ask) -> bool:
    told = branch.told
    if not told or len(ask.messages) <= len(told) or branch.tools != ask.tools:
        return False
    if any(message["role"] == "assistant" for message in ask.messages[len(told) :]):
        return False
    return all(one == other for one, other in zip(told, ask.messages, strict=False))


def _too_long(why: str) -> Refusal:
    return Refusal(400, why, code="context_length_exceeded", param="messages")
