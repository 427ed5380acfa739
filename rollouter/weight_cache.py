"""The weight cache of this host, as its rollouter sees it: a child process that stages each version once for all engines here.

Invariant: whoever waits for something of the cache hears how it ended, also when the process dies: it is started again, and
stages the newest announced version anew. What it cannot do, an engine does by itself, from the trainer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from configs.schema import WeightSyncSettings
from rollouter.engine_member import Held
from rollouter.errors import WeightCacheLost
from sample_bus.messages import WeightRound
from weight_sync.cache_link import Event, NotTaken, Open, Ready, Stage, Staged, StagingFailed, Taken, decode_event, encode
from weight_sync.errors import ProtocolError

log = structlog.get_logger()

_ROOT = Path(__file__).resolve().parent.parent
_REMEMBERED = 256
"""Stagings of engines of which the end is known."""
_MAX_LINE_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_END_S = 5.0


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
            why = await self._serve()
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
                process.kill()
                await process.wait()
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
        self._send(opening)
        try:
            while line := await process.stdout.readline():
                self._take(decode_event(line))
        except (ProtocolError, ValueError) as error:
            process.kill()
            await process.wait()
            return str(error)
        return f"status {await process.wait()}"

    def _forget(self, why: str) -> None:
        """Nothing of the process that ran counts any more."""
        opening = self._address()
        if opening.done():
            opening = self._opening = asyncio.get_running_loop().create_future()
        lost: list[asyncio.Future[Any]] = [opening, *(ended for _, ended in self._stagings.values()), *self._takings.values()]
        self._stagings.clear()
        self._takings.clear()
        _settle(lost, WeightCacheLost(why))

    def _address(self) -> asyncio.Future[Ready]:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_future()
        return self._opening

    # ── what it is asked ─────────────────────────────────────────────────────────────────────────────────────────────

    async def hold(self, announced: WeightRound, *, is_local: bool = True) -> str:
        """Returns, once the cache holds the version, where engines of this host, or of others, stage it from.

        Raises WeightCacheLost with the reason if it does not; the caller sets the deadline.
        """
        if self._newest is None or self._newest.announced_at <= announced.announced_at:
            self._newest = announced
        ready = await asyncio.shield(self._address())
        await asyncio.shield(self._staging_of(announced))
        return ready.address if is_local else ready.tcp_address

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
                timeout_s=min(self._settings.stage_timeout_s, self._settings.round_timeout_s),
            )
        )
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stagings[wanted] = (nonce, ended)
        self._stagings.move_to_end(wanted)
        return ended

    async def wait_staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        """Returns once this staging of an engine is complete. Raises WeightCacheLost with the reason if it is not."""
        await asyncio.shield(self._taking_of(nonce))

    def _taking_of(self, nonce: str) -> asyncio.Future[None]:
        if nonce not in self._takings:
            self._takings[nonce] = asyncio.get_running_loop().create_future()
            while len(self._takings) > _REMEMBERED:
                self._takings.popitem(last=False)[1].cancel()
        return self._takings[nonce]

    def _send(self, command: Open | Stage) -> None:
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
            case Staged():
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


def _settle(futures: Iterable[asyncio.Future[Any]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # seen: nobody may be waiting any more
