"""Messages with plausible values, for tests of what the console makes of them."""

from __future__ import annotations

from console.picture import Picture
from sample_bus.messages import (
    Counts,
    EngineStatus,
    EvaluationResult,
    RolloutCounts,
    RollouterState,
    RollouterStatus,
    StepSummary,
    TimeShares,
    TrainerState,
    TrainerStatus,
)


def step(number: int, **changes: object) -> StepSummary:
    values: dict[str, object] = {
        "step": number,
        "policy_version": number,
        "reward_mean": min(1.0, 0.1 * number),
        "loss": 0.01,
        "grad_norm": 1.0,
        "learning_rate": 1e-5,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "mismatch_mean_abs": 0.001,
        "mismatch_max_abs": 0.01,
        "importance_mean": 1.0,
        "num_samples": 64,
        "num_tokens": 1600,
        "num_trained_tokens": 128,
        "step_time_s": 2.0,
        "finished_at": 1000.0 + 2.0 * number,
    }
    return StepSummary.model_validate(values | changes)


def evaluation(version: int, accuracy: float) -> EvaluationResult:
    return EvaluationResult(
        request_id=version,
        policy_version=version,
        accuracy=accuracy,
        num_samples=64,
        generating_versions=(version,),
        seconds=1.0,
    )


def trainer(**changes: object) -> TrainerStatus:
    values: dict[str, object] = {
        "state": TrainerState.TRAINING,
        "incarnation": "t1",
        "policy_version": 3,
        "step": 3,
        "num_steps": 10,
        "model_dir": "/models/x",
        "counts": Counts(received=80, trained=64, dropped={"stale": 4}, queued=12),
        "shares": TimeShares(waiting=0.3, training=0.6, publishing=0.1),
    }
    return TrainerStatus.model_validate(values | changes)


def rollouter(**changes: object) -> RollouterStatus:
    values: dict[str, object] = {
        "state": RollouterState.GENERATING,
        "policy_version": 3,
        "settings_revision": 2,
        "counts": RolloutCounts(admitted=96, offered=80, in_flight=16),
        "engines": (EngineStatus(name="engine-0", state="serving", policy_version=3, num_running=16, last_pause_ms=35.0),),
        "generated_tokens": 1234,
        "generated_tokens_per_s": 88.0,
    }
    return RollouterStatus.model_validate(values | changes)


def picture(num_steps: int = 10) -> Picture:
    return Picture(name="demo", num_steps=num_steps, max_queued_samples=512, started_at=900.0)
