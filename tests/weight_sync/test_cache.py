"""The cache of a host: one staging for all engines, which goes on without the trainer."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync.peers import open_transfer, weights
from weight_sync import PeerFailed, Publication, TransportName, WeightServer, receive_weights
from weight_sync.arena import Segment
from weight_sync.cache import HostCache
from weight_sync.cache_link import Event, NotTaken, Open, Ready, Stage, Staged, StagingFailed, Taken, decode_event, encode
from weight_sync.errors import ProtocolError
from weight_sync.staging import StagingArea

WAIT_S = 60.0
SETTINGS = WeightSyncSettings(bucket_bytes=1 << 16, round_timeout_s=WAIT_S)


@contextmanager
def trainer(directory: Path) -> Iterator[WeightServer]:
    directory.mkdir(exist_ok=True)
    with WeightServer(
        SETTINGS, socket_dir=directory, dtype=torch.float32, on_staged=lambda _: None, on_failed=lambda _: None
    ) as server:
        yield server


@contextmanager
def host(directory: Path) -> Iterator[tuple[HostCache, queue.Queue[Event]]]:
    events: queue.Queue[Event] = queue.Queue()
    directory.mkdir()
    with HostCache(SETTINGS, socket_dir=directory, dtype=torch.float32, on_event=events.put) as cache:
        yield cache, events


def publish(server: WeightServer, version: int, *, seed: int | None = None) -> Publication:
    return server.publish(weights(version if seed is None else seed).items(), policy_version=version)


def wanted(server: WeightServer, published: Publication, *, nonce: str = "n") -> Stage:
    return Stage(
        nonce=nonce,
        address=server.address,
        policy_version=published.policy_version,
        manifest_digest=published.manifest_digest,
        timeout_s=WAIT_S,
    )


def assert_serves(address: str, version: int, *, seed: int | None = None, nonce: str = "e") -> None:
    with open_transfer(address, version, receiver="engine-0", nonce=nonce) as channel:
        got = {name: tensor.clone() for name, tensor in receive_weights(channel)}
    expected = weights(version if seed is None else seed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_engines_stage_from_the_cache_after_the_trainer_has_gone(tmp_path: Path) -> None:
    """B26: late joiners and restarted engines catch up without it."""
    with host(tmp_path / "c") as (cache, events):
        with trainer(tmp_path / "t") as server:
            for version in (1, 2, 3):
                cache.stage(wanted(server, publish(server, version)))
                staged = events.get(timeout=WAIT_S)
                assert isinstance(staged, Staged), staged
        assert cache.versions == (2, 3)
        for index in range(3):
            assert_serves(cache.address, 3, nonce=f"late-{index}")
            taken = events.get(timeout=WAIT_S)
            assert isinstance(taken, Taken)
            assert (taken.engine, taken.nonce) == ("engine-0", f"late-{index}")
        with pytest.raises(PeerFailed, match="version 1 is not served"):
            assert_serves(cache.address, 1, nonce="old")
        failed = events.get(timeout=WAIT_S)
        assert isinstance(failed, NotTaken)
        assert failed.nonce == "old"
    assert list((tmp_path / "c").iterdir()) == []


def test_engines_of_other_hosts_get_what_this_host_holds(tmp_path: Path) -> None:
    """By tcp, from memory that the trainer lent to this host."""
    events: queue.Queue[Event] = queue.Queue()
    (tmp_path / "c").mkdir()
    cache = HostCache(SETTINGS, socket_dir=tmp_path / "c", dtype=torch.float32, on_event=events.put, serves_others=True)
    with cache:
        with trainer(tmp_path / "t") as server:
            cache.stage(wanted(server, publish(server, 1)))
            assert isinstance(events.get(timeout=WAIT_S), Staged)
        assert cache.tcp_address.startswith("tcp://127.0.0.1:")
        assert_serves(cache.tcp_address, 1)
        assert isinstance(events.get(timeout=WAIT_S), Taken)


@pytest.mark.parametrize("transport", list(TransportName))
def test_whatever_brought_a_version_here_engines_get_it_from_memory(tmp_path: Path, transport: TransportName) -> None:
    """Also one of which only the changes travelled: the second and third versions differ in one tensor."""
    settings = SETTINGS.model_copy(update={"transport": transport.value})
    (tmp_path / "t").mkdir()
    server = WeightServer(
        settings, socket_dir=tmp_path / "t", dtype=torch.float32, on_staged=lambda _: None, on_failed=lambda _: None
    )
    with server, host(tmp_path / "c") as (cache, events):
        for version in (1, 2, 3):
            tensors = weights(1) | {"layer.3.weight": weights(version)["layer.3.weight"]}
            published = server.publish(tensors.items(), policy_version=version)
            cache.stage(wanted(server, published, nonce=f"c{version}"))
            staged = events.get(timeout=WAIT_S)
            assert isinstance(staged, Staged), staged
            with open_transfer(cache.address, version, nonce=f"e{version}") as channel:
                got = {name: tensor.clone() for name, tensor in receive_weights(channel)}
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
            assert isinstance(events.get(timeout=WAIT_S), Taken)


def test_a_host_stages_from_the_cache_of_another_one(tmp_path: Path) -> None:
    """Late hosts need no trainer either."""
    events: queue.Queue[Event] = queue.Queue()
    (tmp_path / "first").mkdir()
    first = HostCache(SETTINGS, socket_dir=tmp_path / "first", dtype=torch.float32, on_event=events.put, serves_others=True)
    with first, host(tmp_path / "second") as (second, second_events):
        with trainer(tmp_path / "t") as server:
            command = wanted(server, publish(server, 1))
            first.stage(command)
            assert isinstance(events.get(timeout=WAIT_S), Staged)
        second.stage(command.model_copy(update={"address": first.tcp_address}))
        assert isinstance(second_events.get(timeout=WAIT_S), Staged)
        assert_serves(second.address, 1)


def _files(segments: Sequence[Segment]) -> set[int]:
    return {os.fstat(segment.fd).st_ino for segment in segments if segment.fd is not None}


def test_the_trainers_memory_is_lent_on_without_a_copy(tmp_path: Path) -> None:
    """One copy in all: what an engine of the host reads are the trainer's pages."""
    with trainer(tmp_path / "t") as server, host(tmp_path / "c") as (cache, events):
        published = publish(server, 1)
        cache.stage(wanted(server, published))
        assert isinstance(events.get(timeout=WAIT_S), Staged)
        areas = [StagingArea(check_manifest=lambda manifest: None, rank=rank, num_ranks=2) for rank in (0, 1)]
        for area in areas:
            area.stage(cache.address, 1, engine="engine-0", nonce="both", timeout_s=WAIT_S)
        taken = events.get(timeout=WAIT_S)
        assert isinstance(taken, Taken)
        pages = _files(server._held[-1].memory.segments)
        for area in areas:
            held = area.get(1, published.manifest_digest)
            assert held.memory.is_lendable
            assert _files(held.memory.segments) == pages
            assert all(torch.equal(held.tensors[name], tensor) for name, tensor in weights(1).items())
        for area in areas:
            area.close()


def test_workers_of_one_engine_count_as_staged_together(tmp_path: Path) -> None:
    """Tensor parallel: the engine has a version once each of its workers has."""
    with trainer(tmp_path / "t") as server, host(tmp_path / "c") as (cache, events):
        cache.stage(wanted(server, publish(server, 1)))
        assert isinstance(events.get(timeout=WAIT_S), Staged)
        for rank in (0, 1):
            with open_transfer(cache.address, 1, receiver="e", nonce="tp", rank=rank, num_ranks=2) as channel:
                assert len(list(receive_weights(channel))) == 8
            if rank == 0:
                with pytest.raises(queue.Empty):
                    events.get(timeout=0.2)
        assert isinstance(events.get(timeout=WAIT_S), Taken)


def test_a_version_with_another_digest_than_announced_is_not_served(tmp_path: Path) -> None:
    """B140"""
    with trainer(tmp_path / "t") as server, host(tmp_path / "c") as (cache, events):
        command = wanted(server, publish(server, 1)).model_copy(update={"manifest_digest": "0" * 32})
        cache.stage(command)
        failed = events.get(timeout=WAIT_S)
        assert isinstance(failed, StagingFailed)
        assert "0" * 32 in failed.reason
        assert cache.versions == ()


def test_a_staging_that_is_overtaken_says_so_and_the_newer_one_is_served(tmp_path: Path) -> None:
    with trainer(tmp_path / "t") as server, host(tmp_path / "c") as (cache, events):
        published = publish(server, 1)
        for index in range(20):
            cache.stage(wanted(server, published, nonce=f"n{index}"))
        ends = {}
        while "n19" not in ends:
            event = events.get(timeout=WAIT_S)
            assert isinstance(event, Staged | StagingFailed)
            ends[event.nonce] = event
        assert isinstance(ends["n19"], Staged)
        assert_serves(cache.address, 1)


def test_a_trainer_that_is_killed_and_comes_again_three_times_is_followed(tmp_path: Path) -> None:
    """B04: the same version number under another trainer means other bytes; the newest ones are served."""
    directory = tmp_path / "t"
    directory.mkdir()
    with host(tmp_path / "c") as (cache, events):
        threads: set[threading.Thread] = set()
        for life in range(4):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(directory), str(life)], stdout=subprocess.PIPE, text=True
            )
            try:
                assert process.stdout is not None
                address, digest = process.stdout.readline().split()
                command = Stage(nonce=f"n{life}", address=address, policy_version=5, manifest_digest=digest, timeout_s=WAIT_S)
                cache.stage(command)
                assert isinstance(events.get(timeout=WAIT_S), Staged)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            assert_serves(cache.address, 5, seed=life, nonce=f"e{life}")
            assert isinstance(events.get(timeout=WAIT_S), Taken)
            if life == 0:
                threads = set(threading.enumerate())
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert len(left) <= 3, left


def test_the_process_serves_until_its_input_ends(tmp_path: Path) -> None:
    """It never outlives its rollouter, and leaves no socket."""
    (tmp_path / "c").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "weight_sync.cache_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, trainer(tmp_path / "t") as server:
        process.stdin.write(encode(Open(socket_dir=str(tmp_path / "c"), dtype="float32", settings=SETTINGS)))
        process.stdin.write(encode(wanted(server, publish(server, 1))))
        process.stdin.flush()
        ready = decode_event(process.stdout.readline())
        assert isinstance(ready, Ready)
        assert isinstance(decode_event(process.stdout.readline()), Staged)
        assert_serves(ready.address, 1)
        assert isinstance(decode_event(process.stdout.readline()), Taken)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("line", [b"", b"null", b'{"kind":"staged"}', b'{"kind":"ready","address":"a","more":1}', b"\xff{"])
def test_a_line_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a line of the weight cache"):
        decode_event(line)


def _serve_until_killed(directory: str, seed: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with trainer(Path(directory)) as server:
        published = publish(server, 5, seed=int(seed))
        sys.stdout.write(f"{server.address} {published.manifest_digest}\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    _serve_until_killed(*sys.argv[1:])
