"""What a run is called over restarts: `RUN_DIR/run_id`.

Invariant: everything durable of a run (spools, journals, retained samples, broker keys) lies below its id, so a run that begins
afresh in the same directory never meets an earlier one's samples, and deletes nothing of it.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from trainer.durable import write_whole
from trainer.errors import TrainerError

FILE = "run_id"
_FORM = re.compile(r"^[0-9a-f]{8}$")


def run_id_of(run_dir: Path, *, afresh: bool) -> str:
    """The id in `run_dir`; a new one, durable on return, when there is none or the run is to begin `afresh`.

    Raises TrainerError naming the file if it holds something else; OSError.
    """
    path = run_dir / FILE
    if not afresh:
        try:
            found = path.read_text().strip()
        except FileNotFoundError:
            pass
        else:
            if not _FORM.match(found):
                raise TrainerError(
                    f"{path}: got {found[:40]!r}, expected 8 hexadecimal digits; "
                    "remove the file to begin afresh (journals and spools of the run stay, under its id)"
                )
            return found
    made = secrets.token_hex(4)
    write_whole(path, made + "\n")
    return made
