"""The engine's side of weight sync: pull a policy version into host memory while the engine goes on generating.

Invariant: what is handed out for loading is complete and verified, and is exactly the version and digest that was asked for.
The weights loaded last stay in memory while the next version arrives; they are what a failed load falls back to. Memory that
the server lends is used as it lies; otherwise two arenas alternate. One staging runs at a time; a newer one ends the older.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import structlog
import torch

from weight_sync.arena import Arena, ArenaPool, Memory
from weight_sync.errors import DeltaRefused, NotStaged, WeightSyncError
from weight_sync.listeners import open_receiver, transport_of
from weight_sync.manifest import Manifest
from weight_sync.stream import receive_weights
from weight_sync.tcp_address import without_secrets
from weight_sync.transport import Borrowing, LoanLike, StageRequest, Terms

log = structlog.get_logger()

Verify = Literal["always", "first", "never"]

_SETTLE_S = 5.0
_MAX_ARENAS = 3
"""The version that is loaded, the next one, and one that others still read."""


class StagingState(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    STAGED = "staged"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """One complete, verified version in host memory."""

    policy_version: int
    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """By name; views of `memory`. Tied tensors stand under the one name under which they travelled."""
    memory: Memory

    @property
    def digest(self) -> str:
        return self.manifest.digest


@dataclass(slots=True, eq=False)
class _Attempt:
    """One staging; `cut` ends it from any thread."""

    address: str
    policy_version: int
    engine: str
    nonce: str
    timeout_s: float
    cohort: int = 1
    verifies: bool = True
    thread: threading.Thread | None = None
    cut: Callable[[str], None] | None = None
    cut_reason: str | None = None
    manifest: Manifest | None = None
    started: float = field(default_factory=time.monotonic)


class StagingArea:
    """Host memory of one engine worker for the weights that it will load next.

    Args:
        check_manifest: refuses, by raising, weights that the engine's model could not take; called before any weight moves.
        dtype: in which floating weights have to come, such as `bfloat16`; empty: in any.
        lendable: whether what it holds can be lent on (`WeightServer.hold`).
        on_end: told the nonce of each staging that has ended, in its thread; `status` and `get` say how.
    """

    def __init__(
        self,
        *,
        check_manifest: Callable[[Manifest], None],
        rank: int = 0,
        num_ranks: int = 1,
        dtype: str = "",
        lendable: bool = False,
        on_end: Callable[[str], None] = lambda nonce: None,
    ) -> None:
        self._check_manifest = check_manifest
        self._on_end = on_end
        self._rank = rank
        self._num_ranks = num_ranks
        self._dtype = dtype
        self._pool = ArenaPool(max_arenas=_MAX_ARENAS, lendable=lendable)
        self._has_verified = False
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._staged: StagedWeights | None = None
        self._loaded: StagedWeights | None = None
        self._trusts_loaded = True
        """False once a delta did not fit what is loaded, until other weights are."""
        self._state = StagingState.IDLE
        self._error = ""

    @property
    def loaded(self) -> StagedWeights | None:
        """What the model holds, as `mark_loaded` said; None before the first commit."""
        return self._loaded

    def status(self) -> dict[str, object]:
        """State, versions and error in plain values."""
        with self._lock:
            return {
                "state": self._state.value,
                "staged": self._staged.policy_version if self._staged else None,
                "loaded": self._loaded.policy_version if self._loaded else None,
                "loaded_digest": self._loaded.digest if self._loaded else "",
                "error": self._error,
            }

    def stage(
        self,
        address: str,
        policy_version: int,
        *,
        engine: str,
        nonce: str,
        timeout_s: float,
        cohort: int = 1,
        verify: Verify = "always",
    ) -> None:
        """Begin to pull `policy_version` from `address` in a thread and return; the server learns how it ended.

        `verify` says when checksums are computed of what arrives: always, with the first version of this worker, or never.
        A staging under way is ended first. Weights that were staged but not committed are forgotten.

        Raises:
            ValueError: `address` is none, or `timeout_s` is not positive.
            RuntimeError: no thread can be started for it.
        """
        transport_of(address)
        if not timeout_s > 0:
            raise ValueError(f"got timeout_s={timeout_s}, expected more than 0")
        verifies = verify == "always" or (verify == "first" and not self._has_verified)
        attempt = _Attempt(address, policy_version, engine, nonce, timeout_s, cohort, verifies)
        with self._lock:
            before, self._attempt = self._attempt, attempt
            forgotten, self._staged = self._staged, None
            self._state = StagingState.STAGING
            self._error = ""
            attempt.thread = threading.Thread(target=self._run, args=(attempt, before), name="weights-stage", daemon=True)
            if before is not None:
                _cut(before, f"staging {nonce} of version {policy_version} takes its place")
            problem: RuntimeError | None = None
            try:
                attempt.thread.start()
            except RuntimeError as error:
                self._attempt, self._state, self._error = before, StagingState.FAILED, str(error)
                problem = error
        if forgotten is not None:
            forgotten.memory.release()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """End a staging under way and wait for its thread. What is held stays readable, but cannot be lent on; a lender has to
        do without it."""
        with self._lock:
            attempt = self._attempt
            if attempt is not None:
                _cut(attempt, "the engine shuts down")
        if attempt is not None and attempt.thread is not None:
            attempt.thread.join(5.0)
        with self._lock:
            held = [weights for weights in (self._staged, self._loaded) if weights is not None]
        for weights in held:
            for segment in weights.memory.segments:
                segment.close()

    def get(self, policy_version: int, manifest_digest: str) -> StagedWeights:
        """The staged weights.

        Raises:
            NotStaged: they are not exactly `policy_version` with `manifest_digest`.
        """
        with self._lock:
            attempt = self._attempt
        if attempt is not None and attempt.manifest is not None and attempt.manifest.digest == manifest_digest:
            assert attempt.thread is not None
            attempt.thread.join(_SETTLE_S)  # the server may know of the last packet before this thread has noted it
        with self._lock:
            staged, state, error = self._staged, self._state, self._error
        if staged is None or (staged.policy_version, staged.digest) != (policy_version, manifest_digest):
            held = f"version {staged.policy_version} with digest {staged.digest}" if staged else "nothing"
            detail = f", last staging failed: {error}" if error else f", state: {state.value}"
            raise NotStaged(f"asked for version {policy_version} with digest {manifest_digest}, staged is {held}{detail}")
        return staged

    def holds(self, policy_version: int, manifest_digest: str) -> bool:
        """Whether the model holds exactly these weights and no others are staged."""
        with self._lock:
            loaded, staged = self._loaded, self._staged
        return (
            loaded is not None
            and staged is None
            and (loaded.policy_version, loaded.digest) == (policy_version, manifest_digest)
        )

    def mark_loaded(self, weights: StagedWeights) -> None:
        """The model now holds `weights`; the memory of those that it held before is free."""
        with self._lock:
            before, self._loaded = self._loaded, weights
            self._trusts_loaded = True
            if self._staged is weights:
                self._staged = None
                self._state = StagingState.IDLE
            else:
                weights.memory.retain()
        if before is not None:
            before.memory.release()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, attempt: _Attempt, before: _Attempt | None) -> None:
        if before is not None and before.thread is not None:
            before.thread.join()
        try:
            staged = self._receive_any(attempt)
        except (WeightSyncError, OSError, ValueError) as error:
            self._end(attempt, None, f"{type(error).__name__}: {error}")
            log.warning("staging failed", policy_version=attempt.policy_version, nonce=attempt.nonce, error=str(error))
        except BaseException as error:
            self._end(attempt, None, repr(error))
            raise
        else:
            self._end(attempt, staged, "")
            seconds = round(time.monotonic() - attempt.started, 3)
            log.info("weights staged", policy_version=attempt.policy_version, digest=staged.digest, seconds=seconds)

    def _end(self, attempt: _Attempt, staged: StagedWeights | None, error: str) -> None:
        with self._lock:
            is_current = self._attempt is attempt
            if is_current:
                self._attempt = None
                self._staged = staged
                self._state = StagingState.STAGED if staged else StagingState.FAILED
                self._error = error
        if staged is not None and not is_current:
            staged.memory.release()
        self._on_end(attempt.nonce)

    def _receive_any(self, attempt: _Attempt) -> StagedWeights:
        """Offer the loaded weights as a base; if what changed in them cannot be used, ask for all of the new ones.

        A member of a cohort cannot ask alone: its attempt fails, and it offers no base in the next one.
        """
        with self._lock:
            base = self._loaded if self._trusts_loaded else None
            if base is not None:
                base.memory.retain()
        try:
            return self._receive(attempt, base)
        except DeltaRefused as error:
            self._trusts_loaded = False
            if attempt.cohort > 1:
                raise
            log.warning(
                "all weights are asked for", policy_version=attempt.policy_version, nonce=attempt.nonce, error=str(error)
            )
        finally:
            if base is not None:
                base.memory.release()
        return self._receive(attempt, None)

    def _receive(self, attempt: _Attempt, base: StagedWeights | None) -> StagedWeights:
        arenas: list[Arena] = []

        def check(manifest: Manifest) -> None:
            attempt.manifest = manifest
            self._check_manifest(manifest)

        def allocate(num_bytes: int) -> torch.Tensor:
            if not arenas:
                arenas.append(self._pool.take_anyway())
                if attempt.manifest is not None:
                    arenas[0].reserve(attempt.manifest.total_bytes + 64 * attempt.manifest.num_tensors)
            return arenas[0].take(num_bytes)

        request = StageRequest(
            policy_version=attempt.policy_version,
            receiver=attempt.engine,
            nonce=attempt.nonce,
            terms=Terms(transport=transport_of(attempt.address).value, dtype=self._dtype),
            rank=self._rank,
            num_ranks=self._num_ranks,
            cohort=attempt.cohort,
            base_version=None if base is None else base.policy_version,
            base_digest="" if base is None else base.digest,
        )
        left_s = max(0.001, attempt.started + attempt.timeout_s - time.monotonic())
        channel = open_receiver(attempt.address, request, timeout_s=left_s, on_open=lambda cut: self._connected(attempt, cut))
        old = None if base is None else base.tensors
        try:
            with channel:
                stream = receive_weights(channel, allocate=allocate, check_manifest=check, base=old, verify=attempt.verifies)
                tensors = dict(stream)
                if attempt.manifest is None:
                    raise WeightSyncError(
                        f"{without_secrets(attempt.address)} sent no manifest of version {attempt.policy_version}"
                    )
                loan = channel.take_loan() if isinstance(channel, Borrowing) else None
        except BaseException:
            for arena in arenas:
                self._pool.give_back(arena, unread=True)
            raise
        self._has_verified |= attempt.verifies
        return StagedWeights(
            policy_version=attempt.policy_version,
            manifest=attempt.manifest,
            tensors=tensors,
            memory=self._memory(arenas, loan),
        )

    def _memory(self, arenas: list[Arena], loan: LoanLike | None) -> Memory:
        """Where the tensors lie: lent, copied, or (a lender may also send what it cannot lend) both."""

        def free(unread: bool) -> None:
            for arena in arenas:
                self._pool.give_back(arena, unread)
            if loan is not None:
                loan.end(unread)

        segments = [segment for arena in arenas for segment in arena.segments]
        return Memory([*segments, *(loan.segments if loan is not None else ())], on_free=free)

    def _connected(self, attempt: _Attempt, cut: Callable[[str], None]) -> None:
        with self._lock:
            attempt.cut = cut
            if attempt.cut_reason is not None:
                cut(attempt.cut_reason)


def _cut(attempt: _Attempt, reason: str) -> None:
    attempt.cut_reason = reason
    if attempt.cut is not None:
        attempt.cut(reason)
