"""The MATH reward: equality of mathematical expressions, by math-verify.

Invariant: math-verify's own time limits are off, for they use signals and fail outside a main thread, where a broad `except`
would turn that into 0; the deadline is the reward process's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.errors import BadGroundTruth

_MAX_CHARS = 20_000
"""Of a reply, its end: the final answer stands there, and extraction is slower than linear."""


def math_equal(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the final answer of the reply (boxed, or the last expression) equals the ground truth, else 0.0.

    The ground truth is LaTeX or a plain expression, with or without `\\boxed` or `$`.
    """
    from math_verify import parse, verify

    gold = parse(_as_latex(str(ground_truth)), parsing_timeout=None)
    if not gold:
        raise BadGroundTruth(f"math_equal: got ground truth {ground_truth!r} from {data_source}, expected an expression")
    answer = parse(solution_str[-_MAX_CHARS:], parsing_timeout=None)
    return 1.0 if answer and verify(gold, answer, timeout_seconds=None) else 0.0


def _as_latex(text: str) -> str:
    return text if "\\boxed" in text or "$" in text else f"${text}$"


math_equal.self_test = (("So it is \\boxed{1/3}.", "1/3"), ("$x = \\frac{1}{2}$", "0.5"))  # type: ignore[attr-defined]
