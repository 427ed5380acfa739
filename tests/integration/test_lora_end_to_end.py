"""Adapters through the whole line: trained, sent merged or alone, sampled with by a real engine, checked in a live run."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.loader import load
from tests.integration.test_end_to_end import PRESET, REPOSITORY, Daemon, console, daemons, ended, metrics, start, until_version

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["daemons"]

MISMATCH = 1e-5
"""Mean |engine - trainer| in nats, float32; observed below 3e-7."""


@pytest.mark.parametrize("lora", ["merged", "adapter"])
async def test_the_engine_samples_with_the_adapters_that_the_trainer_has(
    lora: str, tmp_path: Path, daemons: list[Daemon]
) -> None:
    """B141, B69: on policy, so that each step trains what its own version sampled; the check compares every tensor."""
    run_dir = tmp_path / "run"
    overrides = [
        f"run_dir={run_dir}",
        "num_steps=1000",
        "staleness_threshold=0",
        "sampling.max_tokens=6",
        "trainer.lora_rank=8",
        "trainer.learning_rate=0.002",
        f"weight_sync.lora={lora}",
        "weight_sync.probe=on",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]
    settings = load(PRESET, overrides)
    daemons += [start(program, overrides, tmp_path) for program in ("rollouter", "trainer")]
    async with console(settings) as link:
        await until_version(link, 5)
    found = await asyncio.to_thread(check, run_dir)
    daemons[1].process.send_signal(signal.SIGTERM)
    for daemon in daemons:
        assert await ended(daemon) == 0, daemon.tail()
    (engine,) = found["engines"]
    assert found["is_equal"], found
    assert engine["num_tensors"] == found["num_tensors"] > 0
    assert engine["num_effective"] >= engine["num_tensors"]
    rows = metrics(run_dir, "train")
    assert len(rows) >= 5
    assert max(row["mismatch_mean_abs"] for row in rows) < MISMATCH
    assert any(row["grad_norm"] > 0 for row in rows)
    probes = metrics(run_dir, "probe")
    assert len(probes) >= 5
    assert all(row["probe_mismatch_max_abs_engine-0"] < 1e-4 for row in probes)
    assert not any(row["probe_is_stale_engine-0"] for row in probes)


def check(run_dir: Path) -> dict[str, Any]:
    """What `headrace weights check` says; it exits with 0 when all is equal."""
    done = subprocess.run(
        [sys.executable, "-m", "console.cli", "weights", "check", "--run-dir", str(run_dir), "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain: dict[str, Any] = json.loads(done.stdout)
    return plain
