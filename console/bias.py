"""`headrace status --bias`: what was trained, against what was weighted down or dropped for its age. Pure but for printing."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson

from console.follow import attached
from console.run_dirs import LiveRun
from sample_bus.messages import BiasPart, BiasReport, Spread
from sample_bus.spread import mean, quantile

_COLUMNS = ("trained", "down-weighted", "dropped")
_SOURCES = 8


def bias(run: LiveRun, *, as_json: bool, timeout_s: float) -> int:
    """Print the report of the run. Raises NobodyAnswers."""
    report = asyncio.run(_ask(run, timeout_s))
    if as_json:
        sys.stdout.write(orjson.dumps(bias_as_json(report), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(bias_as_text(report) + "\n")
    return 0


def bias_as_json(report: BiasReport) -> dict[str, Any]:
    """Figures of each part, its histograms left out."""
    return {name: _figures(part) for name, part in zip(_COLUMNS, _parts(report), strict=True)}


def bias_as_text(report: BiasReport) -> str:
    """A table: one column a fate, one row a figure."""
    parts = _parts(report)
    rows: list[tuple[str, list[str]]] = [("samples", [str(part.length.count) for part in parts])]
    for label, field, digits in (("trained tokens", "length", 1), ("reward", "reward", 3), ("turns", "turns", 2)):
        spreads: list[Spread] = [getattr(part, field) for part in parts]
        rows += [
            (f"{label}, mean", [_number(mean(spread), digits) for spread in spreads]),
            (f"{label}, p50", [_number(quantile(spread, 0.5), digits) for spread in spreads]),
            (f"{label}, p90", [_number(quantile(spread, 0.9), digits) for spread in spreads]),
        ]
    names = sorted(
        {name for part in parts for name in part.sources}, key=lambda name: -sum(p.sources.get(name, 0) for p in parts)
    )
    for name in names[:_SOURCES]:
        rows.append((f"from {name}", [_share(part.sources.get(name, 0), part.length.count) for part in parts]))
    rows.append(("closed seats beside them", [str(part.closed_seats) for part in parts]))
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{'since the run began':<{width}}" + "".join(f"{column:>15}" for column in _COLUMNS)]
    lines += [f"{label:<{width}}" + "".join(f"{cell:>15}" for cell in cells) for label, cells in rows]
    if len(names) > _SOURCES:
        lines.append(f"and {len(names) - _SOURCES} more data sources")
    if not report.dropped.length.count and not report.downweighted.length.count:
        lines.append("no sample was dropped or weighted down for its age")
    return "\n".join(lines)


def _parts(report: BiasReport) -> tuple[BiasPart, BiasPart, BiasPart]:
    return report.trained, report.downweighted, report.dropped


def _figures(part: BiasPart) -> dict[str, Any]:
    spreads = {"length": part.length, "reward": part.reward, "turns": part.turns}
    return {
        "samples": part.length.count,
        **{
            name: {"mean": mean(spread), "p50": quantile(spread, 0.5), "p90": quantile(spread, 0.9)}
            for name, spread in spreads.items()
        },
        "sources": part.sources,
        "closed_seats": part.closed_seats,
    }


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(count: int, total: int) -> str:
    return "-" if not total else f"{count / total:.1%}"


async def _ask(run: LiveRun, timeout_s: float) -> BiasReport:
    async with attached(run.bus, run.address, timeout_s=timeout_s) as link:
        return link.get("bias", BiasReport) or BiasReport()
