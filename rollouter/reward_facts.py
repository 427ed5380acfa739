"""What a reward function is told of a rollout beside its reply: a mapping whose texts are decoded when they are looked at.

Invariant: plain data once it is a dict; what the row itself says under a name wins; there is one text for each turn and for
each segment, in the sample's order, so that numbers given back line up with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agent_loop.session import TextCodec, Trajectory
from agent_loop.task import Task

MAX_TEXT_TOKENS = 1 << 18
"""Tokens that are decoded for `turns`, and as many for `segments`; the texts behind them are empty."""


class RewardFacts(Mapping[str, Any]):
    """`extra_info` of one score."""

    def __init__(self, task: Task, trajectory: Trajectory, codec: TextCodec, *, solution_str: str) -> None:
        self._trajectory = trajectory
        self._codec = codec
        self._solution_str = solution_str
        self._lazy = {"turns": self._turns, "segments": self._segments, "turn_segments": trajectory.turn_segments}
        self._known: dict[str, Any] = {
            "prompt_text": task.prompt_text,
            "num_turns": trajectory.num_turns,
            "stop_reason": str(trajectory.stop_reason),
            **task.extra_info,
        }

    def __getitem__(self, key: str) -> Any:
        if key not in self._known and key in self._lazy:
            self._known[key] = self._lazy[key]()
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *(key for key in self._lazy if key not in self._known)])

    def __len__(self) -> int:
        return len(self._known.keys() | self._lazy.keys())

    def _turns(self) -> list[str]:
        """Of each turn, what was sampled."""
        return self._texts(self._trajectory.turn_spans.tolist())

    def _segments(self) -> list[str]:
        """Of each segment, everything from its first sampled token on, observations included."""
        if self._trajectory.segment_starts.size == 1:
            return [self._solution_str]
        return self._texts(self._trajectory.reply_spans())

    def _texts(self, spans: Iterable[tuple[int, int]]) -> list[str]:
        texts, left = [], MAX_TEXT_TOKENS
        for start, end in spans:
            taken = self._trajectory.tokens[start : min(end, start + left)]
            left -= int(taken.size)
            texts.append(self._codec.decode(taken.tolist()) if taken.size else "")
        return texts
