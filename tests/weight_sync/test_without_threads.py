"""A moment in which no thread can be started: at the weight server's start, and when a receiver comes."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import WAIT_S, assert_same, open_descriptors, pull, serving
from weight_sync import PeerFailed
from weight_sync.staging import StagingArea


@pytest.mark.parametrize("transport", ["shared_memory", "file", "tcp", "collective"])
def test_a_moment_in_which_no_thread_can_be_started_costs_one_receiver(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes of a container."""
    start = threading.Thread.start

    def refuse_thread(thread: threading.Thread) -> None:
        if thread.name.startswith("weights-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse_thread)
            with pytest.raises(PeerFailed, match="can't start new thread"):
                pull(server, 1)
        assert_same(pull(server, 1), weights(1))


@pytest.mark.parametrize("transport", ["shared_memory", "file", "tcp", "collective"])
def test_a_server_that_cannot_start_its_thread_leaves_nothing(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"), serving(tmp_path, transport=transport):
            pass
    gc.collect()
    assert open_descriptors() == before
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        assert_same(pull(server, 1), weights(1))


def test_a_staging_that_gets_no_thread_is_refused_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving(tmp_path) as (server, outcomes):
        publication = server.publish(weights(1).items(), policy_version=1)
        area = StagingArea(check_manifest=lambda manifest: None)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse_thread)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                area.stage(server.address, 1, engine="e", nonce="n1", timeout_s=WAIT_S)
        assert area.status()["state"] == "failed"
        area.stage(server.address, 1, engine="e", nonce="n2", timeout_s=WAIT_S)
        assert outcomes.staged.get(timeout=WAIT_S).nonce == "n2"
        assert area.get(1, publication.manifest_digest).policy_version == 1
        area.close()
