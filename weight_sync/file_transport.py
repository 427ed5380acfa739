"""Weights through safetensors files: each version is written once, and every receiver maps it.

Invariant: a version's directory, `<incarnation>-v<N>` with `model.safetensors` and `manifest.msgpack`, appears under its name
only when it is complete. The two newest are kept; a receiver that has mapped an older one goes on reading it. One server at a
time has the directory: it holds a lock there for as long as it lives. Deltas, and weights that are not at rest, take the ring
of `weight_sync.shared_memory`: the control socket lies in the directory too.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync.arena import Segment
from weight_sync.buckets import Piece, encode_header
from weight_sync.channel import Bucket, BucketKind
from weight_sync.connection import Connection
from weight_sync.errors import AddressTaken, ProtocolError
from weight_sync.lending import end_of
from weight_sync.manifest import Manifest
from weight_sync.packets import FilePassed, Packet
from weight_sync.shared_memory import Borrowed, Rings, SharedMemoryReceiver, SharedMemorySender
from weight_sync.snapshot import Snapshot
from weight_sync.transport import Cut, StageRequest, Terms
from weight_sync.unix_listener import UnixListener, open_connection

log = structlog.get_logger()

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.msgpack"
LOCK_FILE = "lock"
_KEPT_VERSIONS = 2
_VERSION_DIR = re.compile(r"\.?[0-9a-f]{8}-v-?\d+")
_MAX_HEADER_BYTES = 100 << 20
_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that the format gives them."""


def write_safetensors(path: Path, snapshot: Snapshot) -> None:
    """All tensors of a version, wide dtypes first, so that each stands at a multiple of its element's size."""
    order = sorted(range(snapshot.manifest.num_tensors), key=lambda index: -snapshot.manifest.specs[index].dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for index in order:
        spec = snapshot.manifest.specs[index]
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb", buffering=0) as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for index in order:
            left = memoryview(snapshot.tensors[index].reshape(-1).view(torch.uint8).numpy().data)
            while left:
                left = left[stream.write(left) :]


class FileStore:
    """The versions of one server in one directory, which is its own from `open` to `close`."""

    def __init__(self, directory: Path, *, needs_lock: bool) -> None:
        """`needs_lock`: servers of other hosts may want the directory too, so a file system that cannot lock is refused."""
        self._directory = directory
        self._needs_lock = needs_lock
        self._incarnation = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._lock_fd: int | None = None
        self._written: dict[Path, _Written] = {}
        """Oldest first."""

    def open(self) -> None:
        """Take the directory, and remove what a server that died left there.

        Raises:
            AddressTaken: another server has it.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = self._take_lock()
        for path in self._directory.iterdir():
            if _VERSION_DIR.fullmatch(path.name):
                log.info("weights of an earlier server are removed", path=str(path))
                shutil.rmtree(path, ignore_errors=True)

    def _take_lock(self) -> int:
        path = self._directory / LOCK_FILE
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if self._needs_lock or isinstance(error, BlockingIOError):
                    os.close(fd)
                    raise AddressTaken(f"another weight server has {self._directory}: {error}") from error
                log.warning("the directory of the weights cannot be locked", directory=str(self._directory), problem=str(error))
            if _is_at(path, fd):
                return fd
            os.close(fd)  # whoever had it removed it between the two calls

    def path_of(self, snapshot: Snapshot) -> Path:
        """The directory of a version, written if it is not there; versions before the two newest are removed."""
        with self._lock:
            path = self._directory / f"{self._incarnation}-v{snapshot.policy_version}"
            written = self._written.get(path)
            if written is None or written.digest != snapshot.manifest.digest or not written.is_there(path):
                if written is not None:
                    log.info("weights are written again", path=str(path))
                    del self._written[path]
                shutil.rmtree(path, ignore_errors=True)
                self._write(path, snapshot)
                self._written[path] = _Written(snapshot.manifest.digest, _files_of(path))
            for old in list(self._written)[:-_KEPT_VERSIONS]:
                shutil.rmtree(old, ignore_errors=True)
                del self._written[old]
            return path

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        beside = path.with_name(f".{path.name}")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            write_safetensors(beside / WEIGHTS_FILE, snapshot)
            (beside / MANIFEST_FILE).write_bytes(snapshot.manifest.encode())
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove what was written, and let the directory go. Safe to call twice, and before `open`."""
        with self._lock:
            for path in self._written:
                shutil.rmtree(path, ignore_errors=True)
            self._written.clear()
            fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            path = self._directory / LOCK_FILE
            if os.fstat(fd).st_size == 0 and _is_at(path, fd):
                path.unlink()
            os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file is the one that has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class _Written:
    """A version as it was written."""

    digest: str
    """Of its manifest."""
    files: tuple[tuple[int, int], ...]

    def is_there(self, path: Path) -> bool:
        """Whether nobody has removed it, or put other files in its place."""
        try:
            return _files_of(path) == self.files
        except OSError:
            return False


def _files_of(path: Path) -> tuple[tuple[int, int], ...]:
    """Inode and bytes of a version's files. Raises OSError if one is not there."""
    stats = [(path / name).stat() for name in (WEIGHTS_FILE, MANIFEST_FILE)]
    return tuple((stat.st_ino, stat.st_size) for stat in stats)


class FileSender(SharedMemorySender):
    """The server's end; a `LendingChannel` that passes the name of a file."""

    def __init__(self, connection: Connection, rings: Rings, bucket_bytes: int, store: FileStore) -> None:
        super().__init__(connection, rings, bucket_bytes)
        self._store = store

    def lend(self, snapshot: Snapshot, segments: Sequence[Segment]) -> None:
        path = self._store.path_of(snapshot)
        self.connection.place = "passing the file"
        self.connection.send(FilePassed(path=str(path)))
        self._confirmed(end_of(snapshot, num_buckets=1))

    def wait_returned(self) -> bool:
        """Nothing was lent but the file, which is never written again."""
        return True


class MappedFile:
    """A version's directory as buckets; a `Borrowed`."""

    def __init__(self, directory: Path, policy_version: int) -> None:
        """Raises ProtocolError when the files are not there or do not fit together."""
        self._policy_version = policy_version
        try:
            self._encoded = (directory / MANIFEST_FILE).read_bytes()
            fd = os.open(directory / WEIGHTS_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ProtocolError(f"version {policy_version} was said to be in {directory}: {error}") from error
        try:
            # private and writable, as torch wants it: what was written would be this process's own
            memory = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ProtocolError(f"{directory / WEIGHTS_FILE} cannot be mapped: {error}") from error
        self.segments = [Segment(torch.frombuffer(memory, dtype=torch.uint8), fd, memory)]

    def buckets(self) -> Iterator[Bucket]:
        manifest = np.frombuffer(self._encoded, dtype=np.uint8)
        yield Bucket(kind=BucketKind.MANIFEST, sequence=0, payload=manifest, header=b"")
        memory = self.segments[0].memory
        header = encode_header(self._pieces(memory), sequence=0, policy_version=self._policy_version)
        payload = memory.numpy()
        payload.flags.writeable = False
        yield Bucket(kind=BucketKind.WEIGHTS, sequence=0, payload=payload, header=header, lent=memory)

    def _pieces(self, memory: torch.Tensor) -> list[Piece]:
        manifest = Manifest.decode(self._encoded)
        try:
            (header_bytes,) = struct.unpack("<Q", memory[:8].numpy().tobytes())
            if header_bytes > min(_MAX_HEADER_BYTES, memory.numel() - 8):
                raise ValueError(f"a header of {header_bytes} bytes")
            entries = json.loads(memory[8 : 8 + header_bytes].numpy().tobytes())
            pieces = []
            for index, (spec, checksum) in enumerate(manifest):
                entry = entries[spec.name]
                begin, end = entry["data_offsets"]
                if (entry["dtype"], tuple(entry["shape"]), end - begin) != (_DTYPES[spec.dtype], spec.shape, spec.num_bytes):
                    raise ValueError(f"{entry} for {spec}")
                place = 8 + header_bytes + begin
                pieces.append(Piece(index=index, spec=spec, offset=0, length=spec.num_bytes, position=place, checksum=checksum))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ProtocolError(
                f"{WEIGHTS_FILE} of version {self._policy_version} does not fit its manifest: {error!r}"
            ) from error
        return pieces

    def drop(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments = []


class FileReceiver(SharedMemoryReceiver):
    """The receiver's end."""

    def _borrow(self, packet: Packet, fd: int | None) -> Borrowed | None:
        if isinstance(packet, FilePassed):
            return MappedFile(Path(packet.path), self.policy_version)
        return super()._borrow(packet, fd)


def open_listener(socket_dir: Path, settings: WeightSyncSettings, terms: Terms) -> UnixListener:
    """In `weight_sync.directory`, or in `socket_dir`."""
    directory = (settings.directory or socket_dir / "weight_files").absolute()
    rings, store = Rings(settings.bucket_bytes), FileStore(directory, needs_lock=False)

    def close() -> None:
        store.close()
        rings.close()

    return UnixListener(
        directory / "control",
        settings,
        terms=terms,
        make_channel=lambda connection: FileSender(connection, rings, settings.bucket_bytes, store),
        on_start=store.open,
        on_close=close,
    )


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> FileReceiver:
    """See `transport.OpenReceiver`."""
    connection, terms = open_connection(address, request, timeout_s=timeout_s, on_open=on_open)
    return FileReceiver(connection, request.policy_version, terms.bucket_bytes)
