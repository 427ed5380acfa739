"""Products of two numbers, a calculator, and the reward.

The model is not able to multiply. It has to write a call that the calculator understands, with the numbers of the question in
it, and to give the result as its answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def rows() -> list[dict[str, Any]]:
    """One row for each two factors from 11 to 60."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{a}*{b}"}],
            "ground_truth": str(a * b),
            "data_source": "products",
            "task_id": f"products/{a}*{b}",
        }
        for a in range(11, 61)
        for b in range(11, 61)
    ]


def calculator(expression: str) -> str:
    """Multiplies whole numbers.

    Args:
        expression: such as `12*34`.
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    if match is None:
        raise ValueError(f"got {expression!r}, expected two numbers with * between them")
    return str(int(match[1]) * int(match[2]))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1 for the right product as the last thing that was said, else 0."""
    answer = solution_str.rsplit("assistant\n", 1)[-1].strip()
    return 1.0 if answer == ground_truth else 0.0
