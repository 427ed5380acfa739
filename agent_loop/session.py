"""A session: one rollout's token sequences, append-only, with what the engine said about each sampled token.

Invariant: each recorded sequence is exactly what the engine was shown and what it sampled, in order. Observations carry mask
0, logprob 0.0 and no version; sampled tokens carry mask 1, their logprob and their version. Nothing is ever decoded and
encoded again. A history that is to be another one begins a new segment (`rewind`, `fork`). A session that is taken up from
its recorded pieces ends up as if it had never been interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from agent_loop.deadline import Deadline
from agent_loop.engine import Engine, Generation, SamplingParams
from agent_loop.errors import AgentLoopError, Diverged, EngineUnavailable, LoopError, NoRoom
from agent_loop.progress import Noted, Piece, Recorder, Rewound, Sampled, Shown, Unrecorded
from agent_loop.slices import Slices
from agent_loop.trajectory import Segment, Trajectory, assemble
from configs.limits import MAX_REWARD

__all__ = ["Session", "TextCodec", "Trajectory", "join", "session_of"]

_MAX_FRUITLESS_ABORTS = 8
"""Consecutive aborts without a new token after which a turn is given up."""


def session_of(request_id: str) -> str:
    """The session that made the request: its requests go on from each other."""
    return request_id.removesuffix("-again").rpartition("-")[0]


class TextCodec(Protocol):
    """The model's tokenizer, for observations and for reading replies; never for replies that are trained."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out; ids beyond the vocabulary become a placeholder."""
        ...


class Session:
    """One rollout's conversation with an engine."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        *,
        rollout_id: str,
        max_model_len: int,
        codec: TextCodec,
        slices: Slices | None = None,
        recorder: Recorder | None = None,
        restored: Sequence[Piece] = (),
        deadline: Deadline | None = None,
    ) -> None:
        """`sampling.max_tokens` bounds one turn; `rollout_id` (with its attempt) prefixes the ids of the engine's requests.

        `slices` bounds what is asked for at once (None: whole turns); each piece goes to `recorder`. `restored`, the pieces
        that a session before this one recorded, are played again: they are recorded already.
        """
        self.sampling = sampling
        self.rollout_id = rollout_id
        self.max_model_len = max_model_len
        self.codec = codec
        self.deadline = deadline
        """Of the attempt; None where it has none."""
        self._engine = engine
        self.reward: float | None = None
        """Set by a loop that knows its reward itself (an environment's return); None: the reward function is asked."""
        self.reward_parts: dict[str, float] = {}
        """What that reward was made of, by name."""
        self.counts: dict[str, int] = {}
        self._closed: list[Segment] = []
        self._segment = Segment()
        self._forks: list[Session] = []
        self._rewarded: tuple[Segment, int] | None = None
        self._num_turns = 0
        self._turn: tuple[Segment, int, int] = (self._segment, 0, 0)
        """Where the last turn began: its segment, its first piece there, and the turns before it."""
        self._last_end: Literal["stop", "length"] | None = None
        self._slices = slices
        self._recorder: Recorder = recorder or Unrecorded()
        self._restored = deque(restored)
        # One more than was recorded: a request whose answer was lost has used its number.
        self._num_requests = sum(isinstance(piece, Sampled) for piece in restored) + bool(restored)

    @property
    def num_tokens(self) -> int:
        """Tokens of the context: of the segment in the making."""
        return self._segment.num_tokens

    @property
    def num_turns(self) -> int:
        """Turns taken so far, in all segments."""
        return self._num_turns

    @property
    def last_end(self) -> Literal["stop", "length"] | None:
        """How the last turn ended; None before one did."""
        return self._last_end

    @property
    def room(self) -> int:
        """Tokens that still fit into the model's length."""
        return self.max_model_len - self._segment.num_tokens

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[n] int32, the whole context."""
        return self._segment.tokens

    def append(self, token_ids: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """Add an observation (prompt, tool output): shown to the model, not trained."""
        piece = np.array(token_ids, dtype=np.int32)
        if piece.ndim != 1:
            raise LoopError(f"rollout {self.rollout_id}: got an observation of shape {piece.shape}, expected [n] token ids")
        if not piece.size:
            return
        if self._restored:
            before = self._restored.popleft()
            if not isinstance(before, Shown) or not np.array_equal(before.token_ids, piece):
                raise self._diverged(f"showed {piece.size} tokens", before)
        else:
            self._recorder.add(Shown(token_ids=piece))
        self._segment.add(piece)

    def rewind(self, num_tokens: int) -> None:
        """Begin a new segment with the first `num_tokens` of the context, as context: what was sampled so far is trained where
        it was sampled. Rewinding to where the context ends, with nothing behind it, changes nothing.

        For a history that is summarized (0), that a template rewrites (what it leaves alone), or that is left for another
        branch one after the other. Raises LoopError beyond the context.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise LoopError(f"rollout {self.rollout_id}: got a rewind to {num_tokens}, expected 0 to {self.num_tokens} tokens")
        if num_tokens == self.num_tokens:
            return
        if self._restored:
            before = self._restored.popleft()
            if not isinstance(before, Rewound) or before.num_tokens != num_tokens:
                raise self._diverged(f"went back to {num_tokens} tokens", before)
        else:
            self._recorder.add(Rewound(num_tokens=num_tokens))
        self._cut(num_tokens)

    def fork(self) -> Session:
        """A session that goes on from this context beside it (a branch, a sub-agent); what it samples is trained with this
        rollout, in segments of its own. A rollout with forks is not continued by another process: it starts over.

        Raises Diverged when recorded pieces are left: a loop that forks has none.
        """
        if self._restored:
            raise self._diverged("forked", self._restored[0])
        self._recorder.spoil()
        fork = Session(
            self._engine,
            self.sampling if self.sampling.seed is None else replace(self.sampling, seed=self._seed(len(self._forks) + 1, 7)),
            rollout_id=f"{self.rollout_id}/{len(self._forks)}",
            max_model_len=self.max_model_len,
            codec=self.codec,
            slices=self._slices,
        )
        if self.num_tokens:
            fork._segment.add(self.tokens)
        self._forks.append(fork)
        return fork

    def drop(self, fork: Session) -> None:
        """Forget a fork of this one in which nothing was sampled; another one stays."""
        if not fork.segments():
            self._forks = [one for one in self._forks if one is not fork]

    def _cut(self, num_tokens: int) -> None:
        kept = self.tokens[:num_tokens]
        if self._segment.is_trained:
            self._closed.append(self._segment)
        self._segment = Segment()
        if num_tokens:
            self._segment.add(kept)

    def reward_turn(self, value: float) -> None:
        """Add a dense reward at the last token of the last turn. Raises LoopError before any turn, or for no finite number of
        at most MAX_REWARD in size."""
        if self._rewarded is None:
            raise LoopError(f"rollout {self.rollout_id}: a reward was given before any turn")
        if not abs(value) <= MAX_REWARD:  # nor is nan
            words = f"got a turn's reward of {value}, expected a finite number of at most {MAX_REWARD:g} in size"
            raise LoopError(f"rollout {self.rollout_id}: {words}")
        segment, token = self._rewarded
        segment.rewards.append((token, float(value)))

    def disown_turn(self) -> None:
        """Train nothing of the last turn, nor of one that was broken off: nobody acted on it. Its tokens stay as context."""
        segment, first, num_turns = self._turn
        self._recorder.spoil()
        segment.disown(first)
        self._num_turns = num_turns

    def truncate(self) -> None:
        """Say that the rollout ends for want of room: its stop reason is `length`."""
        self._last_end = None if self._last_end is None else "length"
        self.count("truncated_rollouts")

    def count(self, what: str, by: int = 1) -> None:
        """Count what happened, by name; it becomes a metric (`MAX_FIGURES` names at most)."""
        self.counts[what] = self.counts.get(what, 0) + by

    async def once(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `work` (a tool call, say), which is not done again when the rollout is continued in another process.

        The result is plain data, and what comes back has been through JSON: lists for tuples. Raises LoopError for other
        results, and what `work` raises; a failure is not noted.
        """
        if self._restored:
            before = self._restored.popleft()
            if not isinstance(before, Noted):
                raise self._diverged("asked for work to be done", before)
            return orjson.loads(before.value)
        result = await work()
        try:
            value = orjson.dumps(result)
        except TypeError as error:
            raise LoopError(f"rollout {self.rollout_id}: got a result of work that is no plain data: {error}") from error
        self._recorder.add(Noted(value=value))
        return orjson.loads(value)

    async def generate(self, *, max_tokens: int | None = None) -> Generation:
        """Sample one turn and record it; its new tokens are bounded by `max_tokens`, the settings and the room left.

        A turn that the engine aborted is continued with the budget that remains, and so is one that is asked for in slices.
        Raises NoRoom when not a single token fits, and what the engine raises.
        """
        budget = min(self.sampling.max_tokens if max_tokens is None else max_tokens, self.room)
        if self.num_tokens == 0:
            raise LoopError(f"rollout {self.rollout_id}: a turn was asked for before any prompt")
        if budget < 1:
            raise NoRoom(
                f"rollout {self.rollout_id}: the context has {self.num_tokens} tokens and engine.max_model_len is "
                f"{self.max_model_len}: no room for a turn"
            )
        start = self.num_tokens
        self._turn = (self._segment, len(self._segment.pieces), self._num_turns)
        parts, end = self._recall()
        budget -= sum(int(part.token_ids.size) for part in parts)
        if end is None and budget < 1:
            end = "length"
        if end is None:
            try:
                end = await self._sample(parts, budget)
            except AgentLoopError:
                self._recorder.spoil()  # the loop may go on from here, which its recorded pieces do not tell
                raise
        self._num_turns += 1
        self._last_end = end
        self._segment.turns.append((start, self.num_tokens))
        self._rewarded = (self._segment, self.num_tokens - 1)
        return replace(join(parts), stop_reason=end)

    def _recall(self) -> tuple[list[Generation], Literal["stop", "length"] | None]:
        """What was recorded of this turn, and how it ended if it did."""
        parts: list[Generation] = []
        while self._restored:
            before = self._restored.popleft()
            if not isinstance(before, Sampled):
                raise self._diverged("asked for a turn", before)
            self._take(before.generation, parts)
            if before.ends_turn is not None:
                return parts, before.ends_turn
        return parts, None

    async def _sample(self, parts: list[Generation], budget: int) -> Literal["stop", "length"]:
        """Add to `parts` until the turn ends; how it ended."""
        fruitless = 0
        while True:
            asked = min(budget, (None if self._slices is None else self._slices.next_size(self.num_tokens)) or budget)
            part = await self._ask(asked, turn_goes_on=asked < budget)
            num_new = int(part.token_ids.size)
            self._take(part, parts)
            budget -= num_new
            end: Literal["stop", "length"] | None = "length" if budget < 1 else None
            if part.stop_reason == "stop" or (part.stop_reason == "length" and num_new < asked):
                end = part.stop_reason
            if num_new:
                await self._recorder.add_sampled(Sampled(generation=part, ends_turn=end))
            if end is not None:
                return end
            fruitless = 0 if num_new else fruitless + 1
            if fruitless == _MAX_FRUITLESS_ABORTS:
                raise EngineUnavailable(f"rollout {self.rollout_id}: aborted {fruitless} times in a row without a new token")

    def _take(self, part: Generation, parts: list[Generation]) -> None:
        self._segment.add(part)
        parts.append(part)

    async def _ask(self, budget: int, *, turn_goes_on: bool) -> Generation:
        number = self._num_requests
        self._num_requests += 1
        seed = None if self.sampling.seed is None else self._seed(number, 0)
        sampling = replace(self.sampling, max_tokens=budget, seed=seed, turn_goes_on=turn_goes_on)
        request_id = f"{self.rollout_id}-{number}"
        self._recorder.asked(budget)
        began_at = 0.0 if self._slices is None else self._slices.clock()
        part = await self._engine.generate(self.tokens, sampling, request_id=request_id)
        part.validate(request_id)
        if self._slices is not None:
            self._slices.took(int(part.token_ids.size), self._slices.clock() - began_at)
        return part

    def _seed(self, number: int, salt: int) -> int:
        assert self.sampling.seed is not None, "a seed is derived from none"
        return (self.sampling.seed + number * 0x9E3779B1 + salt * 0x85EBCA6B) % (1 << 31)

    def _diverged(self, does: str, before: Piece) -> Diverged:
        words = {Shown: "showed something else", Sampled: "took a turn", Noted: "had work done", Rewound: "went back"}
        did = words[type(before)]
        return Diverged(f"rollout {self.rollout_id}: its agent loop {does} where it {did} when it was recorded")

    def trajectory(self) -> Trajectory:
        """What was recorded. Raises LoopError if nothing was generated, Diverged if the loop ended before what is restored."""
        if self._restored:
            raise self._diverged("ended", self._restored[0])
        forks = list(self.forks())
        # Where nothing of its own is left (`disown_turn`), the first fork stands for it.
        first = next((one for one in (self, *forks) if one.segments()), self)
        own = first.segments()
        if first.last_end is None or not own:
            raise LoopError(f"rollout {self.rollout_id}: the agent loop ended without a generated token")
        counts = dict(self.counts)
        for fork in forks:
            for name, count in fork.counts.items():
                counts[name] = counts.get(name, 0) + count
        return assemble(
            [*own, *(segment for fork in forks if fork is not first for segment in fork.segments())],
            num_own_segments=len(own),
            num_turns=self._num_turns + sum(fork.num_turns for fork in forks),
            stop_reason=first.last_end,
            reward=self.reward,
            reward_parts=self.reward_parts,
            counts=counts,
        )

    def segments(self) -> list[Segment]:
        """Those with a sampled token, the one in the making included."""
        return [*self._closed, *([self._segment] if self._segment.is_trained else [])]

    def forks(self) -> Iterator[Session]:
        """All that go on beside it, forks of forks included."""
        for fork in self._forks:
            yield fork
            yield from fork.forks()


def join(parts: Sequence[Generation]) -> Generation:
    """One generation out of consecutive ones; the stop reason is the last one's."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(part.token_ids.size for part in parts[:-1])])
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_starts=np.concatenate(
            [part.version_starts + np.int32(offset) for part, offset in zip(parts, offsets, strict=True)]
        ),
        versions=np.concatenate([part.versions for part in parts]),
        kept_cache=np.concatenate([part.kept_cache for part in parts]),
        stop_reason=parts[-1].stop_reason,
    )
