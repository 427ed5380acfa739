"""A real tokenizer of one token a character, written as a model's directory has it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = ("<eos>", "\n", *"0123456789", "+", "=", "s")


def write_tiny_tokenizer(directory: Path) -> Path:
    """Returns the directory."""
    tokenizer = Tokenizer(models.WordLevel({char: at for at, char in enumerate(CHARACTERS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(str(directory))
    return directory
