"""How a run is shown while it goes on."""

from __future__ import annotations

from typing import Protocol

from console.picture import Picture


class Display(Protocol):
    """Shows one run. Called on the event loop; nothing may block for long."""

    refresh_interval_s: float
    """Changes within this time are shown together."""

    def start(self) -> None: ...

    def show(self, picture: Picture, now: float) -> None:
        """Something changed, or a second passed."""
        ...

    def close(self) -> None:
        """Give the terminal back. May be called more than once."""
        ...
