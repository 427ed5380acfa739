"""A `WeightServer` and an engine's `StagingArea` over the network transports: rounds, deltas, and a server that starts anew."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync.net_peers import Weights, is_same, weights
from weight_sync.server import StageFailure, StageReport, WeightServer
from weight_sync.staging import StagingArea

Outcomes = queue.Queue[StageReport | StageFailure]


def _server(scheme: str, outcomes: Outcomes, directory: Path) -> WeightServer:
    settings = WeightSyncSettings.model_validate({"transport": scheme, "bucket_bytes": 1 << 16})
    return WeightServer(settings, socket_dir=directory, dtype=torch.float32, on_staged=outcomes.put, on_failed=outcomes.put)


def _stage(area: StagingArea, server: WeightServer, outcomes: Outcomes, version: int, *, cohort: int = 1) -> StageReport:
    area.stage(server.address, version, engine="engine-0", nonce=f"n{version}", timeout_s=60.0, cohort=cohort)
    outcome = outcomes.get(timeout=60)
    assert isinstance(outcome, StageReport), outcome
    area.mark_loaded(area.get(version, outcome.digest))
    return outcome


@pytest.mark.parametrize("scheme", ["tcp", "collective"])
def test_rounds_follow_each_other_and_only_what_changed_travels(scheme: str, tmp_path: Path) -> None:
    """B140: each version arrives whole, also when a few elements of it were sent."""
    outcomes: Outcomes = queue.Queue()
    tensors: Weights = weights()
    area = StagingArea(check_manifest=lambda manifest: None)
    with _server(scheme, outcomes, tmp_path) as server:
        for version in (1, 2, 3):
            tensors["layer.0.weight"][: 100 * version] += 1.0
            server.publish(tensors.items(), policy_version=version)
            report = _stage(area, server, outcomes, version)
            assert area.loaded is not None
            assert is_same(area.loaded.tensors, tensors)
            assert (report.payload_bytes < 100_000) is (version > 1)
    area.close()


@pytest.mark.parametrize("scheme", ["tcp", "collective"])
def test_a_server_that_was_started_again_serves_a_receiver_that_was_not(scheme: str, tmp_path: Path) -> None:
    """B04."""
    outcomes: Outcomes = queue.Queue()
    area = StagingArea(check_manifest=lambda manifest: None)
    for start in range(3):
        tensors = weights(seed=start)
        with _server(scheme, outcomes, tmp_path) as server:
            server.publish(tensors.items(), policy_version=1)
            _stage(area, server, outcomes, 1)
        assert area.loaded is not None
        assert is_same(area.loaded.tensors, tensors)
    area.close()
