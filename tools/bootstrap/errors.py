"""SetupError: the only exception that set-up means to show, as one line."""


class SetupError(Exception):
    """Raised when set-up cannot go on; the message says what was met and what to do about it."""
