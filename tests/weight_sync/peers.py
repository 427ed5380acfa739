"""The two ends of a transfer as processes of their own, for tests that kill them.

`python -m tests.weight_sync.peers engine ADDRESS VERSION [HOW]` and `... server DIR [TRANSPORT]`. Each prints a line when
it is where the test wants it, and then waits to be killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync import StageRequest, Terms, WeightServer, open_receiver, receive_weights
from weight_sync.listeners import transport_of
from weight_sync.transport import Receiving


def weights(seed: int, *, num_tensors: int = 8, elements: int = 1 << 16) -> dict[str, torch.Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}.weight": torch.randn(elements, generator=generator) for index in range(num_tensors)}


def open_transfer(
    address: str,
    version: int,
    *,
    receiver: str = "e",
    nonce: str = "n",
    timeout_s: float = 60.0,
    rank: int = 0,
    num_ranks: int = 1,
) -> Receiving:
    """A receiver's end without terms of its own."""
    request = StageRequest(
        policy_version=version,
        receiver=receiver,
        nonce=nonce,
        terms=Terms(transport=transport_of(address).value),
        rank=rank,
        num_ranks=num_ranks,
    )
    return open_receiver(address, request, timeout_s=60.0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_engine(address: str, version: int, how: str) -> None:
    with open_transfer(address, version, receiver="engine-0", nonce=f"pid-{os.getpid()}") as channel:
        for index, (name, _) in enumerate(receive_weights(channel)):
            if index == 2 and how == "stall":
                say("stalled")
                time.sleep(600)
            if index == 2 and how == "raise":
                raise RuntimeError(f"no room for {name}")
    say("received")


def run_server(directory: Path, transport: str) -> None:
    settings = WeightSyncSettings.model_validate({"bucket_bytes": 1 << 16, "transport": transport})
    server = WeightServer(
        settings, socket_dir=directory, dtype=torch.float32, on_staged=lambda report: None, on_failed=lambda failure: None
    )
    with server:
        server.publish(weights(1).items(), policy_version=1)
        say(server.address)
        time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
    else:
        run_server(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "shared_memory")
