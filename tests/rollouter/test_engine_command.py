"""Arguments, environments and shares of engines."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from configs.schema import EngineSettings
from rollouter.engine_command import EngineShare, engine_shares, server_arguments, server_environment

CPU = EngineShare(cores=(0,), gpus=None)
GPU = EngineShare(cores=None, gpus="2,3")


def arguments(settings: EngineSettings, *, on_gpu: bool = False) -> list[str]:
    return server_arguments(settings, model_dir="/m", dtype="float32", socket=Path("/s/e"), on_gpu=on_gpu)


def value_of(name: str, given: list[str]) -> str:
    return given[given.index(name) + 1]


def test_logprobs_are_asked_for_after_temperature_and_no_filter_is_taken_from_the_model() -> None:
    """B50"""
    got = arguments(EngineSettings())
    assert value_of("--logprobs-mode", got) == "processed_logprobs"
    assert value_of("--generation-config", got) == "vllm"


def test_weights_come_by_our_backend_over_a_socket_of_ours() -> None:
    got = arguments(EngineSettings())
    assert value_of("--uds", got) == "/s/e"
    assert json.loads(value_of("--weight-transfer-config", got)) == {"backend": "headrace"}
    assert value_of("--worker-extension-cls", got) == "weight_sync.vllm_plugin.WorkerExtension"


def test_the_operators_arguments_come_last() -> None:
    got = arguments(EngineSettings(extra_args=("--max-num-seqs", "7")))
    assert got[-2:] == ["--max-num-seqs", "7"]


def test_memory_is_bounded_in_the_devices_own_terms() -> None:
    settings = EngineSettings(kv_cache_bytes=1 << 26, gpu_memory_utilization=0.5)
    assert value_of("--kv-cache-memory-bytes", arguments(settings)) == str(1 << 26)
    assert value_of("--gpu-memory-utilization", arguments(settings, on_gpu=True)) == "0.5"
    assert "--enforce-eager" not in arguments(settings, on_gpu=True)
    assert "--kv-cache-memory-bytes" not in arguments(settings, on_gpu=True)


def test_no_prompt_is_read_in_parts_on_a_cpu() -> None:
    """A seeded request whose prompt is read in parts kills a CPU engine of vLLM 0.32."""
    got = arguments(EngineSettings(max_model_len=9000))
    assert "--no-enable-chunked-prefill" in got
    assert int(value_of("--max-num-batched-tokens", got)) >= 9000
    assert "--no-enable-chunked-prefill" not in arguments(EngineSettings(), on_gpu=True)


def test_an_engine_reaches_for_no_network_and_sees_only_its_devices() -> None:
    cpu = server_environment({"HOME": "/h"}, share=CPU, root=Path("/r"), sockets=Path("/s"))
    gpu = server_environment({"HOME": "/h"}, share=GPU, root=Path("/r"), sockets=Path("/s"))
    for environment in (cpu, gpu):
        assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert environment["HOME"] == "/h"
    assert (cpu["CUDA_VISIBLE_DEVICES"], gpu["CUDA_VISIBLE_DEVICES"]) == ("", "2,3")
    assert cpu["OMP_NUM_THREADS"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in gpu


def test_workers_find_our_packages_wherever_the_daemon_was_started() -> None:
    environment = server_environment({"PYTHONPATH": "/a:/r:/b"}, share=CPU, root=Path("/r"), sockets=Path("/s"))
    assert environment["PYTHONPATH"] == "/r:/a:/b"


@given(st.integers(1, 9), st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True))
def test_every_engine_has_cores_and_none_is_shared_without_need(num_engines: int, cores: list[int]) -> None:
    shares = engine_shares(num_engines, cores=cores, gpus=None)
    dealt = [core for share in shares for core in share.cores or ()]
    assert len(shares) == num_engines
    assert all(share.cores for share in shares)
    assert set(dealt) <= set(cores)
    if num_engines <= len(cores):
        assert len(set(dealt)) == len(dealt)
        assert len({len(share.cores or ()) for share in shares}) == 1


def test_gpu_engines_take_their_gpus_and_any_core() -> None:
    """B178"""
    assert engine_shares(2, cores=(0,), gpus=("0", "GPU-7")) == [
        EngineShare(cores=None, gpus="0"),
        EngineShare(cores=None, gpus="GPU-7"),
    ]


def test_processes_of_a_server_meet_in_the_runs_own_directory() -> None:
    """B136: in the shared temporary directory vLLM leaves its sockets behind."""
    for share in (CPU, GPU):
        environment = server_environment({"VLLM_RPC_BASE_PATH": "/tmp"}, share=share, root=Path("/r"), sockets=Path("/s"))
        assert environment["VLLM_RPC_BASE_PATH"] == "/s"
