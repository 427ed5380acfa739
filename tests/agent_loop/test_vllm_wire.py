"""The generate route's JSON: the sampled token's own log-probability, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import NO_VERSION, SamplingParams
from agent_loop.errors import BadGeneration
from agent_loop.vllm_wire import decode_prompt_logprobs, decode_response, encode_request


def entry(token: int, logprob: Any, *top: tuple[int, Any]) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, "top_logprobs": [{"token_id": t, "logprob": value} for t, value in top]}


def response(tokens: list[int], content: list[Any] | None, *, end: str = "length", spans: Any = "whole") -> bytes:
    if spans == "whole":
        spans = [{"version": "3", "start": 0, "end": len(tokens)}]
    choice = {"token_ids": tokens, "finish_reason": end, "logprobs": {"content": content}, "weight_versions": spans}
    return orjson.dumps({"choices": [choice]})


def test_a_request_asks_for_ids_and_the_sampled_logprob_only() -> None:
    sampling = SamplingParams(temperature=0.6, max_tokens=4, stop_token_ids=(2, 9), seed=5)
    body = orjson.loads(encode_request(np.array([1, 2], np.int32), sampling, request_id="r", cache_salt="v1"))
    assert body["token_ids"] == [1, 2]
    assert body["cache_salt"] == "v1"
    assert body["sampling_params"] == {
        "temperature": 0.6, "max_tokens": 4, "stop_token_ids": [2, 9], "logprobs": 0, "detokenize": False, "seed": 5,
    }  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_logprob_is_found_by_the_sampled_tokens_id(order: tuple[int, int]) -> None:
    """B53: the map holds the likeliest token and the sampled one, in either order."""
    both = [(8, -0.1), (5, -4.2)]
    top = [both[index] for index in order]
    got = decode_response(response([5], [entry(top[0][0], top[0][1], *top)]), request_id="r")
    assert got.logprobs.tolist() == pytest.approx([-4.2])


def test_a_logprob_of_another_token_is_refused() -> None:
    """B53"""
    with pytest.raises(BadGeneration, match="no logprob for token 0"):
        decode_response(response([5], [entry(8, -0.1, (8, -0.1))]), request_id="r")


@pytest.mark.parametrize("count", [4, 6])
def test_a_generation_with_too_few_or_too_many_logprobs_is_refused(count: int) -> None:
    """B54: never padded, never cut."""
    with pytest.raises(BadGeneration, match=f"got {count} logprobs, expected 5"):
        decode_response(response([1, 2, 3, 4, 5], [entry(1, -0.1)] * count), request_id="r")


def test_missing_logprobs_are_refused() -> None:
    """B54"""
    with pytest.raises(BadGeneration, match="no logprobs"):
        decode_response(response([1], None), request_id="r")


@pytest.mark.parametrize("value", [None, "NaN", -9999.0, -1e6, {}])
def test_a_logprob_that_is_no_finite_number_is_refused(value: Any) -> None:
    """B55: None, NaN, and the number that vLLM puts in place of NaN and -inf."""
    content = [entry(1, -0.1), entry(2, value), entry(3, -0.1)]
    with pytest.raises(BadGeneration, match="token 1, expected a finite number"):
        decode_response(response([1, 2, 3], content), request_id="r")


def test_a_bare_nan_is_refused() -> None:
    """B55: not JSON at all."""
    with pytest.raises(BadGeneration, match="got no JSON"):
        decode_response(response([1], [entry(1, -0.25)]).replace(b"-0.25", b"NaN"), request_id="r")


def test_version_spans_become_runs() -> None:
    spans = [
        {"version": "default", "start": 0, "end": 0}, {"version": "7", "start": 0, "end": 2},
        {"version": "7", "start": 2, "end": 3}, {"version": "9", "start": 3, "end": 5},
    ]  # fmt: skip
    got = decode_response(response([1] * 5, [entry(1, -0.1)] * 5, spans=spans), request_id="r")
    assert (got.version_starts.tolist(), got.versions.tolist(), got.kept_cache.tolist()) == ([0, 3], [7, 9], [0, 1])


def test_tokens_of_the_weights_an_engine_was_started_with_have_no_version() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}]
    assert decode_response(response([1], [entry(1, -0.1)], spans=spans), request_id="r").versions.tolist() == [NO_VERSION]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [{"version": "1", "start": 0, "end": 1}],
        [{"version": "1", "start": 1, "end": 2}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 2}],
        [{"version": "one", "start": 0, "end": 2}],
        [{"version": "1", "begin": 0}],
        [3],
    ],
)
def test_spans_that_do_not_cover_the_tokens_exactly_are_refused(spans: Any) -> None:
    with pytest.raises(BadGeneration):
        decode_response(response([1, 1], [entry(1, -0.1)] * 2, spans=spans), request_id="r")


def test_an_abort_before_the_first_token_is_empty() -> None:
    got = decode_response(response([], None, end="abort", spans=None), request_id="r")
    assert (got.token_ids.size, got.versions.size, got.stop_reason) == (0, 0, "abort")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[1]}', b'{"choices":[{},{}]}', b"\xff"])
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(BadGeneration, match="request r"):
        decode_response(body, request_id="r")


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
keys = st.sampled_from(["content", "token_id", "logprob", "top_logprobs", "version", "start", "end"])
json_values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(json_values)
def test_no_json_makes_the_decoder_raise_anything_else(value: Any) -> None:
    for field in ("token_ids", "finish_reason", "logprobs", "weight_versions"):
        choice = orjson.loads(response([1, 2], [entry(1, -0.1), entry(2, -0.1)]))["choices"][0]
        choice[field] = value
        try:
            body = orjson.dumps({"choices": [choice]})
        except TypeError:
            continue
        try:
            decode_response(body, request_id="r").validate("r")
        except BadGeneration:
            pass


def test_a_request_may_name_an_adapter_and_have_its_prompt_scored() -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=1, seed=0)
    body = orjson.loads(
        encode_request(np.array([1, 2], np.int32), sampling, request_id="r", model="adapter", scores_prompt=True)
    )
    assert body["model"] == "adapter"
    assert body["sampling_params"]["prompt_logprobs"] == 0
    plain = orjson.loads(encode_request(np.array([1, 2], np.int32), sampling, request_id="r"))
    assert "model" not in plain
    assert "prompt_logprobs" not in plain["sampling_params"]


def scored(*entries: Any) -> bytes:
    return orjson.dumps({"prompt_logprobs": list(entries)})


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    """The likeliest token may stand beside each."""
    body = scored(None, {"7": {"logprob": -0.1}, "5": {"logprob": -2.5}}, {"6": {"logprob": -1.0}})
    assert decode_prompt_logprobs(body, [4, 5, 6], request_id="r") == [-2.5, -1.0]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        scored(),
        scored(None, {"7": {"logprob": -0.1}}),
        scored(None, {"5": {"logprob": -9999.0}}),
        scored(None, {"5": {"logprob": None}}),
        scored(None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -1.0}}),
    ],
)
def test_prompt_logprobs_that_are_not_all_there_are_an_error(body: bytes) -> None:
    with pytest.raises(BadGeneration, match="request r"):
        decode_prompt_logprobs(body, [4, 5], request_id="r")
