"""What a program asks of `/v1/completions`, read and checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.gateway.asks import Rules, checked, limit_of, refused

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (0, 1, False)}
_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAsk:
    """One request to go on from a text, or from token ids."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    model: str


def read_text_ask(found: Any, rules: Rules) -> TextAsk:
    """Raises Refusal (400) naming the parameter."""
    body = checked(found, rules, _NEUTRAL)
    options = body.get("stream_options") or {}
    return TextAsk(
        prompt=_prompt(body.get("prompt")),
        max_tokens=limit_of(body, "max_tokens"),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=body.get("logprobs") is not None and body.get("logprobs") is not False,
        model=str(body.get("model", "")),
    )


def _prompt(found: Any) -> str | tuple[int, ...]:
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], (str, list)):
        found = found[0]
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found:
        if all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MAX_TOKEN_ID for token in found):
            return tuple(found)
        if all(isinstance(text, (str, list)) for text in found):
            raise refused("prompt", f"got {len(found)} prompts, expected one a call")
    raise refused("prompt", "expected a text that is not empty, or a list of token ids")
