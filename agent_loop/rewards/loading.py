"""Reward functions by path, and how each of them is called.

Invariant: what is loaded takes the four arguments of its form; anything else is refused here, before a rollout is played.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from agent_loop.errors import USER_CODE_FAILURES, RewardError, words_of
from agent_loop.rewards.score import Score, score_of
from agent_loop.rewards.texts import exact_match, numeric_match

CHEAP = ("agent_loop.rewards:exact_match", "agent_loop.rewards:numeric_match")
"""Rewards that are computed where they are asked for: they take microseconds, whatever the reply is."""

_PLURAL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class Scoring(Protocol):
    """Something that gives replies their rewards."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Whatever it needs to score is there inside, and gone afterwards."""
        ...

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        """The reward of one reply. Raises RewardError."""
        ...


class Form(StrEnum):
    """How a reward function is called."""

    BLOCKING = "blocking"
    """One reply a call."""
    ASYNC = "async"
    """One reply a call, many calls at once."""
    BATCHED = "batched"
    """Lists of replies (`data_sources, solution_strs, ground_truths, extra_infos`), a list of scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A loaded reward function, called in this process; blocking ones in a thread of their own, so they stall no rollout."""

    path: str
    function: Callable[..., Any]

    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", form_of(self.function))  # found out once: it takes longer than a cheap reward

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Nothing is needed."""
        yield

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        """The reward of one reply, finite. Raises RewardError."""
        is_cheap = self.function in (exact_match, numeric_match)  # these do not look at what is decoded when it is looked at
        arguments = (data_source, solution_str, ground_truth, extra_info if is_cheap else dict(extra_info))
        form = self.form
        try:
            if form is Form.ASYNC:
                value = await self.function(*arguments)
            elif form is Form.BATCHED:
                plural = dict(zip(_PLURAL, ([argument] for argument in arguments), strict=True))
                (value,) = checked_batch(
                    await _in_thread(functools.partial(self.function, **plural), ()), expected=1, path=self.path
                )
            elif is_cheap:
                value = self.function(*arguments)
            else:
                value = await _in_thread(self.function, arguments)
        except RewardError:
            raise
        except USER_CODE_FAILURES as error:
            raise RewardError(f"reward {self.path} raised {words_of(error)} (data source {data_source})") from error
        try:
            return score_of(value, path=self.path)
        except RewardError:
            raise
        except USER_CODE_FAILURES as error:  # a value whose __float__ is the user's
            raise RewardError(
                f"reward {self.path} returned what raises {words_of(error)} (data source {data_source})"
            ) from error


def form_of(function: Callable[..., Any]) -> Form:
    """How `function` wants to be called, by its own form and the names of its parameters."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return Form.ASYNC
    return Form.BATCHED if "solution_strs" in inspect.signature(function).parameters else Form.BLOCKING


def checked_batch(values: Any, *, expected: int, path: str) -> list[Any]:
    """What a batched reward returned, as a list of `expected` values. Raises RewardError."""
    if not is_iterable(values):
        raise RewardError(f"reward {path}: got {type(values).__name__} for a batch, expected a list of scores")
    listed = list(values)
    if len(listed) != expected:
        raise RewardError(f"reward {path}: got {len(listed)} scores for a batch, expected {expected}, one for each reply")
    return listed


def is_iterable(values: Any) -> bool:
    """Whether there is a list in it; none of it is made."""
    try:
        iter(values)
    except TypeError:
        return False
    return True


def load_reward(path: str, arguments: Mapping[str, Any] | None = None) -> Reward:
    """The function at `module:function` or `path/to/file.py:function`, given `arguments` by keyword as well.

    Raises RewardError naming what is missing.
    """
    module_name, _, function_name = path.rpartition(":")
    if not module_name or not function_name:
        raise RewardError(f"data.reward: got {path!r}, expected `module:function` or `path/to/file.py:function`")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except USER_CODE_FAILURES as error:
        raise RewardError(f"data.reward: got {path!r}, and {module_name} does not import: {words_of(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"data.reward: got {path!r}, and {module_name} has no function {function_name}")
    if arguments:
        function = functools.partial(function, **arguments)
    try:
        signature = inspect.signature(function)
        if form_of(function) is Form.BATCHED:
            signature.bind(**{name: [] for name in _PLURAL})
        else:
            signature.bind("data_source", "solution_str", "ground_truth", {})
    except (TypeError, ValueError) as error:
        given = f" with {sorted(arguments)}" if arguments else ""
        raise RewardError(
            f"data.reward: {path} does not take (data_source, solution_str, ground_truth, extra_info){given}: {error}"
        ) from error
    return Reward(path=path, function=function)


def _from_file(file: Path) -> Any:
    name = f"headrace_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up
    spec.loader.exec_module(module)
    return module


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run in a daemon thread that may be abandoned: one that never returns keeps neither its rollout nor the process."""
    future: Future[tuple[Any, BaseException | None]] = Future()

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*arguments), None
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting rollout, whatever it is
            outcome = None, error  # as a value: no future takes a StopIteration
        if not future.cancelled():
            future.set_result(outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    value, error = await asyncio.wrap_future(future)
    if isinstance(error, StopIteration):  # a coroutine may not raise it
        raise RuntimeError(f"it raised {words_of(error)}") from error
    if error is not None:
        raise error
    return value
