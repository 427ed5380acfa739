"""A sender and a receiver that come to a stop in a phase of their second round, to be killed there.

Both run as processes of their own, forked from one that has imported torch already (`context`). They are the product's: a
`WeightServer` and a `StagingArea`; only the seams between their phases are wrapped, so that they can halt there.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import structlog
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync.peers import weights
from weight_sync import StageReport, WeightServer, open_receiver, receive_weights, staging
from weight_sync.connection import Connection
from weight_sync.packets import FilePassed, SegmentPassed
from weight_sync.staging import StagingArea, StagingState

BUCKET_BYTES = 1 << 16
LARGE_BUCKET_BYTES = 4 << 20
LARGE_ELEMENTS = 3 << 20
"""Of each tensor of a `large` variant, whose messages are sent from where the weights lie."""
FOREVER_S = 600.0


class ReceiverPhase(StrEnum):
    BEFORE_HELLO = "before hello"
    AFTER_HELLO = "after hello"
    MANIFEST = "in the manifest"
    MIDDLE = "in the middle"
    BEFORE_CONFIRM = "after the last bucket"
    AFTER_CONFIRM = "after confirming"
    STAGED = "staged, not committed"


class SenderPhase(StrEnum):
    AFTER_HELLO = "after hello"
    OPENED = "before the first byte"
    MANIFEST = "after the manifest"
    MIDDLE = "in the middle"
    BEFORE_END = "after the last bucket"
    AFTER_CONFIRM = "confirmed, not reported"


def context() -> Any:
    """Forks from a process that has imported what is needed and started no thread."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.weight_sync.conformance.halting"])
    return made


def first(variant: str) -> dict[str, torch.Tensor]:
    """Version 1."""
    return weights(1, elements=LARGE_ELEMENTS) if "large" in variant else weights(1)


def changed(seed: int, variant: str) -> dict[str, torch.Tensor]:
    """Version 1 with a few elements of each tensor changed: what changed is far less than all."""
    tensors = first(variant)
    for index, tensor in enumerate(tensors.values()):
        tensor[seed + index :: 500] += seed
    return tensors


def settings_of(variant: str) -> WeightSyncSettings:
    """A transport, and how it is used: `shared_memory delta` goes through the ring of two buckets, `tcp large` sends from the
    snapshot without a copy."""
    transport, _, use = variant.partition(" ")
    return WeightSyncSettings.model_validate(
        {
            "transport": transport,
            "encoding": "delta" if use == "delta" else "full",
            "bucket_bytes": LARGE_BUCKET_BYTES if use == "large" else BUCKET_BYTES,
            "bucket_timeout_s": 20.0,
            "connect_timeout_s": 20.0,
        }
    )


class Halt:
    """Says once where this process is, and stays there."""

    def __init__(self, pipe: Pipe, phase: str) -> None:
        self._pipe = pipe
        self._phase = phase
        self.is_armed = False

    def at(self, phase: str) -> None:
        if self.is_armed and phase == self._phase:
            self._pipe.send("halted")
            time.sleep(FOREVER_S)


# ── the receiver ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_receiver(pipe: Pipe, address: str, phase: str, timeout_s: float) -> None:
    """Load version 1, say so, and upon a word stage version 2 as far as `phase`."""
    _quiet()
    halt = Halt(pipe, phase)

    def opened(*arguments: Any, **keywords: Any) -> Any:
        halt.at(ReceiverPhase.BEFORE_HELLO)
        channel = open_receiver(*arguments, **keywords)
        halt.at(ReceiverPhase.AFTER_HELLO)
        return channel

    def received(*arguments: Any, **keywords: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(receive_weights(*arguments, **keywords)):
            if number == 2:
                halt.at(ReceiverPhase.MIDDLE)
            if number == len(weights(1)) - 1:
                halt.at(ReceiverPhase.BEFORE_CONFIRM)
            yield pair
        halt.at(ReceiverPhase.AFTER_CONFIRM)

    for name, wrapped in (("open_receiver", opened), ("receive_weights", received)):
        setattr(staging, name, wrapped)
    area = StagingArea(check_manifest=lambda manifest: halt.at(ReceiverPhase.MANIFEST))
    stage(area, address, 1, timeout_s=timeout_s)
    load(area, 1)
    pipe.send("loaded")
    pipe.recv()
    halt.is_armed = True
    stage(area, address, 2, timeout_s=timeout_s)
    halt.at(ReceiverPhase.STAGED)
    pipe.send(area.status())
    time.sleep(FOREVER_S)


def stage(area: StagingArea, address: str, version: int, *, timeout_s: float) -> StagingState:
    """Stage and wait for its end."""
    ended = threading.Event()
    area._on_end = lambda nonce: ended.set()
    area.stage(address, version, engine="engine-0", nonce=f"nonce-{version}", timeout_s=timeout_s)
    assert ended.wait(FOREVER_S)
    return StagingState(str(area.status()["state"]))


def load(area: StagingArea, version: int) -> None:
    """What a commit does once the model has taken the weights."""
    staged = area._staged
    assert staged is not None, area.status()
    assert staged.policy_version == version
    area.mark_loaded(area.get(version, staged.digest))


# ── the sender ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Halting:
    """A send channel that may halt before its end, or before and after a loan."""

    def __init__(self, channel: Any, halt: Halt) -> None:
        self._channel = channel
        self._halt = halt
        self._num_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def finish(self, end: Any) -> None:
        self._halt.at(SenderPhase.BEFORE_END)
        self._channel.finish(end)

    def lend(self, *arguments: Any) -> None:
        self._channel.lend(*arguments)
        self._halt.at(SenderPhase.BEFORE_END)

    def send_bucket(self, *arguments: Any, **keywords: Any) -> None:
        self._channel.send_bucket(*arguments, **keywords)
        self._num_sent += 1
        if self._num_sent == 1:
            self._halt.at(SenderPhase.MANIFEST)
        if self._num_sent == 2:
            self._halt.at(SenderPhase.MIDDLE)


def run_sender(pipe: Pipe, directory: str, variant: str, phase: str) -> None:
    """Serve version 1, say where, and upon a word version 2 as far as `phase`."""
    _quiet()
    halt = Halt(pipe, phase)
    taken, sent, lent, noted = WeightServer._take, WeightServer._send, WeightServer._lend, WeightServer._note_staged

    def take(self: WeightServer, *arguments: Any) -> None:
        halt.at(SenderPhase.AFTER_HELLO)
        taken(self, *arguments)

    def send(self: WeightServer, channel: Any, *arguments: Any) -> Any:
        halt.at(SenderPhase.OPENED)
        return sent(self, Halting(channel, halt), *arguments)

    def lend(channel: Any, *arguments: Any) -> Any:
        halt.at(SenderPhase.OPENED)
        return lent(Halting(channel, halt), *arguments)

    def note(self: WeightServer, *arguments: Any) -> None:
        halt.at(SenderPhase.AFTER_CONFIRM)
        noted(self, *arguments)

    _halt_while_lending(halt)
    for name, wrapped in (("_take", take), ("_send", send), ("_lend", staticmethod(lend)), ("_note_staged", note)):
        setattr(WeightServer, name, wrapped)
    reported: list[StageReport] = []
    with WeightServer(
        settings_of(variant),
        socket_dir=Path(directory),
        dtype=torch.float32,
        on_staged=reported.append,
        on_failed=lambda failure: None,
    ) as server:
        server.publish(first(variant).items(), policy_version=1)
        pipe.send(server.address)
        pipe.recv()
        server.publish(changed(2, variant).items(), policy_version=2)
        halt.is_armed = True
        pipe.send("ready")
        time.sleep(FOREVER_S)


def _halt_while_lending(halt: Halt) -> None:
    """Memory: between the table and the first segment, and behind a segment. A file: written and not named yet, and named but
    not passed."""
    send, rename = Connection.send, Path.rename

    def send_and_halt(self: Connection, packet: Any, fd: int | None = None) -> None:
        if isinstance(packet, SegmentPassed) and packet.index == 0:
            halt.at(SenderPhase.MANIFEST)
        if isinstance(packet, FilePassed):
            halt.at(SenderPhase.MIDDLE)
        send(self, packet, fd)
        if isinstance(packet, SegmentPassed):
            halt.at(SenderPhase.MIDDLE)

    def halt_and_rename(self: Path, target: Any) -> Path:
        halt.at(SenderPhase.MANIFEST)
        return rename(self, target)

    for owner, name, wrapped in ((Connection, "send", send_and_halt), (Path, "rename", halt_and_rename)):
        setattr(owner, name, wrapped)


def _quiet() -> None:
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
