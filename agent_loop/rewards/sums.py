"""Rewards of arithmetic: GSM8K's final number, and countdown's equation.

Invariant: an equation is parsed, never evaluated as Python; its arithmetic is exact.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from agent_loop.errors import BadGroundTruth
from agent_loop.rewards.texts import number_in, tagged_answer

_FINAL = re.compile(r"####\s*(-?\$?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")
_MAX_EQUATION_CHARS = 500


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> float:
    """1.0 if the reply's final number is the ground truth's, else 0.0.

    The final number stands after the last `####`; without one, and unless `strict`, it is the last number of the reply. The
    ground truth is a number or a worked solution that ends with `#### number`.
    """
    marked = _FINAL.findall(str(ground_truth))
    expected = number_in(marked[-1] if marked else str(ground_truth))
    if expected is None:
        raise BadGroundTruth(f"gsm8k: got ground truth {ground_truth!r} from {data_source}, expected a number")
    found = _FINAL.findall(solution_str) or ([] if strict else _NUMBER.findall(solution_str))
    return 1.0 if found and number_in(found[-1]) == expected else 0.0


def countdown(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    use_all: bool = True,
) -> float:
    """1.0 if `<answer>` holds an equation of the given numbers that makes the target, `format_score` if it holds an equation
    at all, 0.0 without one.

    The ground truth is `{"target": 98, "numbers": [44, 19, 35]}`. Each number is used once: all of them, or, without
    `use_all`, some of them. Operators: + - * / and brackets; `= 98` at the end is allowed.
    """
    try:
        target = Fraction(str(ground_truth["target"]))
        numbers = Counter(Fraction(str(number)) for number in ground_truth["numbers"])
    except (TypeError, KeyError, ValueError) as error:
        raise BadGroundTruth(
            f"countdown: got ground truth {ground_truth!r} from {data_source}, expected target and numbers"
        ) from error
    answer = tagged_answer(solution_str)
    if answer is None:
        return 0.0
    used: Counter[Fraction] = Counter()
    try:
        value = _value(_equation(answer), used)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    except ZeroDivisionError:
        return format_score
    fits = used == numbers if use_all else used <= numbers
    return 1.0 if fits and value == target else format_score


def _equation(text: str) -> ast.expr:
    left = text.split("=", 1)[0].replace("×", "*").replace("÷", "/").replace("−", "-").strip()
    if len(left) > _MAX_EQUATION_CHARS:
        raise ValueError("too long for an equation")
    return ast.parse(left, mode="eval").body


def _value(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    """The value of an expression, and in `used` the numbers that stand in it. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            exact = Fraction(str(number))
            used[exact] += 1
            return exact
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left, used), _value(right, used)
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div():
                    return one / other
    raise ValueError(f"{type(node).__name__} is no arithmetic")
