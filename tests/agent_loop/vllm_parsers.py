"""vLLM's own parsers of tool calls, asked in a process of their own: `[[parser, reply], …]` as JSON on stdin, what each reads
of its reply as JSON on the last line of stdout: `[[name, arguments], …]`, arguments as the parser has them (text)."""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

SIGNS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|eom_id|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


def make_tokenizer() -> Any:
    """One that has every format's signs, and characters."""
    words = [*(chr(code) for code in range(32, 127)), "\n", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(SIGNS), unk_token="<unk>")


def main() -> None:
    tokenizer = make_tokenizer()
    names = ("add", "add_numbers", "look_up")
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=tools)
    found = []
    for name, text in json.load(sys.stdin):
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
        calls = parser.extract_tool_calls(text, request).tool_calls
        found.append([[call.function.name, call.function.arguments] for call in calls])
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
