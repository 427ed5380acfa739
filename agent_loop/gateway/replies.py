"""Answers in the shape of OpenAI's chat completions and completions, whole or as the events of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from agent_loop.gateway.asks import Ask
from agent_loop.gateway.branches import Answer
from agent_loop.gateway.text_asks import TextAsk

DONE = b"data: [DONE]\n\n"


def completion(ask: Ask, answer: Answer, *, identity: str, created: int) -> dict[str, Any]:
    """The whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None if answer.calls else answer.content}
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer) if ask.logprobs else None,
    }
    return _head(ask, identity, created, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(ask: Ask, answer: Answer, *, identity: str, created: int) -> Iterator[bytes]:
    """The same as server-sent events."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": answer.content}]
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(_calls(answer))]
    for number, delta in enumerate(deltas):
        logprobs = _logprobs(answer) if ask.logprobs and number == 0 else None
        yield _event(ask, identity, created, [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}])
    yield _event(ask, identity, created, [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}])
    if ask.include_usage:
        yield _event(ask, identity, created, [], usage=_usage(answer))
    yield DONE


def text_completion(ask: TextAsk, answer: Answer, *, identity: str, created: int) -> dict[str, Any]:
    """The whole answer of `/v1/completions`."""
    return _head(ask, identity, created, "text_completion") | {"choices": [_text(ask, answer)], "usage": _usage(answer)}


def text_events(ask: TextAsk, answer: Answer, *, identity: str, created: int) -> Iterator[bytes]:
    """The same as server-sent events."""
    yield _event(ask, identity, created, [_text(ask, answer)], kind="text_completion")
    if ask.include_usage:
        yield _event(ask, identity, created, [], kind="text_completion", usage=_usage(answer))
    yield DONE


def _text(ask: TextAsk, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if ask.logprobs:
        ends = list(accumulate(len(text) for text in answer.token_texts))
        logprobs = {
            "tokens": list(answer.token_texts),
            "token_logprobs": answer.turn.logprobs.tolist(),
            "text_offset": [0, *ends[:-1]],
            "top_logprobs": None,
        }
    return {"index": 0, "text": answer.content, "finish_reason": answer.finish_reason, "logprobs": logprobs}


def _event(
    ask: Ask | TextAsk, identity: str, created: int, choices: list[Any], *, kind: str = "chat.completion.chunk", **more: Any
) -> bytes:
    body = _head(ask, identity, created, kind) | {"choices": choices} | more
    return b"data: " + json.dumps(body, allow_nan=False).encode() + b"\n\n"


def _head(ask: Ask | TextAsk, identity: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": created, "model": ask.model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {**call, "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.calls
    ]


def _usage(answer: Answer) -> dict[str, int]:
    new = int(answer.turn.token_ids.size)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": new,
        "total_tokens": answer.num_prompt_tokens + new,
    }


def _logprobs(answer: Answer) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(answer.token_texts, answer.turn.logprobs.tolist(), strict=True)
        ],
        "refusal": None,
    }
