"""Both daemons as processes, a real vLLM server, a model that is trained: the whole line, and a live change in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.loader import load
from configs.paths import bus_address, socket_dir
from configs.schema import Settings
from sample_bus.ledger import Ledger
from sample_bus.messages import ChangeSettings, EndOfRun, EndReason, RollouterStatus, SettingsChanged, TrainerStatus
from sample_bus.open import open_link
from sample_bus.protocols import Link

REPOSITORY = Path(__file__).resolve().parents[2]
PRESET = REPOSITORY / "configs" / "demo-tiny.yaml"
DEADLINE_S = 240.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A daemon's process and its log (JSON lines)."""

    process: subprocess.Popen[bytes]
    log: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [row for row in rows if row["event"] == name]

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])


def start(program: str, overrides: list[str], directory: Path) -> Daemon:
    """A daemon as a user starts it, in a process group of its own."""
    log = directory / f"{program}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{program}.cli", "--config", str(PRESET), *overrides],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Daemon(process=process, log=log)


async def ended(daemon: Daemon) -> int:
    """The exit code, within the deadline."""
    return await asyncio.wait_for(asyncio.to_thread(daemon.process.wait), DEADLINE_S)


def leftovers(run_dir: Path) -> list[str]:
    """Processes that still name the run."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and any(str(run_dir) in word for word in process.info["cmdline"])
    ]


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        if daemon.process.poll() is None:
            os.killpg(daemon.process.pid, signal.SIGKILL)
            daemon.process.wait(30)


@asynccontextmanager
async def console(settings: Settings) -> AsyncIterator[Link]:
    async with open_link(settings.bus, address=bus_address(settings), name="test", role="console") as link:
        await link.wait_connected(DEADLINE_S)
        yield link


async def until_version(link: Link, version: int) -> TrainerStatus:
    async with asyncio.timeout(DEADLINE_S):
        async for status in link.watch("trainer", TrainerStatus):
            if status.policy_version >= version and status.last_step is not None:
                return status
    raise AssertionError("the topic ended")


def metrics(run_dir: Path, family: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["family"] == family]


async def test_versions_are_trained_a_live_change_holds_and_the_books_balance(tmp_path: Path, daemons: list[Daemon]) -> None:
    """Rollouter first; three versions and more; staleness_threshold to 0 in the middle; a clean end on both sides."""
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", "num_steps=10", "staleness_threshold=1.0", "sampling.max_tokens=6"]
    settings = load(PRESET, overrides)
    rollouter = start("rollouter", overrides, tmp_path)
    await asyncio.sleep(2)
    trainer = start("trainer", overrides, tmp_path)
    daemons += [rollouter, trainer]
    async with console(settings) as link:
        before = await until_version(link, 3)
        assert before.last_step is not None
        changed = await link.request(
            "settings.set",
            ChangeSettings(values={"staleness_threshold": 0}, author="test"),
            SettingsChanged,
        )
        assert changed.revision == 1
        async with asyncio.timeout(DEADLINE_S):
            async for status in link.watch("rollouter", RollouterStatus):
                if status.settings_revision == 1:
                    break
            async for end in link.watch("end", EndOfRun):
                assert end.reason is EndReason.FINISHED, end.message
                break
        final = link.get("trainer", TrainerStatus)
        rollouts = link.get("rollouter", RollouterStatus)
    codes = (await ended(trainer), await ended(rollouter))
    assert codes == (0, 0), f"{trainer.tail()}\n---\n{rollouter.tail()}"
    assert final is not None
    assert rollouts is not None
    assert (final.step, final.policy_version) == (10, 10)
    ledger = Ledger(rollouts=rollouts.counts, samples=final.counts)
    assert ledger.closes, ledger.line()
    assert final.counts.trained == 10 * settings.samples_per_step
    for daemon in (trainer, rollouter):
        (event,) = daemon.events("setting changed")
        assert (event["key"], event["old"], event["new"], event["author"]) == ("staleness_threshold", 1.0, 0.0, "test")
    steps = metrics(run_dir, "train")
    assert [row["step"] for row in steps] == list(range(1, 11))
    new = [row for row in steps if row["admitted_revision_max"] == 1]
    assert new, "no group was admitted after the change"
    assert all(row["staleness_max_of_newest_revision"] == 0 for row in new)
    assert any(row["staleness_max"] > 0 for row in steps if row["admitted_revision_max"] == 0), "it never ran ahead before"
    assert all(row["mismatch_mean_abs"] < 1e-3 for row in steps if row["staleness_max"] == 0)
    assert all(abs(row["importance_mean"] - 1) < 1e-3 for row in steps if row["staleness_max"] == 0)
    assert {row["step"] for row in metrics(run_dir, "sync")} == set(range(11))
    first, last = (row["accuracy"] for row in metrics(run_dir, "evaluation"))
    assert 0 <= first <= 1
    assert 0 <= last <= 1
    assert leftovers(run_dir) == []
    assert not list(socket_dir(settings).iterdir())


async def test_learning_rate_zero_leaves_engine_and_trainer_in_agreement(tmp_path: Path, daemons: list[Daemon]) -> None:
    """B70, B50: nothing moves, so the ratio is 1; also at a temperature other than 1. Trainer first."""
    run_dir = tmp_path / "run"
    overrides = [
        f"run_dir={run_dir}",
        "num_steps=3",
        "trainer.learning_rate=0",
        "sampling.temperature=0.6",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]
    daemons += [start("trainer", overrides, tmp_path)]
    await asyncio.sleep(2)
    daemons += [start("rollouter", overrides, tmp_path)]
    codes = [await ended(daemon) for daemon in daemons]
    assert codes == [0, 0], "\n---\n".join(daemon.tail() for daemon in daemons)
    steps = metrics(run_dir, "train")
    assert len(steps) == 3
    for row in steps:
        assert row["mismatch_mean_abs"] < 1e-4
        assert row["mismatch_max_abs"] < 1e-3
        assert abs(row["importance_mean"] - 1) < 1e-3
    assert leftovers(run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "rollouter"])
async def test_death_of_one_daemon_is_named_by_the_other(victim: str, tmp_path: Path, daemons: list[Daemon]) -> None:
    """B14, B15: the survivor says who was lost, ends with an error, leaves nothing behind."""
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", "num_steps=1000", "bus.heartbeat_timeout_s=5", "evaluation.at_start=false"]
    settings = load(PRESET, overrides)
    both = {name: start(name, overrides, tmp_path) for name in ("trainer", "rollouter")}
    daemons += both.values()
    async with console(settings) as link:
        await until_version(link, 2)
    both[victim].process.kill()
    survivor = both["rollouter" if victim == "trainer" else "trainer"]
    assert await ended(survivor) == 1, survivor.tail()
    assert victim in survivor.tail().splitlines()[-1]
    await asyncio.to_thread(both[victim].process.wait, 30)
    async with asyncio.timeout(60):
        while leftovers(run_dir):  # noqa: ASYNC110 - other processes end without telling
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_first_sigterm_drains_both_and_leaves_nothing(tmp_path: Path, daemons: list[Daemon]) -> None:
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", "num_steps=1000", "evaluation.at_start=false"]
    settings = load(PRESET, overrides)
    trainer, rollouter = start("trainer", overrides, tmp_path), start("rollouter", overrides, tmp_path)
    daemons += [trainer, rollouter]
    async with console(settings) as link:
        await until_version(link, 2)
        trainer.process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            async for end in link.watch("end", EndOfRun):
                assert end.reason is EndReason.DRAINED
                break
    assert await ended(trainer) == 0, trainer.tail()
    assert await ended(rollouter) == 0, rollouter.tail()
    assert leftovers(run_dir) == []


@pytest.mark.slow
async def test_an_engine_under_ray_is_trained_with_and_nothing_of_ray_is_left(tmp_path: Path, daemons: list[Daemon]) -> None:
    """engine.placement=ray: three steps and their versions over a server that a Ray actor owns."""
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", "num_steps=3", "engine.placement=ray", "evaluation.at_start=false"]
    daemons += [start("trainer", overrides, tmp_path), start("rollouter", overrides, tmp_path)]
    codes = [await ended(daemon) for daemon in daemons]
    assert codes == [0, 0], "\n---\n".join(daemon.tail() for daemon in daemons)
    (reserved,) = daemons[1].events("Ray reserved the engines' bundles")
    assert reserved["node"] == "127.0.0.1"
    (launched,) = daemons[1].events("engine launched")
    assert launched["placement"] == "ray"
    assert len(metrics(run_dir, "train")) == 3
    assert {row["step"] for row in metrics(run_dir, "sync")} == {0, 1, 2, 3}
    assert leftovers(run_dir) == []
    assert leftovers(Path("hr-ray-")) == []
    assert not list(socket_dir(load(PRESET, overrides)).iterdir())
