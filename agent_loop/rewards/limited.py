"""Programs that a model wrote, run under limits. Blocks; belongs into a reward process.

Invariant: a run ends by its deadline and its process group with it; memory, processor time, file size and output are bounded.
It runs as this user and sees the host's files and network: it is kept from exhausting the host, not from reading it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.errors import RewardUnavailable

MAX_OUTPUT_BYTES = 4 << 20
_MAX_FILE_BYTES = 64 << 20
_WALL = 4.0
"""Deadline on the wall clock in processor seconds: on a busy host a correct program is slow, and must not fail for that."""
_BOOT = """
import resource, sys
memory, cpu_s, file_bytes = map(int, sys.argv[1:4])
for what, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 128),
):
    resource.setrlimit(what, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
with open(sys.argv[4], encoding="utf-8", errors="replace") as file:
    source = file.read()
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a program ended."""

    output: str
    """What it wrote to standard output."""
    errors: str
    """The end of what it wrote to standard error."""
    status: int
    """Exit status; negative: the signal that ended it."""
    timed_out: bool
    """It used up its processor time, or its deadline."""


def run_python(source: str, *, stdin: str = "", cpu_s: float, memory_bytes: int, wall_s: float = math.inf) -> Run:
    """Run `source` as a program in an empty directory, for `wall_s` seconds at most by the clock on the wall.

    Raises RewardUnavailable if it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-reward-", ignore_cleanup_errors=True) as directory:
        path = os.path.join(directory, "program.py")
        with open(path, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - one plain name
            file.write(source)
        limits = (str(memory_bytes), str(max(1, int(cpu_s + 0.999))), str(_MAX_FILE_BYTES), path)
        wall_s = min(wall_s, _WALL * cpu_s)
        return _run((sys.executable, "-I", "-c", _BOOT, *limits), stdin.encode("utf-8", "replace"), directory, wall_s)


def _run(command: Sequence[str], stdin: bytes, directory: str, wall_s: float) -> Run:
    environment = {"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise RewardUnavailable(f"a program to be scored cannot be started: {error.strerror or error}") from error
    with process:
        try:
            output, errors, in_time = _exchange(process, stdin, time.monotonic() + wall_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    status = process.returncode
    return Run(
        output=output.decode("utf-8", "replace"),
        errors=errors[-2000:].decode("utf-8", "replace"),
        status=status,
        timed_out=not in_time or status == -signal.SIGXCPU,
    )


def _exchange(process: subprocess.Popen[bytes], stdin: bytes, deadline: float) -> tuple[bytes, bytes, bool]:
    """Feed it and take what it says, up to MAX_OUTPUT_BYTES each, until it ends; whether it did by `deadline`."""
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    assert process.stderr is not None, "a pipe was asked for"
    said = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    left = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for number in said:
            selector.register(number, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        feeding = True
        while process.poll() is None or any(number in selector.get_map() for number in said):
            if process.poll() is not None and not selector.select(0):
                break  # a child of it holds the pipes open
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                first, second = map(bytes, said.values())
                return first, second, False
            for key, _ in selector.select(min(left_s, 0.05)):
                number = key.fd
                if number in said:
                    chunk = os.read(number, 1 << 16)
                    if not chunk:
                        selector.unregister(number)
                    elif (room := MAX_OUTPUT_BYTES - len(said[number])) > 0:
                        said[number] += chunk[:room]
                elif feeding:
                    with contextlib.suppress(BlockingIOError):
                        try:
                            left = left[os.write(number, left[: 1 << 16]) :] if left else left
                        except BrokenPipeError:
                            left = left[:0]
                    if not left:
                        feeding = False
                        selector.unregister(number)
                        process.stdin.close()
    first, second = map(bytes, said.values())
    return first, second, True
