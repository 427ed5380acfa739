"""A scoring on an event loop of its own, for code that runs on other ones: environments, tools.

Invariant: whoever asks waits on its own loop and blocks none; the processes below are those of rewards, with their deadlines,
retries and limits, and end with this process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from agent_loop.errors import USER_CODE_FAILURES
from agent_loop.rewards.loading import Scoring
from agent_loop.rewards.score import Score

_END_TIMEOUT_S = 30.0


class ScoringThread:
    """Opened in its thread from when it is made."""

    def __init__(self, open_scoring: Callable[[], Scoring], *, name: str) -> None:
        """`open_scoring` may block, and raise: that is raised by each score."""
        self._open_scoring = open_scoring
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._opened: Future[Scoring] = Future()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        """The reward of one reply, from any event loop. Raises RewardError."""
        scoring = await asyncio.shield(asyncio.wrap_future(self._opened))  # others wait for it too
        asked = scoring.score(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    def close(self) -> None:
        """End the processes. Nothing is scored any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_END_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            scoring = self._open_scoring()
        except USER_CODE_FAILURES as error:
            self._opened.set_exception(error)
            self._loop.close()
            return
        self._loop.run_until_complete(self._run(scoring))
        self._loop.close()

    async def _run(self, scoring: Scoring) -> None:
        async with scoring.running():
            self._opened.set_result(scoring)
            await self._ended.wait()
