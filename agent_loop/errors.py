"""Errors of the agent loops.

AgentLoopError
├── EngineError
│   ├── EngineUnavailable    no answer: dead, restarting, overloaded or too slow; may be tried again
│   ├── RequestRefused       a deterministic refusal; trying again cannot help
│   └── BadGeneration        an answer that cannot be trained on
├── NoRoom                   the context leaves no token to generate
├── RewardError              a reward that failed or is no finite number
└── LoopError                an agent loop that left no trajectory behind
    └── Diverged             one that did not repeat what was recorded of it
"""

from __future__ import annotations

USER_CODE_FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""What code that is not ours may raise where it is called: none of it is a reason to end the process."""


class AgentLoopError(Exception):
    """Raised when a rollout cannot go on."""


class EngineError(AgentLoopError):
    """Raised when an engine did not do what was asked."""


class EngineUnavailable(EngineError):
    """Raised when an engine gave no answer: connection lost, a 5xx status, a deadline. The request may be tried again."""


class RequestRefused(EngineError):
    """Raised when an engine refused a request for what it asked (a 4xx status). Never tried again."""


class BadGeneration(EngineError):
    """Raised when an answer is inconsistent: log-probabilities missing, not finite or of another token, versions with gaps."""


class NoRoom(AgentLoopError):
    """Raised when a turn is asked for and the context already fills the model's length."""


class RewardError(AgentLoopError):
    """Raised when a reward function raised, or returned something else than a finite number or a dict with `score`."""


class LoopError(AgentLoopError):
    """Raised when an agent loop ended without a single generated token."""


class Diverged(LoopError):
    """Raised when an agent loop that is continued in another process does something else than was recorded of it."""


def words_of(error: BaseException) -> str:
    """`KeyError: 'x'`, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
