"""The settings with which a run was taken up last, `RUN_DIR/journal/RUN_ID/settings.yaml`: its replay begins from them.

Invariant: they are of a process that had model and checkpoint; one that was refused leaves nothing here, though the run
directory's own `settings.yaml` says how it was to listen.
"""

from __future__ import annotations

from pathlib import Path

from configs.command import SETTINGS_FILE, as_yaml
from configs.schema import Settings
from sample_bus.journal import journal_dir
from trainer.durable import write_whole
from trainer.run_id import FILE


def note(settings: Settings, *, run_id: str) -> None:
    """Durable on return. Raises OSError."""
    write_whole(journal_dir(settings.run_dir, run_id) / SETTINGS_FILE, as_yaml(settings))


def settings_of_run(run_dir: Path) -> Path:
    """Where they are; the directory's own for a run of a version that did not note them, and where there is no run."""
    try:
        run_id = (run_dir / FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return run_dir / SETTINGS_FILE
    noted = journal_dir(run_dir, run_id) / SETTINGS_FILE
    return noted if noted.is_file() else run_dir / SETTINGS_FILE
