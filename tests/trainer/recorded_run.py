"""The directory of a run as a trainer leaves it: settings, journal, kept samples; made by training a tiny model for real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.command import as_yaml
from configs.loader import dump, validate
from configs.schema import Settings
from sample_bus.journal import (
    TRAINER_FILE,
    Record,
    Saved,
    StepBegan,
    StepTrained,
    TrainerBegan,
    VersionPublished,
    encode_record,
    journal_dir,
)
from sample_bus.messages import Counts
from sample_bus.position import BusPosition
from sample_bus.record_log import RecordLog
from sample_bus.sample import Sample, SampleId
from tests.fakes.samples import lease
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.checkpoint import DIRECTORY, save_checkpoint
from trainer.fsdp import FsdpPolicy
from trainer.loop import advantages_of, options_of
from trainer.randomness import Randomness
from trainer.retained import Retained, retained_dir
from trainer.run_state import RunState
from trainer.update import train_step
from weight_sync.arena import Arena
from weight_sync.snapshot import take_snapshot

RUN_ID = "cafe0001"
NUM_STEPS = 4
GROUPS, SEATS = 3, 4
CHECKPOINT_STEP = 2
CHANGED_RATE = 3e-3
"""Learning rate of the steps after CHECKPOINT_STEP, as if it had been changed on the live run."""


def run_settings(run_dir: Path, model_dir: Path, **values: Any) -> Settings:
    return validate(
        {
            "run_dir": str(run_dir),
            "model.source": str(model_dir),
            "model.dtype": "float32",
            "num_steps": NUM_STEPS,
            "group_size": SEATS,
            "samples_per_step": GROUPS * SEATS,
            "trainer.learning_rate": 1e-3,
            "trainer.warmup_steps": 2,
            "tracking.backends": ["jsonl"],
            **values,
        }
    )


def make_run(directory: Path) -> Path:
    """Train NUM_STEPS steps and leave a run directory; returns it."""
    run_dir = directory / "run"
    model_dir = make_tiny_model(directory / "model", TinyModel.TIED, seed=3)
    settings = run_settings(run_dir, model_dir)
    run_dir.mkdir()
    (run_dir / "settings.yaml").write_text(as_yaml(settings))
    (run_dir / "run_id").write_text(RUN_ID)
    retained = Retained(retained_dir(run_dir, RUN_ID))
    policy = FsdpPolicy(model_dir, settings.trainer, dtype=torch.float32)
    records: list[Record] = [
        TrainerBegan(at=0.0, incarnation="first", step=0, policy_version=0, position=[], counts={}),
        _published(policy, step=0),
    ]
    for step in range(1, NUM_STEPS + 1):
        samples = _batch(step)
        for sample_id, sample in samples.items():
            retained.keep(lease(sample, sample_id.seq))
        rate = 1e-3 if step <= CHECKPOINT_STEP else CHANGED_RATE
        options = {"trainer.learning_rate": rate, "trainer.clip_low": 0.2}
        in_force = validate({**dump(settings), **options}).trainer
        ordered = list(samples.items())[::-1]  # as the assembler finished them
        batch = [sample for _, sample in ordered]
        report = train_step(policy, batch, advantages_of(batch, in_force), options_of(in_force))
        records += [
            StepBegan(
                at=0.0,
                step=step,
                policy_version=step - 1,
                samples=[list(sample_id) for sample_id, _ in ordered],
                closures=[],
                options=options,
            ),
            StepTrained(
                at=0.0, step=step, policy_version=step - 1, loss=report.loss, grad_norm=report.grad_norm, replayed=False
            ),
            _published(policy, step=step),
        ]
        if step == CHECKPOINT_STEP:
            state = RunState(
                run_id=RUN_ID, incarnation="first", step=step, policy_version=step, position=BusPosition(), counts=Counts()
            )
            save_checkpoint(run_dir / DIRECTORY, {"policy": policy, "random": Randomness()}, state=state, keep=2)
            records.append(Saved(at=0.0, step=step, policy_version=step, position=[]))
    retained.close()
    write_journal(run_dir, records)
    return run_dir


def write_journal(run_dir: Path, records: Sequence[Record]) -> None:
    path = journal_dir(run_dir, RUN_ID) / TRAINER_FILE
    path.unlink(missing_ok=True)
    journal = RecordLog(path)
    for record in records:
        journal.append(encode_record(record))
    journal.close()


def _batch(step: int) -> Mapping[SampleId, Sample]:
    samples = siblings(num_groups=GROUPS, group_size=SEATS, seed=step)
    return {SampleId("rollouter", 1, (step - 1) * len(samples) + index): sample for index, sample in enumerate(samples)}


def _published(policy: FsdpPolicy, *, step: int) -> VersionPublished:
    snapshot = take_snapshot(Arena(), policy.export_weights(), policy_version=step, dtype=torch.float32)
    return VersionPublished(at=0.0, policy_version=step, step=step, digest=snapshot.manifest.digest)
