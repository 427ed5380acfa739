"""Tiny language models for tests: real architectures, random weights large enough that every error shows in the logprobs.

`make_tiny_model` writes a Hugging Face directory that transformers and vLLM both load; `checkpoint_tensors` reads the tensors
back under the names that a trainer would send.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

VOCAB_SIZE = 300
"""Not a multiple of 64, to which vLLM pads."""


class TinyModel(StrEnum):
    TIED = "tied"
    """Qwen3 with the embedding as its head; normalized queries and keys."""
    UNTIED = "untied"
    """Llama with a head of its own."""
    MOE = "moe"
    """Qwen3-MoE, 4 experts of which 2 are taken."""


def tiny_config(kind: TinyModel) -> PretrainedConfig:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.15,
    }
    match kind:
        case TinyModel.TIED:
            return Qwen3Config(**sizes, tie_word_embeddings=True)
        case TinyModel.UNTIED:
            return LlamaConfig(**sizes, tie_word_embeddings=False)
        case TinyModel.MOE:
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            return Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False)


def make_tiny_model(directory: Path, kind: TinyModel, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with the random weights of `seed` to `directory`; returns it. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, by checkpoint name."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@torch.no_grad()
def reference_logprobs(directory: Path, tokens: list[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32[len(tokens) - 1, VOCAB_SIZE]: log-softmax that predicts tokens 1.. by a transformers forward."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1)
