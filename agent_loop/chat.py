"""A conversation in a session: messages in, tokens shown, with the tokens that were sampled left as they are.

Invariant: what was sampled is never encoded again within its segment. New messages are shown as the difference between the
template's rendering and the text that stands in the context; where the rendering does not go on from that text (the template
rewrites what came before), a new segment begins, or, with `append`, the difference is taken from a conversation of no meaning.
"""

from __future__ import annotations

import json
import re
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
_OBSERVED = ("user", "tool")
_MARK = re.compile(r"Kv3Wq(\d+)qW")
"""Stands for the content of a message: letters that a template leaves as they are."""
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
        num_trusted: int | None = None,
    ) -> None:
        """`tools` are their JSON schemas, as templates take them. In the first `num_trusted` messages (None: all of these)
        special tokens are meant; in what users and tools say later they are characters."""
        self._session = session
        self._codec = chat_codec_of(session)
        self._messages = list(messages)
        self._tools = list(tools)
        self._history = history
        self._num_trusted = len(self._messages) if num_trusted is None else num_trusted
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
        self._session.append(self._encode(self._messages, self._seen, begin=0, trusted=self._num_trusted))

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
            around, text, suffix = self._suffix(messages)
            ids = self._encode(around, text, begin=len(text) - len(suffix), trusted=len(around) - len(messages))
            if len(ids) > self._session.room:
                return False
            self._session.append(ids)
            self._seen += suffix
        else:
            text = self._render(told)
            if text.startswith(self._seen):
                ids = self._encode(told, text, begin=len(self._seen), trusted=len(self._messages))
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
        ids = np.array(self._encode(told, text, begin=0, trusted=self._num_trusted), np.int32)
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

    def _suffix(self, messages: Sequence[Message]) -> tuple[list[Message], str, str]:
        """(a conversation that ends with `messages`, its text, what the template writes behind the assistant's turn in it)."""
        around: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}, *messages]
        text = self._render(around)
        if text.count(_STAND_IN) != 1:
            raise LoopError(f"rollout {self._session.rollout_id}: the chat template does not write an assistant's turn once")
        return around, text, text.split(_STAND_IN)[1].removeprefix(self._end)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._codec.render(messages, tools=self._tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            roles = [str(message.get("role")) for message in messages]
            raise LoopError(
                f"rollout {self._session.rollout_id}: the chat template refused messages of {roles}: {words_of(error)}"
            ) from error

    def _encode(self, messages: Sequence[Message], text: str, *, begin: int, trusted: int) -> list[int]:
        """Token ids of `text`, the rendering of `messages`, from `begin` on. In the contents of observations behind the first
        `trusted` messages special tokens are characters; those of the template are not, also where a content looks like them.

        Raises LoopError where the template writes such a content in a way that is not known.
        """
        special = self._codec.special_tokens
        contents = {
            at: content
            for at, message in enumerate(messages[trusted:], trusted)
            if message.get("role") in _OBSERVED and isinstance(content := message.get("content"), str)
            if any(token in content for token in special)
        }
        if not contents:
            return self._codec.encode(text[begin:]) if begin < len(text) else []
        marked = [{**one, "content": f"Kv3Wq{at}qW"} if at in contents else one for at, one in enumerate(messages)]
        head, *rest = _MARK.split(self._render(marked))  # what stands around the contents, and the numbers of their messages
        ids: list[int] = []
        at, pieces = 0, [(int(number), behind) for number, behind in zip(rest[::2], rest[1::2], strict=True)]
        for number, behind in pieces:
            found = _form(contents.get(number, ""), text, at + len(head), behind) if text.startswith(head, at) else None
            if found is None:
                raise LoopError(
                    f"rollout {self._session.rollout_id}: got an observation with special tokens in it, which the chat "
                    f"template writes in another way: {contents.get(number, '')[:80]!r}"
                )
            between = text[max(at, begin) : at + len(head)]
            ids += self._codec.encode(between) if between else []
            ids += self._codec.encode_plain(found)
            at, head = at + len(head) + len(found), behind
        return ids + (self._codec.encode(text[max(at, begin) :]) if max(at, begin) < len(text) else [])


def _form(content: str, text: str, at: int, behind: str) -> str | None:
    """How `content` is written in `text` at `at`, with `behind` behind it."""
    forms = {content, content.strip(), content.lstrip(), content.rstrip(), json.dumps(content, ensure_ascii=False)[1:-1]}
    fitting = [form for form in forms if text.startswith(form + behind, at)]
    return max(fitting, key=len, default=None)


def _text_behind(codec: ChatCodec, before: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> str:
    """Text of `ids` as it stands behind the tokens `before`."""
    head = codec.decode_whole(before.tolist())
    whole = codec.decode_whole([*before.tolist(), *ids.tolist()])
    return whole[len(head) :] if whole.startswith(head) else codec.decode_whole(ids.tolist())
