"""What is asked to be trained again: the run's settings, recording and kept samples, read and checked.

Invariant: the run's directory is only read, and may belong to a run that goes on. Whatever is wrong with the request is said
here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.command import SETTINGS_FILE
from configs.errors import ConfigError
from configs.loader import dump, load
from configs.schema import Settings
from sample_bus.journal import TRAINER_FILE, journal_dir, read_journal
from trainer.checkpoint import DIRECTORY, Checkpoint, find, read_state
from trainer.comparison import reasons_to_differ
from trainer.errors import CheckpointError, ReplayError
from trainer.model_source import TINY_SORT, check_source
from trainer.recording import PublishedVersion, RecordedStep, Recording, origin_of, recording_of
from trainer.retained import Kept, retained_dir
from trainer.run_id import FILE as RUN_ID_FILE
from trainer.taken_up import settings_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What is to be trained again."""

    settings: Settings
    overridden: Mapping[str, Any]
    """Settings by dotted key that hold for every step, whatever was recorded."""
    origin: int
    """Step after which it begins; 0 is the initial weights."""
    checkpoint: Checkpoint | None
    """Holds the weights of `origin`, if they are not the initial ones."""
    steps: tuple[RecordedStep, ...]
    published: Mapping[int, PublishedVersion]
    """Step to the version that was published after it."""
    kept: Kept
    same_digest: bool
    """Whether the first weights have the digest that the run published, if the model is the same."""
    reasons: tuple[str, ...]
    """Why the outcome may be another than the run's."""


def replay_dir(run_dir: Path) -> Path:
    """`RUN_DIR/replay-N` with the first number that is free."""
    number = 1
    while (run_dir / f"replay-{number}").exists():
        number += 1
    return run_dir / f"replay-{number}"


def settings_file(run_dir: Path) -> Path:
    """Settings of the run in `run_dir`. Raises ConfigError if there is no run."""
    path = settings_of_run(run_dir)
    if not path.is_file():
        raise ConfigError(f"--replay {run_dir}: no {SETTINGS_FILE} in it, expected the directory of a run")
    return path


def prepare(settings: Settings, *, of: Path, given: Collection[str]) -> Again:
    """Read what was recorded and decide where to begin. Makes nothing. Raises as `replay`."""
    run = load(settings_file(of), environment={})
    if settings.run_dir.resolve() == of.resolve():
        raise ConfigError(f"run_dir={settings.run_dir}: is the run's own, expected another directory for its replay")
    _refuse_another_model(run, settings)
    check_source(settings.model)
    recording, run_id = _read(of)
    kept = Kept(retained_dir(of, run_id))
    checkpoints = _checkpoints(of, run_id)
    try:
        origin = origin_of(recording, kept=kept.ids, checkpoints=checkpoints.keys())
    except ReplayError as error:
        raise ReplayError(f"{of}: {error}") from None
    steps = tuple(step for step in recording.steps if origin < step.step <= settings.num_steps)
    if not steps:
        raise ConfigError(f"num_steps={settings.num_steps}: expected more than {origin}, after which the replay begins")
    theirs, mine = dump(run), dump(settings)
    overridden = {key: value for key, value in mine.items() if key in given or value != theirs[key]}
    return Again(
        settings=settings,
        overridden=overridden,
        origin=origin,
        checkpoint=checkpoints[origin] if origin else None,
        steps=steps,
        published=recording.published,
        kept=kept,
        same_digest=run.model.dtype == settings.model.dtype,
        reasons=reasons_to_differ(theirs, mine, overridden=overridden, steps=steps),
    )


def _read(of: Path) -> tuple[Recording, str]:
    try:
        run_id = (of / RUN_ID_FILE).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ReplayError(f"{of / RUN_ID_FILE}: cannot be read: {error.strerror or error}; has the run begun?") from None
    return recording_of(read_journal(journal_dir(of, run_id) / TRAINER_FILE)), run_id


def _checkpoints(of: Path, run_id: str) -> dict[int, Checkpoint]:
    """Step to complete checkpoint of that run, as far as their states can be read."""
    found: dict[int, Checkpoint] = {}
    for path in find(of / DIRECTORY).complete:
        try:
            state = read_state(path)
        except CheckpointError:
            continue
        if state.run_id == run_id:
            found[state.step] = Checkpoint(path=path, state=state)
    return found


def _refuse_another_model(run: Settings, mine: Settings) -> None:
    """The samples' tokens and logprobs mean nothing to another model."""
    theirs, ours = dump(run), dump(mine)
    keys = ["model.source"]
    if run.model.source == TINY_SORT:
        keys += ["model.warm_start_steps", "seed"]
    for key in keys:
        if theirs[key] != ours[key]:
            raise ConfigError(f"{key}: got {ours[key]!r}, expected {theirs[key]!r}: the samples belong to the run's model")
