"""Run directories as both daemons leave them, made from the model of their lives."""

from __future__ import annotations

from pathlib import Path

from sample_bus.journal import ROLLOUTER_FILE, TRAINER_FILE, encode_record, journal_dir
from sample_bus.record_log import RecordLog
from sample_bus.spool import Spool
from tests.sample_bus.lives import GROUP_SIZE, PRODUCER, Lives

RUN_ID = "0a1b2c3d"


def write_run(lives: Lives, run_dir: Path) -> Path:
    """The journals and the spool that both daemons would have left, as real files."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run_id").write_text(RUN_ID + "\n")
    for name, records in ((ROLLOUTER_FILE, lives.rollouter_log), (TRAINER_FILE, lives.trainer_log)):
        journal = RecordLog(journal_dir(run_dir, RUN_ID) / name)
        for record in records:
            journal.append(encode_record(record))
        journal.close()
    directory = run_dir / "spool" / RUN_ID / PRODUCER
    directory.mkdir(parents=True)
    (directory / "state").write_bytes(b"%020d %020d\n" % (lives.epoch, lives.first))
    spool = Spool(directory)
    for kept in lives.kept:
        spool.append(kept.id.seq, [b"frames"])
    spool.close()
    return run_dir


def some_steps() -> Lives:
    """Four groups: two trained and saved, one trained after that, one on its way; a seat of a fifth was given up."""
    lives = Lives(every_steps=2, repeats_began=True)
    lives.start_rollouter()
    lives.start_trainer()
    for _ in range(4):
        lives.admit()
        for _ in range(GROUP_SIZE):
            lives.offer()
            lives.note_offer()
    for number in range(3):
        for _ in range(GROUP_SIZE):
            lives.receive()
        lives.begin_step()
        lives.finish_step()
        if number == 1:
            lives.save()
    lives.admit()
    lives.fail_attempt()
    lives.close_seat()
    lives.note_offer()
    return lives
