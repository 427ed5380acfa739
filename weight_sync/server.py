"""The trainer's side of weight sync: `WeightServer` holds the newest policy versions and streams them to any engine that asks.

Invariant: an engine gets all of one version or an error, and an engine's trouble never stops the trainer: `publish` copies
the weights and returns; threads stream the copy. Two versions are held at most. Publishing v+2 takes the memory of v, so it
waits for engines that still receive v, up to `round_timeout_s`, and then cuts them off by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync.arena import Arena
from weight_sync.delta import Bytes
from weight_sync.delta_cache import DeltaCache
from weight_sync.errors import DeltaRefused, PeerFailed, ProtocolError, TransferTimeout, VersionUnavailable, WeightSyncError
from weight_sync.listeners import open_listener
from weight_sync.manifest import dtype_name
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stream import SendReport, send_weights
from weight_sync.transport import Incoming, Listener, StageRequest, Terms, TransportName, disagreement

log = structlog.get_logger()

_CUT_GRACE_S = 5.0
_AUTO_DELTA = frozenset({TransportName.TCP, TransportName.COLLECTIVE})
"""Where bytes cost more than the comparison of two versions does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A version that is served from now on."""

    policy_version: int
    manifest_digest: str
    num_tensors: int
    total_bytes: int
    seconds: float
    """What `publish` took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """An engine holds a version in its memory, verified, and may commit it."""

    engine: str
    nonce: str
    policy_version: int
    digest: str
    seconds: float
    """From the engine's request to its confirmation (of its slowest worker)."""
    payload_bytes: int = 0
    """What travelled to the last of its workers: tensors, or what changed in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure:
    """A staging that an engine began did not end well; its old weights are untouched."""

    engine: str
    nonce: str
    policy_version: int
    reason: str


@dataclass(slots=True, eq=False)
class _Held:
    """A version and who receives it right now."""

    snapshot: Snapshot
    arena: int
    transfers: set[Incoming] = field(default_factory=set)


@dataclass(slots=True)
class _Ranks:
    """Workers of one engine that have staged, and the slowest one's seconds."""

    done: set[int] = field(default_factory=set)
    seconds: float = 0.0


class WeightServer:
    """Serves published weights over one transport or several. Use it as a context manager; `publish` from one thread.

    `on_staged` and `on_failed` are called from the server's threads; they must hand over and return.
    """

    def __init__(
        self,
        settings: WeightSyncSettings,
        *,
        socket_dir: Path,
        dtype: torch.dtype,
        on_staged: Callable[[StageReport], None],
        on_failed: Callable[[StageFailure], None],
        transports: Sequence[TransportName] = (),
    ) -> None:
        """`transports`: by default the one of the settings."""
        self._settings = settings
        self._dtype = dtype
        self._on_staged = on_staged
        self._on_failed = on_failed
        names = tuple(transports) or (TransportName(settings.transport),)
        self._terms = {
            name: Terms(transport=name.value, bucket_bytes=settings.bucket_bytes, dtype=dtype_name(dtype)) for name in names
        }
        self._listeners: dict[TransportName, Listener] = {
            name: open_listener(settings, socket_dir=socket_dir, terms=terms) for name, terms in self._terms.items()
        }
        self._started: list[Listener] = []
        self._arenas = (Arena(), Arena())
        self._held: list[_Held] = []
        """Oldest first."""
        self._deltas = DeltaCache()
        self._changed = threading.Condition()
        self._ranks: dict[tuple[str, str, int], _Ranks] = {}
        self._publishing = threading.Lock()

    @property
    def address(self) -> str:
        """What receivers are given to stage from, by the first transport."""
        return self.address_of(next(iter(self._listeners)))

    def address_of(self, transport: TransportName) -> str:
        return self._listeners[transport].address

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        """Raises AddressTaken."""
        try:
            for name, listener in self._listeners.items():
                listener.start(partial(self._take, self._terms[name]))
                self._started.append(listener)
        except BaseException:
            self.close()
            raise
        log.info("weight server listens", addresses=[listener.address for listener in self._started])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving: cut the transfers under way, end the threads, remove the sockets. Safe to call twice."""
        started, self._started = self._started, []
        for listener in started:
            listener.close()
        with self._changed:
            self._held.clear()
        if started:
            log.info("weight server closed", addresses=[listener.address for listener in started])

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> Publication:
        """Copy the weights and serve them as `policy_version` from now on; the caller may change its tensors afterwards.

        Floating tensors are cast to the server's dtype, tied ones are kept once. The version before stays available until
        the next `publish`.

        Raises:
            TransferTimeout: an engine that receives the version before last could not be cut off.
            WeightSyncError: a tensor cannot be sent; the versions held before are still served.
        """
        started = time.monotonic()
        with self._publishing:
            arena = self._free_arena(policy_version)
            with torch.no_grad():
                snapshot = take_snapshot(self._arenas[arena], named_tensors, policy_version=policy_version, dtype=self._dtype)
            digest = snapshot.manifest.digest
            with self._changed:
                before = self._held[-1] if self._held else None
                self._held.append(_Held(snapshot=snapshot, arena=arena))
        seconds = time.monotonic() - started
        if before is not None and before.snapshot.manifest.digest == digest:
            log.warning(
                "published weights equal the version before",
                policy_version=policy_version,
                before=before.snapshot.policy_version,
            )
        manifest = snapshot.manifest
        log.debug("weights published", policy_version=policy_version, digest=digest, seconds=round(seconds, 3))
        return Publication(
            policy_version=policy_version,
            manifest_digest=digest,
            num_tensors=manifest.num_tensors,
            total_bytes=manifest.total_bytes,
            seconds=seconds,
        )

    def _free_arena(self, policy_version: int) -> int:
        """An arena that nobody reads; takes the older of two held versions out of service."""
        with self._changed:
            if not self._held:
                return 0
            if len(self._held) < len(self._arenas):
                return 1 - self._held[0].arena
            victim = self._held.pop(0)
            self._deltas.forget(victim.snapshot.policy_version)
            self._ranks = {key: ranks for key, ranks in self._ranks.items() if key[2] != victim.snapshot.policy_version}
            if not self._changed.wait_for(lambda: not victim.transfers, self._settings.round_timeout_s):
                reason = f"version {policy_version} needs the memory of version {victim.snapshot.policy_version}"
                for transfer in victim.transfers:
                    log.warning("receiver cut off", peer=transfer.peer, reason=reason)
                    transfer.cut(reason)
                if not self._changed.wait_for(lambda: not victim.transfers, _CUT_GRACE_S):
                    names = ", ".join(transfer.peer for transfer in victim.transfers)
                    self._held.insert(0, victim)
                    raise TransferTimeout(f"{names} still receives version {victim.snapshot.policy_version}")
            return victim.arena

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, terms: Terms, incoming: Incoming) -> None:
        """One transfer, in a thread of the listener."""
        started = time.monotonic()
        requests = incoming.requests
        is_delta = False
        try:
            self._check_terms(terms, requests)
            version = requests[0].policy_version
            with self._in_use(version, incoming) as held:
                deltas = self._deltas_for(terms, incoming, held)
                is_delta = deltas is not None
                report = self._send(incoming, held.snapshot, deltas)
        except (WeightSyncError, OSError) as error:
            incoming.refuse(str(error))
            if is_delta and isinstance(error, PeerFailed) and DeltaRefused.__name__ in str(error):
                log.warning("delta not taken, the receiver asks for all", peer=incoming.peer, error=str(error))
                return
            for request in requests:
                self._note_failed(request, str(error))
            return
        finally:
            incoming.close()
        for request in requests:
            self._note_staged(request, report, time.monotonic() - started)

    def _check_terms(self, terms: Terms, requests: Sequence[StageRequest]) -> None:
        for request in requests:
            differ = disagreement(terms, request.terms)
            if differ is not None:
                raise ProtocolError(f"the weight server was configured otherwise: {differ}")

    def _send(self, incoming: Incoming, snapshot: Snapshot, deltas: Mapping[str, Bytes] | None) -> SendReport:
        version, manifest = snapshot.policy_version, snapshot.manifest
        return send_weights(incoming.open(), snapshot, policy_version=version, manifest=manifest, deltas=deltas)

    def _deltas_for(self, terms: Terms, incoming: Incoming, held: _Held) -> Mapping[str, Bytes] | None:
        """What changed since the base that every receiver of the transfer holds; None: all has to travel."""
        encoding = self._settings.encoding
        if encoding == "full" or (encoding == "auto" and TransportName(terms.transport) not in _AUTO_DELTA):
            return None
        bases = {(request.base_version, request.base_digest) for request in incoming.requests}
        version, digest = bases.pop()
        if bases or version is None or version == held.snapshot.policy_version:
            return None
        try:
            with self._in_use(version, incoming) as base:
                if base.snapshot.manifest.digest != digest:
                    return None
                return self._deltas.between(base.snapshot, held.snapshot)
        except VersionUnavailable:
            return None

    @contextmanager
    def _in_use(self, version: int, incoming: Incoming) -> Iterator[_Held]:
        """Keep the memory of a version while a transfer reads it. Raises VersionUnavailable."""
        with self._changed:
            held = next((held for held in reversed(self._held) if held.snapshot.policy_version == version), None)
            if held is None:
                versions = [held.snapshot.policy_version for held in self._held]
                raise VersionUnavailable(f"version {version} is not served; available: {versions}")
            held.transfers.add(incoming)
        try:
            yield held
        finally:
            with self._changed:
                held.transfers.discard(incoming)
                self._changed.notify_all()

    def _note_failed(self, request: StageRequest, reason: str) -> None:
        log.debug("staging failed", receiver=request.receiver, policy_version=request.policy_version, error=reason)
        with self._changed:
            self._ranks.pop((request.receiver, request.nonce, request.policy_version), None)
        self._on_failed(
            StageFailure(engine=request.receiver, nonce=request.nonce, policy_version=request.policy_version, reason=reason)
        )

    def _note_staged(self, request: StageRequest, report: SendReport, seconds: float) -> None:
        slowest_s = self._staged_by_all(request, seconds)
        if slowest_s is None:
            return
        log.debug(
            "weights staged", receiver=request.receiver, policy_version=request.policy_version, seconds=round(slowest_s, 3)
        )
        self._on_staged(
            StageReport(
                engine=request.receiver,
                nonce=request.nonce,
                policy_version=request.policy_version,
                digest=report.manifest_digest,
                seconds=slowest_s,
                payload_bytes=report.payload_bytes,
            )
        )

    def _staged_by_all(self, request: StageRequest, seconds: float) -> float | None:
        """The receiver's seconds once all its workers have staged; None before."""
        key = (request.receiver, request.nonce, request.policy_version)
        with self._changed:
            ranks = self._ranks.setdefault(key, _Ranks())
            ranks.done.add(request.rank)
            ranks.seconds = max(ranks.seconds, seconds)
            if len(ranks.done) < request.num_ranks:
                return None
            del self._ranks[key]
            return ranks.seconds
