"""`headrace up`: both daemons as child processes, watched until the run is over.

Invariant: when `run` returns or raises, no process, socket file or shared-memory segment of the run is left; if one could not
be removed, the outcome names it and is a failure. A signal at any moment ends everything within 10 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from configs.paths import bus_address, socket_dir
from configs.schema import Settings
from configs.signals import ending_signals
from console.children import Child, StopTimes, stop
from console.deaths import Death, death_lines
from console.display import Display
from console.follow import follow
from console.leftovers import MARK, Cleared, Traces, adopting_orphans
from console.log_tail import last_error, last_event
from console.metrics_file import read_pauses, read_steps
from console.picture import Picture
from console.verdict import Verdict, judge

log = structlog.get_logger()

_FOLLOW_S = 60.0
"""After one daemon ended well, the other has this long to end too."""
_SECOND_DEATH_S = 1.0
"""After one daemon died, the other's own last words are waited for this long."""
_LOOK_S = 3.0
"""Between two looks at what the processes hold."""
_PATIENCE_FINISHED_S = 5.0
_PATIENCE_STOPPED_S = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What starts the daemons; `--config`, `key=value` … follow."""

    trainer: tuple[str, ...] = (sys.executable, "-m", "trainer.cli")
    rollouter: tuple[str, ...] = (sys.executable, "-m", "rollouter.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    verdict: Verdict
    picture: Picture
    deaths: tuple[str, ...]
    """One line for each daemon that died: its last error and its log."""
    removed: tuple[str, ...]
    """What the daemons left and the console cleaned away."""
    ended_at: float


async def run(
    settings: Settings,
    *,
    config: Path | None,
    overrides: Sequence[str],
    display: Display,
    commands: Commands | None = None,
    times: StopTimes | None = None,
) -> Outcome:
    """Start, show and end one run. `settings` hold an absolute run_dir that is this run's own; `overrides` must say the same.

    Call from the main thread; takes over SIGINT, SIGTERM and SIGHUP while it runs.
    """
    picture = Picture.of(settings, now=time.time())
    traces = Traces(secrets.token_hex(8), socket_dir(settings))
    with _signals() as signals, adopting_orphans():
        session = _Session(settings, picture, display, traces, signals, times or StopTimes())
        arguments = (["--config", str(config)] if config is not None else []) + list(overrides)
        try:
            session.start(commands or Commands(), arguments)
            await session.watch()
        finally:
            await session.close()
        return session.outcome()


class _Signals:
    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    def take(self, number: signal.Signals) -> None:
        """Called for each signal, and with SIGHUP when whoever watched is gone."""
        if self.first is None:
            self.first = number
            self.stop.set()
        else:
            self.kill.set()


class _Session:
    def __init__(
        self, settings: Settings, picture: Picture, display: Display, traces: Traces, signals: _Signals, times: StopTimes
    ) -> None:
        self._settings = settings
        self._picture = picture
        self._display = display
        self._traces = traces
        self._signals = signals
        self._times = times
        self._children: list[Child] = []
        self._changed = asyncio.Event()
        self._exit_codes: dict[str, int | None] = {}
        self._cleared: Cleared | None = None
        self._num_missing = 0

    def start(self, commands: Commands, arguments: Sequence[str]) -> None:
        """Start both daemons."""
        environment = {**os.environ, MARK: self._traces.mark}
        for name, command in (("trainer", commands.trainer), ("rollouter", commands.rollouter)):
            log_path = self._settings.run_dir / "logs" / f"{name}.log"
            self._children.append(Child(name, [*command, *arguments], log_path=log_path, environment=environment))
            log.info("daemon started", child=name, pid=self._children[-1].pid, log=str(log_path))

    async def watch(self) -> None:
        """Show the run until it is over, then stop what is left of it."""
        with self._while_watched():
            self._display.start()
        async with asyncio.TaskGroup() as tasks:
            address = bus_address(self._settings)
            side = [
                tasks.create_task(follow(self._settings.bus, address, self._picture, self._changed.set)),
                tasks.create_task(self._draw()),
                tasks.create_task(self._look()),
            ]
            await self._until_over()
            await self._stop()
            for task in side:
                task.cancel()
        self._fill_gaps()
        self._show()

    async def close(self) -> None:
        """Stop and clean, if that is still to be done; give the terminal back."""
        try:
            await self._stop()
        finally:
            with self._while_watched():
                self._display.close()

    def outcome(self) -> Outcome:
        self._fill_gaps()
        cleared = self._cleared or Cleared()
        died = [child for name, code in self._exit_codes.items() if code for child in self._children if child.name == name]
        return Outcome(
            verdict=judge(self._exit_codes, end=self._picture.end, stopped_by=self._signals.first, left=cleared.left),
            picture=self._picture,
            deaths=self._deaths(died) if self._signals.first is None else (),
            removed=cleared.removed,
            ended_at=time.time(),
        )

    def _deaths(self, died: Sequence[Child]) -> tuple[str, ...]:
        deaths = [
            Death(
                name=child.name,
                exit_code=child.exit_code or 0,
                reason=last_error(child.log_path) or "it wrote nothing",
                log=child.log_path,
            )
            for child in died
        ]
        return death_lines(deaths, rollouter_log=self._settings.run_dir / "logs" / "rollouter.log")

    async def _until_over(self) -> None:
        """Return when both daemons ended, one died, one did not follow the other, or a signal came."""
        await self._wait_exit(min_exits=1, timeout_s=None)
        if not self._signals.stop.is_set():
            if any(child.exit_code for child in self._children):
                await self._wait_exit(min_exits=2, timeout_s=_SECOND_DEATH_S)
            else:
                await self._wait_exit(min_exits=2, timeout_s=_FOLLOW_S)
        for child in sorted(self._children, key=lambda child: child.exit_code is None):
            self._exit_codes.setdefault(child.name, child.exit_code)

    async def _wait_exit(self, *, min_exits: int, timeout_s: float | None) -> None:
        """Wait until `min_exits` daemons have ended, a signal came, or the time is over; record ends in their order."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stopping = asyncio.ensure_future(self._signals.stop.wait())
        waits = {asyncio.ensure_future(child.wait()): child for child in self._children}
        try:
            while True:
                for task, child in waits.items():
                    if task.done() and child.name not in self._exit_codes:
                        self._exit_codes[child.name] = child.exit_code
                        log.info("daemon ended", child=child.name, exit_code=child.exit_code)
                if len(self._exit_codes) >= min_exits or stopping.done():
                    return
                pending = {stopping, *(task for task in waits if not task.done())}
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, *waits):
                task.cancel()

    async def _stop(self) -> None:
        if self._cleared is not None:
            return
        finished = bool(self._children) and all(child.exit_code == 0 for child in self._children)
        if not finished:
            self._picture.see_stopping(time.time())
            self._changed.set()
            self._traces.observe()
            await stop(self._children, self._times, at_once=self._signals.kill)
        self._cleared = await self._traces.clear(patience_s=_PATIENCE_FINISHED_S if finished else _PATIENCE_STOPPED_S)
        self._picture.see_end(time.time())
        for what in self._cleared.removed:
            log.warning("removed what a daemon left", what=what)
        for what in self._cleared.left:
            log.error("could not remove", what=what)

    async def _draw(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # not wait_for: before Python 3.12 it can swallow a cancellation
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            self._changed.clear()
            self._note_logs()
            if self._picture.missing_steps > self._num_missing:
                self._fill_gaps()
            self._num_missing = self._picture.missing_steps
            self._show()
            await asyncio.sleep(self._display.refresh_interval_s)

    def _show(self) -> None:
        with self._while_watched():
            self._display.show(self._picture, time.time())

    @contextlib.contextmanager
    def _while_watched(self) -> Iterator[None]:
        """A pipe whose reader has gone ends the run in order, as a terminal's SIGHUP would."""
        try:
            yield
        except OSError as error:
            if self._signals.first is None:
                log.warning("nobody watches any more, ending the run", error=str(error))
                self._signals.take(signal.SIGHUP)

    async def _look(self) -> None:
        while True:
            self._traces.observe()
            await asyncio.sleep(_LOOK_S)

    def _note_logs(self) -> None:
        """What a daemon does before its first word on the bus stands in its log."""
        for child in self._children:
            if getattr(self._picture, child.name) is None:
                event = last_event(child.log_path)
                if event is not None:
                    self._picture.notes[child.name] = f"starting: {event}"

    def _fill_gaps(self) -> None:
        """Take from the metrics what went by between two looks at a topic."""
        incarnation = self._picture.trainer.incarnation if self._picture.trainer else None
        path = self._settings.run_dir / "metrics.jsonl"
        self._picture.add_steps(read_steps(path, incarnation=incarnation))
        for key, pause in read_pauses(path, incarnation=incarnation).items():
            self._picture.pauses.setdefault(key, pause)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals()
    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, signals.take, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
