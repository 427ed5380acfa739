"""The deltas that a weight server has made: one for each pair of versions, whoever asks for it and however many do.

Invariant: a pair is compared once; whoever asks meanwhile waits for it. A version that is not held any more has no deltas.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import structlog

from weight_sync.delta import Bytes
from weight_sync.snapshot import Snapshot
from weight_sync.version_delta import VersionDelta, delta_between

log = structlog.get_logger()

_WORTHWHILE = 0.9
"""Share of the whole above which the whole is sent, which costs less to receive."""
_MAX_THREADS = 8


class DeltaCache:
    """Safe to use from the threads of several transfers; both versions must stay as they are during a call of `between`."""

    def __init__(self) -> None:
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._lock = threading.Lock()
        self._made: dict[tuple[str, int], Future[VersionDelta | None]] = {}
        """By digest of the base and the new version."""

    def between(self, base: Snapshot, new: Snapshot) -> Mapping[str, Bytes] | None:
        """What changed, as `send_weights` takes it; None: all of the weights are as good."""
        key = (base.manifest.digest, new.policy_version)
        with self._lock:
            made = self._made.get(key)
            is_mine = made is None
            if made is None:
                made = self._made[key] = Future()
        if is_mine:
            self._make(made, base, new)
        found = made.result()
        return None if found is None else found.deltas

    def forget(self, policy_version: int) -> None:
        """The version is not held any more."""
        with self._lock:
            self._made = {key: made for key, made in self._made.items() if key[1] != policy_version}

    def _make(self, made: Future[VersionDelta | None], base: Snapshot, new: Snapshot) -> None:
        try:
            delta = delta_between(base, new, num_threads=self._num_threads)
        except BaseException as error:
            made.set_exception(error)
            raise
        log.info(
            "versions compared",
            base_version=base.policy_version,
            policy_version=new.policy_version,
            changed_share=round(delta.num_changed / max(1, delta.num_elements), 5),
            bytes_share=round(delta.payload_bytes / max(1, delta.total_bytes), 5),
            seconds=round(delta.seconds, 3),
        )
        made.set_result(delta if delta.payload_bytes <= _WORTHWHILE * delta.total_bytes else None)
