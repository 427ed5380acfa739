"""Weights lent as they lie: the descriptors of the memory travel, not the bytes.

Invariant: a borrower maps the memory so that nothing it writes reaches the lender. The loan lasts as long as the borrower's
connection, until it says that nobody reads any more; a connection that ends without that word leaves the memory to the
borrower for good.
"""

from __future__ import annotations

import bisect
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from weight_sync.arena import Segment
from weight_sync.buckets import Piece, encode_header
from weight_sync.channel import Bucket, BucketKind, StreamEnd
from weight_sync.connection import Connection
from weight_sync.errors import ProtocolError, WeightSyncError
from weight_sync.packets import Returned, SegmentPassed, TablePassed
from weight_sync.snapshot import Snapshot

_MADV_POPULATE_READ = 22
_MAX_TABLE_BYTES = 1 << 30
_MAX_SEGMENTS = 4096


def headers_of(snapshot: Snapshot, segments: Sequence[Segment]) -> list[tuple[Segment, bytes]]:
    """Those of the segments in which tensors lie, each with the header that says where. Its pieces are whole tensors."""
    starts = sorted((segment.memory.data_ptr(), index) for index, segment in enumerate(segments))
    pieces: dict[int, list[Piece]] = {}
    where = starts[0][1] if starts else 0
    for index, ((spec, checksum), tensor) in enumerate(zip(snapshot.manifest, snapshot.tensors, strict=True)):
        position = 0
        if spec.num_bytes:
            where = starts[bisect.bisect_right(starts, (tensor.data_ptr(), len(segments))) - 1][1]
            position = tensor.data_ptr() - segments[where].memory.data_ptr()
            assert 0 <= position <= segments[where].memory.numel() - spec.num_bytes, f"{spec} lies in no segment"
        piece = Piece(index=index, spec=spec, offset=0, length=spec.num_bytes, position=position, checksum=checksum)
        pieces.setdefault(where, []).append(piece)
    return [
        (segments[where], encode_header(of_segment, sequence=sequence, policy_version=snapshot.policy_version))
        for sequence, (where, of_segment) in enumerate(pieces.items())
    ]


def lend(connection: Connection, snapshot: Snapshot, segments: Sequence[Segment]) -> StreamEnd:
    """Pass the memory of a version to the other side; what has to be confirmed then."""
    lent = headers_of(snapshot, segments)
    manifest = snapshot.manifest.encode()
    table = b"".join([manifest, *(header for _, header in lent)])
    fd = os.memfd_create("headrace-weights-table", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as stream:
            stream.write(table)
        connection.send(TablePassed(num_segments=len(lent), table_bytes=len(table), manifest_bytes=len(manifest)), fd=fd)
    finally:
        os.close(fd)
    for index, (segment, header) in enumerate(lent):
        connection.place = f"passing segment {index}"
        connection.send(SegmentPassed(index=index, num_bytes=segment.memory.numel(), header_bytes=len(header)), fd=segment.fd)
    connection.place = f"waiting for {len(lent)} segments to be taken"
    return end_of(snapshot, num_buckets=len(lent))


def end_of(snapshot: Snapshot, *, num_buckets: int) -> StreamEnd:
    """What the borrower of a version has to confirm."""
    manifest = snapshot.manifest
    return StreamEnd(
        policy_version=snapshot.policy_version,
        manifest_digest=manifest.digest,
        num_tensors=manifest.num_tensors,
        total_bytes=manifest.total_bytes,
        num_buckets=num_buckets,
    )


class Loan:
    """The borrower's hold on memory that was lent to it."""

    def __init__(self, connection: Connection, segments: Sequence[Segment]) -> None:
        self._connection = connection
        self.segments = segments

    def end(self, unread: bool) -> None:
        """`unread`: nobody reads it any more, here or where it was lent on to, and the lender may write it again."""
        if unread:
            try:
                self._connection.send_whenever(Returned())
            except WeightSyncError:
                pass  # the lender is gone, and nobody will write it
        for segment in self.segments:
            segment.close()
        self._connection.sock.close()

    def end_when_unread(self) -> None:
        """End it when the last view of the memory in this process is gone."""
        mappings = [segment.mapping for segment in self.segments]
        num_left = len(mappings)
        end = Loan(self._connection, ()).end
        for segment in self.segments:
            segment.close()
        self.segments = ()

        def one_is_gone() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                end(True)

        for mapping in mappings:
            weakref.finalize(mapping, one_is_gone).atexit = False
        if not mappings:
            end(True)


class Borrowing:
    """What a table and its segments say, as buckets: the manifest first, then one for each segment."""

    def __init__(self, connection: Connection, packet: TablePassed, fd: int | None) -> None:
        self._connection = connection
        self.segments: list[Segment] = []
        self._num_segments = packet.num_segments
        if fd is None or packet.num_segments > _MAX_SEGMENTS or packet.table_bytes > _MAX_TABLE_BYTES:
            _close(fd)
            raise ProtocolError(f"{connection.peer} sent {packet} {'with' if fd is not None else 'without'} a descriptor")
        with os.fdopen(fd, "rb", buffering=0) as stream:
            stream.seek(0)
            table = stream.read(packet.table_bytes)
        if len(table) != packet.table_bytes or not packet.manifest_bytes <= packet.table_bytes:
            raise ProtocolError(f"{connection.peer} passed a table of {len(table)} bytes with {packet}")
        self._manifest = table[: packet.manifest_bytes]
        self._headers = table[packet.manifest_bytes :]

    def buckets(self) -> Iterator[Bucket]:
        manifest = np.frombuffer(self._manifest, dtype=np.uint8)
        yield Bucket(kind=BucketKind.MANIFEST, sequence=0, payload=manifest, header=b"")
        for index in range(self._num_segments):
            packet, fd = self._connection.receive_with_fd()
            if not isinstance(packet, SegmentPassed) or packet.index != index or fd is None or packet.num_bytes < 1:
                _close(fd)
                raise ProtocolError(f"{self._connection.peer} sent {packet}, expected segment {index}")
            self._connection.place = f"at segment {index}"
            segment = _map(fd, packet.num_bytes)
            self.segments.append(segment)
            header, self._headers = self._headers[: packet.header_bytes], self._headers[packet.header_bytes :]
            payload = segment.memory.numpy()
            payload.flags.writeable = False
            yield Bucket(kind=BucketKind.WEIGHTS, sequence=index, payload=payload, header=header, lent=segment.memory)

    def drop(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments.clear()


def _map(fd: int, num_bytes: int) -> Segment:
    """Private and writable, as torch wants it: a page that was written would be this process's own from then on."""
    try:
        if os.fstat(fd).st_size != num_bytes:
            raise ProtocolError(f"got a segment of {os.fstat(fd).st_size} bytes, expected {num_bytes}")
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            memory.madvise(_MADV_POPULATE_READ)
        except OSError:
            pass  # an older kernel: each page is mapped when it is read
    except BaseException:
        os.close(fd)
        raise
    return Segment(torch.frombuffer(memory, dtype=torch.uint8), fd, memory)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
