"""Agent loops enter by dotted path."""

from __future__ import annotations

import pytest

from agent_loop.errors import LoopError
from agent_loop.loop import load_agent_loop
from agent_loop.single_turn import SingleTurn


def test_the_shipped_loop_loads() -> None:
    assert isinstance(load_agent_loop("agent_loop.single_turn:SingleTurn"), SingleTurn)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("SingleTurn", ", or `module:Class`"),
        ("no.such.module:Loop", "does not import"),
        ("agent_loop.single_turn:Nothing", "expected a class with"),
        ("agent_loop.loop:load_agent_loop", "expected a class with"),
    ],
)
def test_a_path_that_leads_nowhere_says_so(path: str, words: str) -> None:
    """B165"""
    with pytest.raises(LoopError, match=words):
        load_agent_loop(path)
