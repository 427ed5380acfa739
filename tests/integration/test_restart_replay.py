"""A run of two producers, changed live and killed on the way, is taken up as it was, and trained again from what it kept."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from configs.loader import load
from configs.paths import bus_address
from sample_bus.journal import StepBegan, StepTrained
from sample_bus.messages import ChangeSettings, SettingsChanged
from sample_bus.open import open_link
from tests.integration.scripted_run import (
    HANG_S,
    KILLED,
    NUM_STEPS,
    REPOSITORY,
    Script,
    journal_of,
    overrides,
    recording,
    run_to_the_end,
    weights,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NEVER_BEFORE_THE_END = {"checkpoint.every_steps": 100}
LIVE_RATE = 2e-3


async def change_live(run_dir: Path) -> None:
    """As `headrace set` does, as soon as the trainer listens: long before its first step."""
    settings = load(None, overrides(run_dir), environment={})
    async with open_link(settings.bus, address=bus_address(settings), name="test", role="console") as link:
        await link.wait_connected(HANG_S)
        change = ChangeSettings(values={"trainer.learning_rate": LIVE_RATE}, author="test")
        await link.request("settings.set", change, SettingsChanged)


async def replay(run_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `trainer --replay`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trainer.cli",
        "--replay",
        str(run_dir),
        *arguments,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    async with asyncio.timeout(HANG_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run; its first process is killed after some steps, none of which is in a checkpoint."""
    run_dir = tmp_path_factory.mktemp("raced") / "run"
    scripts = [Script.of(name, num_groups=40, seed=seed) for seed, name in enumerate(("rollouter", "another"))]

    async def both() -> list[int]:
        changing = asyncio.ensure_future(change_live(run_dir))
        codes = await run_to_the_end(run_dir, scripts, ["append:250"], **NEVER_BEFORE_THE_END)
        await changing
        return codes

    assert asyncio.run(both()) == [KILLED, 0]
    return run_dir


def test_lost_steps_are_taken_again_with_the_same_records_and_settings(run_dir: Path) -> None:
    """The producers race: only the journal knows what the lost steps had. The rate that was changed live outlives the kill."""
    records = journal_of(run_dir)
    trained = [one for one in records if isinstance(one, StepTrained)]
    replayed = {one.step: one for one in trained if one.replayed}
    first = {one.step: one for one in trained if one.step in replayed and not one.replayed}
    assert first
    assert all((one.loss, one.grad_norm) == (replayed[step].loss, replayed[step].grad_norm) for step, one in first.items())
    steps = recording(run_dir).steps
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    assert len({one for step in steps for one in step.samples}) == sum(len(step.samples) for step in steps)
    rates = [step.options["trainer.learning_rate"] for step in steps]
    assert rates == [LIVE_RATE] * NUM_STEPS
    began = [one for one in records if isinstance(one, StepBegan)]
    assert {one.samples[0][0] for one in began} == {"rollouter", "another"}


async def test_trained_again_from_what_it_kept_it_has_the_same_bits(run_dir: Path) -> None:
    code, out, err = await replay(run_dir)
    assert code == 0, err
    assert f"losses    identical in all {NUM_STEPS} steps" in out
    assert f"weights   identical in all {NUM_STEPS + 1} published versions" in out
    written = Path(out.splitlines()[-1].removeprefix("written to "))
    assert weights(written) == weights(run_dir)


async def test_another_loss_is_compared_on_the_same_samples(run_dir: Path, tmp_path: Path) -> None:
    code, out, err = await replay(run_dir, "trainer.proximal=behavior", f"run_dir={tmp_path / 'again'}", "num_steps=4")
    assert code == 0, err
    assert "expected  trainer.proximal: 'behavior' here, 'step' in the run" in out
    rows = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert any(row["loss"] != row["recorded_loss"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["seed=1"], 2, "trainer: error: seed: got 1, expected 0: the samples belong to the run's model"),
        (["trainer.learning_rat=1"], 2, "unknown setting 'trainer.learning_rat'; nearest valid: trainer.learning_rate"),
        (["num_steps=0"], 2, "num_steps: got 0"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(run_dir: Path, arguments: list[str], code: int, says: str) -> None:
    got, out, err = await replay(run_dir, *arguments)
    assert (got, out) == (code, "")
    assert says in err
    assert len(err.splitlines()) == 1


async def test_a_directory_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    code, _, err = await replay(tmp_path)
    assert code == 2
    assert err == f"trainer: error: --replay {tmp_path}: no settings.yaml in it, expected the directory of a run\n"
