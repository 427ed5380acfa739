"""The example's rows, tool, reward and model fit together; that it learns is seen by running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.tool_formats import Call, Malformed, ToolFormat, read_calls
from agent_loop.toolbox import load_tools
from configs.loader import load
from examples.tool_calling.model import conversation, make_tokenizer
from examples.tool_calling.task import calculator, rows, score
from rollouter.codec import Codec

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "tool_calling" / "run.yaml"


def test_the_settings_name_the_tool() -> None:
    settings = load(CONFIG, environment={})
    (tool,) = load_tools(settings.tools.sources[0])
    assert (tool.name, tool.parameters["required"]) == ("calculator", ["expression"])
    assert calculator("12*34") == "408"
    with pytest.raises(ValueError, match="expected two numbers"):
        calculator("12+34")


def test_the_last_word_is_scored() -> None:
    assert score("products", "<tool_call>…</tool_call>\ntool\n408\nassistant\n408", "408", {}) == 1.0
    assert score("products", "407", "408", {}) == 0.0
    assert len(rows()) == 2500


def test_the_warm_start_shows_what_the_template_writes() -> None:
    tokenizer: Any = make_tokenizer()
    codec = Codec(tokenizer)
    draw = np.random.default_rng(0)
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    kinds: set[type] = set()
    for _ in range(50):
        parts = conversation(draw)
        question = parts[0][0].split("user\n")[1].split("<|im_end|>")[0]
        assert codec.render([{"role": "user", "content": question}], tools=tools, add_generation_prompt=True) == parts[0][0]
        assert codec.decode_whole(codec.encode(parts[1][0])) == parts[1][0]
        kinds |= {type(call) for call in read_calls(parts[1][0].removesuffix("<|im_end|>"), ToolFormat.HERMES)}
    assert kinds == {Call, Malformed}
