"""The engines of this rollouter: started, supervised, kept at one policy version, and used as one `Engine`.

Invariant: an engine gets a request only while it runs, holds the newest committed policy version and is not being updated.
Whatever a round does, generation is resumed in one place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation, SamplingParams
from configs.schema import EngineSettings, WeightSyncSettings
from sample_bus.messages import EngineStatus, RoundResult, WeightRound

PartialRollout = Literal["keep", "recompute", "finish"]

WaitStaged = Callable[[WeightRound, str, str], Awaitable[None]]
"""(round, engine name, nonce): returns once the trainer says that this staging is complete (topic `round`, `staged[engine] == nonce`);
raises any Exception with the reason if it failed (`failed[nonce]`) or was overtaken by a newer round. The pool sets the deadline."""


class EnginePool:
    def __init__(
        self,
        engine: EngineSettings,
        weight_sync: WeightSyncSettings,
        *,
        socket_dir: Path,
        log_dir: Path,
        partial_rollout: PartialRollout,
        on_change: Callable[[], None] = lambda: None,
        on_round_result: Callable[[RoundResult], None] = lambda result: None,
    ) -> None:
        """`on_change` is called on the event loop after any change of `statuses()`; `on_round_result` with the outcome of a
        catch-up of an engine that was restarted (the outcomes of `sync` are returned by it)."""
        raise NotImplementedError

    async def start(self, model_dir: str, dtype: str) -> None:
        """Start (or reach) all engines and check them; afterwards each waits for its first weights. Raises EngineStartError."""
        raise NotImplementedError

    async def supervise(self) -> None:
        """Run beside everything else after `start`: restarts dead engines and lets them catch up. Never returns; raises
        EnginesLost once no engine is left and none may be restarted."""
        raise NotImplementedError

    async def sync(self, round: WeightRound, wait_staged: WaitStaged) -> list[RoundResult]:
        """Bring every living engine to `round`: stage while generating, then pause, load, resume. One result an engine;
        never raises for an engine's failure."""
        raise NotImplementedError

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        """`agent_loop.engine.Engine`: the least loaded engine that serves; waits for one. A request whose engine died is tried
        once more elsewhere."""
        raise NotImplementedError

    def statuses(self) -> tuple[EngineStatus, ...]:
        raise NotImplementedError

    @property
    def policy_version(self) -> int | None:
        """The version that serving engines hold; None before the first sync."""
        raise NotImplementedError

    @property
    def generated_tokens(self) -> int:
        """Tokens that generate() returned since the start."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop what was started here: SIGTERM, then SIGKILL of the process group; no process and no socket is left."""
        raise NotImplementedError
