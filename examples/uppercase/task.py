"""Rows and reward, as Headrace finds them by dotted path.

A row has `prompt` and `ground_truth`; the reward has the signature that verl's users know. Partial credit is given for the
share of leading letters that are right, so that a near miss is worth more than nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = """
apple bread chair cloud dance earth field glass grape green heart horse house juice knife lemon light money mouse music
night ocean paper peach piano plant queen river salad sheep shirt smile snake spoon stone storm sugar table tiger toast
tower train water whale wheel world
"""
WORDS = _TEXT.split()
SHOTS = "cat:CAT\nmilk:MILK\nbird:BIRD\n"


def rows() -> list[dict[str, Any]]:
    """One row a word, after three examples."""
    return [{"prompt": f"{SHOTS}{word}:", "ground_truth": word.upper(), "data_source": "uppercase"} for word in WORDS]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1 for the word in capitals on the first line, else half the share of its leading letters that are right."""
    answer = solution_str.split("\n")[0].strip()
    if answer == ground_truth:
        return 1.0
    right = 0
    for got, expected in zip(answer, ground_truth, strict=False):
        if got != expected:
            break
        right += 1
    return 0.5 * right / len(ground_truth)
