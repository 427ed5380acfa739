"""Attempts as tasks of their own: each ends by itself, at its deadline, or when its rollout is given up.

Invariant: whoever plays an attempt is not held up by an agent loop that swallows its cancellation; what such a loop brings
later is refused and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from agent_loop.deadline import Deadline
from rollouter.errors import GivenUp, LateResult
from rollouter.progress import Recording
from rollouter.rollouts import Episode, Plan, Runner
from rollouter.shelter import sheltered_task

log = structlog.get_logger()

GRACE_S = 2.0
"""How long a cancelled attempt has to end before it is left to itself."""


class Attempts:
    """Plays attempts; owns those that do not end."""

    def __init__(
        self, runner: Runner, *, timeout_s: Callable[[], float], on_late: Callable[[Plan, int], None], grace_s: float = GRACE_S
    ) -> None:
        """`timeout_s`: the runner's own deadline of an attempt, asked at its beginning. `on_late` hears of each result that
        came too late."""
        self._runner = runner
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._on_late = on_late
        self._left: set[asyncio.Task[Episode]] = set()

    @property
    def num_left(self) -> int:
        """Attempts that were cancelled and have not ended."""
        return len(self._left)

    async def play(self, plan: Plan, number: int, stop: asyncio.Future[None], recording: Recording | None = None) -> Episode:
        """Attempt `number`, until `stop` is done. Raises GivenUp then, and what the runner raises."""
        given_up = f"rollout {plan.rollout_id} attempt {number} was given up"
        if stop.done():
            raise GivenUp(f"{given_up} before it began")
        deadline = Deadline(self._timeout_s())
        attempt = self._runner.attempt(plan, number, recording, deadline)
        playing = sheltered_task(attempt, name=f"{plan.rollout_id}.{number}")
        try:
            await self._wait(playing, stop, deadline)
        finally:
            if not playing.done():
                await self._end(playing, plan, number)
            elif not playing.cancelled():
                playing.exception()  # taken notice of, also when this wait itself was cancelled
        if stop.done():
            self._refuse(playing, plan, number)
            raise GivenUp(f"{given_up} while it ran")
        if playing in self._left or playing.cancelled():
            raise TimeoutError(
                f"rollout {plan.rollout_id} attempt {number} gave up after {deadline.timeout_s:g} s; its agent loop does not "
                "end when it is cancelled"
            )
        try:
            return playing.result()
        except LateResult:
            self._on_late(plan, number)
            raise

    async def close(self) -> None:
        """End what was left to itself, as far as it can be ended."""
        for playing in self._left:
            playing.cancel()
        if self._left:
            await asyncio.wait(self._left, timeout=self._grace_s)

    async def _wait(self, playing: asyncio.Task[Episode], stop: asyncio.Future[None], deadline: Deadline) -> None:
        """Until either is done, or the deadline is over by more than the grace."""
        left_s: float | None = deadline.timeout_s
        while not playing.done() and not stop.done() and (left_s is None or left_s > -self._grace_s):
            # One that is held has its whole time from when it begins.
            wait_s = (deadline.timeout_s if left_s is None else left_s) + self._grace_s
            await asyncio.wait((playing, stop), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            left_s = deadline.left_s

    async def _end(self, playing: asyncio.Task[Episode], plan: Plan, number: int) -> None:
        playing.cancel()
        await asyncio.wait((playing,), timeout=self._grace_s)
        if playing.done():
            return
        log.warning("attempt does not end when it is cancelled, left to itself", rollout_id=plan.rollout_id, attempt=number)
        self._left.add(playing)

        def ended(task: asyncio.Task[Episode]) -> None:
            self._left.discard(task)
            self._refuse(task, plan, number)

        playing.add_done_callback(ended)

    def _refuse(self, playing: asyncio.Task[Episode], plan: Plan, number: int) -> None:
        """Count what came too late; take notice of an error, which nobody else does."""
        if not playing.done() or playing.cancelled():
            return
        error = playing.exception()
        if error is None or isinstance(error, LateResult):
            log.info("late result refused", rollout_id=plan.rollout_id, attempt=number)
            self._on_late(plan, number)
