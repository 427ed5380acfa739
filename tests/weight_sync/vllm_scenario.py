"""One real vLLM engine on a CPU, led through syncs that succeed and syncs that fail; prints what was seen as one JSON line.

`python -m tests.weight_sync.vllm_scenario {tied,untied,moe} {float32,bfloat16} DIR`. Logprobs are those of all tokens of the
vocabulary after each prompt token, compared with a transformers forward in the same dtype.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NUM_TOKENS = 40
WAIT_S = 60.0


class Scenario:
    def __init__(self, kind: str, dtype: str, directory: Path) -> None:
        import torch
        from vllm import LLM

        from configs.schema import WeightSyncSettings
        from weight_sync import StageFailure, StageReport, WeightServer

        self.dtype: torch.dtype = getattr(torch, dtype)
        self.models: list[Path] = []
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.references: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.make_models(kind, directory)
        self.llm: Any = LLM(
            model=str(self.models[0]),
            dtype=dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=16 << 20,
            max_model_len=128,
            max_num_seqs=4,
            max_logprobs=-1,
            skip_tokenizer_init=True,
            worker_extension_cls="weight_sync.vllm_plugin.WorkerExtension",
            weight_transfer_config={"backend": "headrace"},
            **self.engine_arguments(),
        )
        self.staged: queue.Queue[StageReport] = queue.Queue()
        self.failed: queue.Queue[StageFailure] = queue.Queue()
        self.server = WeightServer(
            WeightSyncSettings(bucket_bytes=1 << 16),
            socket_dir=directory / "sockets",
            dtype=self.dtype,
            on_staged=self.staged.put,
            on_failed=self.failed.put,
        )
        self.version = 0
        self.verifies = True

    def make_models(self, kind: str, directory: Path) -> None:
        """Models of four seeds, their tensors as the trainer names them, and their logprobs."""
        import torch

        from tests.fakes.tiny_models import VOCAB_SIZE, TinyModel, checkpoint_tensors, make_tiny_model, reference_logprobs

        self.models = [
            make_tiny_model(directory / f"model-{seed}", TinyModel(kind), seed=seed, dtype=self.dtype) for seed in range(4)
        ]
        self.tensors = [checkpoint_tensors(model) for model in self.models]
        self.tokens = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        self.references = [reference_logprobs(model, self.tokens, dtype=self.dtype) for model in self.models]

    def engine_arguments(self) -> dict[str, Any]:
        return {}

    def request_arguments(self) -> dict[str, Any]:
        return {}

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def errors(self) -> list[float]:
        """Largest absolute difference of the engine's logprobs to those of each model, in nats."""
        import torch
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": self.tokens}], sampling, use_tqdm=False, **self.request_arguments())
        logprobs = torch.full_like(self.references[0], float("nan"))
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            for token, entry in entries.items():
                logprobs[position, token] = entry.logprob
        return [float((logprobs - reference).abs().max()) for reference in self.references]

    def publish(self, tensors: Iterable[tuple[str, Any]]) -> str:
        self.version += 1
        return self.server.publish(tensors, policy_version=self.version).manifest_digest

    def stage(self) -> str | None:
        """Stage the newest version; why it failed, or None."""
        nonce = f"nonce-{self.version}"
        self.llm.collective_rpc(
            "headrace_stage",
            kwargs={
                "address": self.server.address,
                "policy_version": self.version,
                "engine": "e",
                "nonce": nonce,
                "timeout_s": WAIT_S,
            },
        )
        while True:
            for reports in (self.staged, self.failed):
                try:
                    report = reports.get(timeout=0.01)
                except queue.Empty:
                    continue
                assert report.nonce == nonce, report
                return getattr(report, "reason", None)

    def commit(self, digest: str, version: int | None = None) -> None:
        version = self.version if version is None else version
        self.llm.start_weight_update()
        update_info = {"policy_version": version, "manifest_digest": digest, "verify": self.verifies}
        self.llm.update_weights({"update_info": update_info})
        self.llm.finish_weight_update(str(version))

    def sync(self, model: int) -> None:
        digest = self.publish(self.tensors[model].items())
        assert self.stage() is None
        self.commit(digest)

    def rpc(self, method: str) -> dict[str, Any]:
        (result,) = self.llm.collective_rpc(method)
        return dict(result)

    def refused(self, step: Callable[[], None]) -> str:
        """What was raised, with its causes."""
        try:
            step()
        except Exception as error:  # noqa: BLE001  (what is raised is what is looked at)
            return f"{type(error).__name__}: {error}"
        return ""

    # ── the scenario ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> dict[str, Any]:
        seen: dict[str, Any] = {"start": self.errors()}
        digest = self.publish(self.tensors[1].items())
        seen["commit before staging"] = self.refused(lambda: self.commit(digest))
        seen["staging"] = self.stage()
        seen["after staging"] = self.errors()
        seen["commit of another digest"] = self.refused(lambda: self.commit("0" * 32))
        seen["commit of another version"] = self.refused(lambda: self.commit(digest, version=9))
        seen["after refusals"] = self.errors()
        self.commit(digest)
        seen["after commit"] = self.errors()
        seen["digest"] = digest
        seen["checksums"] = self.rpc("headrace_checksums")
        seen["status"] = self.rpc("headrace_status")
        seen["expected checksums"] = self.expected_checksums(1)
        seen["verify"] = self.rpc("headrace_verify")
        seen["num_tensors"] = len(self.tensors[1])
        self.llm.start_weight_update()  # and the client is lost
        self.sync(2)
        seen["after a lost client"] = self.errors()
        self.llm.start_weight_update()
        seen["finish without update"] = self.refused(self.llm.finish_weight_update)
        self.run_bad_weights(seen)
        self.run_without_repairs(seen)
        self.sync(3)
        self.sync(1)
        seen["at the end"] = self.errors()
        seen["verify at the end"] = self.rpc("headrace_verify")
        return seen

    def run_bad_weights(self, seen: dict[str, Any]) -> None:
        """From model 2: weights of another shape, of another dtype, and weights that the model takes only in part."""
        good = self.tensors[3]
        name = "model.layers.1.mlp.gate.weight" if "model.layers.1.mlp.gate.weight" in good else "model.norm.weight"
        self.publish({**good, name: good[name][:-1]}.items())
        seen["staging of another shape"] = self.stage()
        self.publish({key: tensor for key, tensor in good.items() if key != name}.items())
        seen["staging of too few"] = self.stage()
        self.publish({**good, "model.layers.0.mlp.lora_A.weight": good[name]}.items())
        seen["staging of too many"] = self.stage()
        engine = self.weight_engine()
        expected, engine._expected = engine._expected, None  # as for a model whose checkpoint cannot be read
        digest = self.publish({key: tensor for key, tensor in good.items() if "layers.1.self_attn.k_proj" not in key}.items())
        seen["staging unchecked"] = self.stage()
        seen["load of too few"] = self.refused(lambda: self.commit(digest))
        seen["after a failed load"] = self.errors()
        seen["verify after a failed load"] = self.rpc("headrace_verify")
        engine._expected = expected

    def run_without_repairs(self, seen: dict[str, Any]) -> None:
        """What vLLM's own reload leaves undone."""
        from weight_sync import vllm_plugin

        repairs = vllm_plugin._before_reload, vllm_plugin._after_reload
        vllm_plugin._before_reload = vllm_plugin._after_reload = lambda model: None
        try:
            seen["verified sync without repairs"] = self.refused(lambda: self.sync(1))
            self.verifies = False
            self.sync(1)
        finally:
            self.verifies = True
            vllm_plugin._before_reload, vllm_plugin._after_reload = repairs
        seen["without repairs"] = self.errors()
        seen["verify without repairs"] = self.rpc("headrace_verify")

    def weight_engine(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine

    def expected_checksums(self, model: int) -> dict[str, str]:
        import torch
        import xxhash

        tensors = self.tensors[model].items()
        return {name: xxhash.xxh3_64_hexdigest(t.contiguous().view(-1).view(torch.uint8).numpy().data) for name, t in tensors}


def set_environment() -> dict[str, str]:
    """Variables with which the engine runs on one thread, in this process, without a network."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def main() -> None:
    kind, dtype, directory = sys.argv[1:]
    os.environ |= set_environment()
    scenario = Scenario(kind, dtype, Path(directory))
    with scenario.server:
        seen = scenario.run()
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
