"""The engine's memory for weights that are on their way."""

from __future__ import annotations

import os
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
def serving(directory: Path, **options: float) -> Iterator[tuple[WeightServer, Outcomes]]:
    outcomes = Outcomes()
    settings = WeightSyncSettings.model_validate({"bucket_bytes": 1 << 16, **options})
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


def test_an_engine_takes_no_memory_where_the_server_lends_its_own(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        for version in range(1, 9):
            sync(area, server, outcomes, version)
            assert area._pool.capacity_bytes == 0
            assert server._pool.capacity_bytes <= 3 * (8 << 18) + (3 << 20)


def test_memory_that_an_engine_was_lent_and_kept_is_never_written_again(tmp_path: Path) -> None:
    with serving(tmp_path, round_timeout_s=0.2) as (server, outcomes):
        area = StagingArea(check_manifest=accept)
        kept = sync(area, server, outcomes, 1)
        for version in range(2, 9):
            server.publish(weights(version).items(), policy_version=version)
            assert_holds(kept, 1)
        assert_holds(sync(area, server, outcomes, 9), 9)


def test_what_was_lent_is_read_when_the_server_is_gone(tmp_path: Path) -> None:
    area = StagingArea(check_manifest=accept)
    with serving(tmp_path) as (server, outcomes):
        kept = sync(area, server, outcomes, 1)
    with serving(tmp_path) as (server, outcomes):
        for version in range(2, 6):
            server.publish(weights(version).items(), policy_version=version)
        assert_holds(kept, 1)


def test_four_engines_read_one_copy(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        publication = server.publish(weights(1).items(), policy_version=1)
        areas = [StagingArea(check_manifest=accept) for _ in range(4)]
        inodes = set()
        for area in areas:
            stage(area, server, 1)
            outcomes.staged.get(timeout=WAIT_S)
            staged = area.get(1, publication.manifest_digest)
            area.mark_loaded(staged)
            inodes |= {os.fstat(segment.fd).st_ino for segment in staged.memory.segments if segment.fd is not None}
        assert len(inodes) == len(server._held[0].memory.segments)
        assert all(area._pool.capacity_bytes == 0 for area in areas)


# ── a cache between the trainer and the engines ──────────────────────────────────────────────────────────────────────


def test_a_cache_lends_on_what_it_was_lent(tmp_path: Path) -> None:
    with serving(tmp_path / "trainer") as (trainer, to_cache), serving(tmp_path / "cache") as (cache, to_engine):
        of_cache, of_engine = StagingArea(check_manifest=accept, lendable=True), StagingArea(check_manifest=accept)
        for version in range(1, 9):
            cache.hold(sync(of_cache, trainer, to_cache, version))
            stage(of_engine, cache, version)
            digest = to_engine.staged.get(timeout=WAIT_S).digest
            staged = of_engine.get(version, digest)
            of_engine.mark_loaded(staged)
            assert_holds(staged, version)
        assert of_cache._pool.capacity_bytes == of_engine._pool.capacity_bytes == cache._pool.capacity_bytes == 0
        assert cache.versions == (7, 8)


def test_a_cache_serves_on_when_the_trainer_is_gone(tmp_path: Path) -> None:
    """B03."""
    with serving(tmp_path / "cache") as (cache, to_engine):
        of_cache = StagingArea(check_manifest=accept, lendable=True)
        with serving(tmp_path / "trainer") as (trainer, to_cache):
            cache.hold(sync(of_cache, trainer, to_cache, 1))
        with serving(tmp_path / "trainer") as (trainer, to_cache):
            for version in range(5, 9):
                trainer.publish(weights(version).items(), policy_version=version)
            area = StagingArea(check_manifest=accept)
            stage(area, cache, 1)
            assert_holds(area.get(1, to_engine.staged.get(timeout=WAIT_S).digest), 1)


def test_an_engine_keeps_its_weights_when_the_cache_that_lent_them_dies(tmp_path: Path) -> None:
    """The trainer may not write memory again that its borrower lent on."""
    with serving(tmp_path / "trainer", round_timeout_s=0.2) as (trainer, to_cache):
        of_cache, of_engine = StagingArea(check_manifest=accept, lendable=True), StagingArea(check_manifest=accept)
        with serving(tmp_path / "cache") as (cache, to_engine):
            cache.hold(sync(of_cache, trainer, to_cache, 1))
            stage(of_engine, cache, 1)
            staged = of_engine.get(1, to_engine.staged.get(timeout=WAIT_S).digest)
            of_engine.mark_loaded(staged)
        for version in range(2, 9):
            sync(of_cache, trainer, to_cache, version)
            assert_holds(staged, 1)


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
        assert area._pool.capacity_bytes == 0
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
