"""Arguments of calls against the JSON schemas of tools, which may be anybody's (an MCP server's).

Invariant: nothing is ever fetched, and a schema that cannot be checked is refused when it is loaded, not when it is used. What
may take long, patterns and large arguments, is said to be so, for the caller to keep it off its event loop; a pattern ends in
time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema
import regex

from agent_loop.errors import ToolError, words_of

_PATTERN_WITHIN_S = 0.1
_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""
_QUOTED = 300
_LARGE_NODES = 200
_LARGE_CHARACTERS = 20_000


class ArgumentCheck:
    """Of one tool."""

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Raises ToolError naming the tool, and what of its schema cannot be checked."""
        self._name = name
        schema = _without_pattern_properties(dict(parameters))
        try:
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            kind.check_schema(schema, format_checker=jsonschema.FormatChecker(()))  # `_look_at` sees to patterns
            self._validator = _bounded(kind)(schema, registry=referencing.jsonschema.EMPTY_REGISTRY)
            self._has_patterns = _look_at(schema)
        except jsonschema.SchemaError as error:
            where = "".join(f"[{part!r}]" for part in error.absolute_path)
            raise ToolError(f"tool {name}: its schema{where} is none: {error.message[:_QUOTED]}") from error
        except Exception as error:
            raise ToolError(f"tool {name}: its schema cannot be checked: {words_of(error)[:_QUOTED]}") from error

    def may_take_long(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the check of these is nothing for an event loop."""
        return self._has_patterns or _is_large(arguments)

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Why they do not fit, in words for the model. Never raises."""
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(dict(arguments)))
        except Exception as raised:  # noqa: BLE001 - a value that the library stumbles over, as over the depth of one
            return f"the arguments of {self._name} cannot be checked: {words_of(raised)[:_QUOTED]}"
        if error is None:
            return None
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"the arguments of {self._name}{where} do not fit: {error.message[:_QUOTED]}"


@functools.cache
def _bounded(kind: Any) -> Any:
    return jsonschema.validators.extend(kind, {"pattern": _pattern})


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if not validator.is_type(instance, "string"):
        return
    try:
        if regex.search(pattern, instance, timeout=_PATTERN_WITHIN_S, concurrent=True) is None:
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")
    except TimeoutError:
        yield jsonschema.ValidationError(f"{instance!r} takes too long to be matched with {pattern!r}")


def _look_at(schema: Any) -> bool:
    """Whether it has patterns. Raises what a pattern that is none, or a reference to nowhere, raises."""
    resource = referencing.Resource.from_contents(schema, default_specification=referencing.jsonschema.DRAFT202012)
    resolver = referencing.jsonschema.EMPTY_REGISTRY.resolver_with_root(resource)
    found, has_patterns = [schema], False
    while found:
        one = found.pop()
        if isinstance(one, list):
            found += one
        if not isinstance(one, Mapping):
            continue
        for key, value in one.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                resolver.lookup(value)
            elif key == "pattern" and isinstance(value, str):
                regex.compile(value)
                has_patterns = True
            elif key not in _DATA:
                found.append(value)
    return has_patterns


def _without_pattern_properties(schema: Any) -> Any:
    """Patterns of names are left to the tool: their matching knows no deadline."""
    if isinstance(schema, list):
        return [_without_pattern_properties(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = {"patternProperties", "additionalProperties", "unevaluatedProperties"}
    if not isinstance(schema.get("patternProperties"), dict):
        left_out = set()
    return {
        key: value if key in _DATA else _without_pattern_properties(value)
        for key, value in schema.items()
        if key not in left_out
    }


def _is_large(value: Any) -> bool:
    found, num_nodes, num_characters = [value], 0, 0
    while found:
        one = found.pop()
        num_nodes += 1
        if isinstance(one, str):
            num_characters += len(one)
        elif isinstance(one, Mapping):
            found += one.values()
        elif isinstance(one, list):
            found += one
        if num_nodes + len(found) > _LARGE_NODES or num_characters > _LARGE_CHARACTERS:
            return True
    return False
