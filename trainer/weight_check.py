"""Whether the engines hold the weights that the trainer published: asked for, compared tensor by tensor, answered.

Invariant: an engine counts as equal only if each of its workers named every tensor of its version with the trainer's checksum,
and none with which the model computes otherwise. One check runs at a time; whoever asks meanwhile waits for his own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import structlog

from sample_bus.errors import RequestFailed
from sample_bus.messages import Accepted
from sample_bus.protocols import ControlServer
from sample_bus.weight_checks import (
    AskWeightCheck,
    EngineVerdict,
    EngineWeights,
    TensorDifference,
    Verdict,
    WeightCheck,
    WeightCheckRequest,
    WorkerWeights,
)

log = structlog.get_logger()

_SHOWN = 100

Checksums = Mapping[str, str]
"""Tensor to xxh3_64 in hex."""


def verdict_on(answer: EngineWeights, published: Mapping[int, Checksums]) -> EngineVerdict:
    """Compare what an engine says it holds with what was published. `published`: by policy version."""
    if answer.error or not answer.workers:
        return EngineVerdict(engine=answer.engine, verdict=Verdict.UNKNOWN, message=answer.error or "it has no worker")
    versions = {worker.policy_version for worker in answer.workers}
    version = answer.workers[0].policy_version
    if len(versions) > 1:
        held = ", ".join(str(worker.policy_version) for worker in answer.workers)
        message = f"its workers hold versions {held}"
        return EngineVerdict(engine=answer.engine, verdict=Verdict.DIFFERENT, num_differences=1, message=message)
    if version is None:
        return EngineVerdict(engine=answer.engine, verdict=Verdict.EMPTY)
    expected = published.get(version)
    if expected is None:
        return EngineVerdict(
            engine=answer.engine,
            verdict=Verdict.BEHIND,
            policy_version=version,
            message=f"the trainer has checksums of versions {', '.join(map(str, sorted(published)))} only",
        )
    differences = [
        difference for index, worker in enumerate(answer.workers) for difference in _differences(index, worker, expected)
    ]
    read_back = [worker.num_equal for worker in answer.workers if worker.num_equal is not None]
    return EngineVerdict(
        engine=answer.engine,
        verdict=Verdict.DIFFERENT if differences else Verdict.EQUAL,
        policy_version=version,
        num_tensors=len(expected) * len(answer.workers),
        num_effective=sum(read_back) if read_back else None,
        num_unread=sum(len(worker.unread) for worker in answer.workers),
        num_differences=len(differences),
        differences=tuple(differences[:_SHOWN]),
    )


def _differences(index: int, worker: WorkerWeights, expected: Checksums) -> Iterator[TensorDifference]:
    for name in sorted(expected.keys() | worker.checksums.keys()):
        mine, theirs = expected.get(name, ""), worker.checksums.get(name, "")
        if mine != theirs:
            yield TensorDifference(name=name, expected=mine, got=theirs, worker=index)
    for name in worker.different:
        checksum = worker.checksums.get(name, "")
        yield TensorDifference(name=name, expected=expected.get(name, ""), got=checksum, worker=index, is_effective=True)


class WeightChecks:
    """Answers `weights.check`; owns topic `weights_check`."""

    def __init__(
        self, control: ControlServer, *, incarnation: str, published: Callable[[], tuple[int, Mapping[int, Checksums]]]
    ) -> None:
        """`published` gives the newest version and the checksums of those that engines may still hold."""
        self._control = control
        self._incarnation = incarnation
        self._published = published
        self._last_id = 0
        self._answers: dict[str, EngineWeights] = {}
        self._changed = asyncio.Condition()
        self._one = asyncio.Lock()
        control.handle("weights.check", AskWeightCheck, self._check)
        control.handle("weights.checked", EngineWeights, self._take)

    async def _check(self, asked: AskWeightCheck) -> WeightCheck:
        async with self._one:
            self._last_id += 1
            self._answers = {}
            request = WeightCheckRequest(incarnation=self._incarnation, request_id=self._last_id, effective=asked.effective)
            await self._control.publish("weights_check", request)
            try:
                async with asyncio.timeout(asked.timeout_s), self._changed:
                    await self._changed.wait_for(self._is_complete)
            except TimeoutError:
                if not self._answers:
                    raise RequestFailed(
                        f"no engine said within {asked.timeout_s:g} s what it holds: is a rollouter connected?"
                    ) from None
            return self._reply()

    def _is_complete(self) -> bool:
        return any(len(self._answers) >= answer.num_engines for answer in self._answers.values())

    def _reply(self) -> WeightCheck:
        newest, published = self._published()
        verdicts = [verdict_on(answer, published) for _, answer in sorted(self._answers.items())]
        num_engines = max(answer.num_engines for answer in self._answers.values())
        verdicts += [
            EngineVerdict(engine=f"(silent {index + 1})", verdict=Verdict.UNKNOWN, message="it did not answer in time")
            for index in range(num_engines - len(verdicts))
        ]
        for verdict in verdicts:
            if verdict.verdict is Verdict.DIFFERENT:
                names = [difference.name for difference in verdict.differences[:10]]
                log.error("engine holds other weights than the trainer", engine=verdict.engine, tensors=names)
        return WeightCheck(policy_version=newest, num_tensors=len(published.get(newest, {})), engines=tuple(verdicts))

    async def _take(self, answer: EngineWeights) -> Accepted:
        if (answer.incarnation, answer.request_id) == (self._incarnation, self._last_id):
            async with self._changed:
                self._answers[answer.engine] = answer
                self._changed.notify_all()
        return Accepted()
