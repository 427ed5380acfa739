"""The peer's virtual environment: made once in the cache, named after its pins, reused afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from configs.paths import cache_dir
from tools.bootstrap.plan import PYTORCH_CPU_INDEX, lacks_torch

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class PeerUnavailable(OSError):
    """Raised when the peer's environment cannot be made."""


def ensure_python() -> Path:
    """The interpreter of an environment that holds TRL. Raises PeerUnavailable naming the installer's log."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    place = cache_dir() / f"peer-trl-{digest}"
    place.parent.mkdir(parents=True, exist_ok=True)
    python, complete, log = place / "bin" / "python", place / ".complete", place.with_suffix(".log")
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(place, ignore_errors=True)
            sys.stderr.write(f"making TRL's environment in {place} (about 1.5 GB, minutes; log {log})\n")
            _run([sys.executable, "-m", "venv", str(place)], log)
            install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)]
            try:
                _run(install, log)
            except PeerUnavailable:
                if not lacks_torch(log.read_text(errors="replace")):
                    raise
                _run([*install, "--extra-index-url", PYTORCH_CPU_INDEX], log)
            complete.touch()
    return python


def _run(command: list[str], log: Path) -> None:
    with log.open("wb") as output:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise PeerUnavailable(f"TRL's environment: {lines[-1] if lines else f'exit code {code}'}; log: {log}")
