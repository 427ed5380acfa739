"""Checkpoints are whole or do not count, and resuming changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from configs.schema import TrainerSettings
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.checkpoint import MARKER, find, resume, save_checkpoint
from trainer.errors import CheckpointError, NoCheckpointError
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step


class Notebook:
    """Something to save: one number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def save(self, directory: Path) -> None:
        (directory / "number.txt").write_text(str(self.number))

    def load(self, directory: Path) -> None:
        self.number = int((directory / "number.txt").read_text())


def save_steps(root: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        save_checkpoint(root, Notebook(step), step=step, state={"step": step}, keep=keep)


def test_the_newest_complete_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 30, 9)
    notebook = Notebook()
    assert resume(tmp_path, notebook, mode="must") == {"step": 30}
    assert notebook.number == 30


def test_half_written_checkpoints_are_told_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B89"""
    save_steps(tmp_path, 10, 20, 30, 40)
    (tmp_path / "step_20" / MARKER).unlink()
    (tmp_path / "step_30" / "policy" / "number.txt").unlink()
    (tmp_path / "step_40" / "policy" / "number.txt").write_text("4")
    (tmp_path / ".unfinished_step_50").mkdir()
    notebook = Notebook()
    assert resume(tmp_path, notebook, mode="auto") == {"step": 10}
    said = capsys.readouterr().out
    assert all(name in said for name in ("step_20", "step_30", "step_40", ".unfinished_step_50"))


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_an_incomplete_checkpoint_alone_is_an_error_not_a_fresh_start(tmp_path: Path, mode: str) -> None:
    """B90"""
    save_steps(tmp_path, 3)
    (tmp_path / "step_3" / MARKER).write_text("{")
    with pytest.raises(NoCheckpointError, match="incomplete: step_3"):
        resume(tmp_path, Notebook(), mode=mode)  # type: ignore[arg-type]


def test_without_any_checkpoint_auto_starts_afresh_and_must_fails(tmp_path: Path) -> None:
    """B92"""
    assert resume(tmp_path / "none", Notebook(), mode="auto") is None
    assert resume(tmp_path, Notebook(), mode="never") is None
    with pytest.raises(NoCheckpointError, match=r"checkpoint\.resume=must"):
        resume(tmp_path, Notebook(), mode="must")


def test_never_starts_afresh_beside_a_checkpoint(tmp_path: Path) -> None:
    """B92"""
    save_steps(tmp_path, 3)
    assert resume(tmp_path, Notebook(), mode="never") is None


def test_changed_bytes_of_the_right_length_are_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    (tmp_path / "step_3" / "policy" / "number.txt").write_text("4")
    with pytest.raises(CheckpointError, match=r"number\.txt: damaged"):
        resume(tmp_path, Notebook(), mode="auto")


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
        save_checkpoint(tmp_path, Full(), step=20, state={}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]
    assert resume(tmp_path, Notebook(), mode="must") == {"step": 10}


def test_saving_again_replaces_what_a_crash_left(tmp_path: Path) -> None:
    """B94"""
    leftover = tmp_path / ".unfinished_step_3" / "policy"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("junk")
    (tmp_path / "step_3").mkdir()
    save_steps(tmp_path, 3)
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
    save_checkpoint(tmp_path / "checkpoints", first, step=5, state={"step": 5, "policy_version": 5}, keep=1)
    assert resume(tmp_path / "checkpoints", second, mode="must") == {"step": 5, "policy_version": 5}
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
