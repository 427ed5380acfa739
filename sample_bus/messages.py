"""What the daemons tell each other on the control channel.

Retained topics (last value wins, a late joiner gets the current value at once) and requests (asked once, answered once).
Everything is validated on decode: pydantic, unknown keys refused.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainerState(StrEnum):
    STARTING = "starting"
    WAITING = "waiting for samples"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving a checkpoint"
    EVALUATING = "waiting for an evaluation"
    ENDED = "ended"


class RollouterState(StrEnum):
    STARTING = "starting"
    STARTING_ENGINES = "starting engines"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    GENERATING = "generating"
    AT_LIMIT = "at the staleness limit"
    SYNCING = "syncing weights"
    EVALUATING = "evaluating"
    DRAINING = "draining"
    ENDED = "ended"


class EndReason(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    DRAINED = "drained"
    """Ended early on request, in good order."""
    STOPPED = "stopped"
    """Ended at once on request."""


# ── retained topics, written by the trainer ──────────────────────────────────────────────────────────────────────────


class SettingChange(Message):
    revision: int
    key: str
    old: Any
    new: Any
    author: str
    changed_at: float
    """Unix seconds."""
    scope: str
    """From when it holds, in general (configs.schema.Scope)."""
    holds_from: str = ""
    """The step, version or event from which it holds, such as `step 17` or `policy version 9`."""


class LiveSettingsState(Message):
    """Topic `settings`."""

    revision: int
    values: dict[str, Any]
    """Dotted key to value, every live setting."""
    changes: tuple[SettingChange, ...] = ()
    """The newest changes, oldest first, at most 100."""


class Counts(Message):
    """The trainer's side of the ledger, in samples, since the run began. After a restart it goes on from the checkpoint's."""

    received: int = 0
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    """Reason to number."""
    queued: int = 0
    """Received, neither trained nor dropped."""
    closed: int = 0
    """Closed seats received, queued ones included; they are no samples and count in none of the above."""
    refunded: int = 0
    """Samples and closed seats of dropped groups, given back to admission since `TrainerStatus.origin_version`."""
    late_results: int = 0
    """Samples refused because their seat was filled or closed already; they count as dropped too."""
    rolled_back: int = 0
    """Trained samples with tokens of a version that a rollback of the trainer has lost."""
    duplicates: int = 0
    """Records that came again although they are held or settled; refused, and counted nowhere else."""
    rejected: int = 0
    """Messages that did not decode or validate; quarantined."""


class StepSummary(Message):
    """What one optimizer step did."""

    step: int
    policy_version: int
    reward_mean: float
    loss: float
    grad_norm: float
    learning_rate: float
    staleness_mean: float
    staleness_max: int
    mismatch_mean_abs: float
    """Mean |engine logprob - trainer logprob| over trained tokens, in nats."""
    mismatch_max_abs: float
    importance_mean: float
    """Mean of exp(policy - behavior) over trained tokens."""
    effective_sample_size: float = 1.0
    """(sum w)^2 / (n sum w^2) of these weights: 1 where all are equal."""
    num_samples: int
    num_tokens: int
    """Tokens of the batch, prompts included."""
    num_trained_tokens: int
    step_time_s: float
    finished_at: float


class TimeShares(Message):
    """Where the trainer's wall clock went since the first sample was waited for; the shares sum to 1."""

    waiting: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    saving: float = 0.0
    other: float = 0.0


class EvaluationResult(Message):
    """Held-out accuracy of one policy version. Also the body of request `evaluation.result`."""

    request_id: int
    policy_version: int
    """The version for which it was asked."""
    accuracy: float
    """Mean reward over all samples, 0 to 1 for exact-match tasks."""
    num_samples: int
    num_failed: int = 0
    """Rollouts that were given up, and stand in no mean."""
    generating_versions: tuple[int, ...]
    """Versions that sampled tokens of it."""
    seconds: float


class SeatDemand(Message):
    """What the trainer's steps have taken and when the next version comes; samples_per_step says what follows."""

    taken_seats: int = Field(ge=0)
    """Seats that steps took since the origin, the one in progress included."""
    begun_step: int = Field(ge=0)
    """The newest step that has its batch."""
    sync_step: int = Field(ge=0)
    """The step after which the next version is published."""


class RoundState(StrEnum):
    """How far the transfer of one policy version is, as the trainer sees it."""

    ANNOUNCED = "announced"
    """Nobody has asked for it yet."""
    STAGING = "staging"
    COMMITTED = "committed"
    """Every living engine serves it."""
    PARTIALLY_COMMITTED = "partially committed"
    """Some serve it; the others were dropped and serve nothing before they have caught up."""
    ABORTED = "aborted"
    """No engine took it; each serves what it held, and tries again by itself."""
    SUPERSEDED = "superseded"
    """A newer version was announced before any engine served it."""


class RoundPhase(StrEnum):
    """Of a round on one engine."""

    ANNOUNCE = "announce"
    STAGE = "stage"
    COMMIT = "commit"
    CONFIRM = "confirm"


class RoundSummary(Message):
    """A round so far."""

    policy_version: int
    state: RoundState
    committed: tuple[str, ...] = ()
    """Engines that serve it."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Engine to why it does not."""
    awaited: tuple[str, ...] = ()
    """Engines that have not said."""
    stage_ms: dict[str, float] = Field(default_factory=dict)
    """Engine to how long the weights took to its memory, while it generated."""
    pause_ms: dict[str, float] = Field(default_factory=dict)
    """Engine to its pause of generation."""
    seconds: float = 0.0
    """From the announcement to the newest commit."""
    total_bytes: int = 0
    """Of the weights."""
    transfer_bytes: int = 0
    """That left the trainer for it; memory that was lent counts once for each borrower."""
    version_spread: int = 0
    """Newest minus oldest version that living engines hold."""
    num_attempts: int = 0
    """Of all engines."""


class TrainerStatus(Message):
    """Topic `trainer`."""

    state: TrainerState
    detail: str = ""
    """What it waits for, in words."""
    incarnation: str
    """Names this process's line of versions."""
    origin_version: int = 0
    """v0: the version from which admission counts."""
    origin_seats: int | None = Field(default=None, ge=0)
    """Seats that the run had settled up to the origin; None: as many as whole sync periods at today's settings hold."""
    policy_version: int = 0
    """Newest published version."""
    consumed_seats: int | None = Field(default=None, ge=0)
    """Seats (samples and closed seats of trained groups: a group counts its group_size) that the steps up to `policy_version`
    took since `origin_version`; None: as many as whole sync periods at today's settings hold."""
    demand: SeatDemand | None = None
    """What is taken beyond that; None before training begins."""
    step: int = 0
    num_steps: int = 0
    agreed: dict[str, Any] = Field(default_factory=dict)
    """Settings that the rollouter must hold alike (configs.agreed)."""
    rollouter: str | None = None
    """The rollouter that is connected now."""
    model_dir: str | None = None
    """Where the model stands, once it is prepared; engines start from it."""
    model_dtype: str | None = None
    """Compute type of the engines, `float32` or `bfloat16`."""
    model_files: dict[str, str] = Field(default_factory=dict)
    """Its files to their digests (configs.model_files), with `model_dir`; empty: nothing is said of them."""
    counts: Counts = Counts()
    shares: TimeShares = TimeShares()
    last_step: StepSummary | None = None
    evaluations: tuple[EvaluationResult, ...] = ()
    round: RoundSummary | None = None
    """The newest one; None before the first version is announced."""
    advice: tuple[str, ...] = ()
    """What a person should look at, in sentences."""


class WeightRound(Message):
    """Topic `round`: the newest published version and how far its transfer is.

    Engines pull (stage) it from `address` while they generate; an engine whose nonce stands in `staged` may commit. Any engine
    may stage the current version at any time: a late joiner or a restarted one catches up the same way. Where versions come
    faster than one is staged, a round tells how stagings of the versions before ended, too; nonces tell them apart.
    """

    policy_version: int
    incarnation: str
    address: str
    """Where `weight_sync` serves it."""
    manifest_digest: str
    """Digest over names, shapes, dtypes and checksums of all tensors (hex)."""
    num_tensors: int
    total_bytes: int
    announced_at: float
    """Unix seconds."""
    staged: dict[str, str] = Field(default_factory=dict)
    """Engine name to the nonce of its newest completed staging."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Nonce to why that staging failed; the newest ones."""
    probe_ids: tuple[int, ...] = ()
    """A sequence that each engine scores once it holds this version; empty: none."""


class EvaluationRequest(Message):
    """Topic `evaluate`: the newest evaluation asked for."""

    incarnation: str
    """Of the trainer that asks: each counts its requests and versions from the start."""
    request_id: int
    policy_version: int


class EndOfRun(Message):
    """Topic `end`: set once, when the run is over."""

    reason: EndReason
    message: str = ""


# ── retained topics, written by the rollouter ────────────────────────────────────────────────────────────────────────


class EngineStatus(Message):
    name: str
    state: str
    policy_version: int | None
    num_running: int = 0
    max_requests: int | None = None
    """Requests that it is given at once at most, at the moment."""
    last_pause_ms: float | None = None
    """Pause of generation in the last sync."""
    is_alive: bool = True
    """Its process runs and answers, so that rounds are brought to it."""


class RetryTask(Message):
    """A task that is to be issued again."""

    group_id: str
    """The group that was too old."""
    task_id: str


class TaskRetries(Message):
    """Topic `retries`, written by the trainer: what the rollouter has not said to have taken yet, the oldest first."""

    run_id: str
    tasks: tuple[RetryTask, ...] = ()


class Spread(Message):
    """How a number is distributed: exact count and total, and a histogram that is exact while there are few distinct values."""

    count: int = 0
    total: float = 0.0
    centers: tuple[float, ...] = ()
    """Rising."""
    counts: tuple[int, ...] = ()
    """Of each center."""


class BiasPart(Message):
    """Samples of one fate."""

    length: Spread = Spread()
    """Trained tokens."""
    reward: Spread = Spread()
    turns: Spread = Spread()
    sources: dict[str, int] = Field(default_factory=dict)
    """Samples by data source."""
    closed_seats: int = 0
    """Rollouts given up in the same groups: they brought no sample, so nothing of theirs is in the above."""


class BiasReport(Message):
    """Topic `bias`, written by the trainer: what was trained, against what was not or not in full, since the run began."""

    trained: BiasPart = BiasPart()
    """With every token counting whole."""
    downweighted: BiasPart = BiasPart()
    """Trained, with some token counting less for its age."""
    dropped: BiasPart = BiasPart()
    """Dropped for their age or for their group's missing seats; not what came twice, was lost, or was left at the end."""


class RolloutCounts(Message):
    """The rollouter's side of the ledger, in rollouts (= samples for single-turn loops), since the run began."""

    admitted: int = 0
    offered: int = 0
    """Samples that the bus took."""
    failed: dict[str, int] = Field(default_factory=dict)
    """Rollouts given up, by reason."""
    retried: int = 0
    in_flight: int = 0
    """Admitted, neither offered nor failed."""
    quarantined_tasks: int = 0
    """Tasks that are not issued because they failed too often."""
    late_results: int = 0
    """Results of attempts that had been given up; refused."""


class Recovery(Message):
    """What a rollouter that came again did with the rollouts that the one before had in flight."""

    process: int
    """Which process of the run it is, from 2."""
    continued: int
    """Went on from their recorded tokens."""
    restarted: int
    """Began anew: no token of theirs was recorded."""
    tokens_kept: int
    """Sampled tokens that were recorded."""
    tokens_lost_at_most: int
    """Asked for and not recorded when the process ended; fewer if it ended while they were being generated."""


class FailureNote(Message):
    """Attempts that failed for one reason since the rollouter's process began."""

    reason: str
    is_evaluation: bool
    """Of an evaluation's rollouts, not of training's."""
    count: int
    first: str
    """What the first of them said, in one line."""


class RollouterStatus(Message):
    """Topic `rollouter`."""

    state: RollouterState
    detail: str = ""
    policy_version: int | None = None
    """Version that all serving engines hold."""
    settings_revision: int = 0
    """Revision of the live settings in force here."""
    counts: RolloutCounts = RolloutCounts()
    incarnation: str | None = None
    """The trainer whose versions count here."""
    oldest_in_flight_version: int | None = None
    """The oldest version of that trainer since which a rollout in flight is played; None: none is."""
    retries_taken: tuple[str, ...] = ()
    """Those of topic `retries`, by group, in whose place another group was admitted; noted in the journal."""
    engines: tuple[EngineStatus, ...] = ()
    generated_tokens: int = 0
    generated_tokens_per_s: float = 0.0
    """Over the last 10 s."""
    loop_lag_ms: float = 0.0
    """How late its event loop was at most in the last 10 s."""
    recovery: Recovery | None = None
    """None in the first process of a run."""
    failures: tuple[FailureNote, ...] = ()
    """In the order in which each reason was first seen."""


# ── requests to the trainer ──────────────────────────────────────────────────────────────────────────────────────────


class ChangeSettings(Message):
    """Request `settings.set`: all or nothing."""

    values: dict[str, Any]
    author: str
    expected_revision: int | None = None
    """Refused if the revision has moved; None: no check."""
    dry_run: bool = False
    """Only say what would change."""

    @field_validator("values")
    @classmethod
    def _finite(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What is no number must not become null on its way."""
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key}: got {value!r}, expected a finite number")
        return values


class RevertSettings(Message):
    """Request `settings.revert`: back to the values of an earlier revision, as a new one."""

    to_revision: int
    author: str
    expected_revision: int | None = None
    dry_run: bool = False


class SettingsChanged(Message):
    """Reply to `settings.set` and `settings.revert`."""

    revision: int
    """In force now."""
    changes: tuple[SettingChange, ...] = ()
    """What changed, or after a dry run what would have."""
    refused: tuple[str, ...] = ()
    """What is wrong with what was asked, one line a problem: nothing changed."""


class AskHistory(Message):
    """Request `settings.history`."""


class SettingsHistory(Message):
    """Reply to `settings.history`; also a record of the trainer's journal of settings, with the changes of one revision."""

    changes: tuple[SettingChange, ...]
    """Oldest first."""


class RoundResult(Message):
    """Request `round.result`: how a round ended on one engine."""

    policy_version: int
    engine: str
    committed: bool
    manifest_digest: str = ""
    """What the engine computed over the bytes it loaded."""
    pause_ms: float = 0.0
    stage_ms: float = 0.0
    drain_ms: float = 0.0
    """From the closing of the engine's door to the pause."""
    incarnation: str = ""
    """Of the trainer whose version it is; empty: not said."""
    attempt: int = Field(default=1, ge=1)
    """Of this engine at this version."""
    phase: RoundPhase | None = None
    """In which it failed."""
    probe_logprobs: tuple[float, ...] = ()
    """Of the round's `probe_ids` but the first, in nats at temperature 1, under the weights that were committed."""
    message: str = ""
    """Why it failed."""


class Failed(Message):
    """Request `run.failed`: the rollouter cannot go on."""

    message: str


class Accepted(Message):
    """Reply that carries nothing."""
