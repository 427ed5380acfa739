"""A run trained again from what it kept has the same bits; with another setting the difference is told and explained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loader import load
from configs.schema import Settings
from sample_bus.journal import TRAINER_FILE, StepBegan, StepTrained, TrainerBegan, journal_dir, read_journal
from sample_bus.record_log import RecordLog, read_records
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.recorded_run import CHANGED_RATE, CHECKPOINT_STEP, NUM_STEPS, RUN_ID, make_run, write_journal
from trainer.checkpoint import find
from trainer.comparison import report
from trainer.errors import ReplayError
from trainer.replay import _ending_asked, replay
from trainer.replay_request import prepare, replay_dir
from trainer.retained import retained_dir
from trainer.retraining import train_again


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy that the test may change; the model stays where it is."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def settings_of(run_dir: Path, *overrides: str) -> Settings:
    """As the command line makes them."""
    return load(run_dir / "settings.yaml", [f"run_dir={replay_dir(run_dir)}", *overrides], environment={})


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def keep_only_from(run_dir: Path, first: int) -> None:
    """Rewrite what was kept without the first records."""
    path = retained_dir(run_dir, RUN_ID) / "000001.log"
    payloads = [payload for _, payload in read_records(path)]
    path.unlink()
    kept = RecordLog(path)
    for payload in payloads[first:]:
        kept.append(payload)
    kept.close()


def test_the_same_settings_give_the_same_bits(run_dir: Path) -> None:
    """Every loss, every gradient norm, every published version; a live change of the learning rate is recorded and holds."""
    before = files_of(run_dir)
    text, comparison = replay(settings_of(run_dir, "checkpoint.at_end=true"), of=run_dir, given=set())
    assert comparison.is_identical
    assert not comparison.reasons
    assert [pair.recorded.step for pair in comparison.steps] == [1, 2, 3, 4]
    assert [pair.recorded.policy_version for pair in comparison.versions] == [0, 1, 2, 3, 4]
    assert f"losses    identical in all {NUM_STEPS} steps" in text
    assert f"weights   identical in all {NUM_STEPS + 1} published versions" in text
    rows = [json.loads(line) for line in (run_dir / "replay-1" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["family"], row["step"]) for row in rows] == [("train", step) for step in range(1, NUM_STEPS + 1)]
    assert all(row["loss"] == row["recorded_loss"] for row in rows)
    assert rows[2]["learning_rate"] == CHANGED_RATE
    assert [path.name for path in find(run_dir / "replay-1" / "checkpoints").complete] == [f"step_{NUM_STEPS}"]
    assert {path: data for path, data in files_of(run_dir).items() if "replay-1" not in path.parts} == before
    assert replay_dir(run_dir) == run_dir / "replay-2"


def test_another_learning_rate_is_compared_on_the_same_samples_and_named(run_dir: Path) -> None:
    text, comparison = replay(
        settings_of(run_dir, "trainer.learning_rate=0.002"), of=run_dir, given={"trainer.learning_rate", "run_dir"}
    )
    apart = comparison.first_version_apart()
    assert apart is not None
    assert apart.recorded.policy_version == 1
    assert comparison.first_step_apart() is comparison.steps[1]
    assert "weights   first apart at policy version 1, after step 1" in text
    assert f"expected  trainer.learning_rate: 0.002 here, 0.001 in the run (steps 1 to {NUM_STEPS})" in text
    assert comparison.is_explained
    lines = {line[:18].strip(): line.split()[-NUM_STEPS:] for line in text.splitlines()}
    assert lines["loss, run"] != lines["loss, here"]
    assert len(lines["grad norm, here"]) == NUM_STEPS


def test_another_loss_is_compared_and_named(run_dir: Path) -> None:
    text, comparison = replay(settings_of(run_dir, "trainer.proximal=behavior"), of=run_dir, given={"trainer.proximal"})
    assert not comparison.is_identical
    assert "expected  trainer.proximal: 'behavior' here, 'step' in the run" in text


def test_fewer_steps_may_be_asked_for(run_dir: Path) -> None:
    _, comparison = replay(settings_of(run_dir, "num_steps=2"), of=run_dir, given={"num_steps"})
    assert comparison.is_identical
    assert len(comparison.steps) == 2


def test_without_the_first_samples_it_begins_from_the_checkpoint_behind_them(run_dir: Path) -> None:
    keep_only_from(run_dir, 15)
    text, comparison = replay(settings_of(run_dir), of=run_dir, given=set())
    assert comparison.is_identical
    assert [pair.recorded.step for pair in comparison.steps] == [3, 4]
    assert f"from checkpoint step_{CHECKPOINT_STEP}" in text


def test_missing_samples_are_told_in_one_line(run_dir: Path) -> None:
    keep_only_from(run_dir, 2)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ReplayError, match=r"2 of 48 samples of steps 1 to 4 were not kept, .* step 1") as raised:
        prepare(settings_of(run_dir), of=run_dir, given=set())
    assert "\n" not in str(raised.value)


def test_a_run_that_kept_nothing_is_told_so(run_dir: Path) -> None:
    shutil.rmtree(retained_dir(run_dir, RUN_ID))
    with pytest.raises(ReplayError, match=r"nothing was kept .* bus\.retain=true"):
        prepare(settings_of(run_dir), of=run_dir, given=set())


def test_a_run_that_has_trained_nothing_is_told_so(run_dir: Path) -> None:
    write_journal(run_dir, [])
    with pytest.raises(ReplayError, match="no step was trained"):
        prepare(settings_of(run_dir), of=run_dir, given=set())
    (run_dir / "run_id").unlink()
    with pytest.raises(ReplayError, match=r"run_id: cannot be read: No such file"):
        prepare(settings_of(run_dir), of=run_dir, given=set())


def test_another_model_is_refused_by_name_and_by_its_weights(run_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", TinyModel.TIED, seed=4)
    with pytest.raises(ConfigError, match=r"model\.source: got .*other.*, expected .*model"):
        prepare(settings_of(run_dir, f"model.source={other}"), of=run_dir, given=set())
    text = (run_dir / "settings.yaml").read_text()
    source = load(run_dir / "settings.yaml", environment={}).model.source
    (run_dir / "settings.yaml").write_text(text.replace(source, str(other)))
    with pytest.raises(ReplayError, match=r"the weights before step 1 have digest .*: another model"):
        replay(settings_of(run_dir), of=run_dir, given=set())


def test_the_runs_own_directory_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is the run's own"):
        prepare(settings_of(run_dir, f"run_dir={run_dir}"), of=run_dir, given={"run_dir"})


def test_a_difference_that_no_setting_explains_is_not_taken_for_granted(run_dir: Path) -> None:
    records = list(read_journal(journal_dir(run_dir, RUN_ID) / TRAINER_FILE))
    at = next(index for index, one in enumerate(records) if isinstance(one, StepTrained) and one.step == 3)
    changed = records[at]
    assert isinstance(changed, StepTrained)
    records[at] = StepTrained(**{name: getattr(changed, name) for name in changed.__slots__} | {"loss": changed.loss + 1e-12})
    write_journal(run_dir, records)
    text, comparison = replay(settings_of(run_dir), of=run_dir, given=set())
    assert not comparison.is_explained
    assert "losses    first apart at step 3: loss" in text
    assert "NOT EXPECTED  no setting differs" in text


def test_a_restart_voids_what_was_trained_beyond_its_checkpoint(run_dir: Path) -> None:
    """Steps 3 and 4 were rolled back; step 3 was then taken with other samples, and only it counts."""
    records = list(read_journal(journal_dir(run_dir, RUN_ID) / TRAINER_FILE))
    began = {one.step: one for one in records if isinstance(one, StepBegan)}
    restart = TrainerBegan(at=1.0, incarnation="second", step=2, policy_version=2, position=[], counts={})
    again = StepBegan(**{name: getattr(began[4], name) for name in began[4].__slots__} | {"step": 3, "policy_version": 2})
    trained = StepTrained(at=1.0, step=3, policy_version=2, loss=0.0, grad_norm=0.0, replayed=False)
    write_journal(run_dir, [*records, restart, again, trained])
    request = prepare(settings_of(run_dir), of=run_dir, given=set())
    assert [step.step for step in request.steps] == [1, 2, 3]
    assert [list(one) for one in request.steps[2].samples] == began[4].samples


def test_asked_to_end_it_stops_between_steps_and_says_so(run_dir: Path) -> None:
    settings = settings_of(run_dir)
    settings.run_dir.mkdir()
    ending = threading.Event()
    ending.set()
    comparison = train_again(prepare(settings, of=run_dir, given=set()), ending)
    assert not comparison.steps
    assert report(comparison).startswith("losses    identical in all 0 steps")


def test_a_signal_asks_to_end_and_the_next_one_ends_the_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _ending_asked() as ending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.wait(30)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before
