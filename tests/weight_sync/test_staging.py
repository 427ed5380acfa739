"""The engine's memory for weights that are on their way."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync.peers import weights
from weight_sync import Manifest, ManifestMismatch, NotStaged, Publication, StageFailure, StageReport, WeightServer
from weight_sync.staging import StagedWeights, StagingArea

WAIT_S = 60.0


def accept(manifest: Manifest) -> None:
    pass


@dataclass
class Outcomes:
    staged: queue.Queue[StageReport] = field(default_factory=queue.Queue)
    failed: queue.Queue[StageFailure] = field(default_factory=queue.Queue)


@contextmanager
def serving(directory: Path) -> Iterator[tuple[WeightServer, Outcomes]]:
    outcomes = Outcomes()
    settings = WeightSyncSettings(bucket_bytes=1 << 16)
    with WeightServer(
        settings, socket_dir=directory, dtype=torch.float32, on_staged=outcomes.staged.put, on_failed=outcomes.failed.put
    ) as server:
        yield server, outcomes


def stage(area: StagingArea, server: WeightServer, version: int, nonce: str = "n", timeout_s: float = WAIT_S) -> None:
    area.stage(server.address, version, engine="e", nonce=nonce, timeout_s=timeout_s)


def sync(area: StagingArea, server: WeightServer, outcomes: Outcomes, version: int) -> StagedWeights:
    """Publish, stage and commit one version."""
    publication = server.publish(weights(version).items(), policy_version=version)
    stage(area, server, version)
    outcomes.staged.get(timeout=WAIT_S)
    staged = area.get(version, publication.manifest_digest)
    area.mark_loaded(staged)
    return staged


def assert_holds(staged: StagedWeights, seed: int) -> None:
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights(seed).items())


def test_a_version_can_be_loaded_as_soon_as_the_trainer_knows_that_it_is_staged(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        for version in range(1, 20):
            staged = sync(area, server, outcomes, version)
            assert_holds(staged, version)
            assert area.status() == {
                "state": "idle",
                "staged": None,
                "loaded": version,
                "loaded_digest": staged.digest,
                "error": "",
            }


def test_memory_is_taken_for_two_versions_and_then_reused(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        pointers, capacities = [], []
        for version in range(1, 7):
            staged = sync(area, server, outcomes, version)
            pointers.append(staged.tensors["layer.0.weight"].data_ptr())
            capacities.append(sum(arena.capacity_bytes for arena in area._arenas))
    assert len(set(pointers)) == 2
    assert pointers[:2] * 3 == pointers
    assert capacities[1:] == [capacities[1]] * 5


def test_the_loaded_version_stays_whole_while_the_next_one_arrives(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        sync(area, server, outcomes, 1)
        for version in (2, 3):
            server.publish(weights(version).items(), policy_version=version)
            stage(area, server, version)
            outcomes.staged.get(timeout=WAIT_S)
            assert area.loaded is not None
            assert_holds(area.loaded, 1)


@pytest.mark.parametrize("wrong", ["version", "digest", "nothing staged", "already loaded"])
def test_only_exactly_the_staged_version_and_digest_is_handed_out(tmp_path: Path, wrong: str) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        publication = server.publish(weights(1).items(), policy_version=1)
        version, digest = 1, publication.manifest_digest
        if wrong == "already loaded":
            stage(area, server, 1)
            outcomes.staged.get(timeout=WAIT_S)
            area.mark_loaded(area.get(1, digest))
        elif wrong != "nothing staged":
            stage(area, server, 1)
            outcomes.staged.get(timeout=WAIT_S)
            version, digest = (2, digest) if wrong == "version" else (1, "0" * 32)
        with pytest.raises(NotStaged, match=f"asked for version {version} with digest {digest}"):
            area.get(version, digest)


def test_weights_that_do_not_fit_are_refused_before_they_move_and_the_trainer_is_told(tmp_path: Path) -> None:
    """B148."""

    def refuse(manifest: Manifest) -> None:
        raise ManifestMismatch(f"{manifest.num_tensors} tensors of another model")

    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=refuse)
        publication = server.publish(weights(1).items(), policy_version=1)
        stage(area, server, 1, nonce="n1")
        failure = outcomes.failed.get(timeout=WAIT_S)
        assert failure.nonce == "n1"
        assert "ManifestMismatch: 8 tensors of another model" in failure.reason
        wait_until_settled(area)
        assert sum(arena.capacity_bytes for arena in area._arenas) == 0
        with pytest.raises(NotStaged, match="8 tensors of another model"):
            area.get(1, publication.manifest_digest)


def wait_until_settled(area: StagingArea) -> None:
    deadline = time.monotonic() + WAIT_S
    while area.status()["state"] == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_version_that_is_not_served_fails_and_the_next_one_succeeds(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        stage(area, server, 7)
        assert "version 7 is not served" in outcomes.failed.get(timeout=WAIT_S).reason
        wait_until_settled(area)
        assert "version 7 is not served" in str(area.status()["error"])
        assert_holds(sync(area, server, outcomes, 8), 8)


def test_a_newer_staging_ends_the_one_under_way(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        publications = [server.publish(weights(v).items(), policy_version=v) for v in (1, 2)]
        held_up: list[Manifest] = []

        def hold_the_first(manifest: Manifest) -> None:
            if not held_up:
                held_up.append(manifest)
                stage(area, server, 2, nonce="second")

        area = StagingArea(check_manifest=hold_the_first)
        stage(area, server, 1, nonce="first")
        report = outcomes.staged.get(timeout=WAIT_S)
        assert (report.nonce, report.policy_version) == ("second", 2)
        assert outcomes.failed.get(timeout=WAIT_S).nonce == "first"
        assert_holds(area.get(2, publications[1].manifest_digest), 2)


def test_staging_the_same_version_again_and_again_ends_with_it_staged(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        publication: Publication = server.publish(weights(1).items(), policy_version=1)
        for attempt in range(30):
            stage(area, server, 1, nonce=f"n{attempt}")
        while outcomes.staged.get(timeout=WAIT_S).nonce != "n29":
            pass
        assert_holds(area.get(1, publication.manifest_digest), 1)


def test_a_server_that_goes_away_leaves_the_loaded_version(tmp_path: Path) -> None:
    """B03."""
    area = StagingArea(check_manifest=accept)
    with serving(tmp_path) as (server, outcomes):
        sync(area, server, outcomes, 1)
    stage(area, server, 2)
    wait_until_settled(area)
    assert area.status()["state"] == "failed"
    assert "does not answer" in str(area.status()["error"])
    assert area.loaded is not None
    assert_holds(area.loaded, 1)
    with serving(tmp_path) as (server, outcomes):
        assert_holds(sync(area, server, outcomes, 3), 3)


def test_a_restarted_trainer_with_the_same_number_but_other_weights_is_not_mistaken(tmp_path: Path) -> None:
    area = StagingArea(check_manifest=accept)
    with serving(tmp_path) as (server, outcomes):
        old = server.publish(weights(1).items(), policy_version=5)
        stage(area, server, 5)
        outcomes.staged.get(timeout=WAIT_S)
    with serving(tmp_path) as (server, outcomes):
        new = server.publish(weights(2).items(), policy_version=5)
        with pytest.raises(NotStaged):
            area.get(5, new.manifest_digest)
        assert_holds(area.get(5, old.manifest_digest), 1)


def test_closing_ends_a_staging_under_way(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        area = StagingArea(check_manifest=lambda manifest: time.sleep(0.2))
        stage(area, server, 1)
        area.close()
        wait_until_settled(area)
        assert area.status()["state"] == "failed"
        assert "shuts down" in str(area.status()["error"])
        assert outcomes.staged.empty()


@pytest.mark.parametrize(
    ("address", "timeout_s"), [("http://x", 1.0), ("shared_memory:/tmp/x", 0.0), ("shared_memory:/tmp/x", float("nan"))]
)
def test_a_staging_that_makes_no_sense_is_refused_at_once(address: str, timeout_s: float) -> None:
    area = StagingArea(check_manifest=accept)
    with pytest.raises(ValueError, match="got"):
        area.stage(address, 1, engine="e", nonce="n", timeout_s=timeout_s)
    assert area.status()["state"] == "idle"
