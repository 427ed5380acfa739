"""`tiny-sort`: a model of about a hundred thousand parameters that can already sort digits, unreliably.

Invariant: the same settings and seed make the same bits. The supervised warm start shows answers most of which are spoiled, so
that the model knows the task and yet is rarely right when sampled: room for reinforcement to sharpen it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.schema import ModelSettings

log = structlog.get_logger()

VOCABULARY = ("<unk>", "<pad>", "<eos>", *"0123456789", "s", "=")
NUM_DIGITS = 5
SPOILED_SHARE = 0.8
"""Share of the shown answers in which digits were replaced."""
_RECIPE = 1
"""Part of the cache's name: raise it when anything here changes what is made."""
_BATCH = 128
_LEARNING_RATE = 2e-3
_LOG_EVERY = 50


def tiny_sort_name(model: ModelSettings, *, seed: int) -> str:
    """Directory name in the cache."""
    text = repr((_RECIPE, model.warm_start_steps, seed, SPOILED_SHARE, VOCABULARY))
    return f"tiny-sort-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def make_tiny_sort(directory: Path, model: ModelSettings, *, seed: int) -> None:
    """Make, warm-start and write the model and its tokenizer into `directory`."""
    make_tokenizer().save_pretrained(directory)
    network = make_network(seed=seed)
    warm_start(network, num_steps=model.warm_start_steps, seed=seed)
    network.save_pretrained(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; `decode` joins them without spaces."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_network(*, seed: int) -> LlamaForCausalLM:
    """A two-layer Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index("<eos>"),
        pad_token_id=VOCABULARY.index("<pad>"),
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def warm_start(network: Any, *, num_steps: int, seed: int) -> None:
    """Supervised steps on spoiled answers, in place; cross-entropy on the answer and its end."""
    draw = np.random.default_rng([seed, _RECIPE])
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(1, num_steps + 1):
        tokens = torch.from_numpy(spoiled_examples(draw, _BATCH))
        logits = network(input_ids=tokens[:, :-1], logits_to_keep=NUM_DIGITS + 1).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -(NUM_DIGITS + 1) :].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % _LOG_EVERY == 0 or step == num_steps:
            log.info("warm start", step=step, num_steps=num_steps, loss=round(loss.item(), 3))


def spoiled_examples(draw: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """[count, 2 * NUM_DIGITS + 3] token ids of `s52713=12357<eos>`; in SPOILED_SHARE of them half of the answer's digits are
    drawn anew."""
    digits = draw.integers(0, 10, (count, NUM_DIGITS))
    answers = np.sort(digits, axis=1)
    spoiled = draw.random((count, 1)) < SPOILED_SHARE
    replaced = spoiled & (draw.random((count, NUM_DIGITS)) < 0.5)
    answers = np.where(replaced, draw.integers(0, 10, answers.shape), answers)
    zero = VOCABULARY.index("0")

    def column(token: str) -> npt.NDArray[np.int64]:
        return np.full((count, 1), VOCABULARY.index(token))

    return np.concatenate([column("s"), digits + zero, column("="), answers + zero, column("<eos>")], axis=1)
