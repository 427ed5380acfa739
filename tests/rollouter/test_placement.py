"""What engines ask of Ray, whether it fits, and the line that says why not. No Ray is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.gpu import GpuShares
from configs.loader import load
from configs.schema import EngineSettings
from rollouter.placement import Node, Resources, asked_bundles, feasible, overlap, ray_environment, refusal

EIGHT = Node(
    address="10.0.0.1",
    is_here=True,
    total=Resources(cpus=64, gpus=8),
    available=Resources(cpus=40, gpus=3),
)
SMALL = Node(address="127.0.0.1", is_here=True, total=Resources(cpus=2, gpus=0), available=Resources(cpus=2, gpus=0))
ELSEWHERE = Node(address="10.0.0.2", is_here=False, total=Resources(cpus=999, gpus=99), available=Resources(cpus=999, gpus=99))
SHARES = GpuShares(engines=("4,5", "6,7"), trainer="3", shared=False)


def test_each_engine_asks_for_its_share_of_the_gpus() -> None:
    assert asked_bundles(EngineSettings(num_engines=2), SHARES) == [Resources(cpus=1, gpus=2)] * 2
    assert asked_bundles(EngineSettings(num_cpus_per_engine=0.5), None) == [Resources(cpus=0.5, gpus=0)]
    assert asked_bundles(EngineSettings(num_gpus_per_engine=1), None) == [Resources(cpus=1, gpus=1)]


@pytest.mark.parametrize(
    ("asked", "node", "problem"),
    [
        (Resources(cpus=1, gpus=1), SMALL, "asked for 1 GPU in all, 0 there"),
        (Resources(cpus=60, gpus=0), SMALL, "asked for 60 CPUs in all, 2 there"),
        (Resources(cpus=65, gpus=6), EIGHT, "asked for 65 CPUs in all, 64 there"),
    ],
)
def test_what_can_never_fit_is_named_with_the_numbers_of_each_node(asked: Resources, node: Node, problem: str) -> None:
    """B122: asked against available and total, on one line, whatever other hosts have."""
    assert feasible([asked], [node, ELSEWHERE]) == [problem]
    line = refusal([asked], [node, ELSEWHERE], waited_s=None)
    assert "\n" not in line
    assert f"1 engine of {asked} each can never be placed on this host: {problem}" in line
    has = f"CPU {node.available.cpus:g} of {node.total.cpus:g}, GPU {node.available.gpus:g} of {node.total.gpus:g} available"
    assert f"node {node.address} (this host): {has}" in line
    assert "node 10.0.0.2: CPU 999 of 999" in line


def test_what_others_hold_is_waited_for_and_then_named() -> None:
    """B122: 6 GPUs of 8, of which 3 are free."""
    asked = [Resources(cpus=30, gpus=6)]
    assert feasible(asked, [EIGHT]) == []
    line = refusal(asked, [EIGHT], waited_s=60)
    assert "within engine.placement_timeout_s=60 s: asked for 6 GPUs in all, 3 free [node 10.0.0.1 (this host): CPU 40" in line


def test_a_cluster_without_this_host_is_refused() -> None:
    assert feasible([Resources(cpus=1, gpus=0)], [ELSEWHERE]) == ["the cluster has no node on this host"]


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8)), min_size=1, max_size=6),
    st.integers(0, 128),
    st.integers(0, 16),
)
def test_feasible_is_exactly_that_the_sums_fit_on_this_host(asked: list[tuple[int, int]], cpus: int, gpus: int) -> None:
    bundles = [Resources(cpus=c, gpus=g) for c, g in asked]
    node = Node(address="a", is_here=True, total=Resources(cpus=cpus, gpus=gpus), available=Resources(cpus=0, gpus=0))
    fits = sum(c for c, _ in asked) <= cpus and sum(g for _, g in asked) <= gpus
    assert (feasible(bundles, [node, ELSEWHERE]) == []) == fits


def test_the_trainers_gpu_is_not_an_engines() -> None:
    """B178: what Ray assigned is compared by the names that the driver and the trainer know."""
    assert overlap("4,5", "3") == []
    assert overlap("2,3", "3") == ["3"]
    assert overlap(None, "3") == []
    assert overlap("", "3") == []
    assert overlap("3", None) == []


def test_our_own_ray_is_on_loopback_needs_a_token_and_knows_only_the_engines_gpus() -> None:
    base = {"RAY_ADDRESS": "10.0.0.1:6379", "CUDA_VISIBLE_DEVICES": "3,4,5,6,7", "HOME": "/home/u"}
    own = ray_environment(base, address=None, token="secret", gpus=SHARES)
    assert "RAY_ADDRESS" not in own
    assert own["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert (own["RAY_NODE_IP_ADDRESS"], own["RAY_AUTH_TOKEN"], own["RAY_worker_niceness"]) == ("127.0.0.1", "secret", "0")
    assert own["HOME"] == "/home/u"
    joined = ray_environment(base, address="auto", token="secret", gpus=SHARES)
    assert joined == base | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_COLOR_PREFIX": "0"}


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "host:", "here"])
def test_an_address_that_ray_would_not_take_is_refused_at_load(address: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.ray_address: got "):
        load(None, [f"engine.ray_address={address}"], environment={})


def test_an_address_is_auto_or_host_and_port() -> None:
    for address in ("auto", "10.0.0.1:6379", "node-1.cluster:6379"):
        assert load(None, [f"engine.ray_address={address}"], environment={}).engine.ray_address == address
