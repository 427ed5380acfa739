"""Rounds in which only what changed travels, between a weight server and the memory of engines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from weight_sync import Manifest, Publication, StageFailure, StageReport, WeightServer
from weight_sync import delta_cache as cache_module
from weight_sync.arena import Arena
from weight_sync.delta_cache import DeltaCache
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.staging import StagedWeights, StagingArea
from weight_sync.version_delta import VersionDelta, delta_between

WAIT_S = 60.0
ELEMENTS = 1 << 15
TRANSPORTS = ["shared_memory", "tcp", "collective", "file"]
TOTAL_BYTES = 6 * 2 * ELEMENTS


def accept(manifest: Manifest) -> None:
    pass


def weights(version: int) -> dict[str, torch.Tensor]:
    """Each version differs from the one before in one of 64 elements of all tensors but the first."""
    made = {f"layer.{index}": torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index)) for index in range(6)}
    for index in range(1, 6):
        for step in range(version):
            made[f"layer.{index}"][step::64] *= 1.01
    return made


def assert_holds(staged: StagedWeights, version: int) -> None:
    for name, tensor in weights(version).items():
        assert torch.equal(staged.tensors[name].view(torch.int16), tensor.bfloat16().view(torch.int16)), name


@dataclass
class Fleet:
    server: WeightServer
    staged: queue.Queue[StageReport] = field(default_factory=queue.Queue)
    failed: queue.Queue[StageFailure] = field(default_factory=queue.Queue)

    def publish(self, version: int) -> Publication:
        return self.server.publish(weights(version).items(), policy_version=version)

    def sync(self, area: StagingArea, publication: Publication) -> StageReport:
        """Stage and commit; returns the server's report."""
        version = publication.policy_version
        area.stage(self.server.address, version, engine="e", nonce=f"v{version}", timeout_s=WAIT_S)
        report = self.staged.get(timeout=WAIT_S)
        staged = area.get(version, publication.manifest_digest)
        assert_holds(staged, version)
        area.mark_loaded(staged)
        assert self.failed.empty()
        return report


@contextmanager
def fleet(directory: Path, encoding: str = "delta", transport: str = "shared_memory") -> Iterator[Fleet]:
    settings = WeightSyncSettings(bucket_bytes=1 << 16, encoding=encoding, transport=transport)
    staged: queue.Queue[StageReport] = queue.Queue()
    failed: queue.Queue[StageFailure] = queue.Queue()
    with WeightServer(
        settings, socket_dir=directory, dtype=torch.bfloat16, on_staged=staged.put, on_failed=failed.put
    ) as server:
        yield Fleet(server, staged, failed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_the_first_round_only_what_changed_travels(tmp_path: Path, transport: str) -> None:
    with fleet(tmp_path, transport=transport) as rounds:
        area = StagingArea(check_manifest=accept)
        assert rounds.sync(area, rounds.publish(1)).payload_bytes == TOTAL_BYTES
        for version in range(2, 6):
            assert 0 < rounds.sync(area, rounds.publish(version)).payload_bytes < 0.05 * TOTAL_BYTES


@pytest.mark.parametrize("encoding", ["full", "auto"])
def test_within_a_host_all_weights_travel_unless_told_otherwise(tmp_path: Path, encoding: str) -> None:
    with fleet(tmp_path, encoding) as rounds:
        area = StagingArea(check_manifest=accept)
        for version in range(1, 4):
            assert rounds.sync(area, rounds.publish(version)).payload_bytes == TOTAL_BYTES


def test_between_hosts_only_what_changed_travels_unless_told_otherwise(tmp_path: Path) -> None:
    with fleet(tmp_path, "auto", "tcp") as rounds:
        area = StagingArea(check_manifest=accept)
        rounds.sync(area, rounds.publish(1))
        assert rounds.sync(area, rounds.publish(2)).payload_bytes < 0.05 * TOTAL_BYTES
    with fleet(tmp_path, "full", "tcp") as rounds:
        rounds.publish(2)
        assert rounds.sync(area, rounds.publish(3)).payload_bytes == TOTAL_BYTES


def test_a_receiver_that_holds_a_version_which_is_gone_gets_all_weights(tmp_path: Path) -> None:
    with fleet(tmp_path) as rounds:
        area = StagingArea(check_manifest=accept)
        rounds.sync(area, rounds.publish(1))
        rounds.publish(2)
        assert rounds.sync(area, rounds.publish(3)).payload_bytes == TOTAL_BYTES


def test_a_receiver_that_holds_other_weights_of_the_same_version_gets_all_weights(tmp_path: Path) -> None:
    """B04: the trainer was killed and retrained version 1 to something else."""
    (tmp_path / "first").mkdir()
    area = StagingArea(check_manifest=accept)
    with fleet(tmp_path / "first") as rounds:
        rounds.sync(area, rounds.publish(1))
    (tmp_path / "second").mkdir()
    with fleet(tmp_path / "second") as rounds:
        other = {name: tensor + 1 for name, tensor in weights(1).items()}
        rounds.server.publish(other.items(), policy_version=1)
        assert rounds.sync(area, rounds.publish(2)).payload_bytes == TOTAL_BYTES


def test_a_restarted_receiver_gets_all_weights_and_then_what_changed(tmp_path: Path) -> None:
    with fleet(tmp_path) as rounds:
        rounds.sync(StagingArea(check_manifest=accept), rounds.publish(1))
        area = StagingArea(check_manifest=accept)
        assert rounds.sync(area, rounds.publish(2)).payload_bytes == TOTAL_BYTES
        assert rounds.sync(area, rounds.publish(3)).payload_bytes < 0.05 * TOTAL_BYTES


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["layer.0", "layer.3"])
def test_a_base_whose_bytes_were_altered_brings_all_weights_in_the_same_round(
    tmp_path: Path, name: str, transport: str
) -> None:
    """An unchanged tensor and a changed one: both are checked as a whole."""
    with fleet(tmp_path, transport=transport) as rounds:
        area = StagingArea(check_manifest=accept)
        rounds.sync(area, rounds.publish(1))
        loaded = area.loaded
        assert loaded is not None
        loaded.tensors[name].view(torch.int16)[5] ^= 1
        assert rounds.sync(area, rounds.publish(2)).payload_bytes == TOTAL_BYTES
        assert rounds.sync(area, rounds.publish(3)).payload_bytes < 0.05 * TOTAL_BYTES


def test_a_member_of_a_cohort_that_refuses_a_delta_gets_all_weights_in_the_next_attempt(tmp_path: Path) -> None:
    areas = [StagingArea(check_manifest=accept) for _ in range(3)]
    with fleet(tmp_path, transport="collective") as rounds:

        def stage(version: int, nonce: str) -> None:
            for number, area in enumerate(areas):
                engine = f"e{number}"
                area.stage(rounds.server.address, version, engine=engine, nonce=nonce, timeout_s=WAIT_S, cohort=len(areas))

        def sent(publication: Publication) -> int:
            (num_bytes,) = {rounds.staged.get(timeout=WAIT_S).payload_bytes for _ in areas}
            for area in areas:
                staged = area.get(publication.policy_version, publication.manifest_digest)
                assert_holds(staged, publication.policy_version)
                area.mark_loaded(staged)
            return num_bytes

        for version in (1, 2):
            publication = rounds.publish(version)
            stage(version, "first")
            assert (sent(publication) < TOTAL_BYTES) == (version == 2)
        loaded = areas[1].loaded
        assert loaded is not None
        loaded.tensors["layer.3"].view(torch.int16)[5] ^= 1
        publication = rounds.publish(3)
        stage(3, "first")
        assert {rounds.failed.get(timeout=WAIT_S).engine for _ in areas} == {"e0", "e1", "e2"}
        stage(3, "second")
        assert sent(publication) == TOTAL_BYTES


def snapshot(version: int) -> Snapshot:
    return take_snapshot(Arena(), weights(version).items(), policy_version=version, dtype=torch.bfloat16)


def test_two_versions_are_compared_once_for_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    may_go_on = threading.Event()

    def counted(base: Snapshot, new: Snapshot, *, num_threads: int) -> VersionDelta:
        compared.append(new.policy_version)
        may_go_on.wait(WAIT_S)
        return delta_between(base, new, num_threads=num_threads)

    monkeypatch.setattr(cache_module, "delta_between", counted)
    cache, base, new = DeltaCache(), snapshot(1), snapshot(2)
    found: queue.Queue[object] = queue.Queue()
    threads = [threading.Thread(target=lambda: found.put(cache.between(base, new))) for _ in range(4)]
    for thread in threads:
        thread.start()
    may_go_on.set()
    results = [found.get(timeout=WAIT_S) for _ in threads]
    for thread in threads:
        thread.join()
    assert compared == [2]
    assert results[0] is not None
    assert all(result is results[0] for result in results)
    cache.forget(2)
    cache.between(base, new)
    assert compared == [2, 2]


def test_versions_that_differ_nearly_everywhere_have_no_delta() -> None:
    generator = torch.Generator().manual_seed(99)
    new = take_snapshot(
        Arena(),
        {name: torch.randn(ELEMENTS, generator=generator) for name in weights(0)}.items(),
        policy_version=2,
        dtype=torch.bfloat16,
    )
    cache = DeltaCache()
    assert cache.between(snapshot(1), new) is None
    assert cache.between(snapshot(1), snapshot(3)) is not None
