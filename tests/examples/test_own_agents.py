"""The agents of the examples, over the gateway: their conversations are trained as one segment; that they learn is seen by
running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agents
import pytest

from configs.loader import load
from examples.agent_framework.agent import MATHS
from examples.own_agent.agent import answer, calculator
from tests.agent_loop.test_gateway import END, said, serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>'


async def test_the_agent_of_the_openai_client_is_one_segment() -> None:
    async with serve(said(CALL), said("408")) as served:
        assert await answer(served.client, "12*34") == "408"
        assert served.trained == f"{CALL}{END}408{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]


async def test_the_agent_of_the_framework_is_one_segment() -> None:
    agents.set_tracing_disabled(True)
    async with serve(said(CALL), said("408")) as served:
        provider = agents.OpenAIProvider(openai_client=served.client)
        config = agents.RunConfig(model="policy", model_provider=provider)
        run: Any = await agents.Runner.run(MATHS, "12*34", run_config=config)
        assert run.final_output == "408"
        assert served.trained == f"{CALL}{END}408{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]


@pytest.mark.parametrize("name", ["own_agent", "agent_framework"])
def test_the_settings_start_the_program(name: str) -> None:
    settings = load(EXAMPLES / name / "run.yaml", environment={})
    assert settings.rollouter.agent_loop == "external"
    assert settings.gateway.command == ("python", "-m", f"examples.{name}.serve")


def test_the_calculator_multiplies() -> None:
    assert calculator("12*34") == "408"
    assert calculator("12+34").startswith("Error")
