"""Where set-up keeps things. The cache directory's rule is the product's own: HEADRACE_CACHE, XDG_CACHE_HOME, ~/.cache."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from tools.bootstrap.errors import SetupError

ROOT = Path(__file__).resolve().parents[2]


def preferred_cache(environ: Mapping[str, str]) -> Path:
    """The cache directory that the environment asks for, absolute; it need not exist."""
    if environ.get("HEADRACE_CACHE"):
        return Path(environ["HEADRACE_CACHE"]).expanduser().absolute()
    base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~") / ".cache")
    return base.expanduser().absolute() / "headrace"


def writable(path: Path) -> bool:
    """Whether `path`, or the nearest ancestor that exists, can be written by this user."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK)


def usable_cache(environ: Mapping[str, str], root: Path) -> Path:
    """The preferred cache, else `.cache` in the checkout. Raises SetupError when neither can be written.

    A cache that cannot be written but holds finished environments is usable: nothing has to be written into it.
    """
    preferred = preferred_cache(environ)
    if writable(preferred) or any(preferred.glob("env-*/COMPLETE")):
        return preferred
    if writable(root / ".cache"):
        return root / ".cache"
    raise SetupError(f"neither {preferred} nor {root} can be written; set HEADRACE_CACHE to a directory with 4 GB free")


def usable_venv(root: Path, cache: Path) -> Path:
    """`.venv` in the checkout, or a directory of the cache that belongs to this checkout where `.venv` cannot be written."""
    venv = root / ".venv"
    if writable(venv):
        return venv
    return cache / f"venv-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}"
