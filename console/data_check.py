"""`headrace data check`: what is wrong with data, by row and column, before a run is started over it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agent_loop.errors import AgentLoopError
from agent_loop.loop import load_agent_loop
from configs.errors import ConfigError
from configs.loader import load
from configs.schema import DataSettings, Settings
from rollouter.codec import Codec, load_codec
from rollouter.data.check import Finding, Report, check
from rollouter.data.framing import Framing
from rollouter.loops import Loops, setup_of

MAX_LINES = 200
"""Findings that are printed; all of them are counted."""


def data_check(
    files: Sequence[str],
    *,
    config: Path | None,
    tokenizer: str | None,
    overrides: Sequence[str],
    as_json: bool,
) -> int:
    """Check the files, or the settings' own sources where none is given. 0: a run would take the data; 1: not.

    `tokenizer`: a model's directory; prompts are then rendered and measured. Raises ConfigError.
    """
    settings = load(config, list(overrides))
    data = settings.data
    if files:
        data = DataSettings.model_validate(data.model_dump() | {"source": tuple(files), "weights": ()})
    codec = None if tokenizer is None else load_codec(_model_dir(tokenizer), trust_remote_code=settings.model.trust_remote_code)
    data = data.model_copy(update={"max_prompt_tokens": _max_prompt_tokens(settings)})
    of_template, framing = ([], None) if codec is None else asyncio.run(_of_loops(settings, codec))
    report = check(data, codec=codec, framing=framing)
    for finding in of_template:
        report.add(finding)
    sys.stdout.write(_as_json(report) if as_json else _as_text(report, data, limit=_limit_words(settings)))
    return 0 if report.is_good else 1


def _model_dir(tokenizer: str) -> str:
    directory = Path(tokenizer).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"--tokenizer: got {tokenizer!r}, expected a directory with a model's tokenizer")
    return str(directory)


async def _of_loops(settings: Settings, codec: Codec) -> tuple[list[Finding], Framing]:
    """(what the model's chat template does to their conversations, what they put around prompts once their tools are loaded).
    Raises ConfigError."""
    rollouter = settings.rollouter
    setup = setup_of(settings)
    try:
        loop = load_agent_loop(rollouter.agent_loop, setup)
    except AgentLoopError as error:
        raise ConfigError(str(error)) from error
    loops = Loops(loop, default_path=rollouter.agent_loop, names=rollouter.agent_loops, setup=setup)
    try:
        loops.make_named()
        findings = [
            Finding(source="chat template", row=0, column="", message=f"{found} (agent loop {path})", is_error=found.is_error)
            for found, path in loops.template_findings(codec).items()
        ]
        await loops.open_tools()
        return findings, loops.framing()
    finally:
        await loops.close()


def _max_prompt_tokens(settings: Settings) -> int:
    """As a run takes it."""
    return min(settings.data.max_prompt_tokens, settings.engine.max_model_len - settings.sampling.max_tokens)


def _limit_words(settings: Settings) -> str:
    """Which settings bound a prompt's length."""
    limit, data = _max_prompt_tokens(settings), settings.data
    if data.max_prompt_tokens == limit:
        return f"data.max_prompt_tokens={limit}"
    return (
        f"{limit} tokens, which engine.max_model_len={settings.engine.max_model_len} leaves beside "
        f"sampling.max_tokens={settings.sampling.max_tokens} (data.max_prompt_tokens={data.max_prompt_tokens} would allow more)"
    )


def _as_json(report: Report) -> str:
    facts = {
        "is_good": report.is_good,
        "rows": report.num_rows,
        "bad": report.num_bad,
        "overlong": report.num_overlong,
        "repeated": report.num_repeated,
        "longest_tokens": report.longest_tokens,
        "longest_chars": report.longest_chars,
        "data_sources": dict(report.data_sources),
        "agent_names": dict(report.agent_names),
        "findings": [asdict(finding) for finding in report.findings],
        "num_findings": report.num_findings_in_all,
    }
    return json.dumps(facts, ensure_ascii=True) + "\n"


def _as_text(report: Report, data: DataSettings, *, limit: str) -> str:
    lines = [_line(finding) for finding in report.findings[:MAX_LINES]]
    unshown = report.num_findings_in_all - len(lines)
    if unshown > 0:
        lines.append(f"… and {unshown} more of these kinds")
    longest = f"{report.longest_chars} characters"
    if report.longest_tokens is not None:
        longest += f", {report.longest_tokens} tokens (at most {data.max_prompt_tokens})"
    lines.append(
        f"{report.num_rows} rows: {report.num_rows - report.num_bad - report.num_overlong} good, {report.num_bad} bad, "
        f"{report.num_overlong} too long, {report.num_repeated} with a prompt seen before; longest prompt {longest}"
    )
    if report.data_sources:
        lines.append("data sources: " + ", ".join(f"{name} {count}" for name, count in report.data_sources.most_common(10)))
    verdict = "a run would take this data" if report.is_good else "a run would refuse this data"
    if report.is_all_overlong:
        verdict += f": no row is left, since every prompt is longer than {limit}"
    lines.append(verdict)
    return "".join(f"{line}\n" for line in lines)


def _line(finding: Finding) -> str:
    place = finding.source if finding.row == 0 else f"{finding.source} row {finding.row}"
    column = f" {finding.column}:" if finding.column else ""
    text = f"{'error' if finding.is_error else 'note'}: {place}:{column} {finding.message}"
    return text.encode("utf-8", "backslashreplace").decode()
