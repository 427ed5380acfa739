"""Schemas of tools, which may be anybody's: refused when they are loaded, or harmless."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from agent_loop.errors import ToolError
from agent_loop.tool_schema import ArgumentCheck


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (of(a={"type": "string", "pattern": "(a"}), "cannot be checked"),
        (of(a={"$ref": "#/$defs/no"}), "cannot be checked"),
        (of(a={"$ref": "http://127.0.0.1:9/x.json"}), "cannot be checked"),
        (of(a={"items": {"$ref": "file:///etc/passwd"}}), "cannot be checked"),
        (of(a={"type": "strin"}), r"\['properties'\]\['a'\].* is none"),
        (of(a={"multipleOf": 0}), r"\['multipleOf'\] is none"),
        ({"type": "object", "properties": 5}, r"\['properties'\] is none: 5 is not of type 'object'"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_by_the_name_of_its_tool(schema: Any, words: str) -> None:
    with pytest.raises(ToolError, match=f"tool far: its schema.*{words}"):
        ArgumentCheck("far", schema)


def test_a_reference_to_elsewhere_is_not_followed() -> None:
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)

        def take() -> None:
            try:
                server.accept()[0].close()
            except TimeoutError:
                return
            asked.set()

        taking = threading.Thread(target=take)
        taking.start()
        with pytest.raises(ToolError):
            ArgumentCheck("far", of(a={"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/x.json"}))
        taking.join(10)
    assert not asked.is_set()


def test_references_within_are_followed_also_in_circles() -> None:
    tree = {"$defs": {"tree": of(left={"$ref": "#/$defs/tree"}, value={"type": "integer"})}, "$ref": "#/$defs/tree"}
    check = ArgumentCheck("plant", tree)
    assert check.problem({"left": {"left": {"value": 3}}}) is None
    assert "['left']['value'] do not fit" in str(check.problem({"left": {"value": "x"}}))
    assert "cannot be checked: RecursionError" in str(ArgumentCheck("round", {"$ref": "#"}).problem({}))


def test_a_pattern_that_would_take_for_ever_is_given_up() -> None:
    check = ArgumentCheck("find", of(text={"type": "string", "pattern": "^(a+)+$"}))
    assert check.may_take_long({"text": "a"})
    assert check.problem({"text": "aaa"}) is None
    assert "do not fit" in str(check.problem({"text": "a" * 60 + "b"}))


def test_patterns_are_those_of_json_schemas() -> None:
    check = ArgumentCheck("find", of(text={"type": "string", "pattern": r"^\p{L}+$"}))
    assert check.problem({"text": "Straße"}) is None
    assert "does not match" in str(check.problem({"text": "1"}))


def test_patterns_of_names_are_left_to_the_tool() -> None:
    schema = {"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False}
    assert ArgumentCheck("find", schema).problem({"a" * 60 + "b": 1}) is None


@pytest.mark.parametrize("value", [10**400, "\x00", {"a": [None] * 300}, "x" * 30_000])
def test_no_value_makes_the_check_fail(value: Any) -> None:
    check = ArgumentCheck("five", of(n={"multipleOf": 0.5, "type": ["number", "string", "object"]}))
    check.problem({"n": value})
    assert check.may_take_long({"n": value}) == (value in ({"a": [None] * 300}, "x" * 30_000))
