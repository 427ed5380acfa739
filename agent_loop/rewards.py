"""Rewards: user functions with verl's signature, and the ones shipped here.

Invariant: a score is a finite float or an error; a failed reward is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from agent_loop.errors import USER_CODE_FAILURES, RewardError, words_of


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the first line of the reply, stripped, is the ground truth, else 0.0."""
    first_line = solution_str.split("\n", 1)[0].strip()
    return 1.0 if first_line == str(ground_truth).strip() else 0.0


def numeric_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the first line of the reply is the same number as the ground truth (`1,000` is `1000.0`), else 0.0."""
    expected = _number(str(ground_truth))
    if expected is None:
        raise RewardError(f"numeric_match: got ground truth {ground_truth!r} from {data_source}, expected a number")
    return 1.0 if _number(solution_str.split("\n", 1)[0]) == expected else 0.0


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A loaded reward function. Blocking ones run in a thread of their own, so they stall no other rollout."""

    path: str
    function: Callable[..., Any]

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
        """The reward of one reply, finite. Raises RewardError."""
        arguments = (data_source, solution_str, ground_truth, dict(extra_info))
        try:
            if inspect.iscoroutinefunction(self.function):
                value = await self.function(*arguments)
            elif self.function in (exact_match, numeric_match):
                value = self.function(*arguments)
            else:
                value = await _in_thread(self.function, arguments)
        except RewardError:
            raise
        except USER_CODE_FAILURES as error:
            raise RewardError(f"reward {self.path} raised {words_of(error)} (data source {data_source})") from error
        return checked_score(value, path=self.path)


def checked_score(value: Any, *, path: str) -> float:
    """`value` as a finite float; of a dict, its `score`. Raises RewardError."""
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardError(f"reward {path}: got a dict with keys {sorted(map(str, value))}, expected one with `score`")
        value = value["score"]
    if value is None or isinstance(value, (str, bytes)):
        raise RewardError(f"reward {path}: got {value!r}, expected a number")
    try:
        score = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {path}: got {type(value).__name__}, expected a number") from error
    if not math.isfinite(score):
        raise RewardError(f"reward {path}: got {score}, expected a finite number")
    return score


def load_reward(path: str) -> Reward:
    """The function at `module:function` or `path/to/file.py:function`. Raises RewardError naming what is missing."""
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
    try:
        inspect.signature(function).bind("data_source", "solution_str", "ground_truth", {})
    except TypeError as error:
        raise RewardError(
            f"data.reward: {path} does not take (data_source, solution_str, ground_truth, extra_info): {error}"
        ) from error
    return Reward(path=path, function=function)


def _from_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"headrace_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run in a daemon thread that may be abandoned: one that never returns keeps neither its rollout nor the process."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting rollout, whatever it is
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await asyncio.wrap_future(future)
