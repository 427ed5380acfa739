"""`/v1/responses`: what a program asks of it as an `Ask`, and the answer in its shape. Pure but for what a session remembers.

Invariant: a response that goes on from another (`previous_response_id`, or its items sent back) is the same conversation, told
in the same messages, as `/v1/chat/completions` would have it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.gateway.asks import Ask, Refusal, Rules, call_of, checked, limit_of, refused, text_of
from agent_loop.gateway.branches import Answer

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "background": (False,),
    "conversation": (None,),
    "prompt": (None,),
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_REMEMBERED = 1024

Message = Mapping[str, Any]


class Responses:
    """Of one session: its earlier responses."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """The conversation as it stood with each response, without the instructions."""

    def read(self, found: Any, rules: Rules) -> Ask:
        """Raises Refusal (400, 404) naming the parameter."""
        body = checked(found, rules, _NEUTRAL)
        asked = body.get("text")
        shape = asked.get("format") if isinstance(asked, Mapping) else None
        if shape is not None and (not isinstance(shape, Mapping) or shape.get("type") != "text"):
            raise refused("text.format", f"got {shape!r}, and only text samples what is trained")
        before = body.get("previous_response_id")
        if before is not None and (not isinstance(before, str) or before not in self._told):
            raise Refusal(
                404, f"got {before!r}, no response of this session", code="unknown_response", param="previous_response_id"
            )
        messages = [*(self._told[before] if before is not None else ()), *_messages(body.get("input"))]
        instructions = body.get("instructions")
        if instructions:
            messages.insert(0, {"role": "system", "content": text_of(instructions, "instructions")})
        tools = () if body.get("tool_choice") == "none" else _tools(body.get("tools") or [])
        include = body.get("include") or []
        if not isinstance(include, list):
            raise refused("include", f"got {include!r}, expected a list")
        return Ask(
            messages=tuple(messages),
            tools=tools,
            max_tokens=limit_of(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            include_usage=True,
            logprobs="message.output_text.logprobs" in include,
            model=str(body.get("model", "")),
        )

    def remember(self, identity: str, body: Mapping[str, Any], ask: Ask, answer: Answer) -> None:
        """Of the answer to `ask`, which was read from `body`."""
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            said["tool_calls"] = list(answer.calls)
        told = ask.messages[1:] if body.get("instructions") else ask.messages
        self._told[identity] = (*told, said)
        while len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)


def response(ask: Ask, answer: Answer, *, identity: str, created: int) -> dict[str, Any]:
    """The whole answer."""
    return _head(ask, identity, created) | _outcome(answer) | {"output": _items(ask, answer, identity), "usage": _usage(answer)}


def response_events(ask: Ask, answer: Answer, *, identity: str, created: int) -> Iterator[bytes]:
    """The same as server-sent events."""
    numbers = iter(range(1 << 20))

    def event(kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(body, allow_nan=False)}\n\n".encode()

    begun = _head(ask, identity, created) | {"status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for at, item in enumerate(_items(ask, answer, identity)):
        where = {"output_index": at, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            yield event("response.output_item.added", output_index=at, item=item | {"status": "in_progress", "content": []})
            inside = {**where, "content_index": 0}
            yield event("response.content_part.added", **inside, part=part | {"text": "", "logprobs": []})
            yield event("response.output_text.delta", **inside, delta=part["text"], logprobs=part["logprobs"])
            yield event("response.output_text.done", **inside, text=part["text"], logprobs=part["logprobs"])
            yield event("response.content_part.done", **inside, part=part)
        else:
            yield event("response.output_item.added", output_index=at, item=item | {"status": "in_progress", "arguments": ""})
            yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", output_index=at, item=item)
    whole = response(ask, answer, identity=identity, created=created)
    yield event(f"response.{whole['status']}", response=whole)


def _head(ask: Ask, identity: str, created: int) -> dict[str, Any]:
    return {
        "id": identity,
        "object": "response",
        "created_at": created,
        "model": ask.model,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in ask.tools],
    }


def _outcome(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def _items(ask: Ask, answer: Answer, identity: str) -> list[dict[str, Any]]:
    """Each with the same id whenever it is told."""
    name = identity.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        logprobs = (
            [
                {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(answer.token_texts, answer.turn.logprobs.tolist(), strict=True)
            ]
            if ask.logprobs
            else []
        )
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{name}{number:03}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
            "status": "completed",
        }
        for number, call in enumerate(answer.calls)
    ]
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    new = int(answer.turn.token_ids.size)
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + new,
    }


def _tools(found: Any) -> tuple[Message, ...]:
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) and tool.get("type") == "function" for tool in found):
        raise refused("tools", "expected a list of functions")
    names = ("name", "description", "parameters", "strict")
    return tuple(
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}} for tool in found
    )


def _messages(found: Any) -> list[Message]:
    if isinstance(found, str) and found:
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise refused("input", "expected a text or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(found):
        where = f"input.{at}"
        if not isinstance(item, Mapping):
            raise refused(where, f"got {type(item).__name__}, expected an object")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            # One turn of the model is several items here, and one message there.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of(item.get("output"), where, kinds=_TEXT_PARTS)
            messages.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id", ""))})
        elif kind != "reasoning":  # which no policy's answer has
            raise refused(where, f"got an item of type {kind!r}, expected a message, function_call or function_call_output")
    return list(messages)


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise refused(where, f"got role {role!r}, expected user, assistant, system or developer")
    content = text_of(item.get("content"), where, kinds=_TEXT_PARTS)
    return {"role": "system" if role == "developer" else str(role), "content": content}
