"""Tasks that run code of users on the rollouter's event loop.

Invariant: whatever such a task raises, or a task that was started from it, is an error of that task. asyncio itself lets a
SystemExit or KeyboardInterrupt of any task end the whole loop, and so would an exception that is no Exception end whoever waits
for it (as gevent's and func_timeout's deadlines are).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_loop.errors import AgentLoopError, words_of

T = TypeVar("T")
_IS_SHELTERED: contextvars.ContextVar[bool] = contextvars.ContextVar("is_sheltered", default=False)


def sheltered_task(work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """A task of the running loop. It and those that are started from it raise an AgentLoopError in place of what is neither an
    Exception nor a cancellation."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_task_factory(), _Factory):
        loop.set_task_factory(_Factory(loop.get_task_factory()))
    context = contextvars.copy_context()
    context.run(_IS_SHELTERED.set, True)
    return loop.create_task(_Sheltered(work), name=name, context=context)


class _Factory:
    """Of tasks; those made in a sheltered context are sheltered themselves."""

    def __init__(self, make: Any) -> None:
        self._make = make or (lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        is_plain = not _IS_SHELTERED.get() or isinstance(work, _Sheltered) or not asyncio.iscoroutine(work)
        return self._make(loop, work if is_plain else _Sheltered(work), **options)


class _Sheltered(Coroutine[Any, Any, T]):
    """A coroutine that raises exceptions only. What ends it from without, `close`, goes through."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.__qualname__ = getattr(work, "__qualname__", type(work).__name__)
        self.__name__ = getattr(work, "__name__", type(work).__name__)

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise self._instead_of(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as raised:
            raise self._instead_of(raised) from raised

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # its frame and the like, for those who print tasks

    def _instead_of(self, error: BaseException) -> AgentLoopError:
        return AgentLoopError(f"{self.__qualname__} raised {words_of(error)}")
