"""Errors of the agent loops.

AgentLoopError
├── EngineError
│   ├── EngineUnavailable    no answer: dead, restarting, overloaded or too slow; may be tried again
│   ├── RequestRefused       a deterministic refusal; trying again cannot help
│   └── BadGeneration        an answer that cannot be trained on
├── NoRoom                   the context leaves no token to generate
├── RewardError              a reward that failed or is no finite number
│   ├── RewardUnavailable    what it needs was not there: judge, sandbox, memory, its process; may be tried again
│   ├── RewardTimeout        not scored within its deadline
│   ├── BadGroundTruth       the row's fault: nothing could be scored against it
│   └── Unscored             the reward said None
├── ToolError                a tool that cannot be used as it is
│   └── ToolUnavailable      what it needs was not there; may be tried again
│       └── ToolLost         it hangs in every place that it may take, for good: the run cannot go on with it
└── LoopError                an agent loop that left no trajectory behind
    ├── Diverged             one that did not repeat what was recorded of it
    └── ProgramUnavailable   the program that plays rollouts cannot be started, or ended while it played this one
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


class RewardUnavailable(RewardError):
    """Raised when the infrastructure of a reward failed: never a wrong answer, never a score. The score may be asked again."""


class RewardTimeout(RewardError):
    """Raised when a score took longer than reward.timeout_s; the process that worked at it was killed."""


class BadGroundTruth(RewardError):
    """Raised when the ground truth of a row is none: no reply could be scored against it, so another attempt is of no use."""


class Unscored(RewardError):
    """Raised when a reward gave None: the rollout has no score, which is something else than a score of 0."""


class ToolError(AgentLoopError):
    """Raised when a tool cannot be loaded, or cannot be told to a model."""


class ToolUnavailable(ToolError):
    """Raised by a tool whose infrastructure failed: the call is made again, and then its rollout fails, with no reward."""


class ToolLost(ToolUnavailable):
    """Raised when calls of a tool hang in every place that it may take and none ends. Threads cannot be killed: the run ends,
    since what is left to train on would be the rollouts that never call the tool."""


class LoopError(AgentLoopError):
    """Raised when an agent loop ended without a single generated token."""


class ProgramUnavailable(LoopError):
    """Raised when a program that plays rollouts is not there, whatever they are about. They may be tried again."""


class Diverged(LoopError):
    """Raised when an agent loop that is continued in another process does something else than was recorded of it."""


def words_of(error: BaseException) -> str:
    """`KeyError: 'x'`, in one line that can be written anywhere."""
    try:
        words = str(error)
    except Exception as raised:  # noqa: BLE001 - an error of somebody else's class
        words = f"its words raise {type(raised).__name__}"
    return " ".join(f"{type(error).__name__}: {words}".split()).encode(errors="backslashreplace").decode()
