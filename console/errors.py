"""Errors of the operator's commands.

ConsoleError
├── NoRun            no run was found where one was looked for
├── NobodyAnswers    no trainer at the address
├── RunIsLive        the run directory belongs to a run that goes on
└── NotQuarantined   nothing in quarantine has that name
"""


class ConsoleError(Exception):
    """Raised when a command cannot do what was asked. The message is one line."""


class NoRun(ConsoleError):
    """Raised when no run that goes on was found."""


class NobodyAnswers(ConsoleError):
    """Raised when no trainer answers at the address."""


class RunIsLive(ConsoleError):
    """Raised when a run that goes on already uses the run directory."""


class NotQuarantined(ConsoleError):
    """Raised when nothing in quarantine has the name that was given, or several things have."""
