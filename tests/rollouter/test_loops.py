"""A row plays the loop that it names, or nothing starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import structlog

from agent_loop.errors import LoopError
from agent_loop.loop import LoopSetup
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from agent_loop.tool_calling import ToolCalling
from configs.errors import ConfigError
from configs.schema import ToolSettings
from rollouter.loops import Loops
from tests.agent_loop.chat_models import FAMILIES, make_codec

TASK = Task(task_id="t", prompt_ids=np.array([1], np.int32), prompt_text="x", ground_truth=1, data_source="d")
TOOLS = ToolSettings(sources=("python",))


def loops_of(*names: str, tools: ToolSettings = TOOLS) -> Loops:
    setup = LoopSetup(tools=tools, environment=None)
    return Loops(SingleTurn(), default_path="single_turn", names=names, setup=setup)


def test_a_row_plays_the_loop_that_it_names() -> None:
    """B165: verl's names too."""
    loops = loops_of("mine=agent_loop.single_turn:SingleTurn")
    assert isinstance(loops.of(TASK), SingleTurn)
    for name in ("tool_calling", "tool_agent", "agent_loop.tool_calling:ToolCalling"):
        assert isinstance(loops.of(replace(TASK, agent_name=name)), ToolCalling)
    assert loops.of(replace(TASK, agent_name="mine")) is loops.of(TASK)


def test_a_name_that_no_loop_answers_to_is_an_error_at_load() -> None:
    """B165"""
    with pytest.raises(ConfigError, match="task t: agent_name: got 'tool_agnt', expected one of single_turn"):
        loops_of().check([TASK, replace(TASK, agent_name="tool_agnt")])
    with pytest.raises(LoopError, match="got 'other'"):
        loops_of().of(replace(TASK, agent_name="other"))
    with pytest.raises(ConfigError, match="expected NAME=module:Class"):
        loops_of("mine")


def test_tools_that_no_row_calls_are_a_warning() -> None:
    """B165"""
    with structlog.testing.capture_logs() as logs:
        loops_of().check([TASK])
    assert [entry["event"] for entry in logs] == ["tools are set, and no row plays an agent loop that calls them"]
    with structlog.testing.capture_logs() as logs:
        loops_of().check([TASK, replace(TASK, agent_name="tool_calling")])
    assert logs == []


def test_a_template_that_no_rollout_of_a_loop_could_use_stops_the_run_before_anything_is_generated() -> None:
    """B60"""
    family = FAMILIES["qwen2.5"]
    refusing = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('user or assistant') }}{% endif %}{% endfor %}"
    )
    codec = make_codec(replace(family, template=refusing + family.template))
    loops = loops_of()
    loops.check_template(codec)
    loops.check([replace(TASK, agent_name="tool_calling")])
    words = r"agent loop agent_loop.tool_calling:ToolCalling: .* refuses messages of role tool .*user or assistant.*no rollout"
    with pytest.raises(ConfigError, match=words):
        loops.check_template(codec)
    with pytest.raises(ConfigError, match="the model has no chat template"):
        loops.check_template(make_codec(replace(family, template="")))


def test_what_a_template_does_to_conversations_is_said_once_with_what_follows() -> None:
    """B59, B60"""
    loops = loops_of("mine=agent_loop.tool_calling:ToolCalling", "other=agent_loop.tool_calling:ToolCalling")
    loops.check([replace(TASK, agent_name=name) for name in ("mine", "other", "tool_calling")])
    with structlog.testing.capture_logs() as logs:
        loops.check_template(make_codec(FAMILIES["deepseek"]))
    assert [(entry["event"], entry["trait"], entry["log_level"]) for entry in logs] == [
        ("chat template", "tools not told", "warning"),
        ("chat template", "history rewritten", "warning"),
    ]
    assert "tools.history=append" in logs[1]["follows"]
