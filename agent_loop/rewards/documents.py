"""The JSON-schema reward.

Invariant: only the reply's JSON is judged; a schema that is none is the row's fault, never the reply's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import BadGroundTruth

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
) -> float:
    """1.0 if the reply's JSON document fits `schema` (else the ground truth: a schema, or its text), else 0.0.

    The document is the last fenced block, else the whole reply. Duplicate keys, NaN and text around it make it none.
    """
    import jsonschema

    asked = ground_truth if schema is None else schema
    try:
        asked = json.loads(asked) if isinstance(asked, str) else asked
        validator = jsonschema.validators.validator_for(asked, default=jsonschema.Draft202012Validator)
        validator.check_schema(asked)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        raise BadGroundTruth(f"json_schema: got no schema from {data_source}: {type(error).__name__}: {error}") from error
    fenced = _FENCED.findall(solution_str)
    try:
        document = json.loads(
            fenced[-1] if fenced else solution_str, parse_constant=_refuse, object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if validator(asked).is_valid(document) else 0.0


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
