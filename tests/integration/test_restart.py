"""A trainer that is killed at any moment and started again ends with the bits of one that never was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.scripted_run import KILLED, NUM_STEPS, Script, recording, run_to_the_end, weights
from trainer.checkpoint import find, read_state

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SCRIPT = Script.of("rollouter", num_groups=60)


def deaths(seed: int, number: int) -> list[str]:
    """Random moments, of every kind."""
    draw = random.Random(seed)
    kinds = draw.sample(["append", "torn", "fsync", "fsync", "rename", "seconds", "append", "torn"], number)
    bounds = {"append": 120, "torn": 120, "fsync": 30, "rename": 4}
    return [f"{kind}:{draw.randint(1, bounds[kind]) if kind in bounds else round(draw.uniform(0.0, 4.0), 3)}" for kind in kinds]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that was never killed is put, by the first test that needs it."""
    return tmp_path_factory.mktemp("straight") / "run"


async def made(straight: Path, **values: object) -> Path:
    if not straight.exists():  # noqa: ASYNC240 - once
        assert await run_to_the_end(straight, [SCRIPT], [], **values) == [0]
    return straight


async def compare(straight: Path, killed: Path, *, published_every: int = 1) -> None:
    """Bit for bit; ids without their epochs, which are those of two spools."""
    left, right = recording(await made(straight)), recording(killed)
    assert len(left.steps) == NUM_STEPS
    assert [[one.seq for one in step.samples] for step in left.steps] == [
        [one.seq for one in step.samples] for step in right.steps
    ]
    assert [(step.loss, step.grad_norm) for step in left.steps] == [(step.loss, step.grad_norm) for step in right.steps]
    assert all(right.published[step] == left.published[step] for step in range(0, NUM_STEPS + 1, published_every))
    assert weights(straight) == weights(killed)
    for run in (straight, killed):
        state = read_state(find(run / "checkpoints").complete[-1])
        counts, (stream,) = state.counts, state.position.streams
        assert counts.trained == left.num_samples
        assert stream.num_settled == counts.trained + sum(counts.dropped.values()) + counts.closed


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))])
async def test_killed_at_random_moments_a_run_has_the_bits_of_one_that_went_straight_on(
    straight: Path, tmp_path: Path, seed: int
) -> None:
    """B97: batches, losses, gradient norms, published versions, weights, moments; position and counts fit each other."""
    appointed = deaths(seed, 4)
    print(f"seed {seed}: {appointed}")  # noqa: T201 - so that a failure can be repeated
    codes = await run_to_the_end(tmp_path / "run", [SCRIPT], appointed)
    assert codes.count(KILLED) >= 1
    await compare(straight, tmp_path / "run")


@pytest.mark.slow
async def test_killed_anywhere_inside_the_writing_of_a_checkpoint_nothing_changes(straight: Path, tmp_path: Path) -> None:
    """B89, B94: at each fsync of the first checkpoint in turn, and at its renames."""
    appointed = [f"fsync:{number}" for number in range(4, 13)] + ["rename:1", "rename:2"]
    codes = await run_to_the_end(tmp_path / "run", [SCRIPT], appointed)
    assert codes.count(KILLED) >= 5
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    await compare(straight, tmp_path / "run")


@pytest.mark.slow
async def test_a_checkpoint_between_two_versions_is_gone_on_from_with_the_same_bits(tmp_path: Path) -> None:
    """The weights of a step that was never published are announced when the run is taken up from there."""
    values = {"trigger_parameter_sync_step": 2}
    straight = await made(tmp_path / "straight", **values)
    codes = await run_to_the_end(tmp_path / "run", [SCRIPT], ["fsync:14", "torn:100", "append:60"], **values)
    assert codes.count(KILLED) == 3
    await compare(straight, tmp_path / "run", published_every=2)
