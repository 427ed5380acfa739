"""Engines' answers beside what the trainer published."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import RequestFailed
from sample_bus.messages import Accepted
from sample_bus.weight_checks import (
    AskWeightCheck,
    EngineWeights,
    Verdict,
    WeightCheck,
    WeightCheckRequest,
    WorkerWeights,
)
from tests.fakes.fake_control import FakeControl
from trainer.weight_check import WeightChecks, verdict_on

PUBLISHED = {6: {"a": "01", "b": "02"}, 7: {"a": "03", "b": "04"}}


def answer(*workers: WorkerWeights, engine: str = "engine-0", num_engines: int = 1, error: str = "") -> EngineWeights:
    return EngineWeights(incarnation="i", request_id=1, engine=engine, num_engines=num_engines, workers=workers, error=error)


def holding(version: int, **changes: str) -> WorkerWeights:
    return WorkerWeights(policy_version=version, checksums={**PUBLISHED[version], **changes}, num_equal=2)


def test_an_engine_with_every_checksum_is_equal_also_one_version_behind() -> None:
    for version in PUBLISHED:
        found = verdict_on(answer(holding(version), holding(version)), PUBLISHED)
        assert (found.verdict, found.num_tensors, found.num_effective) == (Verdict.EQUAL, 4, 4)


def test_each_tensor_that_differs_is_named_with_both_checksums() -> None:
    """B140: missing, surplus and other tensors alike, on whichever worker."""
    odd = WorkerWeights(policy_version=7, checksums={"a": "ff", "c": "05"})
    found = verdict_on(answer(holding(7), odd), PUBLISHED)
    assert found.verdict is Verdict.DIFFERENT
    assert [(d.name, d.expected, d.got, d.worker) for d in found.differences] == [
        ("a", "03", "ff", 1),
        ("b", "04", "", 1),
        ("c", "", "05", 1),
    ]


def test_right_bytes_with_which_the_model_does_not_compute_are_a_difference() -> None:
    """B139: a head that kept its old copy."""
    worker = holding(7).model_copy(update={"num_equal": 1, "different": ("b",)})
    found = verdict_on(answer(worker), PUBLISHED)
    assert found.verdict is Verdict.DIFFERENT
    assert [(d.name, d.is_effective) for d in found.differences] == [("b", True)]


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        (answer(WorkerWeights(policy_version=None)), Verdict.EMPTY),
        (answer(WorkerWeights(policy_version=3, checksums={"a": "01"})), Verdict.BEHIND),
        (answer(error="it is dead"), Verdict.UNKNOWN),
        (answer(), Verdict.UNKNOWN),
        (answer(holding(6), holding(7)), Verdict.DIFFERENT),
    ],
)
def test_what_cannot_be_compared_is_never_equal(given_answer: EngineWeights, expected: Verdict) -> None:
    assert verdict_on(given_answer, PUBLISHED).verdict is expected


@given(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["01", "02"])), st.data())
def test_equal_means_that_no_checksum_differs(held: dict[str, str], data: st.DataObject) -> None:
    published = data.draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["01", "02"])))
    found = verdict_on(answer(WorkerWeights(policy_version=1, checksums=held)), {1: published})
    assert (found.verdict is Verdict.EQUAL) == (held == published)


async def ask(control: FakeControl, answers: list[EngineWeights], *, timeout_s: float = 5.0) -> WeightCheck:
    """Ask, and answer as a rollouter would."""
    WeightChecks(control, incarnation="i", published=lambda: (7, PUBLISHED))

    async def reply() -> None:
        while control.get("weights_check", WeightCheckRequest) is None:
            await control.changed.wait()
        for one in answers:
            await control.request("weights.checked", one, Accepted)

    asked = control.request("weights.check", AskWeightCheck(timeout_s=timeout_s), WeightCheck)
    found, _ = await asyncio.gather(asked, reply())
    return found


async def test_a_check_ends_when_every_engine_has_answered() -> None:
    answers = [answer(holding(7), engine=f"engine-{index}", num_engines=2) for index in range(2)]
    found = await ask(FakeControl(), answers, timeout_s=600.0)
    assert [engine.engine for engine in found.engines] == ["engine-0", "engine-1"]
    assert found.is_equal


async def test_an_engine_that_stays_silent_is_no_equal_one() -> None:
    found = await ask(FakeControl(), [answer(holding(7), num_engines=2)], timeout_s=0.05)
    assert [engine.verdict for engine in found.engines] == [Verdict.EQUAL, Verdict.UNKNOWN]
    assert not found.is_equal


async def test_without_any_answer_the_check_fails_naming_the_deadline() -> None:
    with pytest.raises(RequestFailed, match=r"no engine said within 0\.05 s"):
        await ask(FakeControl(), [], timeout_s=0.05)


async def test_an_answer_to_an_earlier_question_does_not_count() -> None:
    late = answer(holding(7)).model_copy(update={"request_id": 0})
    with pytest.raises(RequestFailed, match="no engine said"):
        await ask(FakeControl(), [late], timeout_s=0.05)


def test_a_check_without_engines_is_not_equal() -> None:
    assert not WeightCheck(policy_version=7, num_tensors=2, engines=()).is_equal
