"""`python -m examples.tool_calling.model DIR`: a small model that has seen how the calculator is called, mostly done badly.

The supervised warm start shows conversations of which most are spoiled: answered without the tool, called with another number,
with JSON that does not close, or with a result that is not the calculator's. So the model knows all of it and is rarely right
when sampled: what it becomes better at is what the reward says. About 90 s on one core; nothing is done where DIR has a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PHRASES = ("user\n", "assistant\n", "tool\n", "system\n", "<tool_call>", "</tool_call>", '{"name": "', "calculator")
MORE_PHRASES = ('", "arguments": {"expression": "', '"}}')
SPECIAL = ("<|im_start|>", "<|im_end|>")
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPOILED_SHARE = 0.75
NUM_STEPS = 500
_BATCH = 64
_LEARNING_RATE = 2e-3
_IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, and one for each phrase that every conversation has."""
    ids = {token: index for index, token in enumerate(["<unk>", "<pad>", *LETTERS])}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in (*PHRASES, *MORE_PHRASES)])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_network(vocabulary: int, *, eos: int, pad: int, seed: int) -> LlamaForCausalLM:
    """A three-layer Llama with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def conversation(draw: np.random.Generator) -> list[tuple[str, bool]]:
    """(text, whether the model writes it) of one conversation, spoiled in SPOILED_SHARE of the cases."""
    a, b = (int(draw.integers(11, 61)) for _ in range(2))
    spoiled = draw.random() < SPOILED_SHARE
    how = int(draw.integers(0, 4)) if spoiled else -1
    head = f"<|im_start|>system\ncalculator<|im_end|>\n<|im_start|>user\n{a}*{b}<|im_end|>\n<|im_start|>assistant\n"
    if how == 0:
        return [(head, False), (f"{int(draw.integers(100, 3601))}<|im_end|>", True)]
    asked = (int(draw.integers(11, 61)), b) if how == 1 else (a, b)
    expression = f"{asked[0]}*{asked[1]}"
    close = "" if how == 2 else '"}}'
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}{close}</tool_call><|im_end|>'
    result = str(asked[0] * asked[1]) if how != 2 else f"Error: got {expression}"
    answer = str(int(draw.integers(100, 3601))) if how in (2, 3) else result
    shown = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    return [(head, False), (call, True), (shown, False), (f"{answer}<|im_end|>", True)]


def batch_of(tokenizer: Any, draw: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, T] token ids and labels; what the model does not write is ignored."""
    rows = []
    for _ in range(count):
        parts = [(tokenizer.encode(text, add_special_tokens=False), mine) for text, mine in conversation(draw)]
        rows.append([(token, token if mine else _IGNORED) for ids, mine in parts for token in ids])
    length = max(map(len, rows))
    padded = [row + [(tokenizer.pad_token_id, _IGNORED)] * (length - len(row)) for row in rows]
    both = torch.tensor(padded)
    return both[..., 0], both[..., 1]


def warm_start(network: Any, tokenizer: Any, *, num_steps: int, seed: int) -> float:
    """Supervised steps in place; the last loss."""
    draw = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss = torch.zeros(())
    for step in range(1, num_steps + 1):
        tokens, labels = batch_of(tokenizer, draw, _BATCH)
        logits = network(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            sys.stderr.write(f"warm start: step {step} of {num_steps}, loss {loss.item():.3f}\n")
    return loss.item()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Makes the model of the tool-calling example.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if (arguments.directory / "config.json").is_file():
        return 0
    torch.set_num_threads(1)
    tokenizer: Any = make_tokenizer()
    network = make_network(len(tokenizer), eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id, seed=arguments.seed)
    warm_start(network, tokenizer, num_steps=arguments.steps, seed=arguments.seed)
    tokenizer.save_pretrained(arguments.directory)
    network.save_pretrained(arguments.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
