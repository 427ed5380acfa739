"""Checkpoints are whole or do not count, and resuming changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from configs.schema import TrainerSettings
from sample_bus.messages import Counts
from sample_bus.position import BusPosition, StreamPosition
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.checkpoint import MARKER, STATE, Checkpoint, choose, find, load, save_checkpoint
from trainer.errors import CheckpointError, NoCheckpointError
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions
from trainer.randomness import Randomness
from trainer.run_state import RunState
from trainer.update import UpdateOptions, train_step


class Notebook:
    """Something to save: one number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def save(self, directory: Path) -> None:
        (directory / "number.txt").write_text(str(self.number))

    def load(self, directory: Path) -> None:
        self.number = int((directory / "number.txt").read_text())


def state_of(step: int, *, run_id: str = "1234abcd") -> RunState:
    stream = StreamPosition(producer="rollouter", epoch=1, watermark=8 * step, beyond=((8 * step + 2, 8 * step + 5),))
    return RunState(
        run_id=run_id,
        incarnation="first",
        step=step,
        policy_version=step,
        position=BusPosition(streams=(stream,)),
        counts=Counts(received=8 * step + 3, trained=8 * step, dropped={"stale": 3}, closed=2),
    )


def save_steps(root: Path, *steps: int, keep: int = 10, run_id: str = "1234abcd") -> None:
    for step in steps:
        save_checkpoint(root, {"policy": Notebook(step)}, state=state_of(step, run_id=run_id), keep=keep)


def newest(root: Path, mode: str = "must", *, run_id: str = "1234abcd") -> Checkpoint:
    chosen = choose(root, mode=mode, run_id=run_id)  # type: ignore[arg-type]
    assert chosen is not None
    return chosen


def test_the_newest_complete_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 30, 9)
    chosen, notebook = newest(tmp_path), Notebook()
    load(chosen, {"policy": notebook})
    assert chosen.state == state_of(30)
    assert notebook.number == 30


def test_a_run_that_began_afresh_goes_on_from_its_own_checkpoint_not_from_a_later_step_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B92: checkpoint.resume=never in a directory that an earlier run filled, then a restart with auto."""
    save_steps(tmp_path, 90, 100, run_id="00000001")
    save_steps(tmp_path, 5, 10, 15, keep=2, run_id="00000002")
    assert newest(tmp_path, run_id="00000002").state.step == 15
    assert [path.name for path in find(tmp_path).complete] == ["step_10", "step_15", "step_90", "step_100"]
    assert newest(tmp_path, run_id="00000003").state.step == 100
    assert "checkpoint of an earlier run" in capsys.readouterr().out


def test_half_written_checkpoints_are_told_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B89"""
    save_steps(tmp_path, 10, 20, 30, 40)
    (tmp_path / "step_20" / MARKER).unlink()
    (tmp_path / "step_30" / "policy" / "number.txt").unlink()
    (tmp_path / "step_40" / "policy" / "number.txt").write_text("4")
    (tmp_path / ".unfinished_step_50").mkdir()
    assert newest(tmp_path, "auto").state.step == 10
    said = capsys.readouterr().out
    assert all(name in said for name in ("step_20", "step_30", "step_40", ".unfinished_step_50"))


@pytest.mark.parametrize("marker", ["{}", '{"files": {}}', '{"files": []}', '{"files": null}', '{"files": {"state.json": 1}}'])
def test_a_marker_that_does_not_list_the_run_s_state_completes_nothing(tmp_path: Path, marker: str) -> None:
    """B89"""
    save_steps(tmp_path, 10, 20)
    (tmp_path / "step_20" / MARKER).write_text(marker)
    assert newest(tmp_path, "auto").state.step == 10


def test_a_marker_that_lists_nothing_of_a_part_is_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    marker = tmp_path / "step_10" / MARKER
    files = json.loads(marker.read_text())["files"]
    marker.write_text(json.dumps({"files": {STATE: files[STATE]}}))
    with pytest.raises(CheckpointError, match=r"complete\.json: lists no file of policy"):
        load(newest(tmp_path), {"policy": Notebook()})


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_an_incomplete_checkpoint_alone_is_an_error_not_a_fresh_start(tmp_path: Path, mode: str) -> None:
    """B90"""
    save_steps(tmp_path, 3)
    (tmp_path / "step_3" / MARKER).write_text("{")
    with pytest.raises(NoCheckpointError, match="incomplete: step_3"):
        newest(tmp_path, mode)


def test_a_death_while_the_first_checkpoint_was_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    """B90: nothing was committed yet, so the run begins again from its journal; `must` still refuses."""
    (tmp_path / ".unfinished_step_5").mkdir()
    assert choose(tmp_path, mode="auto", run_id="1234abcd") is None
    with pytest.raises(NoCheckpointError, match=r"checkpoint\.resume=must"):
        newest(tmp_path, "must")
    (tmp_path / ".discarded_step_4").mkdir()
    with pytest.raises(NoCheckpointError, match=r"incomplete: \.discarded_step_4"):
        newest(tmp_path, "auto")


def test_without_any_checkpoint_auto_starts_afresh_and_must_fails(tmp_path: Path) -> None:
    """B92"""
    assert choose(tmp_path / "none", mode="auto", run_id="1234abcd") is None
    assert choose(tmp_path, mode="never", run_id="1234abcd") is None
    with pytest.raises(NoCheckpointError, match=r"checkpoint\.resume=must"):
        newest(tmp_path, "must")


def test_never_starts_afresh_beside_a_checkpoint(tmp_path: Path) -> None:
    """B92"""
    save_steps(tmp_path, 3)
    assert choose(tmp_path, mode="never", run_id="1234abcd") is None


def test_changed_bytes_of_the_right_length_are_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    (tmp_path / "step_3" / "policy" / "number.txt").write_text("4")
    with pytest.raises(CheckpointError, match=r"number\.txt: damaged"):
        load(newest(tmp_path, "auto"), {"policy": Notebook()})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ('{"step": 3, "policy_version": 3}', "no state of a run: KeyError 'format'"),
        ('{"format": 1}', "got format 1, expected 2"),
        (
            '{"format": 2, "run_id": "x", "incarnation": "i", "step": 3, "policy_version": 3, "position": 7, "counts": {}}',
            "position",
        ),
    ],
)
def test_a_state_that_is_none_is_an_error_that_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    save_steps(tmp_path, 3)
    marker = tmp_path / "step_3" / MARKER
    (tmp_path / "step_3" / STATE).write_text(text)
    files = json.loads(marker.read_text())
    files["files"][STATE]["bytes"] = len(text)
    marker.write_text(json.dumps(files))
    with pytest.raises(CheckpointError, match=rf"step_3/state\.json: .*{problem}"):
        newest(tmp_path, "auto")


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 9, 10, 11, 100, keep=2)
    assert [path.name for path in find(tmp_path).complete] == ["step_11", "step_100"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_is_told_with_the_path_and_leaves_the_older_checkpoints(tmp_path: Path, failure: Exception) -> None:
    """B89"""

    class Full(Notebook):
        def save(self, directory: Path) -> None:
            super().save(directory)
            raise failure

    save_steps(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"step_20: cannot be written: .*No space left on device"):
        save_checkpoint(tmp_path, {"policy": Full()}, state=state_of(20), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]
    assert newest(tmp_path).state == state_of(10)


def test_saving_again_replaces_what_a_crash_left(tmp_path: Path) -> None:
    """B94"""
    leftover = tmp_path / ".unfinished_step_3" / "policy"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("junk")
    for name in ("step_3", ".unfinished_step_9", ".discarded_step_1"):
        (tmp_path / name).mkdir()
    save_steps(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    found = find(tmp_path)
    assert [path.name for path in found.complete] == ["step_3"]
    assert not found.incomplete
    assert not (tmp_path / "step_3" / "policy" / "junk").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits_as_one_that_went_straight_on(tmp_path: Path, dtype: torch.dtype) -> None:
    """B97: every weight and every moment, after 10 steps against 5 + save + load + 5."""
    model = make_tiny_model(tmp_path / "model", TinyModel.MOE, seed=1)
    options = UpdateOptions(learning_rate=1e-3, warmup_steps=7, loss=LossOptions())

    def policy() -> FsdpPolicy:
        return FsdpPolicy(model, TrainerSettings(), dtype=dtype)

    def train(policy: FsdpPolicy, steps: range) -> list[float]:
        losses = []
        for step in steps:
            samples = siblings(seed=step)
            advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
            losses.append(train_step(policy, samples, advantages, options).loss)
        return losses

    straight, first, second = policy(), policy(), policy()
    losses = train(straight, range(10))
    assert train(first, range(5)) == losses[:5]
    save_checkpoint(tmp_path / "checkpoints", {"policy": first}, state=state_of(5), keep=1)
    load(newest(tmp_path / "checkpoints"), {"policy": second})
    assert all(bool(moment.any()) for moment in second._optimizer.first_moments)
    assert train(second, range(5, 10)) == losses[5:]
    for kind in ("weights", "first_moments", "second_moments"):
        for left, right in zip(getattr(straight._optimizer, kind), getattr(second._optimizer, kind), strict=True):
            assert torch.equal(left, right)
    exported = dict(second.export_weights())
    assert all(torch.equal(tensor, exported[name]) for name, tensor in straight.export_weights())


def test_a_checkpoint_of_another_model_is_refused_naming_the_parameter(tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", TinyModel.TIED, seed=1)
    untied = make_tiny_model(tmp_path / "untied", TinyModel.UNTIED, seed=1)
    saved = tmp_path / "saved"
    saved.mkdir()
    FsdpPolicy(tied, TrainerSettings(), dtype=torch.float32).save(saved)
    other = FsdpPolicy(untied, TrainerSettings(), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"parameter lm_head\.weight: got shape none, expected \[300, 64\]"):
        other.load(saved)


def test_a_checkpoint_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", TinyModel.TIED, seed=1)
    policy = FsdpPolicy(model, TrainerSettings(), dtype=torch.float32)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    description = json.loads((saved / "policy.json").read_text())
    (saved / "policy.json").write_text(json.dumps(description | {"num_ranks": 2}))
    with pytest.raises(CheckpointError, match="num_ranks: got 2, expected 1"):
        policy.load(saved)
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match="cannot be read"):
        policy.load(saved)


def test_random_generators_go_on_where_the_checkpoint_left_them(tmp_path: Path) -> None:
    randomness = Randomness()
    randomness.seed(7)
    _draw()
    save_checkpoint(tmp_path, {"random": randomness}, state=state_of(1), keep=1)
    expected = _draw()
    randomness.seed(8)
    load(newest(tmp_path), {"random": randomness})
    assert _draw() == expected
    (tmp_path / "step_1" / "random" / "random.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"random\.json: cannot be read"):
        randomness.load(tmp_path / "step_1" / "random")


def _draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


MOMENTS = ("mkdir", "rename", "fsync", "rmtree")


@pytest.mark.parametrize("victim", MOMENTS)
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, victim: str) -> None:
    """B89: the process is killed at the n-th call that changes the disk, for every n."""
    for number in range(40):
        root = tmp_path / f"{victim}-{number}"
        save_steps(root, 1, 2, keep=2)
        survived = _save_in_a_child_killed_at(root, victim, number)
        chosen, notebook = newest(root), Notebook()
        load(chosen, {"policy": notebook})
        assert chosen.state.step == notebook.number
        assert notebook.number in ((3,) if survived else (2, 3))
        save_steps(root, 4, keep=2)
        assert not find(root).incomplete
        if survived:
            break
    assert survived


def _save_in_a_child_killed_at(root: Path, victim: str, number: int) -> bool:
    """Whether the child came to the end of its save."""
    child = os.fork()
    if child == 0:
        calls = iter(range(number))

        def deadly(function: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        match victim:
            case "mkdir":
                Path.mkdir = deadly(Path.mkdir)  # type: ignore[method-assign]
            case "rename":
                Path.rename = deadly(Path.rename)  # type: ignore[method-assign]
            case "fsync":
                os.fsync = deadly(os.fsync)
            case "rmtree":
                shutil.rmtree = deadly(shutil.rmtree)
        save_steps(root, 3, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
