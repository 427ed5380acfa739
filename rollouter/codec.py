"""The model's tokenizer as the rollouter needs it: prompts to ids, replies to text, stop strings to ids.

Invariant: a prompt is encoded once, with exactly the special tokens that its form asks for; what an engine sampled is only ever
decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from configs.errors import ConfigError
from rollouter.data.rows import Message
from rollouter.errors import DataError

UNKNOWN_TOKEN_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What an id beyond the tokenizer's vocabulary reads as."""


_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None

    def __len__(self) -> int: ...

    @property
    def chat_template(self) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> Any: ...


class Codec:
    """Prompts in, replies out. Implements `agent_loop.session.TextCodec` and `agent_loop.chat.ChatCodec`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._special_tokens = tuple(tokenizer.get_added_vocab())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = [int(token) for token in token_ids]
        text = ""
        begin = 0
        for at, token in enumerate(ids):
            if not 0 <= token < self._size:
                text += self._text(ids[begin:at]) + UNKNOWN_TOKEN_TEXT
                begin = at + 1
        return text + self._text(ids[begin:])

    @property
    def chat_template(self) -> str:
        """Its text; the first one of a model that has several by name; empty where there is none."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", next(iter(template.values()), ""))
        return template if isinstance(template, str) else ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that are tokens of their own wherever they stand."""
        return self._special_tokens

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which special tokens are mere characters."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included; ids beyond the vocabulary become a placeholder."""
        ids = [int(token) for token in token_ids]
        known = [token for token in ids if 0 <= token < self._size]
        if len(known) < len(ids):
            return "".join(
                self._tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < self._size else UNKNOWN_TOKEN_TEXT
                for token in ids
            )
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The chat template's text. Raises whatever the template raises."""
        return cast(
            str,
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
            ),
        )

    def encode_prompt(
        self, prompt: str | tuple[Message, ...], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, npt.NDArray[np.int32]]:
        """(text, ids): text as it stands with the tokenizer's own special tokens; messages, and the JSON schemas of `tools`
        told with them, through the chat template, which brings its special tokens itself.

        Raises DataError when the model has no chat template or the template refuses the messages.
        """
        if isinstance(prompt, str):
            return prompt, np.array(self._tokenizer.encode(prompt, add_special_tokens=True), np.int32)
        if not self.chat_template:
            raise DataError(
                "the model has no chat template, which a prompt of messages needs, and any prompt whose agent loop holds a "
                "conversation: take a model that has one, or text with rollouter.agent_loop=single_turn"
            )
        try:
            text = self.render(prompt, tools=tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            messages = [dict(message) for message in prompt]
            raise DataError(f"the model's chat template refused {messages!r}: {type(error).__name__}: {error}") from error
        return text, np.array(self.encode(text), np.int32)

    def stop_token_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids at which a turn ends: the end-of-sequence token, if any, and one for each string.

        Raises ConfigError for a string that is not exactly one token.
        """
        found = [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]
        for text in stop:
            ids = self.encode(text)
            if len(ids) != 1:
                raise ConfigError(f"sampling.stop: got {text!r}, {len(ids)} tokens of this model, expected exactly one")
            found += ids
        return tuple(dict.fromkeys(found))

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


def load_codec(model_dir: str, *, trust_remote_code: bool) -> Codec:
    """The tokenizer that stands beside the model. Blocking: takes seconds.

    Raises ConfigError when there is none.
    """
    directory = Path(model_dir)
    if directory.is_dir() and not any(file.name.startswith(("tokenizer", "vocab")) for file in directory.iterdir()):
        raise ConfigError(f"{model_dir}: no tokenizer can be loaded: the directory has no file of one")
    try:
        if _is_plain(directory):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir}: no tokenizer can be loaded: {' '.join(str(error).split())}") from error
    return Codec(cast(Tokenizer, tokenizer))


def _is_plain(directory: Path) -> bool:
    """Whether the tokenizer needs no class of its own. `AutoTokenizer` would take the same generic one, but its module imports
    torch, which costs a rollouter seconds and hundreds of megabytes."""
    config = directory / "tokenizer_config.json"
    if not (directory / "tokenizer.json").is_file() or not config.is_file():
        return False
    found = json.loads(config.read_text(encoding="utf-8"))
    return found.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in found
