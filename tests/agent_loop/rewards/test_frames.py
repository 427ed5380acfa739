"""Frames between a rollouter and its reward processes: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import BadGroundTruth, RewardError, RewardUnavailable, Unscored
from agent_loop.rewards.frames import PREFIX_BYTES, Answer, Outcome, OutcomeKind, Reply, Request, frame, parse
from agent_loop.rewards.score import Score

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT | st.integers(0, 99), inner), max_leaves=20)


def body(data: bytes) -> Any:
    assert int.from_bytes(data[:PREFIX_BYTES], "big") == len(data) - PREFIX_BYTES
    return parse(data[PREFIX_BYTES:])


@given(TEXT, VALUES, st.dictionaries(TEXT, VALUES))
def test_a_request_survives_the_way(text: str, truth: Any, extra: dict[str, Any]) -> None:
    reply = Reply(data_source="d", solution_str=text, ground_truth=truth, extra_info=extra)
    request = Request(number=3, function=1, replies=(reply, reply))
    assert Request.decode(body(request.encode())) == request


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(TEXT, st.floats(allow_nan=False)),
    st.none() | st.lists(st.floats(allow_nan=False)).map(tuple),
    st.booleans(),
)
def test_an_answer_survives_the_way(
    value: float, parts: dict[str, float], turns: tuple[float, ...] | None, retire: bool
) -> None:
    outcomes = (
        Outcome(kind=OutcomeKind.SCORED, score=Score(value=value, parts=parts, turn_rewards=turns)),
        Outcome(kind=OutcomeKind.UNAVAILABLE, words="down"),
    )
    answer = Answer(number=1 << 40, outcomes=outcomes, retire=retire)
    assert Answer.decode(body(answer.encode())) == answer


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (OutcomeKind.FAILED, RewardError),
        (OutcomeKind.MISCOUNTED, RewardError),
        (OutcomeKind.UNAVAILABLE, RewardUnavailable),
        (OutcomeKind.BAD_GROUND_TRUTH, BadGroundTruth),
        (OutcomeKind.UNSCORED, Unscored),
    ],
)
def test_an_outcome_without_a_score_is_the_error_that_it_stands_for(kind: OutcomeKind, error: type[RewardError]) -> None:
    """B105"""
    with pytest.raises(RewardError, match="why") as caught:
        Outcome(kind=kind, words="why").result()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "outcome", [["scored", None, ""], ["failed", [1.0, {}, None], ""], ["no kind", None, ""], ["failed"], 3]
)
def test_an_outcome_that_contradicts_itself_is_refused(outcome: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Answer.decode([1, [outcome], False])


@pytest.mark.parametrize("value", [object(), {"a": {1: lambda: 0}}, "\ud800"])
def test_what_cannot_be_carried_is_the_rows_fault(value: Any) -> None:
    with pytest.raises(BadGroundTruth, match="cannot be handed to a reward process"):
        frame(value)
