"""Turns between two of their requests: whose seat is kept, where they go on, under which cache salt."""

from __future__ import annotations

import pytest

from agent_loop.vllm_client import VllmClient
from rollouter.engine_member import EngineState, Held, Member, PartialRollout
from rollouter.open_turns import OpenTurn, OpenTurns, goes_on_here, salt_of


def held(version: int, incarnation: str = "a") -> Held:
    return Held(incarnation=incarnation, policy_version=version)


def member_of(name: str = "e", *, version: int = 3) -> Member:
    client = VllmClient("unix:/nowhere", request_timeout_s=1.0, control_timeout_s=1.0)
    member = Member(name, client, server=None, max_requests=4)
    member.state, member.held = EngineState.SERVING, held(version)
    return member


def turn_at(member: Member, *, asked: Held | None = None, fresh: Held | None = None, num_tokens: int = 10) -> OpenTurn:
    return OpenTurn(member=member, asked=asked or held(3), fresh=fresh, num_tokens=num_tokens)


async def test_a_turn_is_taken_up_once_with_its_seat() -> None:
    given_back: list[Member] = []
    turns, member = OpenTurns(given_back.append), member_of()
    turns.leave("s", turn_at(member))
    assert turns.take_up("other", num_tokens=10) is None
    taken = turns.take_up("s", num_tokens=10)
    assert taken is not None
    assert taken.member is member
    assert turns.take_up("s", num_tokens=10) is None
    turns.close()
    assert given_back == []


async def test_a_request_that_does_not_go_on_from_there_loses_the_seat() -> None:
    given_back: list[Member] = []
    turns, member = OpenTurns(given_back.append), member_of()
    turns.leave("s", turn_at(member, num_tokens=10))
    assert turns.take_up("s", num_tokens=12) is None
    assert given_back == [member]


async def test_closing_gives_every_seat_back() -> None:
    given_back: list[Member] = []
    turns, member = OpenTurns(given_back.append), member_of()
    turns.leave("s", turn_at(member))
    turns.leave("t", turn_at(member))
    turns.leave("t", turn_at(member))
    turns.close()
    assert given_back == [member] * 3


@pytest.mark.parametrize(
    ("state", "version", "is_draining", "expected"),
    [
        (EngineState.SERVING, 3, False, True),
        (EngineState.SERVING, 2, False, False),  # it lags behind the version that counts
        (EngineState.UPDATING, 3, False, False),
        (EngineState.UPDATING, 2, True, True),  # drained of just such turns
        (EngineState.DEAD, 3, False, False),
    ],
)
def test_a_turn_goes_on_where_it_is_if_its_engine_may_be_asked(
    state: EngineState, version: int, is_draining: bool, expected: bool
) -> None:
    member = member_of(version=version)
    member.state, member.is_draining = state, is_draining
    assert goes_on_here(turn_at(member), newest=held(3)) is expected


@pytest.mark.parametrize(
    ("mode", "asked", "fresh", "expected"),
    [
        ("keep", held(3), None, held(3)),
        ("recompute", held(3), None, held(4)),
        ("finish", held(3), None, held(4)),
        ("keep", held(3), held(2), held(4)),  # the prefix cache was emptied since
        ("keep", held(3, "z"), None, held(4)),  # another trainer's
    ],
)
def test_only_keep_goes_on_under_the_salt_of_an_older_version(
    mode: PartialRollout, asked: Held, fresh: Held | None, expected: Held
) -> None:
    member = member_of(version=4)
    turn = turn_at(member, asked=asked, fresh=fresh)
    assert salt_of(turn, member=member, held=held(4), mode=mode) == expected
    assert salt_of(turn, member=member_of("f"), held=held(4), mode=mode) == held(4)
    assert salt_of(None, member=member, held=held(4), mode=mode) == held(4)
