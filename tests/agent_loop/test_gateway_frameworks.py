"""An agent of a framework, unmodified but for its base URL: `openai-agents`."""

from __future__ import annotations

import agents
import pytest

from tests.agent_loop.test_gateway import END, said, serve


@agents.function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


@pytest.mark.parametrize("before", ["", "so "])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_a_tool_is_one_segment(before: str, streamed: bool) -> None:
    agents.set_tracing_disabled(True)
    text = f'{before}<tool_call>{{"name": "multiply", "arguments": {{"a": 2, "b": 3}}}}</tool_call>'
    async with serve(said(text), said("It is 6")) as served:
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=served.client)
        agent = agents.Agent(name="maths", instructions="Use the tool.", model=model, tools=[multiply])
        if streamed:
            run = agents.Runner.run_streamed(agent, "2*3")
            async for _ in run.stream_events():
                pass
            answer = run.final_output
        else:
            answer = (await agents.Runner.run(agent, "2*3")).final_output
        assert answer == "It is 6"
        assert served.trained == f"{text}{END}It is 6{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]
