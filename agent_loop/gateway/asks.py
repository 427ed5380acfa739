"""What a program asks of `/v1/chat/completions`, read and checked, and the checks that all interfaces share. Pure.

Invariant: an `Ask` can be sampled as the run samples. A parameter that would make it sample otherwise is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
}
"""Values that change nothing, of OpenAI's parameters and of vLLM's; null is always one."""
_NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template": (None,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "documents": ([],),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Refusal(Exception):
    """Raised when a request is refused, as OpenAI's interface tells it."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the run makes of requests."""

    run_temperature: float
    temperature: Literal["run", "refuse"]
    """What becomes of a request at another temperature than the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for the assistant's next turn in a conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """As chat templates take them: text contents, `arguments` as objects."""
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    """Whether a stream ends with the usage."""
    logprobs: bool
    model: str


def read_ask(found: Any, rules: Rules) -> Ask:
    """Raises Refusal (400) naming the parameter."""
    body = checked(found, rules, _NEUTRAL_CHAT)
    options = body.get("stream_options") or {}
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and tool.get("type") == "function" for tool in tools):
        raise refused("tools", "expected a list of functions")
    return Ask(
        messages=_messages(body.get("messages")),
        tools=() if body.get("tool_choice") == "none" else tuple(tools),
        max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        model=str(body.get("model", "")),
    )


def checked(found: Any, rules: Rules, neutral: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    """The body, of which nothing samples otherwise than the run; `neutral` are this interface's own values that change
    nothing. Raises Refusal (400) naming the parameter."""
    if not isinstance(found, Mapping):
        raise Refusal(400, f"got {type(found).__name__}, expected a JSON object", code="invalid_body")
    for name, values in (*_NEUTRAL.items(), *neutral.items()):
        value = found.get(name)
        if value is not None and value not in values:
            raise refused(name, f"got {value!r}, and only {values[0]!r} samples what is trained")
    asked = found.get("temperature")
    if rules.temperature == "refuse" and asked is not None and asked != rules.run_temperature:
        raise refused("temperature", f"got {asked!r}, and the run samples at {rules.run_temperature:g} (gateway.temperature)")
    return found


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The bound of new tokens under the first of `names` that is set. Raises Refusal (400)."""
    for name in names:
        limit = body.get(name)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise refused(name, f"got {limit!r}, expected a whole number of at least 1")
        return limit
    return None


def refused(param: str, why: str) -> Refusal:
    return Refusal(400, f"{param}: {why}", code="unsupported_value", param=param)


def text_of(content: Any, where: str, *, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content. Raises Refusal (400) for anything but text or parts of these kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") in kinds for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise refused(f"{where}.content", "expected text, or a list of text parts")


def call_of(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call as chat templates take it. Raises Refusal (400)."""
    if not isinstance(name, str):
        raise refused(where, "expected calls of functions by name")
    arguments = arguments or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise refused(where, f"got arguments of {name} that are not JSON") from None
    return {"id": str(identity or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _messages(found: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise refused("messages", "expected a list of at least one message")
    return tuple(_message(message, f"messages.{at}") for at, message in enumerate(found))


def _message(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or found.get("role") not in _ROLES:
        raise refused(where, f"expected an object with a role of {', '.join(_ROLES)}")
    role = "system" if found["role"] == "developer" else str(found["role"])
    message: dict[str, Any] = {"role": role, "content": text_of(found.get("content"), where)}
    if role == "tool":
        message |= {name: str(found[name]) for name in ("tool_call_id", "name") if found.get(name)}
    if role == "assistant" and found.get("tool_calls"):
        message["tool_calls"] = _calls(found["tool_calls"], f"{where}.tool_calls")
    return message


def _calls(found: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise refused(where, "expected a list of calls")
    calls = []
    for call in found:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise refused(where, "expected calls of functions by name")
        calls.append(call_of(call.get("id"), function.get("name"), function.get("arguments"), where))
    return calls
