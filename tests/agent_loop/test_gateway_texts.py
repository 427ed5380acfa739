"""`/v1/completions`, asked by the real `openai` client: what goes on from a text goes on from the tokens that were sampled."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.agent_loop.test_gateway import CODEC, END, said, serve


async def complete(served: Any, prompt: Any, **more: Any) -> Any:
    return await served.client.completions.create(model="policy", prompt=prompt, **more)


async def test_a_text_that_goes_on_from_a_cut_turn_is_one_segment() -> None:
    async with serve(said(" four", end=False), said("six")) as served:
        first = await complete(served, "2+2 is")
        assert (first.choices[0].text, first.choices[0].finish_reason) == (" four", "length")
        assert first.usage.prompt_tokens == len(CODEC.encode("2+2 is"))
        second = await complete(served, "2+2 is four, 3+3 is ")
        assert (second.choices[0].text, second.choices[0].finish_reason) == ("six", "stop")
        got = served.session.trajectory()
        assert got.segment_starts.tolist() == [0]
        assert served.trained == f" foursix{END}"


async def test_the_model_is_not_shown_an_end_that_the_program_goes_on_without() -> None:
    """B57, B58."""
    async with serve(said(" four"), said("six")) as served:
        await complete(served, "2+2 is")
        await complete(served, "2+2 is four, 3+3 is ")
        assert CODEC.decode_whole(served.engine.prompts[1]) == "2+2 is four, 3+3 is "
        assert served.session.trajectory().segment_starts.size == 2
        assert served.trained == f" four{END}six{END}"


async def test_token_ids_go_on_from_token_ids() -> None:
    async with serve(said("four"), said("six")) as served:
        ids = CODEC.encode("2+2 is")
        await complete(served, ids)
        longer = [*ids, *CODEC.encode(f"four{END}"), *CODEC.encode("3+3 is")]
        await complete(served, [longer])
        assert served.engine.prompts[1] == longer
        assert served.session.trajectory().segment_starts.tolist() == [0]


async def test_another_text_is_a_branch() -> None:
    async with serve(said("a"), said("b")) as served:
        await complete(served, "one")
        await complete(served, "two")
        assert served.session.trajectory().counts["branches"] == 1


async def test_a_text_and_its_logprobs_as_a_stream() -> None:
    async with serve(said("four"), said("four")) as served:
        whole = await complete(served, "x", logprobs=0)
        logprobs = whole.choices[0].logprobs
        assert "".join(logprobs.tokens) == f"four{END}"
        assert logprobs.token_logprobs == pytest.approx([-0.01 * (at + 1) for at in range(len(logprobs.tokens))])
        stream = await complete(served, "y", stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].text == "four"
        assert chunks[-1].usage.completion_tokens == len(logprobs.tokens)


@pytest.mark.parametrize(
    ("prompt", "more", "param"),
    [
        ("", {}, "prompt"),
        (["a", "b"], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([True], {}, "prompt"),
        ("x", {"echo": True}, "echo"),
        ("x", {"best_of": 2}, "best_of"),
        ("x", {"suffix": "z"}, "suffix"),
        ("x", {"logprobs": 5}, "logprobs"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"stop": ["."]}, "stop"),
    ],
)
async def test_what_cannot_be_sampled_so_is_refused_by_name(prompt: Any, more: dict[str, Any], param: str) -> None:
    async with serve() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(served, prompt, **more)
        assert caught.value.param == param


async def test_a_text_beyond_the_model_is_refused_and_the_rollout_goes_on() -> None:
    async with serve(said("a", end=False), said("b")) as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(served, "x " * 4000)
        assert caught.value.code == "context_length_exceeded"
        await complete(served, "x")
        with pytest.raises(openai.BadRequestError):
            await complete(served, "xa" + " y" * 4000)
        await complete(served, "xa y")
        assert served.trained == f"ab{END}"
