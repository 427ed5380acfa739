"""Stream named tensors over a channel, in buckets: `send_weights` and `receive_weights`.

Invariant: what `receive_weights` yields is whole and has the checksum that the sender computed over what it sent; a bucket
that is missing, repeated, late or altered ends the stream with an error. Beyond the channel's two buckets neither side needs
memory for the transfer itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from weight_sync.buckets import BucketLayout, Encoding, Piece, decode_header, encode_header
from weight_sync.channel import Bucket, BucketKind, ReceiveChannel, SendChannel, StreamEnd, ViewChannel
from weight_sync.delta import apply_delta
from weight_sync.errors import DeltaRefused, IntegrityError, ProtocolError
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """What one transfer carried; the receiver has confirmed it."""

    policy_version: int
    manifest_digest: str
    num_tensors: int
    total_bytes: int
    """Of the tensors, whatever travelled for them."""
    payload_bytes: int
    """Of tensors and deltas that travelled."""
    num_buckets: int
    """Buckets with weights."""
    seconds: float


class _BucketWriter:
    """Fills and sends one bucket after the other."""

    def __init__(self, channel: SendChannel, policy_version: int) -> None:
        self._channel = channel
        self._views = channel if isinstance(channel, ViewChannel) else None
        self._view: torch.Tensor | None = None
        """What is sent from where it lies, as the bucket's only piece."""
        self._policy_version = policy_version
        self._layout = BucketLayout(channel.bucket_bytes)
        self._memory: torch.Tensor | None = None
        self._pieces: list[Piece] = []
        self.num_sent = 0
        self.payload_bytes = 0

    def write(self, index: int, spec: TensorSpec, source: torch.Tensor, checksum: int | None) -> int:
        """Send all of a tensor; returns its checksum, computed unless it is given."""
        hasher = xxhash.xxh3_64() if checksum is None else None

        def fill(window: torch.Tensor, offset: int) -> None:
            copy_flat(window.view(spec.dtype), source, offset // spec.dtype.itemsize)
            if hasher is not None:
                hasher.update(window.numpy().data)

        def checksum_at_end() -> int:
            return hasher.intdigest() if checksum is None and hasher is not None else checksum or 0

        lasting: torch.Tensor | None = None
        if hasher is None and self._views is not None and source.is_contiguous() and source.dtype is spec.dtype:
            lasting = source.view(-1).view(torch.uint8) if source.is_cpu and source.numel() else None
        return self._write(index, spec, Encoding.FULL, spec.num_bytes, fill, checksum_at_end, lasting)

    def write_delta(self, index: int, spec: TensorSpec, delta: NDArray[np.uint8], checksum: int) -> int:
        """Send what changed in a tensor; `checksum` is that of the tensor."""

        def fill(window: torch.Tensor, offset: int) -> None:
            np.copyto(window.numpy(), delta[offset : offset + len(window)])

        encoding = Encoding.DELTA if len(delta) else Encoding.UNCHANGED
        return self._write(index, spec, encoding, len(delta), fill, lambda: checksum)

    def _write(
        self,
        index: int,
        spec: TensorSpec,
        encoding: Encoding,
        total: int,
        fill: Callable[[torch.Tensor, int], None],
        checksum_at_end: Callable[[], int],
        lasting: torch.Tensor | None = None,
    ) -> int:
        """Cut `total` bytes into pieces; `fill` writes those from an offset on to a window of a bucket.

        `lasting` has the same bytes, as memory that need not be copied: a piece that takes a whole bucket is sent from there.
        """
        offset = checksum = 0
        while True:
            placed = self._layout.place(spec, total - offset)
            if placed is None:
                self.flush()
                continue
            position, length = placed
            if self._memory is None:
                self._memory = self._channel.next_bucket()
            if lasting is not None and not self._pieces and offset + length < total:
                self._view = lasting[offset : offset + length]
            elif length:
                fill(self._memory[position : position + length], offset)
            done = offset + length == total
            if done:
                checksum = checksum_at_end()
            self._pieces.append(
                Piece(
                    index=index,
                    spec=spec,
                    offset=offset,
                    length=length,
                    position=position,
                    checksum=checksum,
                    encoding=encoding,
                    delta_bytes=total if encoding is Encoding.DELTA else 0,
                )
            )
            offset += length
            if done:
                self.payload_bytes += total
                return checksum

    def flush(self) -> None:
        if not self._pieces:
            return
        header = encode_header(self._pieces, sequence=self.num_sent, policy_version=self._policy_version)
        if self._view is not None and self._views is not None:
            assert len(self._pieces) == 1, "a cut tensor fills its bucket"
            self._views.send_view(BucketKind.WEIGHTS, self.num_sent, payload=self._view, header=header)
        else:
            self._channel.send_bucket(BucketKind.WEIGHTS, self.num_sent, payload_bytes=self._layout.payload_end, header=header)
        self.num_sent += 1
        self._view = None
        self._memory = None
        self._pieces.clear()
        self._layout = BucketLayout(self._channel.bucket_bytes)


def send_weights(
    channel: SendChannel,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    dtype: torch.dtype | None = None,
    manifest: Manifest | None = None,
    deltas: Mapping[str, NDArray[np.uint8]] | None = None,
) -> SendReport:
    """Stream the tensors; return once the receiver has confirmed that it holds them all.

    Floating tensors travel in `dtype` (None: as they are), all others untouched. Tied tensors travel once. Tensors may be
    strided, sharded, on any device, without elements, and larger than a bucket.

    Args:
        manifest: when it is known beforehand it is sent first, so that the receiver can refuse before any weight moves, and
            its checksums are used instead of new ones. It must describe exactly `named_tensors`.
        deltas: with a manifest: for tensors that need not travel whole, what changed since the base that the receiver holds
            (`encode_delta`; empty: nothing).

    Raises:
        TransferTimeout, PeerLost, PeerFailed: see the channel.
        ProtocolError: a tensor is not the one that `manifest` describes.
    """
    started = time.monotonic()
    if manifest is not None:
        _send_manifest(channel, manifest)
    writer = _BucketWriter(channel, policy_version)
    aliases: list[tuple[str, str]] = []
    specs: list[TensorSpec] = []
    checksums: list[int] = []
    for index, (name, tensor) in enumerate(without_aliases(named_tensors, aliases)):
        spec = TensorSpec(name=name, dtype=wire_dtype_of(tensor, dtype), shape=tuple(tensor.shape))
        if manifest is not None and (index >= manifest.num_tensors or manifest.specs[index] != spec):
            raise ProtocolError(f"tensor {index} is {spec}, which is not what the manifest describes")
        specs.append(spec)
        known = None if manifest is None else manifest.checksums[index]
        delta = None if deltas is None or known is None else deltas.get(name)
        if delta is None or known is None:
            checksums.append(writer.write(index, spec, tensor, known))
        else:
            checksums.append(writer.write_delta(index, spec, delta, known))
    writer.flush()
    sent = Manifest(specs=tuple(specs), checksums=tuple(checksums), aliases=tuple(aliases))
    if manifest is not None and sent.num_tensors != manifest.num_tensors:
        raise ProtocolError(f"got {sent.num_tensors} tensors, the manifest describes {manifest.num_tensors}")
    end = StreamEnd(
        policy_version=policy_version,
        manifest_digest=sent.digest,
        num_tensors=sent.num_tensors,
        total_bytes=sent.total_bytes,
        num_buckets=writer.num_sent,
    )
    channel.finish(end)
    return SendReport(
        policy_version=policy_version,
        manifest_digest=end.manifest_digest,
        num_tensors=end.num_tensors,
        total_bytes=end.total_bytes,
        payload_bytes=writer.payload_bytes,
        num_buckets=end.num_buckets,
        seconds=time.monotonic() - started,
    )


def _send_manifest(channel: SendChannel, manifest: Manifest) -> None:
    encoded = np.frombuffer(manifest.encode(), dtype=np.uint8)
    for sequence, start in enumerate(range(0, len(encoded), channel.bucket_bytes)):
        part = encoded[start : start + channel.bucket_bytes]
        channel.next_bucket().numpy()[: len(part)] = part
        channel.send_bucket(BucketKind.MANIFEST, sequence, payload_bytes=len(part), header=b"")


def _own_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def receive_weights(
    channel: ReceiveChannel,
    *,
    allocate: Callable[[int], torch.Tensor] = _own_memory,
    check_manifest: Callable[[Manifest], None] | None = None,
    base: Mapping[str, torch.Tensor] | None = None,
    verify: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as tensors complete, each verified; confirm to the sender after the last one was taken.

    Args:
        allocate: gives uint8[num_bytes] in which a tensor is put together and stays, aligned to 64 bytes; not asked for tensors
            in memory that is lent, which are yielded as they lie.
        check_manifest: called with the manifest before any weight moves, when the sender sends one; it refuses by raising.
        base: by name, the weights that the sender was told of; it may send what changed in them. They are only read.
        verify: whether checksums of tensors that travel whole are computed; those that are built from the base always are.

    Raises:
        IntegrityError: a tensor is not what was sent, or not all of it arrived.
        DeltaRefused: what changed in a tensor does not make the new one from `base`.
        ProtocolError: the stream is none.
        TransferTimeout, PeerLost, PeerFailed: see the channel.
    """
    receiver = _Receiver(channel.policy_version, allocate, check_manifest, base or {}, verify)
    while True:
        received = channel.receive()
        if isinstance(received, StreamEnd):
            receiver.check_end(received)
            channel.confirm(received.manifest_digest)
            return
        complete = receiver.take(received)
        channel.release()
        yield from complete


class _Receiver:
    """Puts tensors together from buckets, in order, and checks each."""

    def __init__(
        self,
        policy_version: int,
        allocate: Callable[[int], torch.Tensor],
        check_manifest: Callable[[Manifest], None] | None,
        base: Mapping[str, torch.Tensor],
        verify: bool,
    ) -> None:
        self._verifies = verify
        self._base = base
        self._policy_version = policy_version
        self._allocate = allocate
        self._check_manifest = check_manifest
        self._encoded_manifest = bytearray()
        self._manifest: Manifest | None = None
        self._num_buckets = 0
        self._specs: list[TensorSpec] = []
        self._checksums: list[int] = []
        self._memory: torch.Tensor | None = None
        self._is_lent = False
        """Whether the tensor under way lies in memory that was lent, where it stays."""
        self._filled = 0
        self._encoding = Encoding.FULL
        self._delta_bytes = 0
        self._hasher = xxhash.xxh3_64()
        self._delta = np.empty(0, np.uint8)
        """Where a delta is put together; reused from tensor to tensor."""

    def take(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Copy a bucket out; the tensors that are complete now."""
        if bucket.kind is BucketKind.MANIFEST:
            self._encoded_manifest += bucket.payload.tobytes()
            return []
        if self._num_buckets == 0:
            self._open_manifest()
        pieces = decode_header(
            bucket.header,
            payload_bytes=len(bucket.payload),
            sequence=self._num_buckets,
            policy_version=self._policy_version,
        )
        self._num_buckets += 1
        return [complete for piece in pieces if (complete := self._take_piece(piece, bucket)) is not None]

    def _open_manifest(self) -> None:
        if self._encoded_manifest:
            self._manifest = Manifest.decode(bytes(self._encoded_manifest))
            if self._check_manifest is not None:
                self._check_manifest(self._manifest)

    def _take_piece(self, piece: Piece, bucket: Bucket) -> tuple[str, torch.Tensor] | None:
        if self._memory is None:
            self._begin(piece, bucket)
        memory = self._memory
        assert memory is not None
        index, spec = len(self._specs) - 1, self._specs[-1]
        expected = (index, spec, self._filled, self._encoding, self._delta_bytes)
        if (piece.index, piece.spec, piece.offset, piece.encoding, piece.delta_bytes) != expected:
            raise IntegrityError(
                f"bucket {bucket.sequence}: got byte {piece.offset} of tensor {piece.index} ({piece.spec}, "
                f"{piece.encoding.name}), expected byte {self._filled} of tensor {index} ({spec}, {self._encoding.name})"
            )
        if self._is_lent:
            if self._verifies:
                self._hasher.update(memory.numpy().data)
        elif piece.length:
            into = memory.numpy() if piece.encoding is Encoding.FULL else self._delta
            window = into[piece.offset : piece.offset + piece.length]
            np.copyto(window, bucket.payload[piece.position : piece.position + piece.length])
            if piece.encoding is Encoding.FULL and self._verifies:
                self._hasher.update(window.data)
        self._filled += piece.length
        return self._complete(piece, memory) if piece.is_last else None

    def _begin(self, piece: Piece, bucket: Bucket) -> None:
        index = len(self._specs)
        if self._manifest is not None and (index >= self._manifest.num_tensors or self._manifest.specs[index] != piece.spec):
            raise IntegrityError(f"tensor {index} is {piece.spec}, which is not what the manifest describes")
        self._specs.append(piece.spec)
        is_whole = piece.encoding is Encoding.FULL and piece.offset == 0 and piece.is_last
        if bucket.lent is not None and is_whole and piece.position % piece.spec.dtype.itemsize == 0:
            self._memory, self._is_lent = bucket.lent[piece.position : piece.position + piece.length], True
        else:
            self._memory, self._is_lent = self._allocate(piece.spec.num_bytes), False
        self._filled = 0
        self._encoding, self._delta_bytes = piece.encoding, piece.delta_bytes
        self._hasher.reset()
        if len(self._delta) < piece.delta_bytes:
            self._delta = np.empty(piece.delta_bytes, np.uint8)

    def _rebuild(self, piece: Piece, memory: NDArray[np.uint8]) -> None:
        """Make the tensor from that of the base."""
        base = self._base.get(piece.spec.name)
        if base is None or base.dtype != piece.spec.dtype or tuple(base.shape) != piece.spec.shape:
            held = "none" if base is None else f"{base.dtype} of shape {list(base.shape)}"
            raise DeltaRefused(f"got what changed in {piece.spec}, the base has {held}")
        old = base.contiguous().view(-1).view(torch.uint8).numpy()
        delta, word_bytes = self._delta[: piece.delta_bytes], piece.spec.dtype.itemsize
        try:
            apply_delta(delta, old, memory, word_bytes, on_block=lambda block: self._hasher.update(block.data))
        except ProtocolError as error:
            raise DeltaRefused(f"got no delta of {piece.spec}: {error}") from error

    def _complete(self, piece: Piece, memory: torch.Tensor) -> tuple[str, torch.Tensor]:
        if piece.encoding is not Encoding.FULL:
            self._rebuild(piece, memory.numpy())
        checksum = self._hasher.intdigest() if self._verifies or piece.encoding is not Encoding.FULL else piece.checksum
        expected = piece.checksum if self._manifest is None else self._manifest.checksums[piece.index]
        if not checksum == piece.checksum == expected:
            kind = IntegrityError if piece.encoding is Encoding.FULL else DeltaRefused
            raise kind(
                f"tensor {piece.spec} has checksum {checksum:016x}, the sender says {piece.checksum:016x} and its manifest "
                f"{expected:016x}"
            )
        self._checksums.append(checksum)
        self._memory = None
        return piece.spec.name, memory.view(piece.spec.dtype).view(piece.spec.shape)

    def check_end(self, end: StreamEnd) -> None:
        if self._num_buckets == 0:
            self._open_manifest()
        if self._memory is not None:
            raise IntegrityError(f"tensor {self._specs[-1]} ends after {self._filled} of {self._specs[-1].num_bytes} bytes")
        got = Manifest(specs=tuple(self._specs), checksums=tuple(self._checksums))
        summary = StreamEnd(
            policy_version=self._policy_version,
            manifest_digest=got.digest,
            num_tensors=got.num_tensors,
            total_bytes=got.total_bytes,
            num_buckets=self._num_buckets,
        )
        if summary != end:
            raise IntegrityError(f"got {summary}, the sender says {end}")
        if self._manifest is not None and self._manifest.digest != got.digest:
            raise IntegrityError(f"got tensors with digest {got.digest}, the manifest has {self._manifest.digest}")
