"""A run whose weights are streamed from where they are trained: no copy of them is ever taken, and none is mixed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from configs.loader import load
from tests.integration.test_end_to_end import PRESET, Daemon, console, daemons, ended, metrics, start, until_version
from tests.integration.test_lora_end_to_end import check

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["daemons"]

MISMATCH = 1e-4
"""|engine - trainer| in nats at the same version, float32."""


@pytest.mark.parametrize("host_cache", ["true", "false"])
async def test_each_version_reaches_the_engine_whole_before_the_weights_change(
    host_cache: str, tmp_path: Path, daemons: list[Daemon]
) -> None:
    """B140: the trainer works ahead of the engine, and what the engine scores under each version is what the trainer does."""
    run_dir = tmp_path / "run"
    overrides = [
        f"run_dir={run_dir}",
        "num_steps=1000",
        "sampling.max_tokens=6",
        "trainer.learning_rate=0.002",
        "weight_sync.snapshot=never",
        f"weight_sync.host_cache={host_cache}",
        "weight_sync.probe=on",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]
    settings = load(PRESET, overrides)
    daemons += [start(program, overrides, tmp_path) for program in ("rollouter", "trainer")]
    async with console(settings) as link:
        await until_version(link, 8)
    found = await asyncio.to_thread(check, run_dir)
    daemons[1].process.send_signal(signal.SIGTERM)
    for daemon in daemons:
        assert await ended(daemon) == 0, daemon.tail()
    assert found["is_equal"], found
    rounds = metrics(run_dir, "round")
    assert sum(row["state"] == "committed" for row in rounds) >= 6, rounds
    probes = metrics(run_dir, "probe")
    assert len(probes) >= 6
    assert all(row["probe_mismatch_max_abs_engine-0"] < MISMATCH for row in probes)
