"""The unit on the bus: what one rollout has to train, in one or several token sequences.

Invariant: a `Sample` is internally consistent. Every per-token array has the length of `tokens`; the version runs cover exactly
the tokens, and so do the segments; masked positions carry logprob 0.0; all numbers are finite. `validate` is called by the
producer before an offer and by the decoder after one. A rollout is one sample, so it is trained whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from configs.limits import MAX_REWARD
from sample_bus.errors import WireError

NO_VERSION = -1
_INT32 = np.dtype(np.int32)
_MAX_LOGPROB = 1e-3
"""Rounding may put a logprob just above 0."""
_MIN, _MAX = np.minimum.reduce, np.maximum.reduce
_UINT8 = np.dtype(np.uint8)
_PER_TOKEN = (("tokens", _INT32), ("loss_mask", _UINT8), ("behavior_logprobs", np.dtype(np.float32)))
_PER_RUN = (("version_starts", _INT32), ("versions", _INT32), ("kept_cache", _UINT8))
COLUMNS = (*(name for name, _ in (*_PER_TOKEN, *_PER_RUN)), "segment_starts", "token_rewards")
"""The arrays of a sample, in the order in which they travel."""
_ONE_SEGMENT = np.zeros(1, np.int32)
_NO_REWARDS = np.zeros(0, np.float32)
_ONE_SEGMENT.flags.writeable = _NO_REWARDS.flags.writeable = False
MAX_FIGURES = 32
"""Entries of `reward_parts`, and of `counts`."""
MAX_FIGURE_NAME = 64


class StopReason(StrEnum):
    """Why the last turn ended."""

    STOP = "stop"
    LENGTH = "length"


class SampleId(NamedTuple):
    """Identity on the bus: dense `seq` per (producer, epoch). A producer's new process starts a new epoch."""

    producer: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """T tokens, prompts and replies, in S sequences end to end, with what training needs."""

    task_id: str
    """Which task, stable over epochs and restarts."""
    group_id: str
    """The group of sibling rollouts: task and issue number."""
    rollout_id: str
    """One agent loop on one task."""
    attempt: int
    """Number of the try, from 0."""
    seat: int
    """Place in the group, 0 … group_size - 1."""
    group_size: int
    data_source: str
    """Where the task came from."""
    tokens: npt.NDArray[np.int32]
    """[T] token ids; each segment begins with its prompt."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 where the token was sampled by the policy and is trained, else 0."""
    behavior_logprobs: npt.NDArray[np.float32]
    """[T] log-probability (nats) under the weights that sampled the token, after temperature; 0.0 where the mask is 0."""
    version_starts: npt.NDArray[np.int32]
    """[R] first token of each run of equal policy version and cache provenance; begins with 0, rising."""
    versions: npt.NDArray[np.int32]
    """[R] policy version of each run; NO_VERSION for tokens that no policy sampled (prompt, tool output)."""
    kept_cache: npt.NDArray[np.uint8]
    """[R] 1 where the engine sampled the run on a KV cache that other weights may have computed, 0 where the run's own version
    had computed all of it, and for runs that no policy sampled."""
    reward: float
    temperature: float
    """Sampling temperature of the trained tokens."""
    stop_reason: StopReason
    num_turns: int
    settings_revision: int
    """Revision of the live settings under which the rollout was admitted."""
    incarnation: str
    """The trainer's incarnation whose versions these are."""
    produced_at: float
    """Unix time in seconds at which the rollout ended."""
    segment_starts: npt.NDArray[np.int32] = field(default_factory=lambda: _ONE_SEGMENT)
    """[S] first token of each sequence; begins with 0, rising. Several where a rollout branched, or its history was rewritten:
    no token of one sequence stands before a token of another. Each sampled token is trained in one of them."""
    token_rewards: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_REWARDS)
    """[T] dense rewards, each at the token that earned it, beside `reward`; [0] where there are none."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What `reward` was made of, by name; for metrics."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened on the way, by name (`tool_calls`, `tool_parse_errors`, …); for metrics."""

    @property
    def num_segments(self) -> int:
        return int(self.segment_starts.shape[0])

    def segments(self) -> list[tuple[int, int]]:
        """First token and end of each sequence."""
        starts = self.segment_starts.tolist()
        return list(zip(starts, [*starts[1:], self.num_tokens], strict=True))

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(getattr(self, name).nbytes for name in COLUMNS)

    def token_versions(self) -> npt.NDArray[np.int32]:
        """[T] int32 policy version of each token, expanded from the runs."""
        ends = np.append(self.version_starts[1:], self.num_tokens)
        return np.repeat(self.versions, ends - self.version_starts)

    @property
    def num_kept_cache_tokens(self) -> int:
        """Sampled tokens whose KV cache other weights may have computed."""
        ends = np.append(self.version_starts[1:], self.num_tokens)
        return int((ends - self.version_starts)[self.kept_cache == 1].sum())

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a trained token; NO_VERSION if none did."""
        sampled = self.versions[self.versions != NO_VERSION]
        return int(sampled.min()) if sampled.size else NO_VERSION

    def validate(self) -> None:
        """Raise WireError naming the first field that is inconsistent."""
        length = self.num_tokens
        if self.tokens.ndim != 1 or length == 0:
            raise WireError(f"tokens: got shape {self.tokens.shape}, expected [T] with T >= 1 (rollout {self.rollout_id})")
        for name, dtype in _PER_TOKEN:
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (length,):
                got, expected = f"{array.dtype}{list(array.shape)}", f"{dtype}[{length}]"
                raise WireError(f"{name}: got {got}, expected {expected} (rollout {self.rollout_id})")
        for name, dtype in _PER_RUN:
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1 or array.size != self.versions.size or array.size == 0:
                raise WireError(
                    f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}[R] (rollout {self.rollout_id})"
                )
        starts, rewards = self.segment_starts, self.token_rewards
        if starts.dtype != _INT32 or starts.ndim != 1 or starts.size == 0:
            got = f"{starts.dtype}{list(starts.shape)}"
            raise WireError(f"segment_starts: got {got}, expected {_INT32}[S] (rollout {self.rollout_id})")
        if rewards.dtype != np.dtype(np.float32) or rewards.shape not in ((0,), (length,)):
            got = f"{rewards.dtype}{list(rewards.shape)}"
            raise WireError(f"token_rewards: got {got}, expected float32[0] or float32[{length}] (rollout {self.rollout_id})")
        self.check_values()

    def check_values(self) -> None:
        """The part of `validate` that looks at values: for arrays whose types and lengths are known to fit."""
        self._check_runs(self.num_tokens)
        self._check_tokens()
        self._check_segments(self.num_tokens)
        self._check_figures()
        if not abs(self.reward) <= MAX_REWARD:  # nor is nan
            expected = f"expected a finite number of at most {MAX_REWARD:g} in size"
            raise WireError(f"reward: got {self.reward}, {expected} (rollout {self.rollout_id})")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise WireError(f"temperature: got {self.temperature}, expected a positive number (rollout {self.rollout_id})")
        if not 0 <= self.seat < self.group_size:
            raise WireError(f"seat: got {self.seat}, expected 0 to {self.group_size - 1} (rollout {self.rollout_id})")

    def _check_runs(self, length: int) -> None:
        """Runs are few: plain numbers are faster than arrays here."""
        starts, versions = self.version_starts.tolist(), self.versions.tolist()
        ends = [*starts[1:], length]
        if starts[0] != 0 or any(end <= start for start, end in zip(starts, ends, strict=True)):
            raise WireError(f"version_starts: runs must rise from 0 below {length} (rollout {self.rollout_id})")
        if (lowest := min(versions)) < NO_VERSION:
            raise WireError(f"versions: got {lowest}, expected >= {NO_VERSION} (rollout {self.rollout_id})")
        kept = self.kept_cache.tolist()
        if (highest := max(kept)) > 1:
            raise WireError(f"kept_cache: got {highest}, expected 0 or 1 (rollout {self.rollout_id})")
        if any(flag and version == NO_VERSION for flag, version in zip(kept, versions, strict=True)):
            raise WireError(f"kept_cache: got 1 for tokens that no policy sampled (rollout {self.rollout_id})")
        for start, end, version in zip(starts, ends, versions, strict=True):
            if version == NO_VERSION and np.count_nonzero(self.loss_mask[start:end]):
                raise WireError(f"versions: a trained token has no policy version (rollout {self.rollout_id})")

    def _check_segments(self, length: int) -> None:
        starts = self.segment_starts.tolist()
        if starts[0] != 0 or starts[-1] >= length or any(b <= a for a, b in pairwise(starts)):
            raise WireError(
                f"segment_starts: got {starts[:8]}, expected rising from 0 below {length} (rollout {self.rollout_id})"
            )
        if len(starts) > 1 and self.loss_mask[self.segment_starts].any():
            raise WireError(f"loss_mask: got 1 where a segment begins, which nothing predicts (rollout {self.rollout_id})")
        if self.token_rewards.size and not (fits := np.abs(self.token_rewards) <= MAX_REWARD).all():
            at = int(np.flatnonzero(~fits)[0])
            got = f"token_rewards[{at}]: got {self.token_rewards[at]}"
            raise WireError(f"{got}, expected a finite number of at most {MAX_REWARD:g} in size (rollout {self.rollout_id})")

    def _check_figures(self) -> None:
        for name, figures, kind in (("reward_parts", self.reward_parts, float), ("counts", self.counts, int)):
            if not figures:
                continue
            if len(figures) > MAX_FIGURES:
                raise WireError(
                    f"{name}: got {len(figures)} entries, expected at most {MAX_FIGURES} (rollout {self.rollout_id})"
                )
            for key, value in figures.items():
                if type(key) is not str or not 0 < len(key) <= MAX_FIGURE_NAME:
                    raise WireError(f"{name}: got the name {str(key)[:80]!r}, expected 1 to {MAX_FIGURE_NAME} characters")
                if type(value) is not kind or not math.isfinite(value) or not abs(value) < 1e300:
                    raise WireError(f"{name}[{key}]: got {str(value)[:80]}, expected a finite {kind.__name__}")

    def _check_tokens(self) -> None:
        logprobs, mask = self.behavior_logprobs, self.loss_mask
        if (lowest := _MIN(self.tokens)) < 0:
            raise WireError(f"tokens: got {int(lowest)}, expected ids >= 0 (rollout {self.rollout_id})")
        if (highest := _MAX(mask)) > 1:
            raise WireError(f"loss_mask: got {int(highest)}, expected 0 or 1 (rollout {self.rollout_id})")
        most = _MAX(logprobs)  # NaN if one is
        if not (most <= _MAX_LOGPROB and _MIN(logprobs) > -math.inf):
            odd = np.flatnonzero(~np.isfinite(logprobs))
            if odd.size:
                at = int(odd[0])
                got = f"behavior_logprobs[{at}]: got {logprobs[at]}"
                raise WireError(f"{got}, expected a finite number (rollout {self.rollout_id})")
            raise WireError(f"behavior_logprobs: got {most}, expected <= 0 (rollout {self.rollout_id})")
        if np.count_nonzero(np.greater(logprobs != 0, mask.view(np.bool_))):
            raise WireError(f"behavior_logprobs: not 0 where the loss mask is 0 (rollout {self.rollout_id})")
