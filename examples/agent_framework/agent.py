"""An agent of `openai-agents`, as its documentation would have it: instructions, a tool, and nothing of Headrace."""

from __future__ import annotations

import re

from agents import Agent, function_tool


def calculator(expression: str) -> str:
    """Multiplies whole numbers.

    Args:
        expression: such as `12*34`.
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    return str(int(match[1]) * int(match[2])) if match else f"Error: got {expression}"


MATHS = Agent(name="maths", tools=[function_tool(calculator)])
