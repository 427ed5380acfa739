"""What travels between a client and vLLM's `/inference/v1/generate`: token ids and numbers, never text.

Invariant: a decoded generation holds exactly what the engine sampled. A log-probability is that of the sampled token, found by
its id; one that is missing, not finite or vLLM's stand-in for either is an error, never a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from agent_loop.engine import NO_VERSION, Generation, SamplingParams, TurnEnd
from agent_loop.errors import BadGeneration

STAND_IN_LOGPROB = -9999.0
"""What vLLM sends for a log-probability that is NaN, -inf or not there."""
UNLABELLED = "default"
"""vLLM's weight version before the first update."""
_LARGEST = int(np.iinfo(np.int32).max)
_ENDS: dict[str, TurnEnd] = {"stop": "stop", "length": "length", "abort": "abort"}


def encode_request(
    prompt_ids: npt.NDArray[np.int32],
    sampling: SamplingParams,
    *,
    request_id: str,
    cache_salt: str | None = None,
    num_logprobs: int = 0,
    model: str | None = None,
    scores_prompt: bool = False,
) -> bytes:
    """JSON body. `num_logprobs` 0 asks for the sampled token's log-probability only; `scores_prompt` for the prompt's too."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": num_logprobs,
        "detokenize": False,
    }
    if scores_prompt:
        parameters["prompt_logprobs"] = 0
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    body: dict[str, Any] = {"request_id": request_id, "token_ids": prompt_ids.tolist(), "sampling_params": parameters}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if model is not None:
        body["model"] = model
    return orjson.dumps(body)


def decode_response(body: bytes, *, request_id: str) -> Generation:
    """The one generation of a response. Raises BadGeneration naming what is wrong.

    A request that went on under new weights was frozen with its KV cache: every run after its first is `kept_cache`.
    """
    choice = decode_choice(body, request_id=request_id)
    token_ids = _integers(choice.get("token_ids"), "token_ids", request_id)
    reason = choice.get("finish_reason")
    end = _ENDS.get(reason) if isinstance(reason, str) else None
    if end is None:
        raise BadGeneration(f"request {request_id}: got finish_reason {reason!r}, expected one of {list(_ENDS)}")
    starts, versions = _version_runs(choice.get("weight_versions"), len(token_ids), request_id)
    generation = Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(_logprobs(choice.get("logprobs"), token_ids, request_id), np.float32),
        version_starts=np.array(starts, np.int32),
        versions=np.array(versions, np.int32),
        kept_cache=(np.arange(len(versions)) > 0).astype(np.uint8),
        stop_reason=end,
    )
    generation.validate(request_id)
    return generation


def decode_prompt_logprobs(body: bytes, token_ids: list[int], *, request_id: str) -> list[float]:
    """Log-probability of each prompt token but the first, whatever the sampling temperature. Raises BadGeneration."""
    try:
        entries = orjson.loads(body)["prompt_logprobs"]
        scored = [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], entries[1:], strict=True)]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise BadGeneration(
            f"request {request_id}: got {body[:200]!r}, expected prompt_logprobs of {len(token_ids)}"
        ) from error
    if not all(logprob > STAND_IN_LOGPROB for logprob in scored):
        raise BadGeneration(f"request {request_id}: got prompt logprobs {scored[:10]}, expected finite numbers")
    return scored


def decode_choice(body: bytes, *, request_id: str) -> dict[str, Any]:
    """The only choice of a response, as parsed JSON. Raises BadGeneration."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadGeneration(f"request {request_id}: got no JSON ({error}): {body[:200]!r}") from error
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadGeneration(f"request {request_id}: got {body[:200]!r}, expected an object with one choice")
    choice: dict[str, Any] = choices[0]
    return choice


def _integers(value: Any, name: str, request_id: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= _LARGEST for item in value):
        raise BadGeneration(f"request {request_id}: got {str(value)[:200]} as {name}, expected a list of token ids")
    return value


def _logprobs(value: Any, token_ids: list[int], request_id: str) -> list[float]:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        if not token_ids:
            return []
        raise BadGeneration(f"request {request_id}: got no logprobs for {len(token_ids)} tokens, expected one for each")
    if len(content) != len(token_ids):
        raise BadGeneration(f"request {request_id}: got {len(content)} logprobs, expected {len(token_ids)}, one for each token")
    return [_logprob_of(token, entry, at, request_id) for at, (token, entry) in enumerate(zip(token_ids, content, strict=True))]


def _logprob_of(token: int, entry: Any, at: int, request_id: str) -> float:
    """The sampled token's own entry: the position's, or one of its alternatives, whichever bears the token's id."""
    alternatives = entry.get("top_logprobs") if isinstance(entry, dict) else None
    for candidate in (entry, *(alternatives if isinstance(alternatives, list) else ())):
        if isinstance(candidate, dict) and candidate.get("token_id") == token:
            logprob = candidate.get("logprob")
            if isinstance(logprob, (int, float)) and not isinstance(logprob, bool) and logprob > STAND_IN_LOGPROB:
                return float(logprob)
            raise BadGeneration(f"request {request_id}: got logprob {logprob} at token {at}, expected a finite number")
    raise BadGeneration(f"request {request_id}: got no logprob for token {at} (id {token}) in {str(entry)[:200]}")


def _version_runs(value: Any, num_tokens: int, request_id: str) -> tuple[list[int], list[int]]:
    if num_tokens == 0:
        return [], []
    if not isinstance(value, list) or not value:
        raise BadGeneration(f"request {request_id}: got {value!r} as weight_versions, expected spans over {num_tokens} tokens")
    starts: list[int] = []
    versions: list[int] = []
    end = 0
    for span in value:
        start, stop = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if type(start) is not int or type(stop) is not int or start != end or stop < start:
            raise BadGeneration(f"request {request_id}: got weight_versions {value}, expected spans without gap or overlap")
        if stop == start:
            continue
        version = _version_of(span.get("version"), request_id)
        if not versions or versions[-1] != version:
            starts.append(end)
            versions.append(version)
        end = stop
    if end != num_tokens:
        raise BadGeneration(f"request {request_id}: got weight_versions up to token {end}, expected up to {num_tokens}")
    return starts, versions


def _version_of(label: Any, request_id: str) -> int:
    if label == UNLABELLED:
        return NO_VERSION
    if isinstance(label, str) and label.isdecimal() and int(label) <= _LARGEST:
        return int(label)
    raise BadGeneration(f"request {request_id}: got weight version {label!r}, expected a policy version or {UNLABELLED!r}")
