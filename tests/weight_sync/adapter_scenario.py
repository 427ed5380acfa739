"""One real vLLM engine on a CPU that is given adapters, led through syncs that succeed and fail; prints what was seen as JSON.

`python -m tests.weight_sync.adapter_scenario {tied,untied} {float32,bfloat16} DIR`. Logprobs are those of all tokens of the
vocabulary after each prompt token, compared with the trainer's own model under the same adapters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.weight_sync.vllm_scenario import NUM_TOKENS, Scenario, set_environment

RANK, ALPHA = 4, 12.0
NUM_VERSIONS = 3


class AdapterScenario(Scenario):
    """Version v has its own adapters; what stands at place 0 is the base alone."""

    def make_models(self, kind: str, directory: Path) -> None:
        import torch

        from configs.schema import TrainerSettings
        from tests.fakes.tiny_models import VOCAB_SIZE, TinyModel, make_tiny_model, reference_logprobs
        from trainer.fsdp import FsdpPolicy

        base = make_tiny_model(directory / "base", TinyModel(kind), seed=0, dtype=self.dtype)
        self.tokens = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        self.models = [base]
        self.references = [reference_logprobs(base, self.tokens, dtype=self.dtype)]
        self.tensors = [{}]
        for seed in range(1, NUM_VERSIONS + 1):
            policy = FsdpPolicy(
                base,
                TrainerSettings(lora_rank=RANK, lora_alpha=ALPHA),
                dtype=self.dtype,
                exports_adapters=True,
                seed=seed,
            )
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for layer in policy._adapted:
                    layer.b.copy_(torch.randn(layer.b.shape, generator=generator) * 0.3)
                logits = policy._model(torch.tensor([self.tokens])).logits[0, :-1].float()
            self.references.append(torch.log_softmax(logits, dim=-1))
            self.tensors.append({name: tensor.clone() for name, tensor in policy.export_weights()})
        (directory / "adapter").mkdir()
        policy.save_adapter(directory / "adapter")
        self.adapter_dir = directory / "adapter"

    def engine_arguments(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 1,
            "additional_config": {"headrace_lora_scale": ALPHA / RANK},
        }

    def request_arguments(self) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        return {"lora_request": LoRARequest("policy", 1, str(self.adapter_dir))}

    def run(self) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        self.sync(1)
        seen["after the first sync"] = self.errors()
        seen["verify"] = self.rpc("headrace_verify")
        seen["num_tensors"] = len(self.tensors[1])
        seen["checksums"] = self.rpc("headrace_checksums")
        seen["expected checksums"] = self.expected_checksums(1)
        self.sync(2)
        seen["after the second sync"] = self.errors()
        self.answer_beside_a_score(seen)
        self.run_bad_adapters(seen)
        self.sync(1)
        seen["at the end"] = self.errors()
        seen["verify at the end"] = self.rpc("headrace_verify")
        return seen

    def answer_beside_a_score(self, seen: dict[str, Any]) -> None:
        """Requests of several kinds in one batch: one whose prompt is scored, and some that generate."""
        from vllm import SamplingParams

        score = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        answer = SamplingParams(max_tokens=12, logprobs=0, seed=1, detokenize=False)
        prompts = [{"prompt_token_ids": self.tokens}] + [{"prompt_token_ids": self.tokens[: 5 + index]} for index in range(3)]
        outputs = self.llm.generate(prompts, [score, answer, answer, answer], use_tqdm=False, **self.request_arguments())
        scored = [entry[token].logprob for token, entry in zip(self.tokens[1:], outputs[0].prompt_logprobs[1:], strict=True)]
        expected = [float(self.references[2][at, token]) for at, token in enumerate(self.tokens[1:])]
        seen["score beside answers"] = max(abs(a - b) for a, b in zip(scored, expected, strict=True))

    def run_bad_adapters(self, seen: dict[str, Any]) -> None:
        """From version 2: adapters whose names match nothing, or only in part, and a slot that loses what it was given."""
        good = self.tensors[3]
        first = next(iter(good))
        self.publish({name.replace("base_model.model.model.", "base_model.model."): t for name, t in good.items()}.items())
        seen["staging of other prefixes"] = self.stage()
        self.publish({name: tensor for name, tensor in good.items() if name != first}.items())
        seen["staging of a half"] = self.stage()
        self.publish({name: tensor[:, :-1] if name == first else tensor for name, tensor in good.items()}.items())
        seen["staging of another shape"] = self.stage()
        digest = self.publish(good.items())
        seen["staging"] = self.stage()
        loader = self.weight_engine()._adapters
        activate = loader._manager.activate_adapter
        loader._manager.activate_adapter = lambda number: self.forget_one(loader, activate, number)
        try:
            seen["load that loses a tensor"] = self.refused(lambda: self.commit(digest))
        finally:
            loader._manager.activate_adapter = activate
        seen["after a failed load"] = self.errors()
        seen["verify after a failed load"] = self.rpc("headrace_verify")

    def forget_one(self, loader: Any, activate: Any, number: int) -> None:
        """As an engine that drops a tensor in silence, once."""
        loader._manager.activate_adapter = activate
        activate(number)
        module, index = next(iter(loader._layers()))[1]
        module.lora_b_stacked[index].zero_()


def main() -> None:
    kind, dtype, directory = sys.argv[1:]
    os.environ |= set_environment()
    scenario = AdapterScenario(kind, dtype, Path(directory))
    with scenario.server:
        seen = scenario.run()
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
