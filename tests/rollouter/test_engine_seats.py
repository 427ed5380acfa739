"""Seats: who gets the next request, and what happens to those that wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.vllm_client import VllmClient
from rollouter.engine_errors import EnginesLost
from rollouter.engine_member import EngineState, Held, Member
from rollouter.engine_seats import Seats, least_loaded

V1 = Held(incarnation="a", policy_version=1)
V2 = Held(incarnation="a", policy_version=2)


def member(
    name: str = "engine-0", *, held: Held | None = V1, seats: int = 2, state: EngineState = EngineState.SERVING
) -> Member:
    client = VllmClient("unix:/nowhere", request_timeout_s=1, control_timeout_s=1)
    made = Member(name, client, server=None, max_requests=seats)
    made.held, made.state = held, state
    return made


def seats_of(*members: Member, held: Held = V1) -> Seats:
    seats = Seats(members)
    seats.held = held
    return seats


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.SERVING])
async def test_an_engine_that_does_not_serve_gets_nothing(state: EngineState) -> None:
    """B26"""
    assert least_loaded([member(state=state)], V1) is None


@pytest.mark.parametrize("held", [None, V2, Held(incarnation="b", policy_version=1)])
async def test_an_engine_with_other_weights_gets_nothing(held: Held | None) -> None:
    """B26: nor does one of another trainer process with the same number."""
    assert least_loaded([member(held=held)], V1) is None


async def test_the_least_loaded_engine_gets_the_request() -> None:
    busy, idle = member("engine-0"), member("engine-1")
    busy.enter()
    assert least_loaded([busy, idle], V1) is idle


async def test_those_who_wait_are_served_in_order() -> None:
    one = member(seats=1)
    seats = seats_of(one)
    assert await seats.take() is one
    order: list[int] = []

    async def wait(number: int) -> None:
        got = await seats.take()
        order.append(number)
        seats.give_back(got)

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert seats.num_waiting == 5
    seats.give_back(one)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert one.in_flight == 0


async def test_those_who_go_on_come_before_those_who_have_not_begun_and_back_to_their_engine() -> None:
    """A turn in slices keeps its engine's KV cache, and rollouts that began end before others begin: two seats, six rollouts of
    four slices each."""
    members = [member("engine-0", seats=1), member("engine-1", seats=1)]
    seats = seats_of(*members)
    under_way: set[int] = set()
    most, order = 0, []

    async def play(number: int) -> None:
        nonlocal most
        for _ in range(4):
            got = await seats.take(f"r{number}")
            under_way.add(number)
            most = max(most, len(under_way))
            await asyncio.sleep(0)
            seats.give_back(got)
        under_way.discard(number)
        order.append(number)

    await asyncio.gather(*(play(number) for number in range(6)))
    assert most == 3
    assert order == sorted(order)
    assert seats.num_waiting == 0

    for session, engine in (("a", members[1]), ("b", members[0])):
        seats._served_by[session] = engine
        assert await seats.take(session) is engine
    assert least_loaded(members, V1, before=members[0]) is None


async def test_an_engine_that_does_not_serve_is_not_waited_for() -> None:
    gone, here = member("engine-0", state=EngineState.DEAD), member("engine-1")
    assert least_loaded([gone, here], V1, before=gone) is here


async def test_a_seat_given_to_one_who_was_cancelled_meanwhile_is_not_lost() -> None:
    one = member(seats=1)
    seats = seats_of(one)
    await seats.take()
    first, second = asyncio.create_task(seats.take()), asyncio.create_task(seats.take())
    await asyncio.sleep(0)
    seats.give_back(one)
    first.cancel()
    assert await second is one
    assert one.in_flight == 1


async def test_when_no_engine_is_left_everybody_hears_why() -> None:
    seats = seats_of(member(state=EngineState.DEAD))
    waiting = asyncio.create_task(seats.take())
    await asyncio.sleep(0)
    seats.fail(EnginesLost("all gone"))
    for take in (waiting, seats.take()):
        with pytest.raises(EnginesLost, match="all gone"):
            await take


async def test_engines_that_have_not_switched_serve_on_while_others_do() -> None:
    """Rolling: a new rollout goes to either; outside a round the older version gets nothing."""
    old, new = member("engine-0", held=V1), member("engine-1", held=V2, seats=1)
    seats = seats_of(old, new, held=V2)
    seats.also = V1
    assert {await seats.take(), await seats.take()} == {old, new}
    assert await seats.take() is old
    seats.give_back(old)
    seats.also = None
    waiting = asyncio.create_task(seats.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    seats.give_back(new)
    assert await waiting is new


async def test_a_session_that_has_seen_the_newer_version_never_gets_the_older_one() -> None:
    """B10: versions never decrease inside a sample; those who need not wait for it go past."""
    old, new = member("engine-0", held=V1), member("engine-1", held=V1, seats=1)
    seats = seats_of(old, new)
    seats._served_by["s"] = new
    assert await seats.take("s") is new
    seats.also, seats.held, new.held = V1, V2, V2
    again, other = asyncio.create_task(seats.take("s")), asyncio.create_task(seats.take("t"))
    assert await other is old
    assert not again.done()
    seats.give_back(new)
    assert await again is new


actions = st.lists(
    st.tuples(st.sampled_from(["take", "give", "cancel", "die", "revive", "sync"]), st.integers(0, 5)), max_size=60
)


@given(actions)
def test_seats_are_never_overbooked_and_none_is_lost(plan: list[tuple[str, int]]) -> None:
    async def play() -> None:
        members = [member(f"engine-{index}", seats=index + 1) for index in range(3)]
        seats = seats_of(*members)
        taken: list[Member] = []
        waiting: list[asyncio.Task[Member]] = []
        for action, number in plan:
            which = members[number % 3]
            match action:
                case "take":
                    waiting.append(asyncio.create_task(seats.take(("", "a", "b", "c")[number % 4])))
                case "give" if taken:
                    seats.give_back(taken.pop(number % len(taken)))
                case "cancel" if waiting:
                    waiting[number % len(waiting)].cancel()
                case "die":
                    which.lose()
                    seats.refresh()
                case "revive":
                    which.held, which.state = seats.held, EngineState.SERVING
                    seats.refresh()
                case "sync":
                    seats.held = which.held = V2
                    seats.refresh()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            taken += [task.result() for task in waiting if task.done() and not task.cancelled()]
            waiting = [task for task in waiting if not task.done()]
            assert all(each.in_flight == taken.count(each) for each in members)
            assert all(each.in_flight <= each.max_requests for each in members)
            assert not waiting or least_loaded(members, seats.held) is None
        for task in waiting:
            task.cancel()

    asyncio.run(play())


def test_the_kv_caches_of_versions_and_trainers_are_kept_apart(tmp_path: Path) -> None:
    """B69"""
    salts = {held.cache_salt for held in (V1, V2, Held(incarnation="b", policy_version=1))}
    assert len(salts) == 3
    assert Held(incarnation="a", policy_version=1).cache_salt == V1.cache_salt


switches = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "give", "switch", "announce", "die"]), st.integers(0, 5)), max_size=80
)


@given(switches)
def test_no_session_ever_goes_back_to_an_older_version(plan: list[tuple[str, int]]) -> None:
    """Rolling rounds in any order with requests, ends and deaths: a round begins when the one before has ended."""

    async def play() -> None:
        members = [member(f"engine-{index}", seats=index + 1) for index in range(3)]
        seats = seats_of(*members)
        seen: dict[str, int] = {}
        taken: list[tuple[str, Member]] = []
        asking: dict[str, asyncio.Task[Member]] = {}
        newest = V1
        for action, number in plan:
            which = members[number % 3]
            match action:
                case "ask":
                    session = "abcdef"[number]
                    if session not in asking and all(session != name for name, _ in taken):
                        asking[session] = asyncio.create_task(seats.take(session))
                case "give" if taken:
                    session, at = taken.pop(number % len(taken))
                    seen[session] = max(seen.get(session, 0), at.held.policy_version if at.held else 0)
                    seats.give_back(at)
                case "switch" if which.held != newest:
                    seats.held = which.held = newest
                    which.state = EngineState.SERVING
                    seats.refresh()
                case "announce" if seats.held == newest:
                    newest = Held(incarnation="a", policy_version=newest.policy_version + 1)
                    seats.also = seats.held
                    seats.refresh()
                case "die":
                    which.lose()
                    seats.refresh()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for session in [session for session, task in asking.items() if task.done()]:
                at = asking.pop(session).result()
                assert at.held is not None
                assert at.held.policy_version >= seen.get(session, 0)
                assert newest.policy_version - at.held.policy_version <= 1
                taken.append((session, at))
        for task in asking.values():
            task.cancel()

    asyncio.run(play())


async def test_siblings_go_where_their_prompt_was_read() -> None:
    members = [member(f"engine-{number}", seats=8) for number in range(4)]
    seats = seats_of(*members)
    for number in range(16):
        await seats.take(f"other{number}")
    first = await seats.take("a0", prompt=7)
    assert await seats.take("a1", prompt=7) is first
    assert await seats.take("b0", prompt=8) is not first


async def test_a_prompt_does_not_load_its_engine_beyond_its_share() -> None:
    """However many siblings a group has, and however long a system prompt all tasks share, no engine is left idle."""
    members = [member(f"engine-{number}", seats=64) for number in range(4)]
    seats = seats_of(*members)
    for number in range(100):
        await seats.take(f"r{number}", prompt=7)
        load = [one.in_flight for one in members]
        assert max(load) <= -(-5 * (number + 1) // (4 * len(members))) + 1
    assert min(load) > 0


async def test_other_weights_have_not_read_the_prompt() -> None:
    members = [member("engine-0", seats=8), member("engine-1", seats=8)]
    seats = seats_of(*members)
    assert await seats.take("a0", prompt=7) is members[0]
    for one in members:
        one.held = V2
    seats.held = V2
    assert await seats.take("a1", prompt=7) is members[1]
