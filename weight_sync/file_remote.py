"""The `file` transport between hosts: files in a directory that all of them mount at the same path, asked for over TCP.

Invariant: as within a host (`weight_sync.file_transport`), a version appears under its name when it is complete, and is never
written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from configs.bus_address import is_loopback
from configs.schema import WeightSyncSettings
from weight_sync.arena import Segment
from weight_sync.channel import Bucket, StreamEnd
from weight_sync.errors import ProtocolError
from weight_sync.file_transport import FileStore, MappedFile
from weight_sync.lending import end_of
from weight_sync.snapshot import Snapshot
from weight_sync.tcp import TcpListener, TcpReceiver, TcpSender, open_link
from weight_sync.tcp_messages import FileNamed
from weight_sync.transport import Cut, Incoming, StageRequest, Terms


def is_remote(settings: WeightSyncSettings) -> bool:
    """Whether other hosts are to be served: a directory is named, and the server listens beyond this host."""
    return settings.directory is not None and not is_loopback(settings.listen_host.strip("[]"))


class RemoteFileListener(TcpListener):
    """A `Listener` at `weight_sync.listen_host`."""

    def __init__(self, settings: WeightSyncSettings, *, directory: Path, terms: Terms) -> None:
        self._directory = directory.absolute()
        self._store = FileStore(self._directory, needs_lock=True)

        def make_sender(*arguments: Any, **options: Any) -> RemoteFileSender:
            return RemoteFileSender(*arguments, store=self._store, **options)

        super().__init__(settings, terms=terms, make_sender=make_sender)

    def start(self, on_transfer: Callable[[Incoming], None]) -> None:
        """Raises AddressTaken when another server has the directory, or the port."""
        try:
            self._store.open()
            super().start(on_transfer)
        except BaseException:
            self._store.close()
            raise

    def close(self) -> None:
        super().close()
        self._store.close()


class RemoteFileSender(TcpSender):
    """The server's end; a `LendingChannel` that passes the name of a directory."""

    def __init__(self, *arguments: Any, store: FileStore, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._store = store

    def lend(self, snapshot: Snapshot, segments: Sequence[Segment]) -> None:
        path = self._store.path_of(snapshot)
        self.name_file(FileNamed(directory=str(path)))
        self.finish(end_of(snapshot, num_buckets=1))

    def wait_returned(self) -> bool:
        """Nothing was lent but the file, which is never written again."""
        return True


class FileLoan:
    """A mapped file; a `LoanLike`. Its pages live for as long as any view of them."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def end(self, unread: bool) -> None:
        for segment in self.segments:
            segment.close()

    def end_when_unread(self) -> None:
        self.end(unread=False)


class RemoteFileReceiver(TcpReceiver):
    """The receiver's end; a `Borrowing`."""

    _mapped: MappedFile | None = None
    _is_taken = False
    _buckets: Iterator[Bucket] = iter(())

    def receive(self) -> Bucket | StreamEnd:
        lent = next(self._buckets, None)
        return super().receive() if lent is None else lent

    def _open_file(self, named: FileNamed) -> Bucket:
        if self._mapped is not None:
            raise ProtocolError("a second directory was named")
        self._mapped = MappedFile(Path(named.directory), self.policy_version)
        self._buckets = self._mapped.buckets()
        return next(self._buckets)

    def release(self) -> None:
        if self._mapped is None:
            super().release()

    def take_loan(self) -> FileLoan | None:
        if self._mapped is None:
            return None
        self._is_taken = True
        return FileLoan(tuple(self._mapped.segments))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._mapped is not None and (error is not None or not self._is_taken):
            self._mapped.drop()
        self._mapped, self._buckets = None, iter(())
        super().__exit__(kind, error, trace)


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> RemoteFileReceiver:
    """See `transport.OpenReceiver`."""
    link, welcome = open_link(address, request, timeout_s=timeout_s, on_open=on_open)
    return RemoteFileReceiver(link, welcome, request.policy_version)
