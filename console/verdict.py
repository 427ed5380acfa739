"""How a run ended, judged from exit codes and the trainer's last word. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from sample_bus.messages import EndOfRun, EndReason

EXIT_REFUSED = 2
"""How a daemon ends that refuses its settings."""
ROLLOUTER_SAID = "RolloutFailed: "
"""What a trainer's last words begin with that ended because the rollouter said that it cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    exit_code: int
    """0 finished, 1 failed, 2 when a daemon refused a setting, 128 + signal when the user stopped it."""
    headline: str


def judge(
    exit_codes: Mapping[str, int | None],
    *,
    end: EndOfRun | None,
    stopped_by: signal.Signals | None,
    left: tuple[str, ...] = (),
) -> Verdict:
    """`exit_codes`: by daemon, in the order of their deaths, before the console stopped anything; None: it was alive.
    `left`: what could not be cleaned away."""
    if stopped_by is not None:
        how = "Ctrl-C" if stopped_by is signal.SIGINT else stopped_by.name
        return _leaving(Verdict(exit_code=128 + stopped_by, headline=f"stopped by {how}"), left)
    died = [f"{name} {exit_text(code)}" for name, code in exit_codes.items() if code]
    if died and exit_codes.get("rollouter") is None and end is not None and end.message.startswith(ROLLOUTER_SAID):
        died.insert(0, "rollouter could not go on")
    if died:
        refused = EXIT_REFUSED in exit_codes.values()
        return _leaving(Verdict(exit_code=EXIT_REFUSED if refused else 1, headline=f"failed: {', '.join(died)}"), left)
    if end is not None and end.reason is EndReason.FAILED:
        return _leaving(Verdict(exit_code=1, headline=f"failed: {end.message}"), left)
    running = [name for name, code in exit_codes.items() if code is None]
    if running:
        gone = [name for name, code in exit_codes.items() if code == 0]
        return _leaving(
            Verdict(exit_code=1, headline=f"failed: {', '.join(gone)} ended and {', '.join(running)} did not follow"), left
        )
    if end is not None and end.reason in (EndReason.STOPPED, EndReason.DRAINED):
        why = f": {end.message}" if end.message else ""
        return _leaving(Verdict(exit_code=1, headline=f"{end.reason} before the last step{why}"), left)
    return _leaving(Verdict(exit_code=0, headline="finished"), left)


def exit_text(code: int) -> str:
    """`exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _leaving(verdict: Verdict, left: tuple[str, ...]) -> Verdict:
    if not left:
        return verdict
    return Verdict(exit_code=verdict.exit_code or 1, headline=f"{verdict.headline}; left behind: {', '.join(left)}")
