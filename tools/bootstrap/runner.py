"""Runs one command with its output in a log and its progress on the terminal; never silent for more than ten seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

QUIET_S = 10.0
TICK_S = 0.5


def say(line: str) -> None:
    """One plain line for the person who runs set-up."""
    sys.stdout.write(f"headrace: {line}\n")
    sys.stdout.flush()


class Ticker:
    """Shows a changing line: in place on a terminal, as a line every QUIET_S seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = time.monotonic()

    def show(self, line: str) -> None:
        if self._terminal:
            width = os.get_terminal_size().columns if sys.stdout.isatty() else 80
            sys.stdout.write("\r" + line[: max(20, width - 1)] + "\x1b[K")
        elif time.monotonic() - self._shown >= QUIET_S:
            sys.stdout.write(f"  {line}\n")
            self._shown = time.monotonic()
        sys.stdout.flush()

    def clear(self) -> None:
        if self._terminal:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


def run(
    command: Sequence[str | Path],
    log: Path,
    describe: Callable[[float, str], str],
    *,
    environment: Mapping[str, str] | None = None,
    held: Sequence[int] = (),
    cwd: Path | None = None,
) -> tuple[int, str]:
    """Exit status and output of `command`, appended to `log`; `describe(elapsed_s, output so far)` is the progress line.

    The descriptors in `held` stay open in the command, so that a file lock outlives this process with it. An
    interruption ends the command before it is passed on.
    """
    start_at = log.stat().st_size if log.exists() else 0
    started = time.monotonic()
    ticker = Ticker()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            pass_fds=tuple(held),
            cwd=cwd,
        )
        try:
            while process.poll() is None:
                ticker.show(describe(time.monotonic() - started, _read(log, start_at)))
                try:
                    process.wait(TICK_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            ticker.clear()
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode, _read(log, start_at)


def _read(log: Path, start_at: int) -> str:
    with log.open("rb") as source:
        source.seek(start_at)
        return source.read().decode("utf-8", "replace")
