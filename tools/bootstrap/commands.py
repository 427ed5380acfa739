"""The commands of set-up, and the one place where a failure becomes a line and an exit status."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bootstrap import checkout, environment, lock, model
from tools.bootstrap.errors import SetupError
from tools.bootstrap.places import ROOT, preferred_cache, usable_cache, usable_venv
from tools.bootstrap.runner import say

_CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", ".import_linter_cache", ".hypothesis")
_BUILDS = ("build", "dist", "headrace.egg-info")


def setup() -> None:
    """The checkout's environment is ready to run; takes a fraction of a second when it already was."""
    started = time.monotonic()
    cache = usable_cache(os.environ, ROOT)
    wanted = environment.wanted_environment(ROOT, cache)
    venv = usable_venv(ROOT, cache)
    if wanted.complete and checkout.up_to_date(venv, checkout.expected_stamp(ROOT, wanted)):
        return
    if cache != preferred_cache(os.environ):
        say(f"{preferred_cache(os.environ)} cannot be written; caching in {cache}")
    if venv != ROOT / ".venv":
        say(f"{ROOT / '.venv'} cannot be written; using {venv}")
    environment.ensure(wanted, ROOT)
    checkout.write_venv(venv, ROOT, wanted)
    say(f"ready after {time.monotonic() - started:.1f} s: {venv / 'bin' / 'headrace'}")


def fetch_model() -> None:
    """The demo's model file is in the cache."""
    cache = usable_cache(os.environ, ROOT)
    model.ensure(cache, environment.wanted_environment(ROOT, cache))


def where_venv() -> None:
    """Prints the directory of the checkout's environment, for the Makefile."""
    sys.stdout.write(f"{usable_venv(ROOT, usable_cache(os.environ, ROOT))}\n")


def where_cache() -> None:
    """Prints the cache directory in use, for the Makefile."""
    sys.stdout.write(f"{usable_cache(os.environ, ROOT)}\n")


def renew_lock() -> None:
    """requirements/cpu.lock holds the newest pins that fit pyproject.toml and the pins that must stay."""
    cache = usable_cache(os.environ, ROOT)
    lock.renew(ROOT, environment.wanted_environment(ROOT, cache), cache / "lock.log")


def clean() -> None:
    """What tools and set-up left in the checkout is gone; the cache stays, for other checkouts use it."""
    for place in (ROOT / ".venv", *(ROOT / name for name in (*_CACHES, *_BUILDS)), *ROOT.rglob("__pycache__")):
        shutil.rmtree(place, ignore_errors=True)
    say(f"cleaned {ROOT}; the cache stays: {preferred_cache(os.environ)}")


COMMANDS: dict[str, Callable[[], None]] = {
    "setup": setup,
    "model": fetch_model,
    "where-venv": where_venv,
    "where-cache": where_cache,
    "lock": renew_lock,
    "clean": clean,
}


def main(arguments: list[str]) -> int:
    """Runs the named command; 0 when it did its work, 1 after one line on why not, 130 when interrupted."""
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        sys.stderr.write(f"usage: python3 -m tools.bootstrap {{{'|'.join(COMMANDS)}}}\n")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        COMMANDS[arguments[0]]()
    except SetupError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.strerror or error}: {error.filename or Path.cwd()}")
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted; what was fetched is kept, run it again to go on\n")
        return 130
    return 0


def _failed(line: str) -> int:
    sys.stderr.write(f"headrace: {line}\n")
    return 1
