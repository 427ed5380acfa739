"""A process group for one transfer: formed from a store of its own, never torch.distributed's default group.

Invariant: a group is closed as a whole and leaves no thread: whoever closes it breaks its connections, which ends what the
others wait for. Waits are for events (an operation done, a member gone); what libraries wait for by themselves has a deadline.
"""

# ruff: noqa: SLF001 - torch keeps deadlines and the address to listen at behind underscores

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from weight_sync.errors import PeerLost, WeightSyncError

GLOO = "gloo"
NCCL = "nccl"
_NUM_THREADS = 2
_PRESENT = "present/"


def own_device() -> str:
    """UUID of this process's CUDA device; empty without one."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_backend(wanted: str, devices: list[str]) -> str:
    """`nccl` where each member has a CUDA device of its own, else `gloo`; `wanted` decides when it is given. Pure.

    Args:
        devices: UUID of each member's device, the sender's too; empty for one without.

    Raises:
        WeightSyncError: `nccl` is wanted and cannot be.
    """
    can_use_nccl = all(devices) and len(set(devices)) == len(devices)
    if wanted == NCCL and not can_use_nccl:
        raise WeightSyncError(f"backend nccl needs a CUDA device of its own for each member, got {devices}")
    return wanted or (NCCL if can_use_nccl else GLOO)


def route_to(host: str, port: int) -> str:
    """The address of this host from which it reaches `host`. Nothing is sent. Raises PeerLost."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerLost(f"{host} port {port} cannot be reached: {error}") from error


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A member's connection to the rendezvous. Raises OSError at once when it is gone, and RuntimeError of torch."""
    socket.create_connection((host, port), timeout_s).close()  # torch would try until the deadline
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class Rendezvous:
    """The store over which members find each other; the sender's. `break_off` ends everybody's wait for it."""

    def __init__(self, bind_host: str, host: str, timeout_s: float) -> None:
        """`host`: by which this process reaches `bind_host`."""
        listening = socket.create_server(
            (bind_host, 0), family=socket.AF_INET6 if ":" in bind_host else socket.AF_INET, backlog=64
        )
        self.port: int = listening.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self.own = connect_store(host, self.port, timeout_s)
        """The sender's own connection; it fails once the rendezvous is broken off."""
        self._lock = threading.Lock()

    def missing(self, size: int) -> list[int]:
        """Ranks of members, from 1, that never came to the store; empty once it is broken off."""
        with self._lock:
            if self._store is None:
                return []
            return [rank for rank in range(1, size) if not self._store.check([f"{_PRESENT}{rank}"])]

    def break_off(self) -> None:
        with self._lock:
            self._store = None


class Broadcast:
    """One broadcast under way. Until `let_go` it keeps the group's connections open, wherever a traceback holds it."""

    def __init__(self, work: Any, on_done: Callable[[], None]) -> None:
        self.is_done = False
        """It ended, well or not. torch's own flag is set only after its callbacks have run."""
        self._work = work
        self._on_done = on_done
        work.get_future().add_done_callback(self._note)

    def _note(self, future: object) -> None:
        self.is_done = True
        self._on_done()

    def problem(self) -> str:
        """Why it failed, once it is done; empty if it did not."""
        work = self._work
        if work is None:
            return "the group was left"
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)[:300] or "no reason given"
        finally:
            del work
        return ""

    def let_go(self) -> None:
        self._work = None


def _gloo_options(own_host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    options._threads = _NUM_THREADS
    options._timeout = timeout
    return options


class Group:
    """This process's membership of one group.

    Args:
        own_host: address at which the other members reach this one.
        form_s: deadline for all to join.
        operation_s: deadline of one broadcast.

    Raises:
        RuntimeError: of torch, when not all joined in time or one went away.
    """

    def __init__(
        self,
        *,
        store: TCPStore,
        own_host: str,
        name: str,
        rank: int,
        size: int,
        backend: str,
        form_s: float,
        operation_s: float,
    ) -> None:
        form, operation = timedelta(seconds=form_s), timedelta(seconds=operation_s)
        store.set(f"{_PRESENT}{rank}", "1")
        named = PrefixStore(name, store)
        self._group: Any
        self._under_way: list[Broadcast] = []
        if backend == NCCL:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = operation
            self._group = dist.ProcessGroupNCCL(named, rank, size, nccl)
        else:
            gloo = _gloo_options(own_host, form)
            self._group = dist.ProcessGroupGloo(named, rank, size, gloo)
            self._group.set_timeout(operation)
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == NCCL else torch.device("cpu")

    def broadcast(self, tensor: torch.Tensor, on_done: Callable[[], None]) -> Broadcast:
        """Begin to send, from rank 0, or to receive; `on_done` is called from any thread when it ended, well or not."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        broadcast = Broadcast(self._group.broadcast([tensor], options), on_done)
        self._under_way = [*(before for before in self._under_way if not before.is_done), broadcast]
        return broadcast

    def close(self) -> None:
        """Break this member's connections. Safe to call twice."""
        for broadcast in self._under_way:
            broadcast.let_go()
        self._under_way = []
        group, self._group = self._group, None
        if group is not None:
            group.abort()
