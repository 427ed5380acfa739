"""What is reported of a step: its summary and its row of metrics, from the samples and the report. Pure.

Invariant: the same samples and the same report give the same row, live or trained again from a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sample_bus.messages import StepSummary
from sample_bus.sample import NO_VERSION, Sample
from trainer.policy import StepReport


def summary_of(
    samples: Sequence[Sample], report: StepReport, *, step: int, policy_version: int, seconds: float, now: float
) -> StepSummary:
    """policy_version: newest published when the step was taken. seconds: of the whole step. now: Unix seconds."""
    staleness = _staleness(samples, policy_version)
    return StepSummary(
        step=step,
        policy_version=policy_version,
        reward_mean=float(np.mean([sample.reward for sample in samples])),
        loss=report.loss,
        grad_norm=report.grad_norm,
        learning_rate=report.learning_rate,
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        mismatch_mean_abs=report.mismatch_mean_abs,
        mismatch_max_abs=report.mismatch_max_abs,
        importance_mean=report.importance_mean,
        effective_sample_size=report.effective_sample_size,
        num_samples=report.num_samples,
        num_tokens=report.num_tokens,
        num_trained_tokens=report.num_trained_tokens,
        step_time_s=seconds,
        finished_at=now,
    )


def metrics_row(samples: Sequence[Sample], summary: StepSummary, report: StepReport) -> dict[str, Any]:
    """A row of family `train`, as far as it follows from the samples and the report."""
    staleness = _staleness(samples, summary.policy_version)
    token_staleness = np.concatenate([_token_staleness(sample, summary.policy_version) for sample in samples])
    lengths = np.array([sample.num_trained_tokens for sample in samples])
    revisions = np.array([sample.settings_revision for sample in samples])
    return {
        **summary.model_dump(exclude={"step", "finished_at"}),
        "reward_std": float(np.std([sample.reward for sample in samples])),
        "staleness_min": int(staleness.min()),
        "token_staleness_mean": float(token_staleness.mean()) if token_staleness.size else 0.0,
        "kept_cache_fraction": sum(sample.num_kept_cache_tokens for sample in samples) / max(1, token_staleness.size),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
        "importance_max": report.importance_max,
        "importance_capped_fraction": report.importance_capped_fraction,
        "kl_behavior_policy": report.kl_behavior_policy,
        "entropy": report.entropy,
        "clip_fraction": report.clip_fraction,
        "num_computed_tokens": report.num_computed_tokens,
        "num_microbatches": report.num_microbatches,
        "skipped": int(report.skipped),
        "stale_weight_mean": report.stale_weight_mean,
        "forward_backward_s": report.forward_backward_s,
        "optimizer_s": report.optimizer_s,
        "admitted_revision_min": int(revisions.min()),
        "admitted_revision_max": int(revisions.max()),
        "staleness_max_of_newest_revision": int(staleness[revisions == revisions.max()].max()),
        **reward_parts(samples),
        **loop_counts(samples),
    }


def reward_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """`reward/NAME`: the mean of each part of the reward, over the samples that have it; `reward_share/NAME`: their share of
    the step's samples."""
    row: dict[str, float] = {}
    for name in sorted({name for sample in samples for name in sample.reward_parts}):
        values = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
        row[f"reward/{name}"] = float(np.mean(values))
        row[f"reward_share/{name}"] = len(values) / len(samples)
    return row


def loop_counts(samples: Sequence[Sample]) -> dict[str, float]:
    """What agent loops counted: `rollout/NAME`, the mean over all samples, with turns and segments; `tool_parse_error_rate`,
    the share of tool calls that could not be read or made, where there was a call."""
    totals: dict[str, int] = {}
    for sample in samples:
        for name, count in sample.counts.items():
            totals[name] = totals.get(name, 0) + count
    row = {f"rollout/{name}": total / len(samples) for name, total in sorted(totals.items())}
    row["num_turns_mean"] = float(np.mean([sample.num_turns for sample in samples]))
    row["num_segments_mean"] = float(np.mean([sample.num_segments for sample in samples]))
    if totals.get("tool_calls"):
        row["tool_parse_error_rate"] = totals.get("tool_parse_errors", 0) / totals["tool_calls"]
    return row


def _staleness(samples: Sequence[Sample], policy_version: int) -> npt.NDArray[np.int64]:
    return np.array([policy_version - sample.oldest_version for sample in samples])


def _token_staleness(sample: Sample, policy_version: int) -> npt.NDArray[np.int32]:
    versions = sample.token_versions()
    sampled: npt.NDArray[np.int32] = versions[versions != NO_VERSION]
    return np.int32(policy_version) - sampled
