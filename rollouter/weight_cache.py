"""The weight cache of this host, as its rollouter sees it: a child process that stages each version once for all engines here.

Invariant: whoever waits for something of the cache hears how it ended, also when the process dies or answers no more, which is
its death: it is started again, and stages the newest announced version anew. What it cannot do, an engine does by itself, from
the trainer; so does every engine from the moment in which the cache missed a deadline until it has staged a version.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from configs.schema import WeightSyncSettings
from rollouter.engine_member import Held
from rollouter.errors import WeightCacheLost
from sample_bus.messages import WeightRound
from weight_sync.cache_link import (
    Event,
    NotTaken,
    Open,
    Ping,
    Pong,
    Ready,
    Stage,
    Staged,
    StagingFailed,
    Taken,
    decode_event,
    encode,
)
from weight_sync.errors import ProtocolError

log = structlog.get_logger()

_ROOT = Path(__file__).resolve().parent.parent
_REMEMBERED = 256
"""Stagings of engines of which the end is known."""
_MAX_LINE_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_END_S = 5.0
_READY_S = 60.0
"""A process that has not said where it serves by then is stuck, unless staging may take longer still."""


class WeightCache:
    """Starts, watches and asks the process. All methods belong to the event loop."""

    def __init__(self, settings: WeightSyncSettings, *, socket_dir: Path, log_file: Path) -> None:
        self._settings = settings
        self._socket_dir = socket_dir
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._dtype = ""
        self.serves_others = False
        """Whether engines of other hosts stage from it too; set before `run`."""
        self._opening: asyncio.Future[Ready] | None = None
        """Where the process that runs now serves, once it says so; an error after it ended."""
        self._newest: WeightRound | None = None
        self._stagings: OrderedDict[Held, tuple[str, asyncio.Future[None]]] = OrderedDict()
        """By version: the nonce, and how it ends. The newest comes last."""
        self._takings: OrderedDict[str, asyncio.Future[None]] = OrderedDict()
        """By an engine's nonce."""
        self._pong: asyncio.Future[None] | None = None
        self._ping = ""
        """The nonce of the one that was sent last."""
        self._is_trusted = True
        """False from a missed deadline on, until it has staged a version."""
        self._stage_s = min(settings.stage_timeout_s, settings.round_timeout_s)
        self._answer_s = min(settings.connect_timeout_s, self._stage_s / 4)
        """Leaves engines time to stage from the trainer."""
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process; None while none runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def launch(self) -> None:
        """Start the process ahead of `open`: it imports what it needs meanwhile. Does nothing while one runs."""
        if self.pid is not None:
            return
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "weight_sync.cache_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        log.info("weight cache launched", pid=self._process.pid, log=str(self._log_file))

    async def run(self, dtype: str) -> None:
        """Serve engines whose weights are `dtype`, and start the process again when it ends. Never returns."""
        self._dtype = dtype
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                why = await self._serve()
            except OSError as error:  # no process can be started at the moment
                why = str(error)
            self._forget(f"the weight cache ended: {why}")
            self.num_restarts += 1
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            log.warning("weight cache is started again", why=why, restart=self.num_restarts, log=str(self._log_file))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """End the process; afterwards neither it nor its socket is left."""
        process, self._process = self._process, None
        self._forget("the weight cache is being closed")
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                log.warning("weight cache did not end in time, killing it", pid=process.pid, waited_s=_END_S)
                await _kill(process)
        if self._socket_dir.is_dir():
            for left in self._socket_dir.iterdir():
                left.unlink()
            self._socket_dir.rmdir()

    async def _serve(self) -> str:
        """One process, until it ends; why it did."""
        await self.launch()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        opening = Open(
            socket_dir=str(self._socket_dir),
            dtype=self._dtype,
            settings=self._settings,
            serves_others=self.serves_others,
        )
        due = asyncio.get_running_loop().call_later(max(self._stage_s, _READY_S), self._look_ready, process)
        try:
            self._send(opening)
            while line := await process.stdout.readline():
                self._take(decode_event(line))
        except (ProtocolError, ValueError, WeightCacheLost) as error:
            await _kill(process)
            return str(error)
        finally:
            due.cancel()
        return f"status {await process.wait()}"

    def _look_ready(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process and not self._is_ready:
            self._miss(f"it was not ready within {max(self._stage_s, _READY_S):g} s")

    def _miss(self, why: str) -> None:
        """It answers no more: whoever waits hears so now, and the process is ended, upon which `run` starts it again."""
        process = self._process
        log.warning("weight cache is killed", pid=self.pid, why=why)
        self._is_trusted = False
        self._forget(f"the weight cache was killed: {why}")
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()

    def _forget(self, why: str) -> None:
        """Nothing of the process that ran counts any more."""
        opening = self._address()
        if opening.done():
            opening = self._opening = asyncio.get_running_loop().create_future()
        lost: list[asyncio.Future[Any]] = [opening, *(ended for _, ended in self._stagings.values()), *self._takings.values()]
        self._stagings.clear()
        self._takings.clear()
        if self._pong is not None:
            lost.append(self._pong)
        _settle(lost, WeightCacheLost(why))

    def _address(self) -> asyncio.Future[Ready]:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
        return self._opening

    @property
    def _is_ready(self) -> bool:
        opening = self._address()
        return opening.done() and opening.exception() is None

    # ── what it is asked ─────────────────────────────────────────────────────────────────────────────────────────────

    async def hold(self, announced: WeightRound, *, is_local: bool = True) -> str:
        """Returns, once the cache holds the version, where engines of this host, or of others, stage it from.

        Raises WeightCacheLost with the reason if it does not, or misses a deadline.
        """
        if self._newest is None or self._newest.announced_at <= announced.announced_at:
            self._newest = announced
        is_held = self._holds(announced)
        if not is_held and announced.announced_at < self._newest.announced_at:  # it stages one at a time
            raise WeightCacheLost(f"the weight cache stages version {self._newest.policy_version} by now")
        if not is_held and not self._is_trusted:
            if self._is_ready:
                self._staging_of(announced)  # so that it may be trusted again
            raise WeightCacheLost("the weight cache has not staged a version since it missed a deadline")
        opening = self._address()
        await asyncio.wait((opening,), timeout=self._stage_s / 2)
        if not opening.done():
            raise WeightCacheLost(f"the weight cache was not ready within {self._stage_s / 2:g} s")
        ready = opening.result()
        await self._until(self._staging_of(announced))
        return ready.address if is_local else ready.tcp_address

    def _holds(self, announced: WeightRound) -> bool:
        known = self._stagings.get(Held.of(announced))
        return known is not None and known[1].done() and known[1].exception() is None

    async def _until(self, ended: asyncio.Future[None]) -> None:
        """As `ended` ends; meanwhile the process is asked now and then whether it still lives. Raises WeightCacheLost."""
        while not ended.done():
            pong = self._asked()
            await asyncio.wait((ended, pong), timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not pong.done():
                self._miss(f"no answer within {self._answer_s:g} s")
            await asyncio.wait((ended,), timeout=self._answer_s)
        await ended

    def _asked(self) -> asyncio.Future[None]:
        """The answer to a ping: to one that is under way, or a new one. Raises WeightCacheLost."""
        if self._pong is None or self._pong.done():
            self._ping = secrets.token_hex(8)
            self._send(Ping(nonce=self._ping))
            self._pong = asyncio.get_running_loop().create_future()
        return self._pong

    def _staging_of(self, announced: WeightRound) -> asyncio.Future[None]:
        wanted = Held.of(announced)
        known = self._stagings.get(wanted)
        if known is not None and not (known[1].done() and known[1].exception() is not None):
            return known[1]
        nonce = secrets.token_hex(8)
        self._send(
            Stage(
                nonce=nonce,
                address=announced.address,
                policy_version=announced.policy_version,
                manifest_digest=announced.manifest_digest,
                timeout_s=self._stage_s,
            )
        )
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        due = loop.call_later(self._stage_s + self._answer_s, self._look_staged, wanted.policy_version, ended)
        ended.add_done_callback(lambda _: due.cancel())
        self._stagings[wanted] = (nonce, ended)
        self._stagings.move_to_end(wanted)
        return ended

    def _look_staged(self, policy_version: int, ended: asyncio.Future[None]) -> None:
        """It says by itself, and a little earlier, that a version did not come in time."""
        if not ended.done():
            self._miss(f"it did not say within {self._stage_s + self._answer_s:g} s what became of version {policy_version}")

    async def wait_staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        """Returns once this staging of an engine is complete. Raises WeightCacheLost with the reason if it is not; the caller
        sets the deadline for the engine."""
        await self._until(self._taking_of(nonce))

    def _taking_of(self, nonce: str) -> asyncio.Future[None]:
        if nonce not in self._takings:
            self._takings[nonce] = asyncio.get_running_loop().create_future()
            while len(self._takings) > _REMEMBERED:
                self._takings.popitem(last=False)[1].cancel()
        return self._takings[nonce]

    def _send(self, command: Open | Stage | Ping) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            raise WeightCacheLost("the weight cache is not running")
        process.stdin.write(encode(command))

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                opening = self._address()
                if opening.done():  # of the process before
                    opening = self._opening = asyncio.get_running_loop().create_future()
                opening.set_result(event)
                if self._newest is not None:
                    self._staging_of(self._newest)
            case Pong():
                if self._pong is not None and event.nonce == self._ping:
                    _settle([self._pong], None)
            case Staged():
                self._is_trusted = True
                log.info(
                    "weights staged on this host",
                    policy_version=event.policy_version,
                    seconds=round(event.seconds, 3),
                    megabytes=round(event.num_bytes / 1e6, 1),
                )
                self._end_staging(event.nonce, None)
            case StagingFailed():
                log.warning("weights were not staged on this host", why=event.reason)
                self._end_staging(event.nonce, WeightCacheLost(event.reason))
            case Taken():
                _settle([self._taking_of(event.nonce)], None)
            case NotTaken():
                _settle([self._taking_of(event.nonce)], WeightCacheLost(f"staging of {event.engine}: {event.reason}"))

    def _end_staging(self, nonce: str, error: Exception | None) -> None:
        """The cache holds the two newest versions, so only those are remembered."""
        _settle((ended for known, ended in self._stagings.values() if known == nonce), error)
        held = [wanted for wanted, (_, ended) in self._stagings.items() if ended.done() and ended.exception() is None]
        for wanted in held[:-2]:
            del self._stagings[wanted]


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        log.error("weight cache was killed and does not end", pid=process.pid, waited_s=_END_S)


def _settle(futures: Iterable[asyncio.Future[Any]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # seen: nobody may be waiting any more
