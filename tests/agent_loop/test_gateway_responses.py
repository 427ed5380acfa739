"""`/v1/responses`, asked by the real `openai` client and by `openai-agents`: the same conversations in other words."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pytest

from tests.agent_loop.test_gateway import CODEC, END, said, serve

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
TOOL: Any = {"type": "function", "name": "multiply", "description": "Multiplies.", "parameters": {"type": "object"}}


async def respond(served: Any, found: Any, **more: Any) -> Any:
    return await served.client.responses.create(model="policy", input=found, **more)


async def test_a_response_goes_on_from_another_by_its_id() -> None:
    async with serve(said("four"), said("six")) as served:
        first = await respond(served, "2+2", instructions="Be short.")
        assert (first.output_text, first.status) == ("four", "completed")
        assert first.usage.output_tokens == len(CODEC.encode("four" + END))
        second = await respond(served, "3+3", instructions="Be short.", previous_response_id=first.id)
        assert second.output_text == "six"
        assert served.session.trajectory().segment_starts.tolist() == [0]
        assert served.trained == f"four{END}six{END}"


async def test_other_instructions_begin_a_segment() -> None:
    async with serve(said("four"), said("six")) as served:
        first = await respond(served, "2+2", instructions="Be short.")
        await respond(served, "3+3", previous_response_id=first.id)
        assert "Be short." not in CODEC.decode_whole(served.engine.prompts[1])
        assert served.session.trajectory().segment_starts.size == 2


async def test_items_sent_back_are_the_same_conversation() -> None:
    async with serve(said(f"so {CALL}"), said("6")) as served:
        first = await respond(served, [{"role": "user", "content": "2*3"}], tools=[TOOL])
        text, call = first.output
        assert (text.content[0].text, call.name, call.arguments) == ("so", "multiply", '{"a": 2, "b": 3}')
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2*3"}]}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [{"type": "reasoning", "id": "rs_1", "summary": []}]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "6"}]
        second = await respond(served, items, tools=[TOOL])
        assert second.output_text == "6"
        assert served.session.trajectory().segment_starts.tolist() == [0]
        assert served.trained == f"so {CALL}{END}6{END}"


async def test_a_turn_that_the_limit_cut_is_incomplete() -> None:
    """B66."""
    async with serve(said("fo", end=False)) as served:
        answer = await respond(served, "x", max_output_tokens=5, include=["message.output_text.logprobs"])
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [one.logprob for one in answer.output[0].content[0].logprobs] == pytest.approx([-0.01, -0.02])


async def test_the_events_of_a_stream_build_the_same_answer() -> None:
    async with serve(said(f"so {CALL}")) as served:
        async with served.client.responses.stream(model="policy", input="2*3", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert "response.function_call_arguments.done" in kinds
        assert (answer.output_text, answer.output[1].name) == ("so", "multiply")


@pytest.mark.parametrize(
    ("found", "more", "param"),
    [
        ("", {}, "input"),
        ([], {}, "input"),
        ([{"type": "computer_call"}], {}, "input.0"),
        ([{"role": "robot", "content": "x"}], {}, "input.0"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], {}, "input.0.content"),
        ("x", {"tools": [{"type": "web_search"}]}, "tools"),
        ("x", {"background": True}, "background"),
        ("x", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("x", {"top_p": 0.5}, "top_p"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(found: Any, more: dict[str, Any], param: str) -> None:
    async with serve() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await respond(served, found, **more)
        assert caught.value.param == param


async def test_a_response_of_another_session_is_unknown() -> None:
    async with serve() as served:
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            await respond(served, "x", previous_response_id="resp_1")


@agents.function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_of_a_framework_by_its_default_interface(streamed: bool) -> None:
    agents.set_tracing_disabled(True)
    async with serve(said(CALL), said("It is 6")) as served:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=served.client)
        agent = agents.Agent(name="maths", instructions="Use the tool.", model=model, tools=[multiply])
        if streamed:
            run = agents.Runner.run_streamed(agent, "2*3")
            async for _ in run.stream_events():
                pass
            answer = run.final_output
        else:
            answer = (await agents.Runner.run(agent, "2*3")).final_output
        assert answer == "It is 6"
        assert served.trained == f"{CALL}{END}It is 6{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]
