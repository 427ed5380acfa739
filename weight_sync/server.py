"""`WeightServer` holds the newest policy versions and sends them to any receiver that asks: in the trainer, or a host's cache.

Invariant: a receiver gets all of one version or an error, and a receiver's trouble never stops the trainer: `publish` copies
the weights and returns; threads send the copy, or lend it where receiver and server can share memory. The two newest versions
are served. There is memory for a third, which may still be read when the fourth comes; then `publish` waits up to
`round_timeout_s` for those who read it, cuts them off by name, and takes other memory. A version that is served from the live
tensors (`publish_live`) is withdrawn before they change.
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
from weight_sync.arena import Arena, ArenaPool, Memory, Segment
from weight_sync.channel import LendingChannel, SendChannel
from weight_sync.delta import Bytes
from weight_sync.delta_cache import DeltaCache
from weight_sync.errors import DeltaRefused, PeerFailed, ProtocolError, VersionUnavailable, WeightSyncError
from weight_sync.listeners import open_listener
from weight_sync.live import Copying, LiveWeights, Read, available_memory, has_room, measure, sizes_of
from weight_sync.manifest import Manifest, dtype_name
from weight_sync.naming import load_name_map, renamed
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.staging import StagedWeights
from weight_sync.stream import SendReport, send_weights
from weight_sync.tcp_address import without_secrets
from weight_sync.transport import Incoming, Listener, StageRequest, Terms, TransportName, disagreement

log = structlog.get_logger()

_MAX_VERSIONS = 2
_MAX_ARENAS = _MAX_VERSIONS + 1
_RETURN_GRACE_S = 0.5
"""Receivers that have moved on say so at once."""
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
    manifest: Manifest
    """With the checksum of each tensor."""
    why_live: str = ""
    """Why it is served from the live tensors, which then must not change before `withdraw_live`; empty: it is a copy."""


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
    """What travelled to the last of its workers, or was lent to it: tensors, or what changed in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure:
    """A staging that an engine began did not end well; its old weights are untouched."""

    engine: str
    nonce: str
    policy_version: int
    reason: str


@dataclass(slots=True, eq=False)
class _Held:
    """A version, where it lies, and who receives it or was lent it."""

    snapshot: Snapshot | LiveWeights
    memory: Memory
    transfers: set[Incoming] = field(default_factory=set)


@dataclass(slots=True)
class _Use:
    """One transfer's use of a version."""

    held: _Held
    has_let_go: bool = True
    """Whether nobody reads its memory after the transfer; of a loan, only its end can tell."""


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
        self._name_map = load_name_map(settings.name_map)
        self._pool = ArenaPool(max_arenas=_MAX_ARENAS, lendable=True)
        self._held: list[_Held] = []
        """Oldest first."""
        self._retired: list[_Held] = []
        """Not served any more, but still read; oldest first."""
        self._deltas = DeltaCache()
        self._changed = threading.Condition()
        self._ranks: dict[tuple[str, str, int], _Ranks] = {}
        self._publishing = threading.Lock()
        self._num_bytes = 0
        """Of one version; 0: not known yet."""
        self._withdrawn: int | None = None
        """The newest version that was served from live tensors and is not any more."""

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
        log.info("weight server listens", addresses=[without_secrets(listener.address) for listener in self._started])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving: cut the transfers under way, end the threads, remove the sockets. Safe to call twice."""
        started, self._started = self._started, []
        for listener in started:
            listener.close()
        with self._changed:
            held, self._held = self._held, []
        for each in held:
            each.memory.release()
        self._pool.close()
        if started:
            log.info("weight server closed", addresses=[without_secrets(listener.address) for listener in started])

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> Publication:
        """Copy the weights and serve them as `policy_version` from now on; the caller may change its tensors afterwards.

        Floating tensors are cast to the server's dtype, tied ones are kept once. The version before stays available until
        the next `publish`.

        Raises:
            WeightSyncError: a tensor cannot be sent; the versions held before are still served.
        """
        started = time.monotonic()
        with self._publishing:
            arena = self._take_arena(policy_version)
            try:
                with torch.no_grad():
                    named = renamed(named_tensors, self._name_map)
                    snapshot = take_snapshot(arena, named, policy_version=policy_version, dtype=self._dtype)
            except BaseException:
                self._pool.give_back(arena, unread=True)
                raise
            before = self._serve(snapshot, Memory(arena.segments, on_free=partial(self._pool.give_back, arena)))
        return self._published(snapshot, before, time.monotonic() - started)

    def publish_live(self, read: Read, *, policy_version: int, why: str) -> Publication:
        """Serve the weights from where they lie, through two buckets for each receiver: nothing is copied here.

        The caller must not change them before `withdraw_live`. `read` is called for each receiver, from the server's threads.
        What receivers hold already cannot be built upon: all of the weights travel.

        Raises:
            WeightSyncError: a tensor cannot be sent; the versions held before are still served.
        """
        started = time.monotonic()

        def read_renamed() -> Iterator[tuple[str, torch.Tensor]]:
            return renamed(read(), self._name_map)

        with self._publishing:
            bucket_bytes = self._settings.bucket_bytes
            weights = measure(read_renamed, policy_version=policy_version, dtype=self._dtype, bucket_bytes=bucket_bytes)
            nowhere = Memory([Segment(torch.empty(0, dtype=torch.uint8))], on_free=lambda unread: None)
            before = self._serve(weights, nowhere)
        return self._published(weights, before, time.monotonic() - started, why_live=why)

    def why_live(self, read: Read) -> str:
        """Why the next version has to be served from the live tensors, by `weight_sync.snapshot`; empty: it can be copied."""
        if self._settings.snapshot == "always":
            return ""
        if self._settings.snapshot == "never":
            return "weight_sync.snapshot=never"
        with self._publishing:
            self._num_bytes = self._num_bytes or sizes_of(lambda: renamed(read(), self._name_map), self._dtype)
            missing, available = self._pool.missing_bytes(self._num_bytes), available_memory()
        if has_room(missing, available_bytes=available):
            return ""
        return f"a snapshot takes {missing / 1e9:.2f} GB and {available / 1e9:.2f} GB are available (weight_sync.snapshot=auto)"

    def withdraw_live(self, reason: str, *, timeout_s: float) -> bool:
        """Serve live tensors no more, so that they may change: whoever receives them has `timeout_s`, and is then cut off.

        Returns whether nobody was.
        """
        with self._changed:
            live = [held for held in self._held if isinstance(held.snapshot, LiveWeights)]
            self._held = [held for held in self._held if held not in live]
            if live:
                self._withdrawn = live[-1].snapshot.policy_version
            self._changed.wait_for(lambda: not any(held.transfers for held in live), timeout_s)
            late = [transfer for held in live for transfer in held.transfers]
        for held in live:
            held.memory.release()
        for transfer in late:
            log.warning("receiver cut off", peer=transfer.peer, reason=reason)
            transfer.cut(reason)
        with self._changed:
            if not self._changed.wait_for(lambda: not any(held.transfers for held in live), _CUT_GRACE_S):
                log.error("live weights change while they are read; their receiver refuses them", waited_s=_CUT_GRACE_S)
        return not late

    def _published(
        self, snapshot: Snapshot | LiveWeights, before: Snapshot | LiveWeights | None, seconds: float, *, why_live: str = ""
    ) -> Publication:
        policy_version, manifest = snapshot.policy_version, snapshot.manifest
        digest = manifest.digest
        if before is not None and before.manifest.digest == digest:
            log.warning(
                "published weights equal the version before", policy_version=policy_version, before=before.policy_version
            )
        log.debug("weights published", policy_version=policy_version, digest=digest, seconds=round(seconds, 3))
        return Publication(
            policy_version=policy_version,
            manifest_digest=digest,
            num_tensors=manifest.num_tensors,
            total_bytes=manifest.total_bytes,
            seconds=seconds,
            manifest=manifest,
            why_live=why_live,
        )

    def hold(self, weights: StagedWeights) -> None:
        """Serve a version that came from another server, as it lies, until two newer ones are held. A version that is held
        already, with these bytes, is left as it is."""
        names = (spec.name for spec in weights.manifest.specs)
        snapshot = Snapshot(
            policy_version=weights.policy_version,
            manifest=weights.manifest,
            tensors=tuple(weights.tensors[name] for name in names),
        )
        with self._changed:
            digests = {held.snapshot.policy_version: held.snapshot.manifest.digest for held in self._held}
        if digests.get(weights.policy_version) != weights.digest:
            weights.memory.retain()
            self._serve(snapshot, weights.memory)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are served, oldest first."""
        with self._changed:
            return tuple(held.snapshot.policy_version for held in self._held)

    def _serve(self, snapshot: Snapshot | LiveWeights, memory: Memory) -> Snapshot | LiveWeights | None:
        """Serve a version from now on, without the one before last; the version before."""
        with self._changed:
            before = self._held[-1].snapshot if self._held else None
            self._held.append(_Held(snapshot=snapshot, memory=memory))
            retired = self._held[:-_MAX_VERSIONS]
            del self._held[:-_MAX_VERSIONS]
            for held in retired:
                self._deltas.forget(held.snapshot.policy_version)
            self._retired += [held for held in retired if held.transfers]
        for held in retired:
            held.memory.release()
        self._give_up_stagings()
        return before

    def _give_up_stagings(self) -> None:
        """Tell of those that some workers have ended and others cannot begin any more; those under way may still end well."""
        with self._changed:
            given_up = self._without_end()
            for key in given_up:
                del self._ranks[key]
        for receiver, nonce, version in given_up:
            reason = f"version {version} is not served any more, and not all workers of {receiver} had staged it"
            self._on_failed(StageFailure(engine=receiver, nonce=nonce, policy_version=version, reason=reason))

    def _without_end(self) -> list[tuple[str, str, int]]:
        versions = {held.snapshot.policy_version for held in self._held}
        transfers = [transfer for held in (*self._held, *self._retired) for transfer in held.transfers]
        requests = [request for transfer in transfers for request in transfer.requests]
        receiving = {(request.receiver, request.nonce, request.policy_version, request.rank) for request in requests}
        return [
            key
            for key, ranks in self._ranks.items()
            if key[2] not in versions and not any(other[:3] == key and other[3] not in ranks.done for other in receiving)
        ]

    def _take_arena(self, policy_version: int) -> Arena:
        """Memory for a version: that of the version before last, or, while that is still read, other memory if there is enough;
        only where memory is short does training wait for who reads it."""
        arena = self._pool.take(timeout_s=_RETURN_GRACE_S)
        if arena is None and self._has_room_for_another():
            log.info("an older version is still read, other memory is taken", policy_version=policy_version)
            return self._pool.take_anyway()
        if arena is None:
            timeout_s = self._settings.round_timeout_s
            log.warning("training waits for memory that is still read", policy_version=policy_version, timeout_s=timeout_s)
            arena = self._pool.take(timeout_s=timeout_s)
        if arena is None:
            self._cut_late(policy_version)
            arena = self._pool.take(timeout_s=_CUT_GRACE_S)
        return arena or self._pool.take_anyway()

    def _has_room_for_another(self) -> bool:
        with self._changed:
            num_bytes = self._held[-1].snapshot.manifest.total_bytes if self._held else 0
        return has_room(num_bytes, available_bytes=available_memory())

    def _cut_late(self, policy_version: int) -> None:
        """End what still receives or reads versions that are not served any more."""
        with self._changed:
            late = [(held.snapshot.policy_version, transfer) for held in self._retired for transfer in held.transfers]
        for version, transfer in late:
            reason = f"version {policy_version} needs the memory of version {version}"
            log.warning("receiver cut off", peer=transfer.peer, reason=reason)
            transfer.cut(reason)

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, terms: Terms, incoming: Incoming) -> None:
        """One transfer, in a thread of the listener, and the loan that may come of it."""
        started = time.monotonic()
        requests = incoming.requests
        is_delta = False
        try:
            self._check_terms(terms, requests)
            with self._in_use(requests[0].policy_version, incoming) as use:
                deltas = self._deltas_for(terms, incoming, use.held)
                is_delta = deltas is not None
                channel = incoming.open()
                snapshot = use.held.snapshot
                lender = channel if isinstance(channel, LendingChannel) and use.held.memory.is_lendable else None
                if lender is None or is_delta or isinstance(snapshot, LiveWeights):
                    report = self._send(channel, snapshot, deltas)
                else:
                    use.has_let_go = False
                    report = self._lend(lender, snapshot, use.held.memory)
                for request in requests:
                    self._note_staged(request, report, time.monotonic() - started)
                if lender is not None and not is_delta:
                    use.has_let_go = lender.wait_returned()
        except (WeightSyncError, OSError) as error:
            incoming.refuse(str(error))
            asks_alone = all(request.cohort == 1 for request in requests)
            if is_delta and asks_alone and isinstance(error, PeerFailed) and DeltaRefused.MARK in str(error):
                log.warning("delta not taken, the receiver asks for all", peer=incoming.peer, error=str(error))
                return
            for request in requests:
                self._note_failed(request, str(error))
        finally:
            incoming.close()

    def _check_terms(self, terms: Terms, requests: Sequence[StageRequest]) -> None:
        for request in requests:
            differ = disagreement(terms, request.terms)
            if differ is not None:
                raise ProtocolError(f"the weight server was configured otherwise: {differ}")

    def _send(self, channel: SendChannel, snapshot: Snapshot | LiveWeights, deltas: Mapping[str, Bytes] | None) -> SendReport:
        version, manifest = snapshot.policy_version, snapshot.manifest
        if isinstance(snapshot, LiveWeights):
            return send_weights(Copying(channel), snapshot, policy_version=version, manifest=manifest, dtype=self._dtype)
        return send_weights(channel, snapshot, policy_version=version, manifest=manifest, deltas=deltas)

    @staticmethod
    def _lend(channel: LendingChannel, snapshot: Snapshot, memory: Memory) -> SendReport:
        started = time.monotonic()
        channel.lend(snapshot, memory.segments)
        manifest = snapshot.manifest
        return SendReport(
            policy_version=snapshot.policy_version,
            manifest_digest=manifest.digest,
            num_tensors=manifest.num_tensors,
            total_bytes=manifest.total_bytes,
            payload_bytes=manifest.total_bytes,
            num_buckets=0,
            seconds=time.monotonic() - started,
        )

    def _deltas_for(self, terms: Terms, incoming: Incoming, held: _Held) -> Mapping[str, Bytes] | None:
        """What changed since the base that every receiver of the transfer holds; None: all has to travel."""
        encoding = self._settings.encoding
        if encoding == "full" or (encoding == "auto" and TransportName(terms.transport) not in _AUTO_DELTA):
            return None
        if isinstance(held.snapshot, LiveWeights):
            return None
        bases = {(request.base_version, request.base_digest) for request in incoming.requests}
        version, digest = bases.pop()
        if bases or version is None or version == held.snapshot.policy_version:
            return None
        try:
            with self._in_use(version, incoming) as base:
                old = base.held.snapshot
                if isinstance(old, LiveWeights) or old.manifest.digest != digest:
                    return None
                return self._deltas.between(old, held.snapshot)
        except VersionUnavailable:
            return None

    @contextmanager
    def _in_use(self, version: int, incoming: Incoming) -> Iterator[_Use]:
        """Keep the memory of a version while a transfer, or who was lent it, reads it. Raises VersionUnavailable."""
        with self._changed:
            held = next((held for held in reversed(self._held) if held.snapshot.policy_version == version), None)
            if held is None:
                versions = [held.snapshot.policy_version for held in self._held]
                gone = "; it was served from the live weights, which have changed" if version == self._withdrawn else ""
                raise VersionUnavailable(f"version {version} is not served; available: {versions}{gone}")
            held.memory.retain()
            held.transfers.add(incoming)
        use = _Use(held)
        try:
            yield use
        finally:
            with self._changed:
                held.transfers.discard(incoming)
                self._changed.notify_all()
                self._retired = [retired for retired in self._retired if retired.transfers]
            held.memory.release(said=use.has_let_go)

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
            self._give_up_stagings()
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
