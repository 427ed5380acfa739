"""The signals that ask a process of ours to end."""

from __future__ import annotations

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP of a closed terminal unless this process was told to ignore it, as by `nohup`."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)
