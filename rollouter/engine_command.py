"""How a vLLM server is started: its arguments, its environment, its share of the machine. All pure.

Invariant: a server that is started here reports log-probabilities after temperature, samples from the whole distribution, loads
weights with the `headrace` backend, and reaches for no network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.gpu import VISIBLE
from configs.schema import EngineSettings

CPU_MIN_BATCHED_TOKENS = 2048
"""Tokens of one forward pass on a CPU; no less than a whole sequence, since none is read in parts."""
WORKER_EXTENSION = "weight_sync.vllm_plugin.WorkerExtension"
WEIGHT_BACKEND = "headrace"
CPU_BLOCK_SIZE = 32
"""Tokens of a KV-cache block, the granularity of prefix reuse; the smallest that vLLM's CPU attention takes (default: 128)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """What one engine may use."""

    cores: tuple[int, ...] | None
    """Core numbers to run on; None: all, as GPU engines do."""
    gpus: str | None
    """Value of CUDA_VISIBLE_DEVICES; None on a CPU machine."""


def engine_shares(num_engines: int, *, cores: Sequence[int], gpus: Sequence[str] | None) -> list[EngineShare]:
    """One share an engine. Cores are dealt out evenly; where there are fewer than engines, they are shared in turn."""
    if gpus is not None:
        return [EngineShare(cores=None, gpus=gpus[index]) for index in range(num_engines)]
    if len(cores) < num_engines:
        return [EngineShare(cores=(cores[index % len(cores)],), gpus=None) for index in range(num_engines)]
    each = len(cores) // num_engines
    return [EngineShare(cores=tuple(cores[index * each : (index + 1) * each]), gpus=None) for index in range(num_engines)]


def server_arguments(settings: EngineSettings, *, model_dir: str, dtype: str, socket: Path, on_gpu: bool) -> list[str]:
    """Arguments of `vllm serve`; `engine.extra_args` come last and win."""
    arguments = [
        *("--model", model_dir, "--served-model-name", "policy", "--dtype", dtype, "--uds", str(socket)),
        *("--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out"),
        "--skip-tokenizer-init",  # ids only; the stop tokens come with each request
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--weight-transfer-config", json.dumps({"backend": WEIGHT_BACKEND})),
        *(() if settings.adaptive_requests else ("--disable-log-stats",)),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", "--disable-fastapi-docs"),
    ]
    if on_gpu:
        arguments += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    else:
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
        arguments += ["--block-size", str(CPU_BLOCK_SIZE)]
        # A prompt read in parts makes vLLM rewind the request's generator, which PyTorch's CPU generator cannot do: the engine
        # would die at the first such prompt of a seeded request.
        arguments += ["--no-enable-chunked-prefill"]
        arguments += [
            "--max-num-batched-tokens",
            str(max(CPU_MIN_BATCHED_TOKENS, settings.max_model_len, settings.max_num_seqs)),
        ]
    return [*arguments, *settings.extra_args]


def server_environment(
    base: Mapping[str, str], *, share: EngineShare, root: Path, sockets: Path, verbose: bool = False
) -> dict[str, str]:
    """Environment of a server. `root` is the directory that holds our packages: vLLM's workers import one of them; `sockets` is
    where its processes meet, which else is the temporary directory that everybody shares."""
    path = [str(root), *(part for part in base.get("PYTHONPATH", "").split(":") if part and part != str(root))]
    environment = {
        **base,
        "PYTHONPATH": ":".join(path),
        "PYTHONUNBUFFERED": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOG_STATS_INTERVAL": "3600",  # where statistics are kept, they are asked for
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG" if verbose else "INFO",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if share.gpus is not None:
        return environment | {VISIBLE: share.gpus}
    return environment | {
        VISIBLE: "",
        "OMP_NUM_THREADS": str(len(share.cores or (0,))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_COMPILE_DISABLE": "1",  # the first request would wait for a compiler
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process is pinned by us
    }
