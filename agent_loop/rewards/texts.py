"""Rewards that compare texts: exact line, number, choice, pattern, format.

Invariant: pure and linear in the reply, but for `regex_match`, whose pattern is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from agent_loop.errors import BadGroundTruth

_CHOICE_WORDS = re.compile(
    r"(?:answer|choice|option)\b(?:\s+is\b)?\s*[:=]?[\s*_`$]*(?:\\boxed\{|\\text\{)*\(?([A-Za-z])\b(?![a-z'])", re.IGNORECASE
)
_CHOICE_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Za-z])\)?\s*\}")
_CHOICE_TAGGED = re.compile(r"<answer>\s*\(?([A-Za-z])\)?[.:]?\s*</answer>")
_CHOICE_ALONE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|answer)>")


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the first line of the reply, stripped, is the ground truth, else 0.0."""
    first_line = solution_str.split("\n", 1)[0].strip()
    return 1.0 if first_line == str(ground_truth).strip() else 0.0


def numeric_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the first line of the reply is the same number as the ground truth (`1,000` is `1000.0`), else 0.0."""
    expected = number_in(str(ground_truth))
    if expected is None:
        raise BadGroundTruth(f"numeric_match: got ground truth {ground_truth!r} from {data_source}, expected a number")
    return 1.0 if number_in(solution_str.split("\n", 1)[0]) == expected else 0.0


def choice(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 if the letter that the reply settles on is the ground truth's, else 0.0.

    Looked for in this order, each time the last one: `<answer>C</answer>`, `\\boxed{C}`, `answer is C`, a last line of one
    letter.
    """
    expected = str(ground_truth).strip().strip("().").upper()
    if len(expected) != 1 or not expected.isalpha():
        raise BadGroundTruth(f"choice: got ground truth {ground_truth!r} from {data_source}, expected one letter")
    return 1.0 if chosen_letter(solution_str) == expected else 0.0


def chosen_letter(text: str) -> str | None:
    """The letter that a reply to a multiple-choice question settles on, as a capital; None if it names none."""
    for pattern in (_CHOICE_TAGGED, _CHOICE_BOXED, _CHOICE_WORDS):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).upper()
    lines = text.strip().splitlines()
    alone = _CHOICE_ALONE.fullmatch(lines[-1].strip()) if lines else None
    return alone[1].upper() if alone else None


def regex_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    pattern: str | None = None,
    whole: bool = False,
) -> float:
    """1.0 if `pattern` (else the ground truth, as a pattern) is found in the reply, or is all of it, else 0.0."""
    asked = str(ground_truth) if pattern is None else pattern
    try:
        compiled = re.compile(asked, re.DOTALL)
    except re.error as error:
        raise BadGroundTruth(f"regex_match: got pattern {asked!r} from {data_source}: {error}") from error
    found = compiled.fullmatch(solution_str.strip()) if whole else compiled.search(solution_str)
    return 1.0 if found else 0.0


def think_answer_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 if the reply is `<think>…</think>` then `<answer>…</answer>`, each tag once, neither of them empty; else 0.0.

    A chat template that opens `<think>` itself is allowed for: the opening tag may be missing.
    """
    text = solution_str.strip()
    if text.startswith("<think>"):
        text = text.removeprefix("<think>")
    if _TAGS.findall(text) != ["</think>", "<answer>", "</answer>"] or not text.endswith("</answer>"):
        return 0.0
    thought, _, rest = text.partition("</think>")
    between, _, answer = rest.removesuffix("</answer>").partition("<answer>")
    return 1.0 if thought.strip() and answer.strip() and not between.strip() else 0.0


def tagged_answer(text: str) -> str | None:
    """What stands in the last `<answer>…</answer>`, stripped; None without one."""
    found = _TAGGED.findall(text)
    return str(found[-1]).strip() if found else None


def number_in(text: str) -> Decimal | None:
    """The finite number that `text` spells, thousands separators, a currency sign and a full stop aside."""
    try:
        number = Decimal(text.strip().replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
