"""reasoning-gym's own scorers.

Invariant: an answer is scored against the entry that the row was made from: the same family, configuration and number. If
another release makes another entry of these, that is an error, not a wrong answer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import BadGroundTruth, RewardError
from agent_loop.rewards.texts import tagged_answer

_UNBUILT = ("cellpylib", "pycosat", "zss")
"""Requirements without a wheel: a few families need one, and all would fail to import for want of them."""
_IMPORTING = threading.Lock()
"""Environments' threads import it at once."""


def reasoning_gym(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """What the family's `score_answer` gives (0 to 1) for the last `<answer>…</answer>` of the reply, else for the whole reply.

    `extra_info["reasoning_gym"]` names the entry: `{"name", "config", "index"}`, as rows of `reasoning_gym:NAME` have it. Other
    rows need `metadata` with `source_dataset`, as the package itself gives it.
    """
    info = extra_info or {}
    answer = tagged_answer(solution_str)
    answer = solution_str.strip() if answer is None else answer
    recipe, metadata = info.get("reasoning_gym"), info.get("metadata")
    if isinstance(recipe, Mapping):
        config = json.dumps(dict(recipe.get("config") or {}), sort_keys=True)
        dataset = _dataset(str(recipe["name"]), config)
        entry = dataset[int(recipe["index"])]
        if str(entry["answer"]) != str(ground_truth):
            raise BadGroundTruth(
                f"reasoning_gym: got ground truth {str(ground_truth)[:100]!r} from {data_source}, and entry {recipe['index']} "
                f"of {recipe['name']} has {str(entry['answer'])[:100]!r}: made by another release?"
            )
        return float(dataset.score_answer(answer, entry))
    if isinstance(metadata, Mapping) and "source_dataset" in metadata:
        scorer = _import().get_score_answer_fn(str(metadata["source_dataset"]))
        entry = {"question": info.get("question", ""), "answer": ground_truth, "metadata": dict(metadata)}
        return float(scorer(answer, entry))
    raise BadGroundTruth(f"reasoning_gym: got no extra_info.reasoning_gym and no metadata.source_dataset from {data_source}")


@functools.lru_cache(maxsize=16)
def _dataset(name: str, config: str) -> Any:
    return _import().create_dataset(name, **{"seed": 0, **json.loads(config)})


def _import() -> Any:
    try:
        return import_reasoning_gym()
    except ImportError as error:
        raise RewardError(f"reasoning_gym does not import: {error}") from error


def import_reasoning_gym() -> Any:
    """The package, with empty modules in place of requirements that are not installed: only what uses one fails.

    Raises ImportError when it is not installed itself.
    """
    with _IMPORTING:
        added = [missing for missing in _UNBUILT if missing not in sys.modules and importlib.util.find_spec(missing) is None]
        for missing in added:
            sys.modules[missing] = types.ModuleType(missing)
        try:
            return importlib.import_module("reasoning_gym")
        finally:
            for missing in added:
                del sys.modules[missing]
