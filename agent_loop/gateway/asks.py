"""What a program asks of `/v1/chat/completions`, read and checked. Pure.

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
    "top_logprobs": (0,),
    "stop": ("", []),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}
"""Values that change nothing; null is always one."""
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
class Ask:
    """One request."""

    messages: tuple[Mapping[str, Any], ...]
    """As chat templates take them: text contents, `arguments` as objects."""
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    """Whether a stream ends with the usage."""
    logprobs: bool
    model: str


def read_ask(body: Any, *, run_temperature: float, temperature: Literal["run", "refuse"]) -> Ask:
    """Raises Refusal (400) naming the parameter."""
    if not isinstance(body, Mapping):
        raise Refusal(400, f"got {type(body).__name__}, expected a JSON object", code="invalid_body")
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise _refused(name, f"got {value!r}, and only {neutral[0]!r} samples what is trained")
    asked = body.get("temperature")
    if temperature == "refuse" and asked is not None and asked != run_temperature:
        raise _refused("temperature", f"got {asked!r}, and the run samples at {run_temperature:g} (gateway.temperature)")
    limit = body.get("max_completion_tokens", None) or body.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise _refused("max_tokens", f"got {limit!r}, expected a whole number of at least 1")
    options = body.get("stream_options") or {}
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and tool.get("type") == "function" for tool in tools):
        raise _refused("tools", "expected a list of functions")
    return Ask(
        messages=_messages(body.get("messages")),
        tools=() if body.get("tool_choice") == "none" else tuple(tools),
        max_tokens=limit,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        model=str(body.get("model", "")),
    )


def _messages(found: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise _refused("messages", "expected a list of at least one message")
    return tuple(_message(message, f"messages.{at}") for at, message in enumerate(found))


def _message(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or found.get("role") not in _ROLES:
        raise _refused(where, f"expected an object with a role of {', '.join(_ROLES)}")
    role = "system" if found["role"] == "developer" else str(found["role"])
    message: dict[str, Any] = {"role": role, "content": _text(found.get("content"), where)}
    if role == "tool":
        message |= {name: str(found[name]) for name in ("tool_call_id", "name") if found.get(name)}
    if role == "assistant" and found.get("tool_calls"):
        message["tool_calls"] = _calls(found["tool_calls"], f"{where}.tool_calls")
    return message


def _calls(found: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise _refused(where, "expected a list of calls")
    calls = []
    for call in found:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refused(where, "expected calls of functions by name")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise _refused(where, f"got arguments of {function['name']} that are not JSON") from None
        calls.append(
            {"id": str(call.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise _refused(f"{where}.content", "expected text, or a list of text parts")


def _refused(param: str, why: str) -> Refusal:
    return Refusal(400, f"{param}: {why}", code="unsupported_value", param=param)
