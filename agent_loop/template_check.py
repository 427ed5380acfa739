"""What a model's chat template does to the conversations of an agent loop, found out before anything is generated. Pure.

Invariant: the template is asked as a rollout would ask it. What would fail every rollout is an error; what changes how rollouts
are trained, or may fail some, is not. Nothing that a template raises leaves this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from agent_loop.chat import ChatCodec, Message
from agent_loop.errors import words_of
from agent_loop.tool_formats import Call, ToolFormat, format_of_template, read_calls, signed_format

_ASKED, _SAID, _THOUGHT, _SHOWN = "Qx7Zuser", "Qx7Zsaid", "Qx7Zthought", "Qx7Zshown"
"""Texts that no template writes by itself."""
_BEGIN, _END = "<think>", "</think>"
_ID = "call00001"
"""Some templates accept ids of nine letters and digits only."""
_STAND_IN_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = Call(name="look_up", arguments={"word": "heron's", "number": 3})


class Trait(StrEnum):
    """What was found, for whoever counts or looks for one."""

    NO_TEMPLATE = "no template"
    ROLE_REFUSED = "role refused"
    ROLE_IGNORED = "role ignored"
    TURN_NOT_ONCE = "turn not written once"
    HISTORY_REWRITTEN = "history rewritten"
    THINKING_MOVED = "thinking outside its block"
    TOOLS_NOT_TOLD = "tools not told"
    CALL_NOT_READ = "call not read"
    CALL_NOT_WRITTEN = "call not written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One trait of a template, and what follows from it."""

    trait: Trait
    found: str
    follows: str
    is_error: bool = False

    def __str__(self) -> str:
        return f"{self.found}: {self.follows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How an agent loop uses the template."""

    shows: tuple[str, ...]
    """Roles of the messages that it shows the model behind a turn (`tool`, `user`) or before all (`system`)."""
    calls_tools: bool = False
    """It tells the model its tools and answers each call with the role `tool`; without that role none of its rollouts works."""
    gives_calls: bool = False
    """Messages may come to it with `tool_calls`, as OpenAI's interface has them."""
    tool_format: ToolFormat | Literal["auto"] = "auto"
    history: Literal["template", "append"] = "template"


def check_template(codec: ChatCodec, usage: Usage) -> list[Finding]:
    """Everything found, errors first."""
    if not codec.chat_template:
        follows = "its agent loop needs one; take a model that has one, or rollouter.agent_loop=single_turn"
        return [Finding(trait=Trait.NO_TEMPLATE, found="the model has no chat template", follows=follows, is_error=True)]
    asked = _Asked(codec, usage)
    found = [*_roles(asked), *_calls(asked), *_history(asked), *_thinking(asked)]
    return sorted(found, key=lambda one: not one.is_error)


class _Asked:
    """A template, asked as the loop asks it."""

    def __init__(self, codec: ChatCodec, usage: Usage) -> None:
        self.usage = usage
        self.template = codec.chat_template
        self._codec = codec
        self._tools = [_STAND_IN_TOOL] if usage.calls_tools or usage.gives_calls else []
        head = self.text([_asked()])
        self.opens_thinking = not isinstance(head, Exception) and head.rstrip().endswith(_BEGIN)

    def text(self, messages: Sequence[Message], *, head: bool = True) -> str | Exception:
        """What it writes, or raises; `head`: with the beginning of the assistant's next turn."""
        try:
            return self._codec.render(messages, tools=self._tools, add_generation_prompt=head)
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author: it may raise anything
            return error

    @property
    def tool_format(self) -> ToolFormat:
        chosen = self.usage.tool_format
        return format_of_template(self.template) if chosen == "auto" else chosen

    @property
    def answering_roles(self) -> list[str]:
        return [role for role in self.usage.shows if role != "system"]


def _roles(asked: _Asked) -> Iterator[Finding]:
    """Roles that it refuses or leaves out, and turns that it does not write as such."""
    usage = asked.usage
    for role in usage.shows:
        needed = (usage.calls_tools and role == "tool") or usage.shows == (role,)
        messages = [_shown("system"), _asked()] if role == "system" else [_asked(), _said(_SAID), _shown(role)]
        text = asked.text(messages)
        if isinstance(text, Exception):
            follows = "no rollout could show its model an answer" if needed else "a rollout that shows one fails"
            found = f"the chat template refuses messages of role {role} ({words_of(text)[:200]})"
            yield Finding(trait=Trait.ROLE_REFUSED, found=found, follows=follows, is_error=needed)
            continue
        if _SHOWN not in text:
            follows = "the model would never see what they say"
            found = f"the chat template leaves out messages of role {role}"
            yield Finding(trait=Trait.ROLE_IGNORED, found=found, follows=follows, is_error=needed)
        if role != "system" and text.count(_SAID) != 1:
            is_error = usage.history == "append"
            follows = (
                "the history cannot be appended to (tools.history=append)"
                if is_error
                else "every later turn begins a segment of its own, on a history that the model did not write"
            )
            found = f"the chat template writes an assistant's turn {text.count(_SAID)} times before role {role}"
            yield Finding(trait=Trait.TURN_NOT_ONCE, found=found, follows=follows, is_error=is_error)
    if usage.shows == ("user",) and isinstance(error := asked.text([_asked(), _shown("user")]), Exception):
        found = f"the chat template refuses a user's message behind another ({words_of(error)[:200]})"
        follows = "an environment whose reset shows something fails its rollouts: let it show nothing"
        yield Finding(trait=Trait.ROLE_REFUSED, found=found, follows=follows)


def _calls(asked: _Asked) -> Iterator[Finding]:
    """Whether tools are told, and whether a call that it writes reads as that call."""
    usage = asked.usage
    if not (usage.calls_tools or usage.gives_calls):
        return
    head = asked.text([_asked()])
    if isinstance(head, Exception):
        return
    if usage.calls_tools and _CALL.name not in head:
        follows = "the model learns of its tools only if the prompt tells it"
        yield Finding(trait=Trait.TOOLS_NOT_TOLD, found="the chat template does not write the tools", follows=follows)
    chosen = asked.tool_format
    written = _written_call(asked, head)
    if isinstance(written, Exception):
        if usage.gives_calls:
            found = f"the chat template refuses messages with tool_calls ({words_of(written)[:200]})"
            yield Finding(trait=Trait.ROLE_REFUSED, found=found, follows="a request with such a history is refused")
        return
    if not written:
        if usage.gives_calls:
            found, follows = (
                "the chat template leaves tool_calls out",
                "a history with calls is shown to the model without them",
            )
            yield Finding(trait=Trait.CALL_NOT_WRITTEN, found=found, follows=follows)
        signed = signed_format(asked.template)
        fitting = [] if signed in (None, chosen) else [signed]
        if not fitting:
            return
    else:
        if read_calls(written, chosen) == [_CALL]:
            return
        fitting = [one for one in ToolFormat if read_calls(written, one) == [_CALL]]
    writes = f"as {' or '.join(one for one in fitting if one)}" if fitting else f"as {written[:120]!r}"
    auto = " (auto)" if usage.tool_format == "auto" else ""
    found = f"tools.format is {chosen}{auto}, and the chat template writes calls {writes}"
    advice = f"; set tools.format={fitting[0]}" if fitting else ""
    follows = f"calls that the model makes as its template has them are not seen{advice}"
    yield Finding(trait=Trait.CALL_NOT_READ, found=found, follows=follows)


def _written_call(asked: _Asked, head: str) -> str | Exception:
    """The turn that stands for a message with a call, without what ends a turn; empty where the call is not in it."""
    function = {"name": _CALL.name, "arguments": dict(_CALL.arguments)}
    said = {**_said(""), "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
    text, plain = asked.text([_asked(), said], head=False), asked.text([_asked(), _said(_SAID)], head=False)
    if isinstance(text, Exception):
        return text
    turn = text[_common(text, head) :]
    if isinstance(plain, str):
        turn = turn.removesuffix(plain.rpartition(_SAID)[2])
    return turn if _CALL.name in turn else ""


def _history(asked: _Asked) -> Iterator[Finding]:
    """Turns that are written in another way once more messages stand behind them."""
    if asked.usage.history == "append":
        return
    rewritten: list[str] = []
    for name, said in _turns(asked).items():
        for role in asked.answering_roles:
            how = _goes_on(asked, said, role)
            if not how:
                rewritten.append(f"{name} (before role {role})")
    if rewritten:
        yield Finding(
            trait=Trait.HISTORY_REWRITTEN,
            found=f"the chat template writes earlier turns in another way than they were sampled: {', '.join(rewritten)}",
            follows="each begins a new segment on the history as the template has it; tools.history=append keeps it",
        )


def _turns(asked: _Asked) -> dict[str, str]:
    """What a model may say, by what is special about it."""
    thinking = f"\n{_THOUGHT}\n{_END}\n\n{_SAID}"
    if asked.opens_thinking:
        return {"turns with thinking": thinking.lstrip("\n")}
    return {
        "plain turns": _SAID,
        "turns with thinking": f"{_BEGIN}{thinking}",
        "turns with blanks around them": f" {_SAID}\n",
        "empty turns": "",
    }


def _goes_on(asked: _Asked, said: str, role: str) -> bool:
    """Whether three turns of `said`, each answered by `role`, stay as they were; one that is refused stays for its rollout."""
    messages: list[Message] = [_asked()]
    seen = asked.text(messages)
    for number in range(3):
        messages += [_said(said), {**_shown(role), "content": f"{_SHOWN}{number}"}]
        text = asked.text(messages)
        if isinstance(seen, Exception) or isinstance(text, Exception):
            return True
        if not text.startswith(seen + said):
            return False
        seen = text
    return True


def _thinking(asked: _Asked) -> Iterator[Finding]:
    """Thinking that leaves its block, or an answer that gets into it."""
    said = _said(_turns(asked)["turns with thinking"])
    conversations = [[_asked(), said], *([_asked(), said, _shown(role)] for role in asked.answering_roles)]
    for messages in conversations:
        text = asked.text(messages, head=False)
        if isinstance(text, Exception) or (_is_inside(text, _THOUGHT) is not False and _is_inside(text, _SAID) is not True):
            continue
        yield Finding(
            trait=Trait.THINKING_MOVED,
            found=f"the chat template writes a turn's thinking outside its {_BEGIN} block, or its answer inside"
            + (f" (before role {messages[-1]['role']})" if len(messages) > 2 else ""),
            follows="later turns go on from a history that the model did not write and would not"
            if asked.usage.history == "template"
            else "prompts that hold such turns show the model what it would not write",
        )
        return


def _is_inside(text: str, mark: str) -> bool | None:
    """Whether every `mark` stands within a block of thinking; None: there is none."""
    found = None
    at = text.find(mark)
    while at >= 0:
        before = text[:at]
        is_inside = before.rfind(_BEGIN) > before.rfind(_END) and _END in text[at:]
        if mark == _THOUGHT and not is_inside:
            return False
        found = is_inside if found is None else found or is_inside
        at = text.find(mark, at + len(mark))
    return found


def _common(text: str, other: str) -> int:
    """Characters at the beginning that are alike."""
    shorter = min(len(text), len(other))
    return next((at for at in range(shorter) if text[at] != other[at]), shorter)


def _asked() -> Message:
    return {"role": "user", "content": _ASKED}


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _shown(role: str) -> Message:
    extra = {"name": _CALL.name, "tool_call_id": _ID} if role == "tool" else {}
    return {"role": role, "content": _SHOWN, **extra}
