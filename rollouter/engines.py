"""The seam between the daemon and its engines: the engine pool in a run, a careful fake in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from agent_loop.engine import Engine
from sample_bus.messages import EngineStatus, RoundResult, WeightRound
from sample_bus.weight_checks import EngineWeights

WaitStaged = Callable[[WeightRound, str, str], Awaitable[None]]
"""(round, engine, nonce): returns once that staging is complete; raises why it is not."""


class EngineServer(Protocol):
    """One vLLM server that is started, watched and ended: by this process, or by a Ray actor."""

    @property
    def address(self) -> str:
        """`unix:` and its socket."""
        ...

    @property
    def pid(self) -> int | None:
        """Of the server's process; None before the first launch."""
        ...

    async def launch(self) -> None:
        """Start the process, which then waits for `serve`; does nothing while one runs. Raises EngineStartError."""
        ...

    async def serve(self, model_dir: str, dtype: str) -> None:
        """Launch if need be, load the model, and return once it answers. Raises EngineStartError."""
        ...

    async def wait_ended(self) -> int:
        """Wait for the process to end by itself; its exit status, negative for a signal."""
        ...

    def why_ended(self) -> str:
        """What is known of its end."""
        ...

    def kill(self) -> None:
        """End it at once; `wait_ended` returns soon after."""
        ...

    async def stop(self) -> None:
        """End it; afterwards neither process nor socket is left."""
        ...


class EngineFleet(Engine, Protocol):
    """All engines of this rollouter, kept at one policy version and used as one."""

    async def launch(self) -> None:
        """Let the engines get ready for `start` as far as they can without knowing the model."""
        ...

    async def start(self, model_dir: str, dtype: str) -> None:
        """Start or reach all engines; afterwards each waits for its first weights."""
        ...

    async def supervise(self) -> None:
        """Run beside everything else after `start`; never returns, raises when no engine is left."""
        ...

    async def sync(self, round: WeightRound, wait_staged: WaitStaged) -> list[RoundResult]:
        """Bring every living engine to `round`; never raises for an engine's failure."""
        ...

    async def check_weights(self, *, effective: bool) -> list[EngineWeights]:
        """What each engine holds, one answer an engine, also where it cannot be asked; `effective`: read back from the model,
        too."""
        ...

    def statuses(self) -> tuple[EngineStatus, ...]: ...

    @property
    def generated_tokens(self) -> int:
        """Tokens that generate() returned since the start."""
        ...

    async def close(self) -> None:
        """Stop what was started here."""
        ...
