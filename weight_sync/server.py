"""The trainer's side of weight sync: `WeightServer` holds the newest policy versions and streams them to any engine that asks.

Invariant: an engine gets all of one version or an error, and an engine's trouble never stops the trainer: `publish` copies
the weights and returns; threads stream the copy. Two versions are held at most. Publishing v+2 takes the memory of v, so it
waits for engines that still receive v, up to `round_timeout_s`, and then cuts them off by name.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync.arena import Arena
from weight_sync.connection import ADDRESS_SCHEME, socket_path
from weight_sync.errors import AddressTaken, TransferTimeout, VersionUnavailable, WeightSyncError
from weight_sync.packets import Hello
from weight_sync.shared_memory import Ring, SharedMemorySender
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stream import send_weights

log = structlog.get_logger()

_MAX_STREAMS = 64
_MAX_FREE_RINGS = 4
_CUT_GRACE_S = 5.0
_ACCEPT_PAUSE_S = 0.2
"""After an accept that failed, such as for want of file descriptors."""
_SOCKET_NAME = "weights"


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
    senders: set[SharedMemorySender] = field(default_factory=set)


@dataclass(slots=True)
class _Ranks:
    """Workers of one engine that have staged, and the slowest one's seconds."""

    done: set[int] = field(default_factory=set)
    seconds: float = 0.0


class WeightServer:
    """Serves published weights on a Unix socket. Use it as a context manager; `publish` from one thread.

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
    ) -> None:
        self._settings = settings
        self._dtype = dtype
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._path = Path(socket_path(f"{ADDRESS_SCHEME}{socket_dir.absolute() / _SOCKET_NAME}"))
        self._arenas = (Arena(), Arena())
        self._held: list[_Held] = []
        """Oldest first."""
        self._changed = threading.Condition()
        self._connections: dict[SharedMemorySender, threading.Thread] = {}
        self._ranks: dict[tuple[str, str, int], _Ranks] = {}
        self._free_rings: list[Ring] = []
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._publishing = threading.Lock()

    @property
    def address(self) -> str:
        """What engines are given to stage from: `unix:PATH`."""
        return f"{ADDRESS_SCHEME}{self._path}"

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self._listener = _listen(self._path)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="weights-accept", daemon=True)
        self._acceptor.start()
        log.info("weight server listens", address=self.address)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving: cut the transfers under way, end the threads, remove the socket. Safe to call twice."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with self._changed:
            self._closing.set()
            open_now = dict(self._connections)
        listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        for sender in open_now:
            sender.connection.cut("the weight server closes")
        deadline = time.monotonic() + _CUT_GRACE_S
        for thread in (self._acceptor, *open_now.values()):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        listener.close()
        self._path.unlink(missing_ok=True)
        with self._changed:
            for ring in self._free_rings:
                ring.close()
            self._free_rings.clear()
            self._held.clear()
        log.info("weight server closed", address=self.address)

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
            self._ranks = {key: ranks for key, ranks in self._ranks.items() if key[2] != victim.snapshot.policy_version}
            if not self._changed.wait_for(lambda: not victim.senders, self._settings.round_timeout_s):
                reason = f"version {policy_version} needs the memory of version {victim.snapshot.policy_version}"
                for sender in victim.senders:
                    log.warning("engine cut off", peer=sender.connection.peer, reason=reason)
                    sender.connection.cut(reason)
                if not self._changed.wait_for(lambda: not victim.senders, _CUT_GRACE_S):
                    names = ", ".join(sender.connection.peer for sender in victim.senders)
                    self._held.insert(0, victim)
                    raise TransferTimeout(f"{names} still receives version {victim.snapshot.policy_version}")
            return victim.arena

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                log.warning("connection not accepted", error=str(error))
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        sender = SharedMemorySender(
            sock,
            peer=f"process {pid}",
            deadline=time.monotonic() + self._settings.round_timeout_s,
            handshake_timeout_s=self._settings.connect_timeout_s,
            bucket_timeout_s=self._settings.bucket_timeout_s,
        )
        with self._changed:
            refusal = None
            if uid not in (os.getuid(), 0):
                refusal = f"user {uid} may not read weights of user {os.getuid()}"
            elif len(self._connections) >= _MAX_STREAMS:
                refusal = f"{_MAX_STREAMS} transfers are under way"
            elif not self._closing.is_set():
                thread = threading.Thread(target=self._serve, args=(sender, pid), name=f"weights-{pid}", daemon=True)
                self._connections[sender] = thread
                thread.start()
                return
        log.warning("weight transfer refused", pid=pid, reason=refusal or "the weight server closes")
        sender.connection.give_up(refusal or "the weight server closes")
        sock.close()

    def _serve(self, sender: SharedMemorySender, pid: int) -> None:
        """One connection, from its first packet to its last."""
        try:
            with sender.connection.sock:
                try:
                    hello = sender.receive_hello()
                except WeightSyncError as error:
                    log.warning("connection is no engine's", pid=pid, error=str(error))
                    sender.connection.give_up(str(error))
                    return
                self._stage(sender, hello)
        finally:
            with self._changed:
                del self._connections[sender]
                self._changed.notify_all()

    def _stage(self, sender: SharedMemorySender, hello: Hello) -> None:
        started = time.monotonic()
        try:
            digest = self._send(sender, hello)
        except (WeightSyncError, OSError) as error:
            log.debug("staging failed", engine=hello.engine, policy_version=hello.policy_version, error=str(error))
            sender.connection.give_up(str(error))
            with self._changed:
                self._ranks.pop((hello.engine, hello.nonce, hello.policy_version), None)
            self._on_failed(
                StageFailure(engine=hello.engine, nonce=hello.nonce, policy_version=hello.policy_version, reason=str(error))
            )
            return
        seconds = self._staged_by_all(hello, time.monotonic() - started)
        if seconds is None:
            return
        log.debug("weights staged", engine=hello.engine, policy_version=hello.policy_version, seconds=round(seconds, 3))
        self._on_staged(
            StageReport(
                engine=hello.engine,
                nonce=hello.nonce,
                policy_version=hello.policy_version,
                digest=digest,
                seconds=seconds,
            )
        )

    def _send(self, sender: SharedMemorySender, hello: Hello) -> str:
        with self._changed:
            held = next((h for h in reversed(self._held) if h.snapshot.policy_version == hello.policy_version), None)
            if held is None:
                versions = [h.snapshot.policy_version for h in self._held]
                raise VersionUnavailable(f"version {hello.policy_version} is not served; available: {versions}")
            held.senders.add(sender)
            ring = self._free_rings.pop() if self._free_rings else None
        try:
            ring = ring or Ring(self._settings.bucket_bytes)
            sender.welcome(ring)
            snapshot = held.snapshot
            report = send_weights(sender, snapshot, policy_version=hello.policy_version, manifest=snapshot.manifest)
            return report.manifest_digest
        finally:
            with self._changed:
                held.senders.discard(sender)
                self._changed.notify_all()
                if ring is not None and len(self._free_rings) < _MAX_FREE_RINGS and not self._closing.is_set():
                    self._free_rings.append(ring)
                elif ring is not None:
                    ring.close()

    def _staged_by_all(self, hello: Hello, seconds: float) -> float | None:
        """The engine's seconds once all its workers have staged; None before."""
        key = (hello.engine, hello.nonce, hello.policy_version)
        with self._changed:
            ranks = self._ranks.setdefault(key, _Ranks())
            ranks.done.add(hello.rank)
            ranks.seconds = max(ranks.seconds, seconds)
            if len(ranks.done) < hello.num_ranks:
                return None
            del self._ranks[key]
            return ranks.seconds


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path`; takes the place of one that a dead process left behind.

    Raises:
        AddressTaken: a live process answers there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            if _answers(path):
                raise AddressTaken(f"another weight server answers on {ADDRESS_SCHEME}{path}") from error
            path.unlink(missing_ok=True)
            listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_MAX_STREAMS)
    except BaseException:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
