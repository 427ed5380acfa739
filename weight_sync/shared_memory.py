"""The channel within one host: memory that is lent, or a ring of two buckets, and a Unix socket for the control packets.

A version at rest is lent (`weight_sync.lending`); what is not at rest, because there is no memory for a copy of it, streams
through the ring.

Invariant: the ring has no name. It is a memfd that the server makes and passes over the socket, so nothing is left behind
when either side dies; receivers can only read it. At most two buckets are out; a bucket is written again only after the
receiver gave it back.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from configs.schema import WeightSyncSettings
from weight_sync.arena import Segment
from weight_sync.buckets import ALIGNMENT
from weight_sync.channel import Bucket, BucketKind, StreamEnd
from weight_sync.connection import Connection
from weight_sync.errors import IntegrityError, PeerFailed, PeerLost, ProtocolError
from weight_sync.lending import Borrowing, Loan, lend
from weight_sync.packets import BucketSent, Done, End, Free, Packet, Returned, RingPassed, TablePassed
from weight_sync.snapshot import Snapshot
from weight_sync.transport import Cut, StageRequest, Terms
from weight_sync.unix_listener import UnixListener, open_connection

NUM_SLOTS = 2
MAX_BUCKET_BYTES = 1 << 30
_MAX_FREE_RINGS = 4
_SOCKET_NAME = "weights"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10


class Ring:
    """Two buckets of shared memory, mapped and faulted in once, then reused from transfer to transfer."""

    def __init__(self, bucket_bytes: int) -> None:
        bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        self.bucket_bytes = bucket_bytes
        self.fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, NUM_SLOTS * bucket_bytes)
            memory = mmap.mmap(self.fd, NUM_SLOTS * bucket_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | _F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = tuple(whole[slot * bucket_bytes : (slot + 1) * bucket_bytes] for slot in range(NUM_SLOTS))

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last view of it does."""
        os.close(self.fd)


class Rings:
    """Rings that were used, for the next transfers."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._closed = False
        self.free: list[Ring] = []

    def take(self) -> Ring:
        with self._lock:
            if self.free:
                return self.free.pop()
        return Ring(self._bucket_bytes)

    def give_back(self, ring: Ring) -> None:
        with self._lock:
            if not self._closed and len(self.free) < _MAX_FREE_RINGS:
                self.free.append(ring)
                return
        ring.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            rings, self.free = self.free, []
        for ring in rings:
            ring.close()


class SharedMemorySender:
    """The server's end of one transfer that was welcomed; a `SendChannel`."""

    def __init__(self, connection: Connection, rings: Rings, bucket_bytes: int) -> None:
        self.connection = connection
        self._rings = rings
        self._bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        self._ring: Ring | None = None
        self._out: list[int] = []
        self._slot: int | None = None
        self._num_sent = 0

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    def _opened(self) -> Ring:
        """The ring, passed to the receiver when the first bucket is wanted."""
        if self._ring is None:
            self._ring = self._rings.take()
            self.connection.send(RingPassed(bucket_bytes=self._bucket_bytes), fd=self._ring.fd)
        return self._ring

    def lend(self, snapshot: Snapshot, segments: Sequence[Segment]) -> None:
        self._confirmed(lend(self.connection, snapshot, segments))

    def wait_returned(self) -> bool:
        return isinstance(self.connection.receive_whenever(), Returned)

    def close(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            self._rings.give_back(ring)

    def next_bucket(self) -> torch.Tensor:
        ring = self._opened()
        if len(self._out) == NUM_SLOTS:
            self.connection.place = f"waiting for bucket {self._num_sent - NUM_SLOTS} to be taken"
            packet = self.connection.receive()
            if not isinstance(packet, Free) or packet.slot != self._out[0]:
                raise ProtocolError(f"{self.connection.peer} sent {packet}, expected Free of slot {self._out[0]}")
            self._slot = self._out.pop(0)
        else:
            self._slot = len(self._out)
        return ring.slots[self._slot]

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        assert self._slot is not None, "send_bucket without next_bucket"
        memory = self._opened().slots[self._slot].numpy()
        memory[payload_bytes : payload_bytes + len(header)] = np.frombuffer(header, dtype=np.uint8)
        self.connection.place = f"sending bucket {self._num_sent}"
        self.connection.send(
            BucketSent(
                kind=kind,
                sequence=sequence,
                slot=self._slot,
                payload_bytes=payload_bytes,
                header_bytes=len(header),
                header_checksum=xxhash.xxh3_64_intdigest(header),
            )
        )
        self._out.append(self._slot)
        self._slot = None
        self._num_sent += 1

    def finish(self, end: StreamEnd) -> None:
        self.connection.place = f"after the last bucket ({self._num_sent - 1})"
        self._confirmed(end)

    def _confirmed(self, end: StreamEnd) -> None:
        self.connection.send(
            End(
                policy_version=end.policy_version,
                manifest_digest=end.manifest_digest,
                num_tensors=end.num_tensors,
                total_bytes=end.total_bytes,
                num_buckets=end.num_buckets,
            )
        )
        while isinstance(packet := self.connection.receive(), Free) and self._out:
            self._out.pop(0)
        if not isinstance(packet, Done) or packet.manifest_digest != end.manifest_digest:
            raise ProtocolError(f"{self.connection.peer} sent {packet}, expected Done with digest {end.manifest_digest}")


class Borrowed(Protocol):
    """Memory in which a version lies, as buckets."""

    segments: list[Segment]

    def buckets(self) -> Iterator[Bucket]: ...

    def drop(self) -> None:
        """Let go of it."""
        ...


class SharedMemoryReceiver:
    """The engine's end of one transfer; a `ReceiveChannel` and a context manager.

    Left with an exception, it tells the server what went wrong before it closes.
    """

    def __init__(self, connection: Connection, policy_version: int, bucket_bytes: int) -> None:
        self.connection = connection
        self._memory: NDArray[np.uint8] | None = None
        self._bucket_bytes = bucket_bytes
        self._policy_version = policy_version
        self._slot: int | None = None
        self._next_slot = 0
        self._borrowing: Borrowed | None = None
        self._buckets: Iterator[Bucket] = iter(())
        self._loan: Loan | None = None

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def receive(self) -> Bucket | StreamEnd:
        lent = next(self._buckets, None)
        if lent is not None:
            return lent
        packet, fd = self.connection.receive_with_fd()
        if self._borrowing is None:
            self._borrowing = self._borrow(packet, fd)
            if self._borrowing is not None:
                self._buckets = self._borrowing.buckets()
                return next(self._buckets)
        if isinstance(packet, RingPassed) and self._memory is None:
            self._map_ring(packet, fd)
            packet, fd = self.connection.receive_with_fd()
        if fd is not None:
            os.close(fd)  # nobody asked for it
        match packet:
            case BucketSent():
                return self._open_bucket(packet)
            case End():
                return StreamEnd(
                    policy_version=packet.policy_version,
                    manifest_digest=packet.manifest_digest,
                    num_tensors=packet.num_tensors,
                    total_bytes=packet.total_bytes,
                    num_buckets=packet.num_buckets,
                )
            case _:
                raise ProtocolError(f"{self.connection.peer} sent {type(packet).__name__}, expected a bucket or the end")

    def _borrow(self, packet: Packet, fd: int | None) -> Borrowed | None:
        """What is lent, if that is what the packet says."""
        return Borrowing(self.connection, packet, fd) if isinstance(packet, TablePassed) else None

    def _map_ring(self, packet: RingPassed, fd: int | None) -> None:
        num_bytes = NUM_SLOTS * packet.bucket_bytes
        if fd is None:
            raise ProtocolError(f"{self.connection.peer} sent {packet} without a descriptor")
        try:
            if not 0 < packet.bucket_bytes <= MAX_BUCKET_BYTES or os.fstat(fd).st_size != num_bytes:
                raise ProtocolError(f"{self.connection.peer} passed a ring of {os.fstat(fd).st_size} bytes with {packet}")
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._bucket_bytes = packet.bucket_bytes

    def _open_bucket(self, packet: BucketSent) -> Bucket:
        if self._memory is None:
            raise ProtocolError(f"{self.connection.peer} sent a bucket before the ring")
        self.connection.place = f"at bucket {packet.sequence}"
        if packet.slot != self._next_slot or packet.payload_bytes + packet.header_bytes > self._bucket_bytes:
            raise ProtocolError(f"got {packet}, expected slot {self._next_slot} and at most {self._bucket_bytes} bytes")
        start = packet.slot * self._bucket_bytes
        payload = self._memory[start : start + packet.payload_bytes]
        header = self._memory[start + packet.payload_bytes :][: packet.header_bytes].tobytes()
        if xxhash.xxh3_64_intdigest(header) != packet.header_checksum:
            raise IntegrityError(f"the header of bucket {packet.sequence} has another checksum than the one announced")
        try:
            kind = BucketKind(packet.kind)
        except ValueError as error:
            raise ProtocolError(f"bucket {packet.sequence} has kind {packet.kind}, which is unknown") from error
        self._slot = packet.slot
        return Bucket(kind=kind, sequence=packet.sequence, payload=payload, header=header)

    def release(self) -> None:
        if self._borrowing is not None:
            return
        assert self._slot is not None, "release without receive"
        self.connection.send(Free(slot=self._slot))
        self._next_slot = (self._slot + 1) % NUM_SLOTS
        self._slot = None

    def confirm(self, manifest_digest: str) -> None:
        self.connection.send(Done(manifest_digest=manifest_digest))

    def take_loan(self) -> Loan | None:
        """See `transport.Borrowing`."""
        if self._borrowing is None:
            return None
        self._loan = Loan(self.connection, tuple(self._borrowing.segments))
        return self._loan

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, PeerLost | PeerFailed):
            self.connection.give_up(f"{type(error).__name__}: {error}")
        if self._loan is None or error is not None:
            self.connection.sock.close()
            if self._borrowing is not None:
                self._borrowing.drop()
        # a reference to the channel, as in a traceback, must not keep the memory
        self._memory, self._borrowing, self._buckets, self._loan = None, None, iter(()), None


def open_listener(socket_dir: Path, settings: WeightSyncSettings, terms: Terms) -> UnixListener:
    rings = Rings(settings.bucket_bytes)
    return UnixListener(
        socket_dir.absolute() / _SOCKET_NAME,
        settings,
        terms=terms,
        make_channel=lambda connection: SharedMemorySender(connection, rings, settings.bucket_bytes),
        on_close=rings.close,
    )


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> SharedMemoryReceiver:
    """See `transport.OpenReceiver`."""
    connection, terms = open_connection(address, request, timeout_s=timeout_s, on_open=on_open)
    return SharedMemoryReceiver(connection, request.policy_version, terms.bucket_bytes)
