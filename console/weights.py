"""`headrace weights check`: whether every engine holds, and computes with, the trainer's weights."""

from __future__ import annotations

import asyncio
import sys

import orjson

from console.follow import attached
from console.run_dirs import LiveRun
from sample_bus.weight_checks import AskWeightCheck, EngineVerdict, Verdict, WeightCheck

_SHOWN = 20
_ATTACH_S = 5.0
"""For a trainer to answer at all."""
_MARGIN_S = 5.0
"""For the answer's own way, beyond the time that the engines have."""


def check(run: LiveRun, *, effective: bool, as_json: bool, timeout_s: float) -> int:
    """Print a line for each engine and the tensors in which it differs; 0 if every engine is equal, else 1.

    Raises NobodyAnswers, RequestFailed.
    """
    found = asyncio.run(_ask(run, AskWeightCheck(effective=effective, timeout_s=timeout_s)))
    if as_json:
        plain = {"is_equal": found.is_equal, **found.model_dump(mode="json")}
        sys.stdout.write(orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(as_text(found) + "\n")
    return 0 if found.is_equal else 1


def as_text(found: WeightCheck) -> str:
    """A line for each engine, then the differences as a table."""
    lines = [f"trainer: policy version {found.policy_version}, {found.num_tensors} tensors"]
    lines += [_line(engine, newest=found.policy_version) for engine in found.engines]
    lines += _table(found.engines)
    if not found.engines:
        lines.append("no engine answered")
    return "\n".join(lines)


def _line(engine: EngineVerdict, *, newest: int) -> str:
    words = [f"{engine.engine}: {engine.verdict}"]
    if engine.policy_version is not None:
        words.append(
            f"policy version {engine.policy_version}" + ("" if engine.policy_version == newest else f", not {newest} yet")
        )
    if engine.verdict in (Verdict.EQUAL, Verdict.DIFFERENT) and engine.num_tensors:
        words.append(f"{engine.num_tensors} checksums compared")
        if engine.num_effective is not None:
            words.append(f"{engine.num_effective} read back from the model and equal")
        if engine.num_unread:
            words.append(f"{engine.num_unread} could not be read back")
    if engine.num_differences:
        words.append(f"{engine.num_differences} differ")
    if engine.message:
        words.append(engine.message)
    return ", ".join(words)


def _table(engines: tuple[EngineVerdict, ...]) -> list[str]:
    rows = [
        (
            engine.engine if difference.worker == 0 else f"{engine.engine}/{difference.worker}",
            difference.name,
            difference.expected or "no such tensor",
            "computes with others" if difference.is_effective else difference.got or "no such tensor",
        )
        for engine in engines
        for difference in engine.differences
    ]
    if not rows:
        return []
    heads = ("engine", "tensor", "trainer", "engine's")
    shown = rows[:_SHOWN]
    widths = [max(len(row[column]) for row in (heads, *shown)) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *shown)]
    left = sum(engine.num_differences for engine in engines) - len(shown)
    return [*lines, f"and {left} more"] if left > 0 else lines


async def _ask(run: LiveRun, asked: AskWeightCheck) -> WeightCheck:
    async with attached(run.bus, run.address, timeout_s=min(asked.timeout_s, _ATTACH_S)) as link:
        return await link.request("weights.check", asked, WeightCheck, timeout_s=asked.timeout_s + _MARGIN_S)
