"""One rollout, several token sequences: each sampled token is trained exactly once, where it was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import SamplingParams
from agent_loop.errors import Diverged, LoopError
from agent_loop.progress import Piece, Rewound
from agent_loop.session import Session
from rollouter.progress_records import Got, decode_entry, encode_entry
from sample_bus.sample import StopReason
from tests.agent_loop.scripted import Letters, ScriptedEngine, generation
from tests.fakes.samples import make_sample


class Kept:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.spoilt = False

    def asked(self, num_tokens: int) -> None:
        return

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)

    async def add_sampled(self, piece: Piece) -> None:
        self.add(piece)

    def spoil(self) -> None:
        self.spoilt = True


def session_of(*script: Sequence[int], recorder: Kept | None = None, restored: Sequence[Piece] = ()) -> Session:
    engine = ScriptedEngine(*(generation(tokens) for tokens in script))
    sampling = SamplingParams(temperature=1.0, max_tokens=100, seed=7)
    return Session(
        engine, sampling, rollout_id="r.0", max_model_len=512, codec=Letters(), recorder=recorder, restored=tuple(restored)
    )


async def test_a_rewritten_history_begins_a_segment_and_trains_no_token_twice() -> None:
    """B59: a template that strips the thinking from history: every sampled token is trained where it was sampled."""
    session = session_of([10, 11, 12], [20, 21])
    session.append([1, 2])
    await session.generate()
    session.rewind(2)
    session.append([12, 3])
    await session.generate()
    got = session.trajectory()
    assert got.tokens.tolist() == [1, 2, 10, 11, 12, 1, 2, 12, 3, 20, 21]
    assert got.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert got.segment_starts.tolist() == [0, 5]
    assert got.response_ids.tolist() == [10, 11, 12, 20, 21]
    assert (got.num_turns, got.num_prompt_tokens) == (2, 2)


async def test_a_context_that_was_only_shown_leaves_no_segment() -> None:
    session = session_of([10])
    session.append([1, 2, 3])
    session.rewind(0)
    session.append([4])
    await session.generate()
    got = session.trajectory()
    assert (got.tokens.tolist(), got.segment_starts.tolist()) == ([4, 10], [0])


async def test_forks_are_trained_with_their_rollout() -> None:
    """B32: all in or all out."""
    session = session_of([10], [20], [30], [40])
    session.append([1])
    await session.generate()
    left, right = session.fork(), session.fork()
    left.append([2])
    right.append([3])
    await left.generate()
    await right.generate()
    right.count("searches")
    session.append([4])
    await session.generate()
    got = session.trajectory()
    assert got.segment_starts.tolist() == [0, 4, 8]
    assert got.tokens.tolist() == [1, 10, 4, 40, 1, 10, 2, 20, 1, 10, 3, 30]
    assert got.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert got.response_ids.tolist() == [10, 4, 40]
    assert (got.num_turns, got.counts) == (4, {"searches": 1})


async def test_requests_of_forks_are_told_apart_and_draw_with_other_seeds() -> None:
    engine = ScriptedEngine(*(generation([9]) for _ in range(3)))
    sampling = SamplingParams(temperature=1.0, max_tokens=9, seed=7)
    session = Session(engine, sampling, rollout_id="r.0", max_model_len=99, codec=Letters())
    session.append([1])
    forks = [session, session.fork(), session.fork()]
    for one in forks:
        await one.generate()
    assert engine.request_ids == ["r.0-0", "r.0/0-0", "r.0/1-0"]
    assert len({one.seed for one in engine.samplings}) == 3


async def test_a_rollout_with_forks_is_not_continued_elsewhere() -> None:
    recorder = Kept()
    session = session_of([10], recorder=recorder)
    session.append([1])
    session.fork()
    assert recorder.spoilt


async def test_dense_rewards_stand_at_the_end_of_their_turn() -> None:
    session = session_of([10, 11], [20])
    session.append([1])
    await session.generate()
    session.append([2])
    session.reward_turn(0.5)
    session.rewind(1)
    session.append([3])
    await session.generate()
    session.reward_turn(-1)
    session.reward_turn(0.25)
    got = session.trajectory()
    assert got.token_rewards.tolist() == [0, 0, 0.5, 0, 0, 0, -0.75]
    assert got.loss_mask[got.token_rewards != 0].all()


async def test_a_reward_before_any_turn_or_without_a_value_is_refused() -> None:
    session = session_of([10])
    session.append([1])
    with pytest.raises(LoopError, match="before any turn"):
        session.reward_turn(1.0)
    await session.generate()
    with pytest.raises(LoopError, match="got a turn's reward of nan"):
        session.reward_turn(float("nan"))


def test_a_rewind_beyond_the_context_is_refused() -> None:
    session = session_of()
    session.append([1, 2])
    with pytest.raises(LoopError, match="got a rewind to 3, expected 0 to 2 tokens"):
        session.rewind(3)


async def test_a_recorded_rewind_is_played_again() -> None:
    recorder = Kept()
    session = session_of([10, 11], [20], recorder=recorder)
    session.append([1])
    await session.generate()
    session.rewind(2)
    session.append([3])
    await session.generate()
    assert Rewound(num_tokens=2) in recorder.pieces
    encoded = [encode_entry(("g", 0), Got(index=index, piece=piece)) for index, piece in enumerate(recorder.pieces)]
    pieces = [entry.piece for _, entry in (decode_entry(payload, "here") for payload in encoded) if isinstance(entry, Got)]
    again = session_of(restored=pieces)
    again.append([1])
    await again.generate()
    again.rewind(2)
    again.append([3])
    await again.generate()
    assert again.trajectory().tokens.tolist() == session.trajectory().tokens.tolist()
    other = session_of(restored=pieces)
    other.append([1])
    await other.generate()
    with pytest.raises(Diverged, match="went back to 1 tokens where it went back"):
        other.rewind(1)


OPERATIONS = st.lists(st.tuples(st.sampled_from("argft"), st.integers(0, 6)), max_size=20)


@given(OPERATIONS)
def test_whatever_a_loop_does_each_sampled_token_is_trained_once_and_the_sample_is_valid(plan: list[tuple[str, int]]) -> None:
    """B57, B59"""
    num_sampled = 1

    async def play() -> Session:
        nonlocal num_sampled
        root = session_of(*([100 + index] * (index % 3 + 1) for index in range(len(plan) + 1)))
        sessions = [root]
        for kind, number in plan:
            session = sessions[number % len(sessions)]
            if kind == "a" or not session.num_tokens:
                session.append([number])
            elif kind == "r":
                session.rewind(min(number, session.num_tokens))
            elif kind == "f":
                sessions.append(session.fork())
            elif kind == "t":
                num_sampled += (await session.generate()).token_ids.size
                session.reward_turn(1.0)
            else:
                num_sampled += (await session.generate()).token_ids.size
        root.append([5])
        num_sampled += (await root.generate()).token_ids.size
        return root

    got = asyncio.run(play()).trajectory()
    assert int(got.loss_mask.sum()) == num_sampled - 1
    sample = make_sample(
        tokens=got.tokens,
        loss_mask=got.loss_mask,
        behavior_logprobs=got.behavior_logprobs,
        version_starts=got.version_starts,
        versions=got.versions,
        kept_cache=got.kept_cache,
        segment_starts=got.segment_starts,
        token_rewards=got.token_rewards,
        stop_reason=StopReason(got.stop_reason),
    )
    sample.validate()
    assert np.count_nonzero(got.token_rewards) <= num_sampled
