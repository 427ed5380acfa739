"""New weights in a real vLLM engine on a CPU: our way, and vLLM's own, in one process.

`python -m benchmarks.weights_engine [--quick]` prints one JSON object. The engine has a decoder of random bfloat16 weights
(0.27 GB, or with --quick 0.03 GB). Ours: publish float32 weights, stage them (an engine generates meanwhile), swap. vLLM's
own: write a checkpoint to /dev/shm, `reload_weights` from there. The pause is the time of the swap or of the reload, in which
nothing is generated; the first token comes from a request that is made when the engine goes on. What HTTP adds is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
WAIT_S = 120.0
NUM_WARM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians."""

    prepare_s: float
    """Before the pause: publish and stage, or write the checkpoint."""
    pause_ms: float
    first_token_ms: float
    """From the end of the pause."""
    until_first_token_s: float
    """From the trainer's last step."""


class Bench:
    """The engine, and the trainer's weights."""

    def __init__(self, directory: Path, *, quick: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig
        from vllm import LLM

        from benchmarks.weights_model import SHAPES

        shapes = SHAPES["0.03 GB" if quick else "0.27 GB"]
        config = LlamaConfig(
            num_hidden_layers=shapes.layers,
            hidden_size=shapes.hidden,
            intermediate_size=shapes.intermediate,
            num_attention_heads=shapes.hidden // 64,
            num_key_value_heads=shapes.key_value // 64,
            vocab_size=shapes.vocabulary,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        network.save_pretrained(directory / "model")
        self.weights = {
            name: tensor.detach().float() for name, tensor in network.state_dict().items() if name != "lm_head.weight"
        }
        self.num_bytes = 2 * sum(tensor.numel() for tensor in self.weights.values())
        self.llm: Any = LLM(
            model=str(directory / "model"),
            dtype="bfloat16",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            worker_extension_cls="weight_sync.vllm_plugin.WorkerExtension",
            weight_transfer_config={"backend": "headrace"},
        )

    def first_token_ms(self) -> float:
        from vllm import SamplingParams

        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self.llm.generate([{"prompt_token_ids": list(range(3, 67))}], sampling, use_tqdm=False)
        return (time.perf_counter() - started) * 1e3

    def ours(self, directory: Path, repetitions: int) -> Figures:
        import torch

        from configs.schema import WeightSyncSettings
        from weight_sync import StageFailure, StageReport, WeightServer

        reports: queue.Queue[StageReport | StageFailure] = queue.Queue()
        rounds = []
        with WeightServer(
            WeightSyncSettings(),
            socket_dir=directory,
            dtype=torch.bfloat16,
            on_staged=reports.put,
            on_failed=reports.put,
        ) as server:
            for version in range(NUM_WARM + repetitions):
                self.weights["model.norm.weight"] += 0.01
                started = time.perf_counter()
                digest = server.publish(self.weights.items(), policy_version=version).manifest_digest
                where = {"address": server.address, "policy_version": version, "engine": "e", "nonce": f"v{version}"}
                self.llm.collective_rpc("headrace_stage", kwargs={**where, "timeout_s": WAIT_S})
                report = reports.get(timeout=WAIT_S)
                if isinstance(report, StageFailure):
                    raise RuntimeError(report.reason)
                staged = time.perf_counter()
                self.llm.start_weight_update()
                self.llm.update_weights({"update_info": {"policy_version": version, "manifest_digest": digest}})
                self.llm.finish_weight_update(str(version))
                rounds.append(self._figures(started, staged))
        return _median(rounds[NUM_WARM:])

    def reload(self, repetitions: int) -> Figures:
        import torch
        from safetensors.torch import save_file

        rounds = []
        with tempfile.TemporaryDirectory(prefix="hr-", dir="/dev/shm") as directory:
            for _ in range(NUM_WARM + repetitions):
                self.weights["model.norm.weight"] += 0.01
                started = time.perf_counter()
                cast = {name: tensor.to(torch.bfloat16) for name, tensor in self.weights.items()}
                save_file(cast, Path(directory) / "model.safetensors", metadata={"format": "pt"})
                written = time.perf_counter()
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
                rounds.append(self._figures(started, written))
        return _median(rounds[NUM_WARM:])

    def _figures(self, started: float, paused: float) -> Figures:
        resumed = time.perf_counter()
        first_token_ms = self.first_token_ms()
        return Figures(
            prepare_s=paused - started,
            pause_ms=(resumed - paused) * 1e3,
            first_token_ms=first_token_ms,
            until_first_token_s=resumed - started + first_token_ms / 1e3,
        )


def _median(rounds: list[Figures]) -> Figures:
    return sorted(rounds, key=lambda figures: figures.pause_ms)[len(rounds) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_engine", description="New weights in a real engine.")
    parser.add_argument("--quick", action="store_true", help="a small model")
    quick = parser.parse_args().quick
    os.environ |= ENVIRONMENT
    repetitions = 3 if quick else 9
    with tempfile.TemporaryDirectory(prefix="hr-") as place:
        bench = Bench(Path(place), quick=quick)
        found = {
            "num_bytes": bench.num_bytes,
            "ours": asdict(bench.ours(Path(place), repetitions)),
            "reload_weights": asdict(bench.reload(repetitions)),
        }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
