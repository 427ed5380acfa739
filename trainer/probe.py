"""The probe: one fixed sequence, scored by the trainer at each version and by each engine after it took that version.

Invariant: both sides score the same tokens under the same version's weights, so that what is left of the difference is the
engine's and the trainer's arithmetic, or weights that did not arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from sample_bus.messages import RoundResult
from sample_bus.sample import NO_VERSION, Sample, StopReason
from trainer.policy import Policy

log = structlog.get_logger()

MAX_TOKENS = 24
_STALE_RATIO = 2.0
_STALE_FLOOR = 1e-4
"""Nats: below it everything is rounding."""
_VERSIONS_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """One engine's logprobs of the probe beside the trainer's of the same version, in nats."""

    engine: str
    policy_version: int
    mismatch_mean_abs: float
    mismatch_max_abs: float
    is_stale: bool
    """The engine's are those of the version before rather than of its own."""


def probe_ids(vocab_size: int, *, max_model_len: int) -> tuple[int, ...]:
    """The same tokens in every process: spread over the vocabulary, in no order that a text would have."""
    num_tokens = min(MAX_TOKENS, max_model_len - 1)
    return tuple(int(token) for token in np.random.default_rng(0).integers(0, vocab_size, num_tokens))


def compare(
    engine: str, policy_version: int, got: Sequence[float], expected: Sequence[float], before: Sequence[float] | None
) -> ProbeReport:
    """`got` by the engine, `expected` by the trainer at its version, `before` by the trainer at the version before.

    An engine whose logprobs are more than twice as close to `before` has not taken its version. Where a version changes less
    than rounding does, nothing is said.
    """
    ours = np.abs(np.subtract(got, expected))
    theirs = None if before is None else float(np.abs(np.subtract(got, before)).mean())
    mean = float(ours.mean())
    return ProbeReport(
        engine=engine,
        policy_version=policy_version,
        mismatch_mean_abs=mean,
        mismatch_max_abs=float(ours.max()),
        is_stale=theirs is not None and mean > _STALE_FLOOR and mean > _STALE_RATIO * theirs,
    )


def row_of_probe(report: ProbeReport) -> dict[str, float]:
    """Metrics of one engine at one version."""
    return {
        f"probe_mismatch_mean_abs_{report.engine}": report.mismatch_mean_abs,
        f"probe_mismatch_max_abs_{report.engine}": report.mismatch_max_abs,
        f"probe_is_stale_{report.engine}": float(report.is_stale),
    }


class Probe:
    """What the trainer knows of the probe at the newest versions."""

    def __init__(self, policy: Policy, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._policy = policy
        self._sample = _sample(self.ids)
        self._scored: dict[int, npt.NDArray[np.float32]] = {}

    def score(self, policy_version: int) -> None:
        """Score it with the weights of now, which are `policy_version`'s. Collective; drives the model."""
        (logprobs,) = self._policy.logprobs([self._sample])
        self._scored[policy_version] = logprobs[1:]
        while len(self._scored) > _VERSIONS_KEPT:
            del self._scored[next(iter(self._scored))]

    def take(self, result: RoundResult) -> ProbeReport | None:
        """Compare what an engine said with its round's result; None where it said nothing that can be compared."""
        expected = self._scored.get(result.policy_version)
        got = result.probe_logprobs
        if expected is None or not got:
            return None
        if len(got) != len(expected):
            log.warning("probe has another length", engine=result.engine, got=len(got), expected=len(expected))
            return None
        before = self._scored.get(result.policy_version - 1)
        report = compare(
            result.engine, result.policy_version, got, expected.tolist(), None if before is None else before.tolist()
        )
        (log.error if report.is_stale else log.debug)(
            "probe: the engine computes with the version before" if report.is_stale else "probe",
            engine=report.engine,
            policy_version=report.policy_version,
            mismatch_mean_abs=round(report.mismatch_mean_abs, 6),
            mismatch_max_abs=round(report.mismatch_max_abs, 6),
        )
        return report


def _sample(ids: Sequence[int]) -> Sample:
    """The probe as something that a policy scores: its first token is the prompt."""
    length = len(ids)
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return Sample(
        task_id="probe",
        group_id="probe",
        rollout_id="probe",
        attempt=0,
        seat=0,
        group_size=1,
        data_source="probe",
        tokens=np.array(ids, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(length, np.float32),
        version_starts=np.array([0, 1], np.int32),
        versions=np.array([NO_VERSION, 0], np.int32),
        kept_cache=np.zeros(2, np.uint8),
        reward=0.0,
        temperature=1.0,
        stop_reason=StopReason.STOP,
        num_turns=1,
        settings_revision=0,
        incarnation="probe",
        produced_at=0.0,
    )
