"""The trainer daemon with an appointed death: `python -m tests.integration.mortal_trainer DEATH ARGUMENTS…`.

DEATH is `never`, or one of these, at which the process is killed as by `kill -9`:

    append:N     before its Nth write to a log (journal, kept records)
    torn:N       in the middle of its Nth write to a log, half of which reaches the file
    fsync:N      in place of its Nth fsync: inside the writing of a checkpoint, mostly
    rename:N     in place of its Nth rename
    seconds:S    so long after its first write to a log
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sample_bus.packing import Buffer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nth(count: int, call: Callable[..., Any], last: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`call`, but the process dies at its call number `count`, after `last` if one is given."""
    left = [count]

    def counted(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if last is not None:
                last(*arguments, **named)
            die()
        return call(*arguments, **named)

    return counted


def half_of_it(file: int, parts: Sequence[Buffer], at: int) -> None:
    whole = b"".join(parts)
    os.pwrite(file, whole[: len(whole) // 2], at)


def appoint(death: str) -> None:
    kind, _, number = death.partition(":")
    match kind:
        case "never":
            pass
        case "append":
            os.pwritev = nth(int(number), os.pwritev)
        case "torn":
            os.pwritev = nth(int(number), os.pwritev, half_of_it)
        case "fsync":
            os.fsync = nth(int(number), os.fsync)
        case "rename":
            os.rename = nth(int(number), os.rename)
        case "seconds":
            appoint_time(float(number))
        case _:
            raise SystemExit(f"no death {death!r}")


def appoint_time(seconds: float) -> None:
    write = os.pwritev
    begun = threading.Event()

    def first_write(*arguments: Any) -> int:
        if not begun.is_set():
            begun.set()
            threading.Timer(seconds, die).start()
        return write(*arguments)

    os.pwritev = first_write


if __name__ == "__main__":
    appoint(sys.argv[1])
    from trainer.cli import main

    main(sys.argv[2:])
