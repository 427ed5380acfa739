"""Where a run stands before its trainer begins: its id, its checkpoint, and what its journal says beyond. Light: no torch.

Invariant: position and counts are of the checkpoint whose weights are loaded; without one, and with one of an earlier run, the
run stands at the beginning of its streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog
import yaml

from configs.errors import ConfigError
from configs.schema import Settings
from sample_bus.journal import TRAINER_FILE, journal_dir, read_journal
from sample_bus.messages import BiasReport, Counts
from sample_bus.position import BusPosition
from trainer.checkpoint import DIRECTORY, Checkpoint, choose
from trainer.history import History, history_of
from trainer.run_id import FILE, run_id_of
from trainer.taken_up import settings_of_run

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    run_id: str
    journal_path: Path
    checkpoint: Checkpoint | None
    """Whose weights are taken."""
    step: int
    policy_version: int
    position: BusPosition
    counts: Counts
    bias: BiasReport
    history: History


def standing_of(settings: Settings) -> Standing:
    """Read, and make a run id where there is none. The caller holds the lock on the run directory.

    Raises NoCheckpointError and CheckpointError (`checkpoint.choose`), JournalError, TrainerError (`run_id`), and ConfigError
    when the groups of the run are of another size.
    """
    mode = settings.checkpoint.resume
    if mode != "never":
        _check_group_size(settings)
    run_id = run_id_of(settings.run_dir, afresh=mode == "never")
    journal_path = journal_dir(settings.run_dir, run_id) / TRAINER_FILE
    checkpoint = choose(settings.run_dir / DIRECTORY, mode=mode, run_id=run_id)
    own = checkpoint if checkpoint is not None and checkpoint.state.run_id == run_id else None
    if own is not None and not journal_path.exists():
        log.warning(
            "the trainer's journal is missing: steps are not taken again as before, and the ledger will not close",
            path=str(journal_path),
            checkpoint_step=own.state.step,
        )
    step = checkpoint.state.step if checkpoint is not None else 0
    position = own.state.position if own is not None else BusPosition()
    return Standing(
        run_id=run_id,
        journal_path=journal_path,
        checkpoint=checkpoint,
        step=step,
        policy_version=checkpoint.state.policy_version if checkpoint is not None else 0,
        position=position,
        counts=own.state.counts if own is not None else Counts(),
        bias=own.state.bias if own is not None else BiasReport(),
        history=history_of(read_journal(journal_path), step=step, position=position),
    )


def _check_group_size(settings: Settings) -> None:
    """The groups that come again are as large as they were begun: a step of another size would never fill."""
    if not (settings.run_dir / FILE).exists():
        return
    try:
        before = yaml.safe_load(settings_of_run(settings.run_dir).read_text(encoding="utf-8"))["group_size"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return  # nothing was remembered of it
    if before != settings.group_size:
        raise ConfigError(
            f"group_size: got {settings.group_size}, expected {before}, with which the run in {settings.run_dir} was begun; or "
            "begin afresh with checkpoint.resume=never"
        )
