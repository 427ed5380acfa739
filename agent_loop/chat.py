"""A conversation in a session: messages in, tokens shown, with the tokens that were sampled left as they are.

Invariant: what was sampled is never encoded again within its segment. New messages are shown as the difference between the
template's rendering and the text that stands in the context; where the rendering does not go on from that text (the template
rewrites what came before), a new segment begins, or, with `append`, the difference is taken from a conversation of no meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation
from agent_loop.errors import LoopError, words_of
from agent_loop.session import Session

Message = Mapping[str, Any]
_STAND_IN = "Qx7Zj"
"""An assistant's turn that no template writes by itself."""
_TOKENS_BEFORE = 4
"""A tokenizer may write a token in another way at the beginning of a text than behind others."""


class ChatCodec(Protocol):
    """The model's tokenizer and chat template."""

    @property
    def chat_template(self) -> str:
        """Its text; empty where the model has none."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Texts that are tokens of their own wherever they stand."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which special tokens are mere characters."""
        ...

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        ...

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The template's text. Raises whatever the template raises."""
        ...


def chat_codec_of(session: Session) -> ChatCodec:
    """Raises LoopError where the model has no chat template."""
    codec: Any = session.codec
    if not getattr(codec, "chat_template", ""):
        raise LoopError(f"rollout {session.rollout_id}: the model has no chat template, which its agent loop needs")
    found: ChatCodec = codec
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn as text."""

    text: str
    content: str
    """Without the special token that ended it."""
    end: str
    """That token's text; empty where none ended it."""


def read_turn(codec: ChatCodec, context: npt.NDArray[np.int32], turn: Generation) -> Said:
    """The text of `turn`, which was sampled behind the token ids `context` ([n] int32)."""
    before = context[-_TOKENS_BEFORE:]
    text = _text_behind(codec, before, turn.token_ids)
    if turn.stop_reason == "stop" and turn.token_ids.size:
        end = codec.decode_whole(turn.token_ids[-1:].tolist())
        if end in codec.special_tokens:
            return Said(text=text, content=_text_behind(codec, before, turn.token_ids[:-1]), end=end)
    return Said(text=text, content=text, end="")


class Conversation:
    """Of one session."""

    def __init__(
        self,
        session: Session,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        history: Literal["template", "append"] = "template",
    ) -> None:
        """`tools` are their JSON schemas, as templates take them."""
        self._session = session
        self._codec = chat_codec_of(session)
        self._messages = list(messages)
        self._tools = list(tools)
        self._history = history
        self._seen = ""
        """Text of the context."""
        self._end = ""
        """Text of the special token that ended the last turn."""

    @property
    def messages(self) -> list[Message]:
        return list(self._messages)

    def open(self) -> None:
        """Show the first messages. Raises LoopError when the template refuses them."""
        self._seen = self._render(self._messages)
        self._session.append(self._codec.encode(self._seen))

    def took(self, turn: Generation) -> str:
        """Take a turn of the session into the conversation; its text without the token that ended it."""
        said = read_turn(self._codec, self._session.tokens[: -turn.token_ids.size], turn)
        self._end = said.end
        self._seen += said.text
        self._messages.append({"role": "assistant", "content": said.content})
        return said.content

    def show(self, messages: Sequence[Message]) -> bool:
        """Show `messages`, and the head of the assistant's next turn. False, and nothing is shown, where they do not fit into
        the model's length. Raises LoopError when the template refuses them."""
        told = [*self._messages, *messages]
        if self._history == "append":
            suffix = self._suffix(messages)
            ids = self._encode(suffix, messages)
            if len(ids) > self._session.room:
                return False
            self._session.append(ids)
            self._seen += suffix
        else:
            text = self._render(told)
            if text.startswith(self._seen):
                ids = self._encode(text[len(self._seen) :], messages)
                if len(ids) > self._session.room:
                    return False
                self._session.append(ids)
            elif not self._rewrite(text, told):
                return False
            self._seen = text
        self._messages = told
        return True

    def _rewrite(self, text: str, told: Sequence[Message]) -> bool:
        """Begin a segment with `text`, as far as the context differs from it."""
        ids = np.array(self._encode(text, [one for one in told if one.get("role") == "tool"]), np.int32)
        if ids.size > self._session.max_model_len:
            return False
        context = self._session.tokens
        shorter = min(ids.size, context.size)
        differs = np.flatnonzero(ids[:shorter] != context[:shorter])
        common = int(differs[0]) if differs.size else shorter
        self._session.rewind(common)
        self._session.append(ids[common:])
        self._session.count("rewritten_histories")
        return True

    def _suffix(self, messages: Sequence[Message]) -> str:
        """What the template writes behind an assistant's turn."""
        text = self._render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}, *messages])
        if text.count(_STAND_IN) != 1:
            raise LoopError(f"rollout {self._session.rollout_id}: the chat template does not write an assistant's turn once")
        return text.split(_STAND_IN)[1].removeprefix(self._end)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._codec.render(messages, tools=self._tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            roles = [str(message.get("role")) for message in messages]
            raise LoopError(
                f"rollout {self._session.rollout_id}: the chat template refused messages of {roles}: {words_of(error)}"
            ) from error

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Token ids of `text`; special tokens that stand in the contents of `messages` are characters there."""
        ids: list[int] = []
        at = 0
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str) or not any(special in content for special in self._codec.special_tokens):
                continue
            written = next((form for form in (content, content.strip(), _escaped(content)) if form in text[at:]), None)
            if written is None:
                raise LoopError(
                    f"rollout {self._session.rollout_id}: got an observation with special tokens in it, which the chat "
                    f"template writes in another way: {content[:80]!r}"
                )
            begin = text.index(written, at)
            ids += self._codec.encode(text[at:begin]) if begin > at else []
            ids += self._codec.encode_plain(written)
            at = begin + len(written)
        return ids + (self._codec.encode(text[at:]) if at < len(text) else [])


def _text_behind(codec: ChatCodec, before: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> str:
    """Text of `ids` as it stands behind the tokens `before`."""
    head = codec.decode_whole(before.tolist())
    whole = codec.decode_whole([*before.tolist(), *ids.tolist()])
    return whole[len(head) :] if whole.startswith(head) else codec.decode_whole(ids.tolist())


def _escaped(content: str) -> str:
    return json.dumps(content, ensure_ascii=False)[1:-1]
