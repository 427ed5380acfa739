"""Which tokens a request stands for: a session's branches, each a conversation or a text that was told so far.

Invariant: what goes on from what a branch was told and answered is appended to that branch's tokens. Any other history begins a
branch of its own, in a segment of its own; so does a request that comes while its branch is taken.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from agent_loop.chat import Conversation, Said, read_turn
from agent_loop.engine import Generation
from agent_loop.errors import AgentLoopError, NoRoom, words_of
from agent_loop.gateway.asks import Ask, Refusal
from agent_loop.gateway.text_asks import TextAsk
from agent_loop.session import Session
from agent_loop.tool_formats import Call, ToolFormat, read_calls

_SIGNS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.MISTRAL: "[TOOL_CALLS]", ToolFormat.DEEPSEEK: "<｜tool▁calls▁begin｜>"}
"""What stands before the first call; in other formats a call is the whole reply."""
_LONG_TEXT = 20_000
"""Characters of messages that are encoded in a thread: it takes some milliseconds."""


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
    """Of the turn's tokens, where logprobs were asked for."""
    branch: Any
    """Where it was given."""


class TextCodec(Protocol):
    """What a text's branch asks of the model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, prompt: str) -> tuple[str, npt.NDArray[np.int32]]:
        """(text, [n] int32 token ids), with the special tokens that the tokenizer puts before a text."""
        ...


class _Talk:
    """A conversation."""

    def __init__(self, session: Session, ask: Ask, history: Literal["template", "append"]) -> None:
        self.session = session
        self.busy = False
        self._tools = ask.tools
        self._chat = Conversation(session, ask.messages, tools=ask.tools, history=history, num_trusted=0)
        self._told: list[Mapping[str, Any]] = []
        """What it was told and what it answered, as the program has it."""

    @property
    def extent(self) -> int:
        """How much it was told."""
        return len(self._told)

    def goes_on(self, ask: Ask) -> bool:
        told, messages = self._told, ask.messages
        if not told or len(messages) <= len(told) or self._tools != ask.tools:
            return False
        if any(message["role"] == "assistant" for message in messages[len(told) :]):
            return False
        return all(one == other for one, other in zip(told, messages, strict=False))

    def open(self, ask: Ask) -> bool:
        self._chat.open()
        return True

    def show(self, ask: Ask) -> bool:
        return self._chat.show(ask.messages[len(self._told) :])

    def took(self, turn: Generation) -> str:
        return self._chat.took(turn)

    def told(self, ask: Ask, content: str, calls: Sequence[Mapping[str, Any]]) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = list(calls)
        self._told = [*ask.messages, said]


class _Text:
    """A text, or token ids, without a conversation's form."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.busy = False
        self._codec: Any = session.codec
        self._text: str | None = None
        """All of it as the program has it; None where it began with token ids."""
        self._said: Said | None = None
        self._was_cut = False

    @property
    def extent(self) -> int:
        """Tokens that it was told."""
        return self.session.num_tokens

    def goes_on(self, ask: TextAsk) -> bool:
        # One that was cut may be asked to go on as it is.
        at_least = 0 if self._said is not None and not self._said.end and self._was_cut else 1
        if isinstance(ask.prompt, str):
            text = self._text
            return text is not None and len(ask.prompt) >= len(text) + at_least and ask.prompt.startswith(text)
        tokens = self.session.tokens
        if len(ask.prompt) < tokens.size + at_least:
            return False
        return np.array_equal(np.array(ask.prompt[: tokens.size], np.int32), tokens)

    def open(self, ask: TextAsk) -> bool:
        if isinstance(ask.prompt, str):
            codec: TextCodec = self._codec
            self._text = ask.prompt
            self.session.append(codec.encode_prompt(ask.prompt)[1])
        else:
            self.session.append(ask.prompt)
        return True

    def show(self, ask: TextAsk) -> bool:
        if isinstance(ask.prompt, str):
            ids = self._codec.encode(ask.prompt[len(self._text or "") :])
            ended = bool(self._said and self._said.end)  # by a token that the program was not told, and does not go on from
            if len(ids) > self.session.room + ended:
                return False
            if ended:
                self.session.rewind(self.session.num_tokens - 1)
            self._text = ask.prompt
        else:
            ids = ask.prompt[self.session.num_tokens :]
            if len(ids) > self.session.room:
                return False
            self._text = None
        self.session.append(ids)
        return True

    def took(self, turn: Generation) -> str:
        self._said = read_turn(self._codec, self.session.tokens[: -turn.token_ids.size], turn)
        self._was_cut = turn.stop_reason == "length"
        if self._text is not None:
            self._text += self._said.content
        return self._said.content


B = TypeVar("B", _Talk, _Text)


class Branches:
    """Of one rollout."""

    def __init__(self, session: Session, *, tool_format: ToolFormat, history: Literal["template", "append"]) -> None:
        self._root = session
        self._format = tool_format
        self._history = history
        self._talks: list[_Talk] = []
        self._texts: list[_Text] = []
        self._root_taken = False

    async def answer(self, ask: Ask) -> Answer:
        """Sample the assistant's next turn. Raises Refusal (400) where it does not fit, and what the engine raises: the rollout
        cannot go on then, since the turn was begun."""
        size = sum(len(message["content"]) for message in ask.messages)
        talk = await self._branch(self._talks, ask, lambda session: _Talk(session, ask, self._history), size)
        num_prompt_tokens = talk.session.num_tokens
        turn = await self._generate(talk, ask.max_tokens)
        content, calls = self._read(talk.took(turn), turn, bool(ask.tools))
        talk.told(ask, content, calls)
        ended: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else _end_of(turn)
        return self._answer(talk, content, calls, turn, num_prompt_tokens, ended, logprobs=ask.logprobs)

    async def go_on(self, ask: TextAsk) -> Answer:
        """Sample what follows a text. Raises as `answer`."""
        text = await self._branch(self._texts, ask, _Text, len(ask.prompt))
        num_prompt_tokens = text.session.num_tokens
        turn = await self._generate(text, ask.max_tokens)
        return self._answer(text, text.took(turn), (), turn, num_prompt_tokens, _end_of(turn), logprobs=ask.logprobs)

    def disown(self, answer: Answer) -> None:
        """Nobody got `answer`, so nobody acts on it: it is not trained, and nothing goes on from it."""
        branch = answer.branch
        if branch in (*self._talks, *self._texts):
            branch.session.disown_turn()
            self._forget(branch)
            self._root.count("abandoned_turns")

    async def _branch(self, branches: list[B], ask: Any, make: Callable[[Session], B], size: int) -> B:
        """The branch that `ask`, of about `size` characters, goes on from, the one that was told most if there are several, or
        a new one; what is new was shown, and it is taken. Raises Refusal (400)."""
        found = max((one for one in branches if not one.busy and one.goes_on(ask)), key=lambda one: one.extent, default=None)
        branch = found or make(self._session())
        session = branch.session
        branch.busy = True
        begin = branch.open if found is None else branch.show
        try:
            # Long texts are encoded beside the event loop.
            fits = begin(ask) if size < _LONG_TEXT else await asyncio.to_thread(begin, ask)
            if not fits:
                raise _too_long("the prompt does not fit into engine.max_model_len")
        except BaseException as error:
            branch.busy = False
            if found is None:
                self._give_back(session)
            if isinstance(error, Refusal) or not isinstance(error, Exception):
                raise
            # A template or a tokenizer may raise anything at what a program sends: nothing was sampled, the rollout goes on.
            why = str(error) if isinstance(error, AgentLoopError) else f"the messages cannot be encoded: {words_of(error)}"
            raise Refusal(400, why, code="invalid_messages", param="messages") from error
        if found is None:
            if session.room < 1:
                self._give_back(session)
                why = f"the prompt has {session.num_tokens} tokens, and engine.max_model_len is {session.max_model_len}"
                raise _too_long(why)
            branches.append(branch)
            if session is not self._root:
                self._root.count("branches")
        return branch

    def _session(self) -> Session:
        """For a new branch."""
        session = self._root.fork() if self._root_taken else self._root
        self._root_taken = True
        session.rewind(0)
        return session

    async def _generate(self, branch: _Talk | _Text, max_tokens: int | None) -> Generation:
        limit = branch.session.sampling.max_tokens
        try:
            return await branch.session.generate(max_tokens=min(limit, max_tokens or limit))
        except asyncio.CancelledError:
            branch.session.disown_turn()
            self._forget(branch)
            raise
        except NoRoom as error:
            self._forget(branch)
            raise _too_long(str(error)) from error
        finally:
            branch.busy = False

    def _forget(self, branch: _Talk | _Text) -> None:
        self._talks = [one for one in self._talks if one is not branch]
        self._texts = [one for one in self._texts if one is not branch]
        self._give_back(branch.session)

    def _give_back(self, session: Session) -> None:
        if session is not self._root:
            self._root.drop(session)
        elif not self._root.num_turns:
            self._root_taken = False

    def _answer(
        self,
        branch: _Talk | _Text,
        content: str,
        calls: tuple[Mapping[str, Any], ...],
        turn: Generation,
        num_prompt_tokens: int,
        ended: Literal["stop", "length", "tool_calls"],
        *,
        logprobs: bool,
    ) -> Answer:
        codec: Any = self._root.codec
        texts = tuple(codec.decode_whole([token]) for token in turn.token_ids.tolist()) if logprobs else ()
        return Answer(
            content=content,
            calls=calls,
            turn=turn,
            num_prompt_tokens=num_prompt_tokens,
            finish_reason=ended,
            token_texts=texts,
            branch=branch,
        )

    def _read(self, text: str, turn: Generation, has_tools: bool) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """(content, calls). A reply with a call that cannot be read, or that the token limit cut, is content."""
        found = read_calls(text, self._format) if has_tools and turn.stop_reason == "stop" else []
        calls = tuple(
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in found
            if isinstance(call, Call) and _is_json(call)
        )
        if len(calls) < len(found):
            self._root.count("tool_parse_errors")
            return text, ()
        if not calls:
            return text, ()
        self._root.count("tool_calls", len(calls))
        before, found_sign, _ = text.partition(_SIGNS.get(self._format, "\0"))
        return before.strip() if found_sign else "", calls


def _is_json(call: Call) -> bool:
    """Whether a program can be told its arguments."""
    try:
        json.dumps([call.name, dict(call.arguments)], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _end_of(turn: Generation) -> Literal["stop", "length"]:
    return "length" if turn.stop_reason == "length" else "stop"


def _too_long(why: str) -> Refusal:
    return Refusal(400, why, code="context_length_exceeded", param="messages")
