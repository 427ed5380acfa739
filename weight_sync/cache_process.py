"""The process of a host's weight cache: `python -m weight_sync.cache_process`, commands on standard input, events on output.

It ends when standard input does, so it never outlives its rollouter; whatever is printed goes to standard error.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import structlog
import torch

from configs.logs import set_up
from configs.schema import LoggingSettings
from weight_sync.cache import HostCache
from weight_sync.cache_link import Event, Open, Ping, Pong, Ready, Stage, decode_command, encode
from weight_sync.errors import ProtocolError

log = structlog.get_logger()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Output:
    """Lines of several threads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """A rollouter that does not read any more is about to close standard input too."""
        with self._lock:
            try:
                self._file.write(encode(event))
                self._file.flush()
            except OSError as error:
                log.warning("rollouter does not listen", event_lost=event.kind, error=str(error))


def serve(commands: BinaryIO, output: Output) -> None:
    """Until `commands` ends. Raises ProtocolError, AddressTaken."""
    first = commands.readline()
    if not first:
        return
    opening = decode_command(first)
    if not isinstance(opening, Open) or opening.dtype not in _DTYPES:
        raise ProtocolError(f"got {opening}, expected Open with a dtype of {sorted(_DTYPES)}")
    torch.set_num_threads(1)
    cache = HostCache(
        opening.settings,
        socket_dir=Path(opening.socket_dir),
        dtype=_DTYPES[opening.dtype],
        on_event=output.write,
        serves_others=opening.serves_others,
    )
    with cache:
        output.write(Ready(address=cache.address, tcp_address=cache.tcp_address))
        for line in commands:
            match decode_command(line):
                case Stage() as command:
                    cache.stage(command)
                case Ping(nonce=nonce):
                    output.write(Pong(nonce=nonce))
                case Open():
                    raise ProtocolError("got open a second time, expected stage or ping")


def main() -> None:
    """Exits with 0 once standard input has ended."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_up(LoggingSettings(), daemon="weight-cache")
    serve(sys.stdin.buffer, Output(lines))
    log.info("rollouter has gone, the weight cache ends")


if __name__ == "__main__":
    main()
