"""Tiny models for conversations: chat templates after the published formats of model families, and a tokenizer of characters
that knows their special tokens, in which some pairs of letters may be written in two ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollouter.codec import Codec

_TOOLS_QWEN = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n"
    "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nAnswer with <tool_call>...</tool_call>"
    "<|im_end|>\n{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{%- endif %}\n"
)
_TOOL_TURN_QWEN = (
    "{%- elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = (
    _TOOLS_QWEN + "{%- for m in messages %}{% if m.role == 'user' or m.role == 'assistant' or (m.role == 'system' and not "
    "loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + _TOOL_TURN_QWEN
    + "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # thinking is taken out of every turn before the last user's message
    _TOOLS_QWEN + "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = "
    "loop.index0 %}{% endif %}{% endfor %}{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not "
    "loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- elif m.role == 'assistant' %}<|im_start|>assistant"
    "\n"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
    "<|im_end|>\n"
    + _TOOL_TURN_QWEN
    + "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>"
    "\n\n{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{%- for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>"
    "{{ m.content }}<｜tool▁output▁end｜>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}<|im_start|>system\nYou are helpful"
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    template: str
    end: str
    """Token that ends a turn."""
    bos: str | None = None


FAMILIES = {
    "qwen2.5": Family(template=QWEN25, end="<|im_end|>"),
    "qwen3": Family(template=QWEN3, end="<|im_end|>"),
    "llama3": Family(template=LLAMA3, end="<|eot_id|>", bos="<|begin_of_text|>"),
    "gemma": Family(template=GEMMA, end="<end_of_turn>", bos="<bos>"),
    "deepseek": Family(template=DEEPSEEK, end="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "smollm2": Family(template=SMOLLM2, end="<|im_end|>"),
}
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_PAIRS = ("he", "ll", "lo", "th", "in", "nk", "to", "ol")


def make_codec(family: Family) -> Codec:
    """The codec of `make_tokenizer`."""
    return Codec(make_tokenizer(family))


def make_tokenizer(family: Family) -> Any:
    """A byte-pair tokenizer: letters, some merges, bytes for what it does not know, and every family's special tokens."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    pieces = [*letters, *_PAIRS, "hell", "hello", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [(pair[0], pair[1]) for pair in _PAIRS] + [("he", "ll"), ("hell", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.end,
        bos_token=family.bos,
        additional_special_tokens=[token for token in _SPECIAL if token not in (family.end, family.bos)],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = family.template
    return fast
