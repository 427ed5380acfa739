"""Engines under Ray, seen from the rollouter: one driver process, and a server that is reached through it for each engine.

Invariant: what was started ends with `close`, or with this process: the driver (`rollouter.ray_host`) ends with its standard
input. No wait here is silent or without a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from configs.gpu import GpuShares
from configs.schema import EngineSettings
from rollouter.engine_errors import EngineStartError
from rollouter.engine_log import failure_line, last_line, tail
from rollouter.placement import asked_bundles, overlap, ray_environment
from rollouter.vllm_server import remove_sockets

log = structlog.get_logger()

_ROOT = Path(__file__).resolve().parent.parent
_REPORT_EVERY_S = 5.0
_STOP_S = 10.0
"""For one engine; it is killed after 5 s."""
_CLOSE_S = 15.0
"""For the driver to end its engines and Ray."""
_LINE_BYTES = 1 << 20
_LONGEST_BASE = 20
"""Bytes; Ray's sockets lie 80 bytes deeper."""

_Value = TypeVar("_Value")


class RayDriver:
    """The process that talks to Ray; started by the first engine that is launched, and again should it have ended."""

    def __init__(self, settings: EngineSettings, *, gpus: GpuShares | None, log_file: Path) -> None:
        self.settings = settings
        self.trainer_gpus = None if gpus is None or gpus.shared else gpus.trainer
        self._gpus = gpus
        self._log_file = log_file
        self._log_start = 0
        self._servers: list[dict[str, Any]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._temp_dir: Path | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def add(self, server: dict[str, Any]) -> int:
        """Have an engine placed; returns its number."""
        self._servers.append(server)
        return len(self._servers) - 1

    async def ready(self) -> None:
        """Start the driver and reserve a bundle for each engine, unless that is done. Raises EngineStartError."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await self._end()
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.settings.start_timeout_s):
                    answer = await self._start()
            except TimeoutError:
                await self._end()
                raise EngineStartError(
                    f"Ray did not answer within engine.start_timeout_s={self.settings.start_timeout_s:g} s; last line of "
                    f"{self._log_file}: {last_line(self._log_text())}"
                ) from None
            except BaseException:
                await asyncio.shield(self._end())
                raise
            seconds = round(time.monotonic() - started, 1)
            log.info("Ray reserved the engines' bundles", node=answer["address"], ray=answer["ray"], seconds=seconds)

    async def call(self, engine: int, method: str, *arguments: Any) -> Any:
        """Call the actor of `engine`. Raises EngineStartError with the reason if it fails or has ended."""
        return await self._ask(engine, method, arguments)

    def post(self, engine: int, method: str) -> None:
        """Call the actor of `engine` and let the outcome be."""
        self._ask(engine, method, ()).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """End the driver, and with it Ray if it was started here; afterwards no process and no file of it is left."""
        async with self._starting:
            await self._end()

    async def _start(self) -> dict[str, Any]:
        address = self.settings.ray_address
        if address is None:
            base = tempfile.gettempdir()
            self._temp_dir = Path(tempfile.mkdtemp(prefix="hr-ray-", dir=base if len(base) <= _LONGEST_BASE else "/tmp"))
        bundles = asked_bundles(self.settings, self._gpus)
        environment = ray_environment(os.environ, address=address, token=secrets.token_hex(32), gpus=self._gpus)
        environment["PYTHONPATH"] = ":".join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "rollouter.ray_host"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        log.info("starting Ray" if address is None else "joining Ray", address=address, pid=self._process.pid)
        order = {
            "address": address,
            "temp_dir": None if self._temp_dir is None else str(self._temp_dir),
            "bundles": [{"cpus": bundle.cpus, "gpus": bundle.gpus} for bundle in bundles],
            "settings": self.settings.model_dump(mode="json"),
            "servers": self._servers,
        }
        placed = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(self._process))
        self._write(order)
        answer: dict[str, Any] = await _saying(
            placed, "waiting for Ray", lambda: last_line(self._log_text()), engines=len(bundles)
        )
        return answer

    def _ask(self, engine: int, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._process is None or self._reading is None or self._reading.done():
            answered.set_exception(EngineStartError(self._how_it_ended()))
            return answered
        number = next(self._numbers)
        self._waiting[number] = answered
        self._write({"id": number, "engine": engine, "method": method, "arguments": arguments})
        return answered

    def _write(self, value: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out answers until the driver ends; whoever still waits is told then."""
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                answer = json.loads(line)
                answered = self._waiting.pop(answer["id"], None)
                if answered is None or answered.done():
                    continue
                if "error" in answer:
                    answered.set_exception(EngineStartError(answer["error"]))
                else:
                    answered.set_result(answer["value"])
            await process.wait()
            self._sweep(process)
        finally:
            waiting, self._waiting = self._waiting, {}
            for answered in waiting.values():
                if not answered.done():
                    answered.set_exception(EngineStartError(self._how_it_ended()))

    def _how_it_ended(self) -> str:
        status = None if self._process is None else self._process.returncode
        return f"Ray's driver has ended (status {status}): {failure_line(self._log_text())} [{self._log_file}]"

    def _log_text(self) -> str:
        return tail(self._log_file, since=self._log_start)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await process.wait()
            except TimeoutError:
                log.warning("Ray's driver did not end in time, killing it", pid=process.pid, waited_s=_CLOSE_S)
            self._sweep(process)
            await process.wait()
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    def _sweep(self, process: asyncio.subprocess.Process) -> None:
        """End what is left of the driver's process group, Ray's own processes included, and remove their files."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None


class RayServer:
    """An `EngineServer` in a Ray actor on this host."""

    def __init__(self, name: str, driver: RayDriver, *, socket: Path, log_file: Path, cores: tuple[int, ...] | None) -> None:
        self.name = name
        self.socket = socket.absolute()
        self.log_file = log_file.absolute()
        self._driver = driver
        self._engine = driver.add({"name": name, "socket": str(self.socket), "log_file": str(self.log_file), "cores": cores})
        self._pid: int | None = None
        self._log_start = 0
        self._why = "it was never launched"

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int | None:
        return self._pid

    async def launch(self) -> None:
        """Start the process in its actor, after Ray, the bundles and the actor. Raises EngineStartError."""
        await self._driver.ready()
        before = self.log_file.stat().st_size if self.log_file.exists() else 0
        launched = await self._call("launch", "waiting for an engine's Ray actor")
        taken = overlap(launched["gpus"], self._driver.trainer_gpus)
        if taken:
            raise EngineStartError(
                f"{self.name}: Ray assigned GPU {','.join(taken)}, which is the trainer's; leave it out of the Ray cluster"
            )
        if launched["pid"] != self._pid:
            self._pid, self._log_start = launched["pid"], before
            log.info("engine launched", engine=self.name, pid=self._pid, gpus=launched["gpus"], placement="ray")

    async def serve(self, model_dir: str, dtype: str) -> None:
        """As `VllmServer.serve`. Raises EngineStartError."""
        await self.launch()
        started = time.monotonic()
        await self._call("serve", "engine is starting", model_dir, dtype)
        log.info("engine answers", engine=self.name, seconds=round(time.monotonic() - started, 1))

    async def wait_ended(self) -> int:
        """Wait for the process or its actor to end; -SIGKILL stands for an end that nobody saw."""
        try:
            ended = await self._driver.call(self._engine, "wait_ended")
        except EngineStartError as error:
            self._why = str(error)
            return -signal.SIGKILL
        self._why = ended["why"]
        return int(ended["status"])

    def why_ended(self) -> str:
        return self._why

    def kill(self) -> None:
        self._driver.post(self._engine, "kill")

    async def stop(self) -> None:
        """End the process; its actor stays until the driver is closed."""
        try:
            async with asyncio.timeout(_STOP_S):
                await self._driver.call(self._engine, "stop")
        except (EngineStartError, TimeoutError) as error:
            log.debug("engine is left to the end of its actor", engine=self.name, why=str(error))
        remove_sockets(self.socket)

    async def _call(self, method: str, event: str, *arguments: Any) -> Any:
        """Under engine.start_timeout_s and somewhat: the actor keeps that deadline itself, and says more about it."""
        timeout_s = self._driver.settings.start_timeout_s + _STOP_S
        try:
            async with asyncio.timeout(timeout_s):
                call = self._driver.call(self._engine, method, *arguments)
                return await _saying(
                    call, event, lambda: last_line(tail(self.log_file, since=self._log_start)), engine=self.name
                )
        except TimeoutError:
            raise EngineStartError(f"{self.name}: its Ray actor did not answer `{method}` within {timeout_s:g} s") from None


async def _saying(work: Awaitable[_Value], event: str, doing: Callable[[], str], **details: Any) -> _Value:
    """`work`, with a line every few seconds while it lasts."""
    task = asyncio.ensure_future(work)
    waited_s = 0.0
    try:
        while True:
            await asyncio.wait((task,), timeout=_REPORT_EVERY_S)
            if task.done():
                return task.result()
            waited_s += _REPORT_EVERY_S
            log.info(event, waited_s=waited_s, doing=doing(), **details)
    finally:
        task.cancel()
