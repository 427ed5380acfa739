"""Errors of the trainer.

TrainerError
├── PackingError
├── NonFiniteError
├── CheckpointError
│   └── NoCheckpointError
├── ModelError
├── ReplayError
└── RunDirInUse
"""


class TrainerError(Exception):
    """Base of what the trainer raises."""


class PackingError(TrainerError):
    """Raised when a sample cannot be trained: a token id outside the vocabulary, or a first token that is to be trained."""


class NonFiniteError(TrainerError):
    """Raised when a loss or a gradient is NaN or infinite; the weights are unchanged."""


class CheckpointError(TrainerError):
    """Raised when a checkpoint is damaged, incomplete or belongs to another model."""


class NoCheckpointError(CheckpointError):
    """Raised when resuming was asked for and no complete checkpoint exists."""


class ModelError(TrainerError):
    """Raised when the model cannot be found, converted, made or loaded."""


class ReplayError(TrainerError):
    """Raised when a run cannot be trained again from what it kept: nothing or not enough was, or the model is another."""


class RunDirInUse(TrainerError):
    """Raised when another trainer is at work in the run directory."""
