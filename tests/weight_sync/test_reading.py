"""Weights read by whoever wants them, under the names that the engine knows."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import assert_same, serving
from weight_sync import PeerFailed, WeightSyncError, get_weights


def to_engine(name: str) -> str | None:
    """Layers are called blocks, and layer 3 stays here."""
    return None if ".3." in name else name.replace("layer", "block")


def to_one(name: str) -> str:
    return "all"


@pytest.mark.parametrize("transport", ["shared_memory", "file", "tcp"])
def test_a_version_is_read_from_the_server(tmp_path: Path, transport: str) -> None:
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        server.publish(weights(2).items(), policy_version=2)
        assert_same(dict(get_weights(server.address, policy_version=1)), weights(1))
        assert_same(dict(get_weights(server.address, policy_version=2, verify=False)), weights(2))
        with pytest.raises(PeerFailed, match="version 3 is not served"):
            next(get_weights(server.address, policy_version=3))


def test_what_is_still_referred_to_is_not_written_again(tmp_path: Path) -> None:
    with serving(tmp_path, round_timeout_s=0.1) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        name, kept = next(iter(dict(get_weights(server.address, policy_version=1)).items()))
        for version in range(2, 8):
            server.publish(weights(version).items(), policy_version=version)
            assert torch.equal(kept, weights(1)[name])


def test_memory_comes_back_when_the_last_reference_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        places = set()
        for version in range(1, 9):
            server.publish(weights(version).items(), policy_version=version)
            assert_same(dict(get_weights(server.address, policy_version=version)), weights(version))
            gc.collect()
            places |= {segment.memory.data_ptr() for segment in server._held[-1].memory.segments}
        assert len(places) <= 3 * len(server._held[-1].memory.segments)


def test_names_are_mapped_before_anything_else_sees_them(tmp_path: Path) -> None:
    with serving(tmp_path, name_map=f"{__name__}:to_engine") as (server, _):
        publication = server.publish(weights(1).items(), policy_version=1)
        received = dict(get_weights(server.address, policy_version=1))
    assert publication.num_tensors == 7
    assert_same(received, {f"block.{index}.weight": weights(1)[f"layer.{index}.weight"] for index in range(8) if index != 3})


def test_two_tensors_with_one_name_are_refused(tmp_path: Path) -> None:
    same_name = pytest.raises(WeightSyncError, match=r"'layer.0.weight' and 'layer.1.weight' the same name, 'all'")
    with serving(tmp_path, name_map=f"{__name__}:to_one") as (server, _), same_name:
        server.publish(weights(1).items(), policy_version=1)


@pytest.mark.parametrize("path", ["no.such.module:f", "weight_sync:missing", "weight_sync:PeerFailed.x", ":"])
def test_a_name_map_that_is_not_there_is_said_at_the_start(tmp_path: Path, path: str) -> None:
    with pytest.raises(WeightSyncError, match="name_map"), serving(tmp_path, name_map=path):
        pass
