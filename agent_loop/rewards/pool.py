"""Reward processes as one place to ask: a queue before them, batches where a function takes them.

Invariant: every reply that is handed in gets a score or an error, or its caller has gone. A failure stays with the reply that
caused it: a batch that fails as a whole is scored one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from agent_loop.errors import RewardError, RewardUnavailable
from agent_loop.rewards.frames import FunctionSpec, OutcomeKind, Reply
from agent_loop.rewards.loading import Form
from agent_loop.rewards.process import RewardProcess
from agent_loop.rewards.score import Score
from configs.schema import RewardSettings

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    function: int
    reply: Reply
    future: asyncio.Future[Score] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    taken: bool = False

    @property
    def is_open(self) -> bool:
        return not self.taken and not self.future.done()


class RewardPool:
    """Processes that hold the same functions: either all async ones, or none."""

    def __init__(self, specs: Sequence[FunctionSpec], forms: Sequence[Form], settings: RewardSettings) -> None:
        self._forms = tuple(forms)
        self._settings = settings
        self._is_async = Form.ASYNC in self._forms
        assert not self._is_async or set(self._forms) == {Form.ASYNC}, f"async functions beside others: {self._forms}"
        count = settings.num_async_processes if self._is_async else settings.num_processes
        self.processes = tuple(RewardProcess(specs, settings) for _ in range(count))
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._for_batches: dict[int, deque[_Job]] = {}
        self._is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The processes start, and take replies as they become ready; outside none of them is left."""
        places = self._settings.max_concurrent if self._is_async else 1
        slots = [asyncio.create_task(self._serve(one)) for one in self.processes for _ in range(places)]
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
            for one in self.processes:
                await asyncio.shield(one.close())
            while not self._queue.empty():
                _fail(self._queue.get_nowait(), RewardUnavailable("the reward processes are gone"))

    async def score(self, function: int, reply: Reply) -> Score:
        """Raises RewardError. Cancelled, it leaves a call that runs to its end or its deadline."""
        assert self._is_running, "a score was asked for outside running()"
        job = _Job(function=function, reply=reply)
        if self._forms[function] is Form.BATCHED:
            self._for_batches.setdefault(function, deque()).append(job)
        self._queue.put_nowait(job)
        return await job.future

    async def _serve(self, process: RewardProcess) -> None:
        try:
            await process.start()
        except RewardError as error:
            log.warning("reward process did not start", error=str(error))
        while True:
            job = await self._queue.get()
            if not job.is_open:
                continue
            job.taken = True
            jobs = [job] if self._forms[job.function] is not Form.BATCHED else await self._batch(job)
            try:
                await self._score(process, jobs)
            finally:
                for one in jobs:
                    _fail(one, RewardUnavailable("the reward processes are gone"))

    async def _batch(self, first: _Job) -> list[_Job]:
        """`first` and what else waits for the same function, after the time that a batch waits."""
        waiting = self._for_batches[first.function]
        if sum(job.is_open for job in waiting) + 1 < self._settings.max_batch and self._settings.batch_wait_s:
            await asyncio.sleep(self._settings.batch_wait_s)
        jobs = [first]
        while waiting and len(jobs) < self._settings.max_batch:
            job = waiting.popleft()
            if job.is_open:
                job.taken = True
                jobs.append(job)
        return jobs

    async def _score(self, process: RewardProcess, jobs: list[_Job]) -> None:
        jobs = [job for job in jobs if not job.future.done()]
        if not jobs:
            return
        replies = [job.reply for job in jobs]
        try:
            outcomes = await process.call(jobs[0].function, replies, may_share=self._is_async)
        except RewardError as error:
            if len(jobs) == 1:
                _fail(jobs[0], error)
                return
            outcomes = ()
        if len(jobs) > 1 and all(outcome.kind is OutcomeKind.FAILED for outcome in outcomes):
            log.info("batch of replies failed, scored one by one", replies=len(jobs))
            for job in jobs:
                await self._score(process, [job])
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.future.done():
                continue
            try:
                job.future.set_result(outcome.result())
            except RewardError as error:
                _fail(job, error)


def _fail(job: _Job, error: RewardError) -> None:
    if not job.future.done():
        job.future.set_exception(error)
        job.future.exception()  # its caller may have gone
