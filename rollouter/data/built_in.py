"""Tasks that need no file: sums of two digits, digits to be sorted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

NUM_SORT_ROWS = 4096
NUM_SORT_DIGITS = 5
ADDITION_SHOTS = "2+3=5\n4+1=5\n6+2=8\n"


def addition() -> Iterator[dict[str, Any]]:
    """The 81 sums of two digits from 1 to 9, each after three solved ones."""
    for a in range(1, 10):
        for b in range(1, 10):
            yield {
                "prompt": f"{ADDITION_SHOTS}{a}+{b}=",
                "ground_truth": str(a + b),
                "data_source": "addition",
                "extra_info": {"a": a, "b": b},
                "task_id": f"addition/{a}+{b}",
            }


def sort() -> Iterator[dict[str, Any]]:
    """Distinct strings of digits to be sorted, `s52713=` → `12357`; the same ones for every run."""
    random_digits = random.Random("headrace sort")
    seen: set[str] = set()
    while len(seen) < NUM_SORT_ROWS:
        digits = "".join(random_digits.choices("0123456789", k=NUM_SORT_DIGITS))
        if digits in seen:
            continue
        seen.add(digits)
        yield {
            "prompt": f"s{digits}=",
            "ground_truth": "".join(sorted(digits)),
            "data_source": "sort",
            "extra_info": {"digits": digits},
            "task_id": f"sort/{digits}",
        }


BUILT_IN: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {"addition": addition, "sort": sort}
