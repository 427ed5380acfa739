"""What a rollout recorded, in the layout of a sample, and the segments that it is built of.

Invariant: a segment is exactly what the engine was shown and what it sampled, in order. Each sampled token is trained in one
segment; where it stands in another one it is context: mask 0, logprob 0.0, no version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_loop.engine import NO_VERSION, Generation
from agent_loop.errors import RewardError


@dataclass(slots=True, eq=False)
class Segment:
    """One token sequence in the making."""

    pieces: list[npt.NDArray[np.int32] | Generation] = field(default_factory=list)
    """Observations, and parts of turns."""
    num_tokens: int = 0
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(token, dense reward), counted from the segment's first token."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """(first token, the one after the last) of each turn that ended in it."""

    def add(self, piece: npt.NDArray[np.int32] | Generation) -> None:
        self.pieces.append(piece)
        self.num_tokens += int(piece.token_ids.size if isinstance(piece, Generation) else piece.size)

    def disown(self, first: int) -> None:
        """From piece `first` on nothing counts as sampled: it is context. For a turn that ends the segment."""
        begin = sum(int(piece.token_ids.size if isinstance(piece, Generation) else piece.size) for piece in self.pieces[:first])
        self.pieces[first:] = [piece.token_ids if isinstance(piece, Generation) else piece for piece in self.pieces[first:]]
        self.rewards = [(token, value) for token, value in self.rewards if token < begin]
        self.turns = [turn for turn in self.turns if turn[0] < begin]

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[n] int32"""
        parts = [piece.token_ids if isinstance(piece, Generation) else piece for piece in self.pieces]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def is_trained(self) -> bool:
        """Whether a token was sampled in it."""
        return any(isinstance(piece, Generation) and piece.token_ids.size for piece in self.pieces)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first sampled one; all if none was sampled."""
        count = 0
        for piece in self.pieces:
            if isinstance(piece, Generation):
                if piece.token_ids.size:
                    return count
            else:
                count += int(piece.size)
        return count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """What a session recorded: T tokens in S segments end to end, in R runs of equal version and cache provenance."""

    tokens: npt.NDArray[np.int32]
    """[T] each segment begins with its prompt."""
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
    segment_starts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    """[S] first token of each segment: the session's own in order, then those of its forks."""
    num_own_segments: int = 1
    """Of the session itself."""
    token_rewards: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] dense rewards; [0] where there are none."""
    turn_spans: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """[K, 2] first token of each turn, and the one after its last; segment by segment."""
    reward: float | None = None
    """What the loop itself gave, an environment's return for example; None: the reward function is asked."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def response_ids(self) -> npt.NDArray[np.int32]:
        """[n] everything after the first prompt, later observations included; of several segments, of each own one what
        follows its first sampled token."""
        if self.segment_starts.size == 1:
            return self.tokens[self.num_prompt_tokens :]
        return np.concatenate([self.tokens[start:end] for start, end in self.reply_spans()[: self.num_own_segments]])

    def reply_spans(self) -> list[tuple[int, int]]:
        """Of each segment its first sampled token, and the one after its end."""
        starts = self.segment_starts.tolist()
        ends = [*starts[1:], self.tokens.size]
        return [(start + int(np.argmax(self.loss_mask[start:end])), end) for start, end in zip(starts, ends, strict=True)]

    def turn_segments(self) -> list[int]:
        """Of each turn the number of its segment."""
        found: list[int] = (np.searchsorted(self.segment_starts, self.turn_spans[:, 0], side="right") - 1).tolist()
        return found

    def with_turn_rewards(self, rewards: Sequence[float]) -> Trajectory:
        """With rewards of turns added to those that it has, each at the last token of its turn.

        Raises RewardError unless there is one for each turn, and all are finite as float32.
        """
        if len(rewards) != len(self.turn_spans):
            raise RewardError(f"got {len(rewards)} turn_rewards, expected {len(self.turn_spans)}, one for each turn")
        dense = np.zeros(self.tokens.size, np.float64)
        if self.token_rewards.size:
            dense += self.token_rewards
        np.add.at(dense, self.turn_spans[:, 1] - 1, np.asarray(rewards, np.float64))
        if not (np.abs(dense) <= np.finfo(np.float32).max).all():
            raise RewardError(f"got turn_rewards up to {max(map(abs, rewards)):g}, expected numbers that fit into float32")
        return replace(self, token_rewards=dense.astype(np.float32))


def assemble(
    segments: Sequence[Segment],
    *,
    num_own_segments: int,
    num_turns: int,
    stop_reason: Literal["stop", "length"],
    reward: float | None,
    reward_parts: Mapping[str, float],
    counts: Mapping[str, int],
) -> Trajectory:
    """The trajectory of `segments` (each of them trained), end to end."""
    starts: list[int] = []
    versions: list[int] = []
    kept: list[int] = []
    segment_starts: list[int] = []
    masks, logprobs = [], []
    rewards: list[tuple[int, float]] = []
    turns: list[tuple[int, int]] = []
    at = 0
    for segment in segments:
        segment_starts.append(at)
        rewards += [(at + token, value) for token, value in segment.rewards]
        turns += [(at + start, at + end) for start, end in segment.turns]
        for piece in segment.pieces:
            if isinstance(piece, Generation):
                n = int(piece.token_ids.size)
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
    token_rewards = np.zeros(at if rewards else 0, np.float32)
    for token, value in rewards:
        token_rewards[token] += value
    return Trajectory(
        tokens=np.concatenate([segment.tokens for segment in segments]),
        loss_mask=np.concatenate(masks),
        behavior_logprobs=np.concatenate(logprobs),
        version_starts=np.array(starts, np.int32),
        versions=np.array(versions, np.int32),
        kept_cache=np.array(kept, np.uint8),
        num_turns=num_turns,
        num_prompt_tokens=segments[0].num_prompt_tokens,
        stop_reason=stop_reason,
        segment_starts=np.array(segment_starts, np.int32),
        num_own_segments=num_own_segments,
        token_rewards=token_rewards,
        turn_spans=np.array(turns, np.int32).reshape(-1, 2),
        reward=reward,
        reward_parts=dict(reward_parts),
        counts=dict(counts),
    )
