"""What a rollouter and its reward processes say to each other: length-prefixed msgpack over pipes. Never pickle.

Invariant: a row survives the way as JSON would carry it, or better: bytes, integers of any size and NumPy arrays (as lists)
included; what cannot be carried is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from agent_loop.errors import BadGroundTruth, RewardError, RewardUnavailable, Unscored
from agent_loop.rewards.loading import Form
from agent_loop.rewards.score import Score

PREFIX_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
MAX_WORDS = 10_000
"""Characters that are told of a failure."""
_BIG_INT = 1


class OutcomeKind(StrEnum):
    """How the scoring of one reply ended in a reward process."""

    SCORED = "scored"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    BAD_GROUND_TRUTH = "bad ground truth"
    UNSCORED = "unscored"
    MISCOUNTED = "miscounted"
    """A batch came back with another number of scores."""


_ERRORS: Mapping[OutcomeKind, type[RewardError]] = {
    OutcomeKind.FAILED: RewardError,
    OutcomeKind.UNAVAILABLE: RewardUnavailable,
    OutcomeKind.BAD_GROUND_TRUTH: BadGroundTruth,
    OutcomeKind.UNSCORED: Unscored,
    OutcomeKind.MISCOUNTED: RewardError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A reward function to be loaded."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Given to it by keyword at each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first frame to a process."""

    functions: tuple[FunctionSpec, ...]
    sys_path: tuple[str, ...]
    max_memory_bytes: int | None
    timeout_s: float
    """After which a call is given up."""

    def encode(self) -> bytes:
        functions = [[spec.path, dict(spec.arguments)] for spec in self.functions]
        told = {"sys_path": list(self.sys_path), "memory": self.max_memory_bytes, "timeout_s": self.timeout_s}
        return frame({"functions": functions, **told})

    @staticmethod
    def decode(value: Any) -> Start:
        functions = tuple(FunctionSpec(path=path, arguments=arguments) for path, arguments in value["functions"])
        return Start(
            functions=functions,
            sys_path=tuple(value["sys_path"]),
            max_memory_bytes=value["memory"],
            timeout_s=float(value["timeout_s"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The first frame from a process: the functions are loaded, or why not."""

    forms: tuple[Form, ...] = ()
    refused: str = ""

    def encode(self) -> bytes:
        return frame({"forms": [form.value for form in self.forms], "refused": self.refused})

    @staticmethod
    def decode(value: Any) -> Ready:
        return Ready(forms=tuple(Form(form) for form in value["forms"]), refused=str(value["refused"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply to be scored."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of one function: several replies if it is batched. Without replies it takes request `number` back."""

    number: int
    function: int
    replies: tuple[Reply, ...]

    def encode(self) -> bytes:
        """Raises BadGroundTruth for a row that cannot be carried."""
        replies = [[one.data_source, one.solution_str, one.ground_truth, dict(one.extra_info)] for one in self.replies]
        return frame([self.number, self.function, replies])

    @staticmethod
    def decode(value: Any) -> Request:
        number, function, replies = value
        return Request(
            number=number,
            function=function,
            replies=tuple(
                Reply(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)
                for source, text, truth, extra in replies
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one reply."""

    kind: OutcomeKind
    score: Score | None = None
    words: str = ""
    """Why there is no score."""

    def result(self) -> Score:
        """Raises the RewardError that it stands for."""
        if self.score is not None:
            return self.score
        raise _ERRORS[self.kind](self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcomes of one request."""

    number: int
    outcomes: tuple[Outcome, ...]
    retire: bool
    """The process has grown too large, or left too many children behind: it should be replaced."""

    def encode(self) -> bytes:
        outcomes = [
            [one.kind.value, None if one.score is None else _plain_score(one.score), _writable(one.words)]
            for one in self.outcomes
        ]
        return frame([self.number, outcomes, self.retire])

    @staticmethod
    def decode(value: Any) -> Answer:
        number, outcomes, retire = value
        return Answer(number=int(number), outcomes=tuple(_outcome(one) for one in outcomes), retire=bool(retire))


def _plain_score(score: Score) -> list[Any]:
    return [score.value, dict(score.parts), None if score.turn_rewards is None else list(score.turn_rewards)]


def _score(value: Any) -> Score:
    number, parts, turns = value
    return Score(
        value=float(number),
        parts={str(name): float(part) for name, part in parts.items()},
        turn_rewards=None if turns is None else tuple(float(one) for one in turns),
    )


def _outcome(value: Any) -> Outcome:
    kind, score, words = value
    scored = None if score is None else _score(score)
    if (scored is not None) != (kind == OutcomeKind.SCORED):
        raise ValueError(f"outcome {kind} with score {scored}")
    return Outcome(kind=OutcomeKind(kind), score=scored, words=str(words))


def _writable(words: str) -> str:
    """Somebody's words, in Unicode and not too many."""
    return words[:MAX_WORDS].encode(errors="backslashreplace").decode()


def frame(value: Any) -> bytes:
    """`value` as one frame. Raises BadGroundTruth for what cannot be carried."""
    try:
        body = msgpack.packb(value, default=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadGroundTruth(f"a row cannot be handed to a reward process: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise BadGroundTruth(
            f"a row of {len(body)} bytes cannot be handed to a reward process, expected at most {MAX_FRAME_BYTES}"
        )
    return len(body).to_bytes(PREFIX_BYTES, "big") + bytes(body)


def parse(body: bytes) -> Any:
    """What `frame` made of a value, its prefix taken off."""
    return msgpack.unpackb(body, strict_map_key=False, ext_hook=_from_ext)


def _plain(value: Any) -> Any:
    if isinstance(value, int):  # one that msgpack has no room for
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, (date, Decimal)):
        return str(value)
    raise TypeError(f"got a {type(value).__name__}, expected plain data")


def _from_ext(code: int, data: bytes) -> Any:
    return int.from_bytes(data, "big", signed=True) if code == _BIG_INT else msgpack.ExtType(code, data)
