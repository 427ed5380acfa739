"""Publishing policy versions: snapshot, announce, follow the engines until they have committed.

Invariant: topic `round` always describes the newest version; training goes on as soon as the snapshot is taken. What becomes of
a round is said whenever it changes (`trainer.rounds`), at its deadline too when nothing is heard; nobody waits for it. Only
where no snapshot is taken, the next change of the weights waits until the receivers have them (`trainer.live_gate`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from sample_bus.messages import Accepted, RollouterStatus, RoundResult, RoundState, RoundSummary, WeightRound
from sample_bus.protocols import ControlServer
from trainer.live_gate import LiveGate
from trainer.probe import Probe, ProbeReport
from trainer.rounds import Rounds
from weight_sync.errors import WeightSyncError
from weight_sync.live import Read
from weight_sync.manifest import Manifest
from weight_sync.server import Publication, StageFailure, StageReport, WeightServer

log = structlog.get_logger()

_FAILURES_TOLD = 64
"""In topic `round`, newest last; whoever waits for one of them reads the topic at once."""
_CHECKSUMS_KEPT = 4
"""Versions; an engine holds the newest one, or in a round or after a failed one an older one."""


class Publisher:
    """Owns the weight server and topic `round`. A context manager; all methods belong to the event loop."""

    def __init__(
        self,
        control: ControlServer,
        settings: WeightSyncSettings,
        *,
        incarnation: str,
        socket_dir: Path,
        dtype: torch.dtype,
        loop: asyncio.AbstractEventLoop,
        on_version: Callable[[int, str], None] = lambda version, digest: None,
        on_round: Callable[[RoundSummary], None] = lambda summary: None,
        probe: Probe | None = None,
        on_probe: Callable[[ProbeReport], None] = lambda report: None,
        on_wait: Callable[[str], None] = lambda what: None,
    ) -> None:
        """`on_version` is told each version and its digest before it is announced, `on_round` what becomes of it, whenever
        that changes, `on_probe` what an engine that took it made of `probe`, and `on_wait` what a change of the weights waits
        for, empty when it goes on."""
        self._control = control
        self._probe = probe
        self._on_probe = on_probe
        self._settings = settings
        self._incarnation = incarnation
        self._loop = loop
        self._on_version = on_version
        self._on_round = on_round
        self._on_wait = on_wait
        self._gate: LiveGate | None = None
        """Of the version that is served from the live weights."""
        self._why_live = ""
        self._rounds = Rounds(announce_timeout_s=settings.announce_timeout_s, round_timeout_s=settings.round_timeout_s)
        self._seen_alive: frozenset[str] = frozenset()
        self._said: RoundSummary | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._round: WeightRound | None = None
        self._changed = asyncio.Condition()
        self._committed: dict[str, int] = {}
        self.last_results: dict[str, RoundResult] = {}
        """Engine name to how its newest round ended."""
        self._checksums: dict[int, dict[str, str]] = {}
        self._announcements: set[asyncio.Task[None]] = set()
        self._server = WeightServer(
            settings, socket_dir=socket_dir, dtype=dtype, on_staged=self._staged_in_thread, on_failed=self._failed_in_thread
        )
        control.handle("round.result", RoundResult, self._take_result)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop serving; the socket is gone afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        if self._gate is not None:
            self._gate.give_up()
        self._server.close()

    async def announce(self, weights: Read, *, policy_version: int, executor: Executor) -> float:
        """Snapshot `weights` on `executor` and announce them as `policy_version`. Returns the snapshot's seconds.

        Where there is no memory for it they are served as they lie: call `before_change` before they change.

        Raises WeightSyncError when an earlier version is still in use beyond its deadline.
        """
        probe = self._probe

        def publish() -> Publication:
            if probe is not None:
                probe.score(policy_version)
            why_live = self._server.why_live(weights)
            if why_live:
                return self._server.publish_live(weights, policy_version=policy_version, why=why_live)
            return self._server.publish(weights(), policy_version=policy_version)

        publication = await self._loop.run_in_executor(executor, publish)
        before = self._round
        self._round = WeightRound(
            policy_version=policy_version,
            incarnation=self._incarnation,
            address=self._server.address,
            manifest_digest=publication.manifest_digest,
            num_tensors=publication.num_tensors,
            total_bytes=publication.total_bytes,
            announced_at=time.time(),
            staged={} if before is None else before.staged,
            failed={} if before is None else before.failed,
            probe_ids=() if probe is None else probe.ids,
        )
        if self._gate is not None:  # nothing changed since: this version is as good
            self._gate.give_up()
        if publication.why_live:
            due_at = time.monotonic() + self._settings.stage_timeout_s
            self._gate = LiveGate(policy_version=policy_version, why=publication.why_live, due_at=due_at)
            say = log.debug if publication.why_live == self._why_live else log.warning
            say(
                "no snapshot is taken: the next change of the weights waits until they are staged",
                policy_version=policy_version,
                why=publication.why_live,
                timeout_s=self._settings.stage_timeout_s,
            )
        self._why_live = publication.why_live
        self._remember(policy_version, publication.manifest)
        self._on_version(policy_version, publication.manifest_digest)
        left = self._rounds.announce(policy_version, total_bytes=publication.total_bytes, now=self._loop.time())
        if left is not None and left is not RoundState.COMMITTED:
            log.warning("round before did not end everywhere", policy_version=policy_version - 1, state=left.value)
        await self._control.publish("round", self._round)
        self._follow()
        log.info(
            "policy version published",
            policy_version=policy_version,
            num_tensors=publication.num_tensors,
            megabytes=round(publication.total_bytes / 1e6, 1),
            snapshot_ms=round(publication.seconds * 1e3, 1),
        )
        return publication.seconds

    def before_change(self) -> None:
        """Blocks the calling thread until the live weights may change; at once where a snapshot was taken."""
        gate = self._gate
        if gate is None:
            return
        if not gate.is_open:
            started = time.monotonic()
            log.info("training waits", policy_version=gate.policy_version, awaited=sorted(gate.awaited), why=gate.why)
            self._loop.call_soon_threadsafe(self._on_wait, f"waits for {gate}")
            if not gate.wait():
                log.warning(
                    "weights change before they are staged", policy_version=gate.policy_version, awaited=sorted(gate.awaited)
                )
            log.info("training goes on", policy_version=gate.policy_version, waited_s=round(time.monotonic() - started, 3))
            self._loop.call_soon_threadsafe(self._on_wait, "")
        self._server.withdraw_live(f"the live weights of version {gate.policy_version} change", timeout_s=gate.left_s)
        self._gate = None

    def published(self) -> tuple[int, Mapping[int, Mapping[str, str]]]:
        """The newest version, and by version the checksum of each tensor of those that engines may still hold."""
        return max(self._checksums, default=0), self._checksums

    def _remember(self, policy_version: int, manifest: Manifest) -> None:
        self._checksums[policy_version] = {spec.name: f"{checksum:016x}" for spec, checksum in manifest}
        while len(self._checksums) > _CHECKSUMS_KEPT:
            del self._checksums[next(iter(self._checksums))]

    async def follow_engines(self) -> None:
        """Let rounds know which engines live. Never returns."""
        async for _ in self._control.watch("rollouter", RollouterStatus):
            if self._alive() != self._seen_alive:
                self._follow()

    async def wait_committed(self, policy_version: int, *, timeout_s: float) -> None:
        """Until some engine serves `policy_version`. Raises WeightSyncError at the deadline."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: any(version >= policy_version for version in self._committed.values()))
        except TimeoutError:
            raise WeightSyncError(
                f"no engine committed policy version {policy_version} within {timeout_s:.0f} s; committed: {self._committed}"
            ) from None

    async def _take_result(self, result: RoundResult) -> Accepted:
        current = self._round
        if result.incarnation not in ("", self._incarnation):
            log.info("result of another trainer's round", engine=result.engine, incarnation=result.incarnation)
            return Accepted()
        self.last_results[result.engine] = result
        if not result.committed:
            log.warning(
                "round failed",
                engine=result.engine,
                policy_version=result.policy_version,
                phase=result.phase,
                attempt=result.attempt,
                reason=result.message,
            )
            self._rounds.take(result, self._loop.time())
            self._follow()
            return Accepted()
        is_current = current is not None and result.policy_version == current.policy_version
        if current is not None and is_current and result.manifest_digest != current.manifest_digest:
            raise WeightSyncError(
                f"engine {result.engine} loaded digest {result.manifest_digest} as policy version {result.policy_version}, "
                f"expected {current.manifest_digest}"
            )
        log.info(
            "round committed",
            engine=result.engine,
            policy_version=result.policy_version,
            pause_ms=round(result.pause_ms, 1),
            stage_ms=round(result.stage_ms, 1),
        )
        self._rounds.take(result, self._loop.time())
        if self._gate is not None and self._gate.policy_version == result.policy_version:
            self._gate.staged.add(result.engine)
        self._follow()
        report = None if self._probe is None else self._probe.take(result)
        if report is not None:
            self._on_probe(report)
        async with self._changed:
            self._committed[result.engine] = result.policy_version
            self._changed.notify_all()
        return Accepted()

    def _follow(self) -> None:
        """Look at the newest round, say what has changed, and look again at its deadline."""
        now = self._loop.time()
        self._seen_alive = self._alive()
        self._rounds.expect(self._seen_alive, now)
        self._look_at_gate()
        summary = self._rounds.summary(now)
        if summary is not None and summary != self._said:
            before, self._said = self._said, summary
            if before is None or (before.policy_version, before.state) != (summary.policy_version, summary.state):
                self._log_state(summary)
            self._on_round(summary)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self._rounds.due_at()
        if due_at is not None:
            self._timer = self._loop.call_at(max(due_at, now), self._follow)

    def _look_at_gate(self) -> None:
        gate = self._gate
        if gate is not None:
            gate.look(
                engines=self._seen_alive,
                has_rollouter=self._control.get("rollouter", RollouterStatus) is not None,
                has_cache=self._settings.host_cache,
            )

    def _alive(self) -> frozenset[str]:
        rollouter = self._control.get("rollouter", RollouterStatus)
        return frozenset(engine.name for engine in rollouter.engines if engine.is_alive) if rollouter else frozenset()

    def _log_state(self, summary: RoundSummary) -> None:
        bad = summary.state in (RoundState.ABORTED, RoundState.PARTIALLY_COMMITTED)
        (log.warning if bad else log.info)(
            "round state",
            policy_version=summary.policy_version,
            state=summary.state.value,
            committed=list(summary.committed),
            failed=summary.failed,
            awaited=list(summary.awaited),
        )

    def _staged_in_thread(self, report: StageReport) -> None:
        self._loop.call_soon_threadsafe(
            self._note, report.policy_version, "staged", report.engine, report.nonce, report.payload_bytes
        )

    def _failed_in_thread(self, failure: StageFailure) -> None:
        log.warning("staging failed", engine=failure.engine, policy_version=failure.policy_version, reason=failure.reason)
        self._loop.call_soon_threadsafe(self._note, failure.policy_version, "failed", failure.nonce, failure.reason)

    def _note(self, policy_version: int, field: str, key: str, value: str, transfer_bytes: int = 0) -> None:
        if field == "staged" and self._gate is not None and self._gate.policy_version == policy_version:
            self._gate.staged.add(key)
        self._rounds.note_staging(policy_version, transfer_bytes=transfer_bytes, now=self._loop.time())
        self._follow()
        if self._round is None:
            return
        told = {**getattr(self._round, field), key: value}
        if field == "failed":
            told = dict(list(told.items())[-_FAILURES_TOLD:])
        self._round = self._round.model_copy(update={field: told})
        task = self._loop.create_task(self._control.publish("round", self._round))
        self._announcements.add(task)
        task.add_done_callback(self._announcements.discard)
