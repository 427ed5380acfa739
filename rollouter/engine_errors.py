"""Errors of the engines.

RolloutError
├── EngineStartError   an engine that did not come up, or that cannot be trained with
└── EnginesLost        no engine is left, and none may be started again
"""

from __future__ import annotations

from rollouter.errors import RolloutError


class EngineStartError(RolloutError):
    """Raised when an engine did not answer in time, ended while starting, or reports unusable log-probabilities.

    The message quotes the last relevant line of its log.
    """


class EnginesLost(RolloutError):
    """Raised when every engine has died more often than engine.max_restarts allows."""
