"""One vLLM server process: started, waited for, watched, ended.

Invariant: what was started here ends here. The server is the leader of its own process group, which is swept when it ends; the
kernel ends it when this process dies. Its log stays in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import structlog

from configs.schema import EngineSettings
from rollouter.engine_command import EngineShare, server_arguments, server_environment
from rollouter.engine_errors import EngineStartError
from rollouter.engine_log import failure_line, last_line, tail

log = structlog.get_logger()

_ROOT = Path(__file__).resolve().parent.parent
_TERMINATE_S = 5.0
_REPORT_EVERY_S = 5.0
_CONNECT_EVERY_S = 0.1


class VllmServer:
    """A server that can be started again after it ended."""

    def __init__(self, name: str, settings: EngineSettings, *, socket: Path, log_file: Path, share: EngineShare) -> None:
        self.name = name
        self.socket = socket
        self._inner_sockets = inner_sockets(socket)
        self.log_file = log_file
        self.started_at = 0.0
        self._settings = settings
        self._share = share
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def launch(self) -> None:
        """Start the process; it imports vLLM and waits for `serve`. Does nothing while one runs."""
        if self._process is not None and self._process.returncode is None:
            return
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._remove_sockets()
        self._inner_sockets.mkdir(mode=0o700, parents=True)
        environment = server_environment(os.environ, share=self._share, root=_ROOT, sockets=self._inner_sockets)
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "rollouter.vllm_serve"),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.started_at = time.monotonic()
        if self._share.cores is not None:
            try:
                os.sched_setaffinity(self._process.pid, self._share.cores)
            except ProcessLookupError:
                pass  # it ended at once; whoever waits for it says why
        log.info("engine launched", engine=self.name, pid=self._process.pid, cores=self._share.cores, gpus=self._share.gpus)

    async def serve(self, model_dir: str, dtype: str) -> None:
        """Have the launched process load `model_dir` and wait until it answers.

        Raises EngineStartError when it ends, or does not answer within engine.start_timeout_s; it is ended then.
        """
        await self.launch()
        process = self._running()
        arguments = server_arguments(
            self._settings, model_dir=model_dir, dtype=dtype, socket=self.socket, on_gpu=self._share.gpus is not None
        )
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._hand_over(process, arguments)
                await self._answer(process)
        except TimeoutError:
            done_last = last_line(self._log_text())
            await self.stop()
            raise EngineStartError(
                f"{self.name} did not answer within engine.start_timeout_s={self._settings.start_timeout_s:g} s; last line of "
                f"{self.log_file}: {done_last}"
            ) from None
        log.info("engine answers", engine=self.name, seconds=round(time.monotonic() - self.started_at, 1))

    async def wait_ended(self) -> int:
        """Wait for the process to end by itself; sweeps its process group. Returns the exit status, negative for a signal."""
        status = await self._running().wait()
        self._sweep()
        return status

    def why_ended(self) -> str:
        """What its log says about its end."""
        return failure_line(self._log_text())

    def kill(self) -> None:
        """End the whole process group at once; `wait_ended` returns soon after."""
        self._sweep()

    async def stop(self) -> None:
        """SIGTERM, after 5 s SIGKILL; afterwards neither process nor socket is left."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            try:
                process.terminate()
                async with asyncio.timeout(_TERMINATE_S):
                    await process.wait()
            except TimeoutError:
                log.warning("engine did not end in time, killing it", engine=self.name, pid=process.pid, waited_s=_TERMINATE_S)
            except ProcessLookupError:
                pass
        self._sweep()
        await process.wait()
        self._remove_sockets()

    async def _hand_over(self, process: asyncio.subprocess.Process, arguments: list[str]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        try:
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended; `_answer` says why

    async def _answer(self, process: asyncio.subprocess.Process) -> None:
        """Until the socket takes connections, which it does once the model is loaded."""
        ended = asyncio.ensure_future(process.wait())
        reported = time.monotonic()
        try:
            while not await _connects(self.socket):
                await asyncio.wait((ended,), timeout=_CONNECT_EVERY_S)
                if ended.done():
                    self._sweep()
                    raise EngineStartError(
                        f"{self.name} ended while starting (status {ended.result()}): {self.why_ended()} [{self.log_file}]"
                    )
                now = time.monotonic()
                if now - reported >= _REPORT_EVERY_S:
                    reported = now
                    waited_s = round(now - self.started_at)
                    log.info("engine is starting", engine=self.name, waited_s=waited_s, doing=last_line(self._log_text()))
        finally:
            ended.cancel()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise EngineStartError(f"{self.name} was never launched")
        return self._process

    def _log_text(self) -> str:
        text = tail(self.log_file)
        written = self.log_file.stat().st_size - self._log_start if self.log_file.exists() else 0
        return text.encode()[-written:].decode(errors="replace") if written > 0 else ""

    def _remove_sockets(self) -> None:
        remove_sockets(self.socket)

    def _sweep(self) -> None:
        """SIGKILL to what is left of the process group."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def inner_sockets(socket: Path) -> Path:
    """Where the processes of the server at `socket` meet."""
    return socket.with_name(f"{socket.name}.d")


def remove_sockets(socket: Path) -> None:
    """Also those by which vLLM's processes meet: vLLM leaves them behind."""
    socket.unlink(missing_ok=True)
    shutil.rmtree(inner_sockets(socket), ignore_errors=True)


async def _connects(socket: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    writer.close()
    return True
