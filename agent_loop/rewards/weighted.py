"""A weighted sum of rewards: each part where it belongs, asked again when its infrastructure fails.

Invariant: the sum is that of all parts, or an error: a part that failed never counts as 0. Only what is known to be cheap runs
in this process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from agent_loop.errors import RewardError, RewardUnavailable
from agent_loop.rewards.frames import FunctionSpec, Reply
from agent_loop.rewards.loading import CHEAP, Form, Scoring, load_reward
from agent_loop.rewards.pool import RewardPool
from agent_loop.rewards.process import forms_of
from agent_loop.rewards.score import Score
from configs.schema import RewardSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A summand."""

    function: str
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pooled:
    """A function in a pool, as something that scores."""

    pool: RewardPool
    function: int

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its pool is run by whoever made it."""
        yield

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        reply = Reply(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
        return await self.pool.score(self.function, reply)


class Weighted:
    """Implements Scoring. A single part without a name is no sum: its score is the score."""

    def __init__(
        self, parts: Mapping[str, tuple[float, Scoring]], settings: RewardSettings, *, pools: tuple[RewardPool, ...] = ()
    ) -> None:
        self._parts = dict(parts)
        self._settings = settings
        self.pools = pools

    @staticmethod
    def open(parts: Mapping[str, Part], settings: RewardSettings) -> Weighted:
        """Load every function, those that get processes of their own in a first one. Blocks. Raises RewardError."""
        specs = {name: FunctionSpec(path=part.function, arguments=part.arguments) for name, part in parts.items()}
        apart = [name for name, spec in specs.items() if spec.path not in CHEAP or spec.arguments]
        forms = dict(zip(apart, forms_of([specs[name] for name in apart], settings), strict=True)) if apart else {}
        scorings: dict[str, Scoring] = {name: load_reward(spec.path) for name, spec in specs.items() if name not in forms}
        pools = []
        for is_async in (False, True):
            names = [name for name in apart if (forms[name] is Form.ASYNC) == is_async]
            if names:
                pool = RewardPool([specs[name] for name in names], [forms[name] for name in names], settings)
                pools.append(pool)
                scorings |= {name: _Pooled(pool=pool, function=index) for index, name in enumerate(names)}
        return Weighted({name: (part.weight, scorings[name]) for name, part in parts.items()}, settings, pools=tuple(pools))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for pool in self.pools:
                await stack.enter_async_context(pool.running())
            yield

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        """The sum, of turns' rewards too; its parts are those of each summand before its weight.

        Raises RewardError, the first part's that failed, or where two parts have rewards of another number of turns.
        """
        reply = Reply(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
        results = await asyncio.gather(
            *(self._retried(name, scoring, reply) for name, (_, scoring) in self._parts.items()), return_exceptions=True
        )
        total = 0.0
        parts: dict[str, float] = {}
        turns: tuple[float, ...] | None = None
        first = ""
        for (name, (weight, _)), result in zip(self._parts.items(), results, strict=True):
            if isinstance(result, BaseException):
                raise result
            total += weight * result.value
            if result.turn_rewards is not None:
                if turns is not None and len(turns) != len(result.turn_rewards):
                    raise RewardError(f"turn_rewards: got {len(turns)} from {first} and {len(result.turn_rewards)} from {name}")
                first = first or name
                before = turns or (0.0,) * len(result.turn_rewards)
                turns = tuple(so_far + weight * one for so_far, one in zip(before, result.turn_rewards, strict=True))
            parts |= {f"{name}/{inner}" if name else inner: value for inner, value in result.parts.items()}
            if name:
                parts[name] = result.value
        return Score(value=total, parts=parts, turn_rewards=turns)

    async def _retried(self, name: str, scoring: Scoring, reply: Reply) -> Score:
        attempts, delay_s = self._settings.max_attempts, self._settings.retry_delay_s
        for attempt in range(1, attempts + 1):
            try:
                return await scoring.score(
                    data_source=reply.data_source,
                    solution_str=reply.solution_str,
                    ground_truth=reply.ground_truth,
                    extra_info=reply.extra_info,
                )
            except RewardUnavailable as error:
                if attempt == attempts:
                    raise RewardUnavailable(f"{error} ({attempts} times in a row, reward.max_attempts)") from error
                log.warning("reward is asked again", part=name, attempt=attempt, error=str(error))
            await asyncio.sleep(delay_s * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))
        raise AssertionError("unreachable")
