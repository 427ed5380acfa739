"""A session: one rollout's token sequence, append-only, with what the engine said about each sampled token.

Invariant: the recorded sequence is exactly what the engine was shown and what it sampled, in order. Observations carry mask
0, logprob 0.0 and no version; sampled tokens carry mask 1, their logprob and their version. Nothing is ever decoded and
encoded again. A session that is taken up from its recorded pieces ends up as if it had never been interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from agent_loop.engine import NO_VERSION, Engine, Generation, SamplingParams
from agent_loop.errors import AgentLoopError, Diverged, EngineUnavailable, LoopError, NoRoom
from agent_loop.progress import Noted, Piece, Recorder, Sampled, Shown, Unrecorded
from agent_loop.slices import Slices

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """What a session recorded, in the layout of a sample: T tokens in R runs of equal version and cache provenance."""

    tokens: npt.NDArray[np.int32]
    """[T] prompt first."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 where the token was sampled."""
    behavior_logprobs: npt.NDArray[np.float32]
    """[T] nats, after temperature; 0.0 where the mask is 0."""
    version_starts: npt.NDArray[np.int32]
    """[R]"""
    versions: npt.NDArray[np.int32]
    """[R] NO_VERSION for observations."""
    kept_cache: npt.NDArray[np.uint8]
    """[R] as in `Generation`; 0 for observations."""
    num_turns: int
    num_prompt_tokens: int
    """Tokens before the first sampled one."""
    stop_reason: Literal["stop", "length"]
    """How the last turn ended."""

    @property
    def response_ids(self) -> npt.NDArray[np.int32]:
        """[T - num_prompt_tokens] everything after the first prompt, later observations included."""
        return self.tokens[self.num_prompt_tokens :]


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
    ) -> None:
        """`sampling.max_tokens` bounds one turn; `rollout_id` (with its attempt) prefixes the ids of the engine's requests.

        `slices` bounds what is asked for at once (None: whole turns); each piece goes to `recorder`. `restored`, the pieces
        that a session before this one recorded, are played again: they are recorded already.
        """
        self.sampling = sampling
        self.rollout_id = rollout_id
        self.max_model_len = max_model_len
        self.codec = codec
        self._engine = engine
        self._pieces: list[npt.NDArray[np.int32] | Generation] = []
        self._num_tokens = 0
        self._num_turns = 0
        self._last_end: Literal["stop", "length"] | None = None
        self._slices = slices
        self._recorder: Recorder = recorder or Unrecorded()
        self._restored = deque(restored)
        # One more than was recorded: a request whose answer was lost has used its number.
        self._num_requests = sum(isinstance(piece, Sampled) for piece in restored) + bool(restored)

    @property
    def num_tokens(self) -> int:
        """Tokens recorded so far."""
        return self._num_tokens

    @property
    def num_turns(self) -> int:
        return self._num_turns

    @property
    def room(self) -> int:
        """Tokens that still fit into the model's length."""
        return self.max_model_len - self._num_tokens

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[T] int32, the whole context."""
        parts = [piece.token_ids if isinstance(piece, Generation) else piece for piece in self._pieces]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

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
        self._pieces.append(piece)
        self._num_tokens += int(piece.size)

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
        if self._num_tokens == 0:
            raise LoopError(f"rollout {self.rollout_id}: a turn was asked for before any prompt")
        if budget < 1:
            raise NoRoom(
                f"rollout {self.rollout_id}: the context has {self._num_tokens} tokens and engine.max_model_len is "
                f"{self.max_model_len}: no room for a turn"
            )
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
            asked = min(budget, (None if self._slices is None else self._slices.next_size(self._num_tokens)) or budget)
            part = await self._ask(asked, turn_goes_on=asked < budget)
            num_new = int(part.token_ids.size)
            self._take(part, parts)
            budget -= num_new
            end: Literal["stop", "length"] | None = "length" if budget < 1 else None
            if part.stop_reason == "stop" or (part.stop_reason == "length" and num_new < asked):
                end = part.stop_reason
            if num_new:
                self._recorder.add(Sampled(generation=part, ends_turn=end))
            if end is not None:
                return end
            fruitless = 0 if num_new else fruitless + 1
            if fruitless == _MAX_FRUITLESS_ABORTS:
                raise EngineUnavailable(f"rollout {self.rollout_id}: aborted {fruitless} times in a row without a new token")

    def _take(self, part: Generation, parts: list[Generation]) -> None:
        self._pieces.append(part)
        self._num_tokens += int(part.token_ids.size)
        parts.append(part)

    async def _ask(self, budget: int, *, turn_goes_on: bool) -> Generation:
        number = self._num_requests
        self._num_requests += 1
        seed = self.sampling.seed
        sampling = replace(
            self.sampling,
            max_tokens=budget,
            seed=None if seed is None else (seed + number * 0x9E3779B1) % (1 << 31),
            turn_goes_on=turn_goes_on,
        )
        request_id = f"{self.rollout_id}-{number}"
        self._recorder.asked(budget)
        began_at = 0.0 if self._slices is None else self._slices.clock()
        part = await self._engine.generate(self.tokens, sampling, request_id=request_id)
        part.validate(request_id)
        if self._slices is not None:
            self._slices.took(int(part.token_ids.size), self._slices.clock() - began_at)
        return part

    def _diverged(self, does: str, before: Piece) -> Diverged:
        did = {Shown: "showed something else", Sampled: "took a turn", Noted: "had work done"}[type(before)]
        return Diverged(f"rollout {self.rollout_id}: its agent loop {does} where it {did} when it was recorded")

    def trajectory(self) -> Trajectory:
        """What was recorded. Raises LoopError if nothing was generated, Diverged if the loop ended before what is restored."""
        if self._restored:
            raise self._diverged("ended", self._restored[0])
        turns = [piece for piece in self._pieces if isinstance(piece, Generation) and piece.token_ids.size]
        if self._last_end is None or not turns:
            raise LoopError(f"rollout {self.rollout_id}: the agent loop ended without a generated token")
        starts: list[int] = []
        versions: list[int] = []
        kept: list[int] = []
        masks, logprobs = [], []
        at = 0
        num_prompt_tokens = -1
        for piece in self._pieces:
            if isinstance(piece, Generation):
                n = int(piece.token_ids.size)
                if n and num_prompt_tokens < 0:
                    num_prompt_tokens = at
                runs = zip(piece.version_starts.tolist(), piece.versions.tolist(), piece.kept_cache.tolist(), strict=True)
                masks.append(np.ones(n, np.uint8))
                logprobs.append(np.minimum(piece.logprobs, 0.0).astype(np.float32, copy=False))
            else:
                n = int(piece.size)
                runs = zip([0], [NO_VERSION], [0], strict=True)
                masks.append(np.zeros(n, np.uint8))
                logprobs.append(np.zeros(n, np.float32))
            for start, version, was_kept in runs:
                if not versions or (versions[-1], kept[-1]) != (version, was_kept):
                    starts.append(at + start)
                    versions.append(version)
                    kept.append(was_kept)
            at += n
        return Trajectory(
            tokens=self.tokens,
            loss_mask=np.concatenate(masks),
            behavior_logprobs=np.concatenate(logprobs),
            version_starts=np.array(starts, np.int32),
            versions=np.array(versions, np.int32),
            kept_cache=np.array(kept, np.uint8),
            num_turns=self._num_turns,
            num_prompt_tokens=num_prompt_tokens,
            stop_reason=self._last_end,
        )


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
