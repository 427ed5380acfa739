"""Either side killed, or frozen, in each phase of a round, over each transport: the old weights stay whole, the next round
completes with no restart of the other side, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.conformance.halting import (
    ReceiverPhase,
    SenderPhase,
    changed,
    context,
    first,
    load,
    run_receiver,
    run_sender,
    settings_of,
    stage,
)
from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import WAIT_S, Outcomes, assert_same, leftovers, mappings
from weight_sync import WeightServer
from weight_sync.staging import StagingArea, StagingState

pytestmark = pytest.mark.slow

VARIANTS = ["shared_memory", "shared_memory delta", "file", "tcp", "tcp delta", "tcp large", "collective"]
UNKNOWN_TO_THE_SERVER = (ReceiverPhase.BEFORE_HELLO,)
DONE_FOR_THE_SERVER = (ReceiverPhase.AFTER_CONFIRM, ReceiverPhase.STAGED)


@dataclass
class Child:
    process: Any
    pipe: Connection

    def said(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the child said nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    here, there = context().Pipe()
    process = context().Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    made = Child(process, here)
    try:
        yield made
    finally:
        made.kill()
        here.close()
        process.close()


def idle(pipe: Connection) -> None:
    """A child that does nothing."""


@contextmanager
def serving(directory: Path, variant: str, **changes: float) -> Iterator[tuple[WeightServer, Outcomes]]:
    outcomes = Outcomes()
    with WeightServer(
        settings_of(variant).model_copy(update=changes),
        socket_dir=directory,
        dtype=weights(1)["layer.0.weight"].dtype,
        on_staged=outcomes.staged.put,
        on_failed=outcomes.failed.put,
    ) as server:
        yield server, outcomes


@dataclass(frozen=True)
class Before:
    mappings: set[str]
    num_descriptors: int


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check_clean(directory: Path, before: Before) -> None:
    """No socket, file, thread, descriptor or shared memory is left of what was served from `directory`."""
    gc.collect()
    assert not [path for path in directory.rglob("*") if not path.is_dir()]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]
    assert not leftovers(before.mappings)
    assert num_descriptors() <= before.num_descriptors


def warm_up(directory: Path, variant: str) -> Before:
    """Libraries open descriptors and threads of their own at their first transfer, and so does the process that forks the
    children; what there is then."""
    with child(idle):
        pass
    with serving(directory, variant) as (server, _):
        server.publish(first(variant).items(), policy_version=1)
        area = StagingArea(check_manifest=lambda manifest: None)
        assert stage(area, server.address, 1, timeout_s=WAIT_S) is StagingState.STAGED
        area.close()
    del area
    return Before(mappings=mappings(), num_descriptors=num_descriptors())


@pytest.mark.parametrize("phase", ReceiverPhase)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_receiver_killed_in_any_phase_leaves_the_next_round_whole(tmp_path: Path, variant: str, phase: ReceiverPhase) -> None:
    """B03, B05, B22."""
    before = warm_up(tmp_path, variant)
    with serving(tmp_path, variant) as (server, outcomes):
        server.publish(first(variant).items(), policy_version=1)
        with child(run_receiver, server.address, phase.value, WAIT_S) as receiver:
            assert receiver.said() == "loaded"
            assert outcomes.staged.get(timeout=WAIT_S).policy_version == 1
            server.publish(changed(2, variant).items(), policy_version=2)
            receiver.pipe.send("go")
            assert receiver.said() == "halted"
            receiver.kill()
            if phase in DONE_FOR_THE_SERVER:
                assert outcomes.staged.get(timeout=WAIT_S).policy_version == 2
            elif phase not in UNKNOWN_TO_THE_SERVER:
                assert outcomes.failed.get(timeout=WAIT_S).policy_version == 2
        server.publish(changed(3, variant).items(), policy_version=3)
        area = StagingArea(check_manifest=lambda manifest: None)
        for version, expected in ((2, changed(2, variant)), (3, changed(3, variant))):
            assert stage(area, server.address, version, timeout_s=WAIT_S) is StagingState.STAGED, area.status()
            load(area, version)
            assert area.loaded is not None
            assert_same(area.loaded.tensors, expected)
        area.close()
    del area
    check_clean(tmp_path, before)


@pytest.mark.parametrize("phase", SenderPhase)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sender_killed_in_any_phase_leaves_the_old_weights_and_its_successor_serves(
    tmp_path: Path, variant: str, phase: SenderPhase
) -> None:
    """B02, B03, B04."""
    before = warm_up(tmp_path, variant)
    area = StagingArea(check_manifest=lambda manifest: None)
    with child(run_sender, str(tmp_path), variant, phase.value) as sender:
        address = sender.said()
        assert stage(area, address, 1, timeout_s=WAIT_S) is StagingState.STAGED, area.status()
        load(area, 1)
        sender.pipe.send("go")
        assert sender.said() == "ready"
        ending = threading.Thread(target=stage, args=(area, address, 2), kwargs={"timeout_s": WAIT_S})
        ending.start()
        assert sender.said() == "halted"
        sender.kill()
        ending.join(WAIT_S)
        assert not ending.is_alive()
    assert area.loaded is not None
    assert area.loaded.policy_version == 1
    assert_same(area.loaded.tensors, first(variant))
    if area.status()["state"] == StagingState.STAGED:
        assert area._staged is not None
        assert_same(area._staged.tensors, changed(2, variant))
    else:
        assert phase is not SenderPhase.AFTER_CONFIRM
    with serving(tmp_path, variant) as (server, _):
        server.publish(changed(3, variant).items(), policy_version=3)
        assert stage(area, server.address, 3, timeout_s=WAIT_S) is StagingState.STAGED, area.status()
        load(area, 3)
        assert_same(area.loaded.tensors, changed(3, variant))
        area.close()
    del area
    check_clean(tmp_path, before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_frozen_sender_costs_its_receiver_no_longer_than_the_deadline(tmp_path: Path, variant: str) -> None:
    """B02, B12: a process that is stopped, not dead, closes no connection."""
    area = StagingArea(check_manifest=lambda manifest: None)
    with child(run_sender, str(tmp_path), variant, SenderPhase.MIDDLE.value) as sender:
        address = sender.said()
        assert stage(area, address, 1, timeout_s=WAIT_S) is StagingState.STAGED, area.status()
        load(area, 1)
        sender.pipe.send("go")
        assert sender.said() == "ready"
        ending = threading.Thread(target=stage, args=(area, address, 2), kwargs={"timeout_s": 2.0})
        ending.start()
        assert sender.said() == "halted"
        os.kill(sender.process.pid, signal.SIGSTOP)
        ending.join(WAIT_S)
        assert not ending.is_alive()
    assert area.status()["state"] == StagingState.FAILED
    assert area.loaded is not None
    assert_same(area.loaded.tensors, first(variant))
    area.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_frozen_receiver_costs_the_server_no_longer_than_the_deadline(tmp_path: Path, variant: str) -> None:
    """B12, B22."""
    with serving(tmp_path, variant, bucket_timeout_s=1.0, round_timeout_s=2.0) as (server, outcomes):
        server.publish(first(variant).items(), policy_version=1)
        with child(run_receiver, server.address, ReceiverPhase.MIDDLE.value, WAIT_S) as receiver:
            assert receiver.said() == "loaded"
            assert outcomes.staged.get(timeout=WAIT_S).policy_version == 1
            server.publish(changed(2, variant).items(), policy_version=2)
            receiver.pipe.send("go")
            assert receiver.said() == "halted"
            os.kill(receiver.process.pid, signal.SIGSTOP)
            assert outcomes.failed.get(timeout=WAIT_S).policy_version == 2
            server.publish(changed(3, variant).items(), policy_version=3)
            area = StagingArea(check_manifest=lambda manifest: None)
            assert stage(area, server.address, 3, timeout_s=WAIT_S) is StagingState.STAGED, area.status()
            load(area, 3)
            assert area.loaded is not None
            assert_same(area.loaded.tensors, changed(3, variant))
            area.close()
