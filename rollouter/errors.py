"""Errors of the rollouter.

RolloutError
├── DataError          rows that cannot become tasks; also a ConfigError
│   └── DataChanged    a file that was written to while it is read, or is gone
├── TooManyFailures    so many rollouts failed that going on makes no sense
├── RoundFailed        a policy version that the engines could not take
├── WeightCacheLost    the host's weight cache ended, or could not stage a version
├── EvaluationFailed   an evaluation without a single scored sample
├── DataExhausted      the passes over the data that were allowed are over before the steps
├── AllQuarantined     every task failed so often that none may be issued
├── AnotherModel       the trainer has another model than the one that is served here
├── RunDirInUse        another rollouter is at work in the run directory
├── GivenUp            an attempt was ended from outside
├── LateResult         an attempt's result after its deadline; also a TimeoutError
└── TrainerFailed      the trainer ended the run with an error
"""

from __future__ import annotations

from configs.errors import ConfigError


class RolloutError(Exception):
    """Raised when the rollouter cannot go on."""


class DataError(RolloutError, ConfigError):
    """Raised when a row lacks something; the message has the file, the row, the columns found and what is needed."""


class DataChanged(DataError):
    """Raised when a data file was written to in place since it was opened, or cannot be read any more: no row is to blame."""


class TooManyFailures(RolloutError):
    """Raised when rollouter.max_consecutive_failures rollouts failed in a row, or more than rollouter.max_failed_fraction of
    the newest ones; carries the first one's reason."""


class RoundFailed(RolloutError):
    """Raised when no engine took a policy version, tried several times."""


class EvaluationFailed(RolloutError):
    """Raised when an evaluation ended without a single scored sample: no accuracy is better than a wrong 0."""


class DataExhausted(RolloutError):
    """Raised when data.num_epochs passes are over and the run still needs samples."""


class AllQuarantined(RolloutError):
    """Raised when every task is in quarantine and nothing is in flight; says where, and how tasks are released."""


class AnotherModel(RolloutError):
    """Raised when a trainer has another model than the one whose tokens are in the prompts and whose engines run here."""


class RunDirInUse(RolloutError):
    """Raised when another process is the rollouter of the run directory."""


class GivenUp(RolloutError):
    """Raised in place of an attempt's result when its rollout was given up while it ran."""


class LateResult(RolloutError, TimeoutError):
    """Raised when an attempt brought a result after its deadline: it is refused."""


class TrainerFailed(RolloutError):
    """Raised when topic `end` says that the trainer failed; carries its words."""


class WeightCacheLost(RolloutError):
    """Raised to who waits for the host's weight cache when it ended, or says why it has not what was asked for."""
