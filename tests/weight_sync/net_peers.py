"""The two ends of a transfer over a network transport, without a `WeightServer`: in this process, or as ones to be killed.

`python -m tests.weight_sync.net_peers receive ADDRESS NAME COHORT [HOW]` and `... serve SCHEME`. Each prints a line when it is
where the test wants it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync.arena import Arena
from weight_sync.errors import WeightSyncError
from weight_sync.listeners import open_listener, open_receiver
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stream import receive_weights, send_weights
from weight_sync.transport import Incoming, StageRequest, Terms

WAIT_S = 60.0
Weights = dict[str, torch.Tensor]


def weights(*, num_tensors: int = 8, elements: int = 1 << 16, seed: int = 1) -> Weights:
    """The same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}.weight": torch.randn(elements, generator=generator) for index in range(num_tensors)}


def snapshot_of(tensors: Weights) -> Snapshot:
    return take_snapshot(Arena(), tensors.items(), policy_version=1, dtype=torch.float32)


def settings_for(scheme: str, **changes: object) -> WeightSyncSettings:
    return WeightSyncSettings.model_validate(
        {"transport": scheme, "bucket_bytes": 1 << 16, "connect_timeout_s": 20.0} | changes
    )


class Serving:
    """A listener that sends one snapshot to whoever asks; `outcomes` has what became of each transfer."""

    def __init__(
        self,
        settings: WeightSyncSettings,
        tensors: Weights | None = None,
        *,
        before_send: Callable[[Incoming], None] = lambda incoming: None,
        dtype: str = "",
        backend: str = "",
    ) -> None:
        self.snapshot = snapshot_of(tensors if tensors is not None else weights())
        self.outcomes: queue.Queue[int | Exception] = queue.Queue()
        self._before_send = before_send
        stated = Terms(transport=settings.transport, bucket_bytes=settings.bucket_bytes, dtype=dtype, backend=backend)
        self.listener = open_listener(settings, socket_dir=Path("/nowhere"), terms=stated)

    def __enter__(self) -> Self:
        self.listener.start(self._serve)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.listener.close()

    @property
    def address(self) -> str:
        return self.listener.address

    def outcome(self) -> int | Exception:
        return self.outcomes.get(timeout=WAIT_S)

    def _serve(self, incoming: Incoming) -> None:
        outcome: int | Exception
        try:
            self._before_send(incoming)
            report = send_weights(incoming.open(), self.snapshot, policy_version=1, manifest=self.snapshot.manifest)
            outcome = report.num_buckets
        except (WeightSyncError, RuntimeError) as error:
            incoming.refuse(str(error))
            outcome = error.with_traceback(None)
        finally:
            incoming.close()
        self.outcomes.put(outcome)


def request(address: str, *, name: str = "engine-0", cohort: int = 1, **terms: object) -> StageRequest:
    stated = Terms(**({"transport": address.partition(":")[0]} | terms))  # type: ignore[arg-type]
    return StageRequest(policy_version=1, receiver=name, nonce=f"of-{os.getpid()}", terms=stated, cohort=cohort)


def receive(address: str, *, name: str = "engine-0", cohort: int = 1, timeout_s: float = WAIT_S, **terms: object) -> Weights:
    asked = request(address, name=name, cohort=cohort, **terms)
    with open_receiver(address, asked, timeout_s=timeout_s) as channel:
        return dict(receive_weights(channel))


def receive_in_threads(address: str, names: list[str], *, cohort: int) -> dict[str, Weights | Exception]:
    """What each of the receivers got, or its error."""
    results: dict[str, Weights | Exception] = {}

    def run(name: str) -> None:
        try:
            results[name] = receive(address, name=name, cohort=cohort)
        except WeightSyncError as error:
            results[name] = error.with_traceback(None)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def is_same(received: object, expected: Weights) -> bool:
    assert isinstance(received, dict), received
    return list(received) == list(expected) and all(torch.equal(received[name], tensor) for name, tensor in expected.items())


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of this module's commands; killed at the end."""
    child = subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _run_receiver(address: str, name: str, cohort: int, how: str) -> None:
    if how == "connect":
        _say("ready")
        sys.stdin.readline()
    with open_receiver(address, request(address, name=name, cohort=cohort), timeout_s=WAIT_S) as channel:
        for index, _ in enumerate(receive_weights(channel)):
            if index == 2 and how == "stall":
                _say("stalled")
                time.sleep(600)
    _say("received")


def _run_server(scheme: str) -> None:
    with Serving(settings_for(scheme)) as serving:
        _say(serving.address)
        time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if sys.argv[1] == "receive":
        _run_receiver(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else "")
    else:
        _run_server(sys.argv[2])
