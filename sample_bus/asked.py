"""Requests on a client's side: what was asked and is not answered. Lives in the event loop.

Invariant: a request ends with the trainer's reply or with RequestFailed, at its deadline at the latest; it is never carried
out by two trainers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sample_bus.errors import RequestFailed
from sample_bus.frames import Reply, Request
from sample_bus.messages import Message
from sample_bus.topics import decode_body, encode_body

M = TypeVar("M", bound=Message)
Send = Callable[[Request], None]


@dataclass(slots=True, eq=False)
class _Question:
    request: Request
    answer: asyncio.Future[Reply]
    sent: bool


class Asked:
    def __init__(self) -> None:
        self._questions: dict[int, _Question] = {}
        self._last_id = 0

    async def ask(
        self, name: str, body: Message, reply: type[M], *, timeout_s: float, send: Send | None, state: Callable[[], str]
    ) -> M:
        """Send now, or without `send` at the next `send_again`. Raises RequestFailed."""
        self._last_id += 1
        request = Request(id=self._last_id, name=name, body=encode_body(body))
        question = _Question(request, asyncio.get_running_loop().create_future(), send is not None)
        self._questions[request.id] = question
        try:
            if send is not None:
                send(request)
            async with asyncio.timeout(timeout_s):
                answer = await question.answer
        except TimeoutError as error:
            raise RequestFailed(f"{name}: no answer from the trainer within {timeout_s:g} s (it is {state()})") from error
        finally:
            del self._questions[request.id]
        if not answer.ok:
            raise RequestFailed(f"{name}: {answer.error}")
        return decode_body(answer.body, reply, f"reply to {name}")

    def take(self, reply: Reply) -> None:
        question = self._questions.get(reply.id)
        if question is not None and not question.answer.done():
            question.answer.set_result(reply)

    def send_again(self, send: Send) -> None:
        """The connection was made anew: ask what is unanswered; the trainer knows what it did already."""
        for question in self._questions.values():
            question.sent = True
            send(question.request)

    def restarted(self) -> None:
        """Another trainer: whether the old one did what it was asked cannot be known."""
        self._fail(lambda question: question.sent, "the trainer restarted before it answered")

    def fail(self, why: str) -> None:
        self._fail(lambda question: True, why)

    def _fail(self, chosen: Callable[[_Question], bool], why: str) -> None:
        for question in self._questions.values():
            if chosen(question) and not question.answer.done():
                question.answer.set_exception(RequestFailed(f"{question.request.name}: {why}"))
