"""Run directories: taking one for a new run, finding the one of a run that goes on.

A run goes on when something accepts connections at its bus address, or is subscribed to its channel on a Redis server.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from configs.command import SETTINGS_FILE
from configs.errors import ConfigError
from configs.loader import load
from configs.paths import bus_address, held_alone, make_run_dir
from configs.redis_address import is_redis
from configs.schema import BusSettings, Settings
from console.errors import NoRun, RunIsLive

RUNS = Path("runs")
RUN_ID_FILE = "run_id"
"""Written by the trainer: names the run over restarts."""
_CONNECT_TIMEOUT_S = 1.0
_LOCK_FILE = ".up.lock"


class LiveRun(NamedTuple):
    """How to speak with a run."""

    bus: BusSettings
    address: str
    run_dir: Path | None
    """None when only the address is known."""


def claim(settings: Settings, *, is_explicit: bool) -> Path:
    """An absolute run directory for a new run, made if need be.

    A directory that an earlier run has used is passed over for `NAME-2`, `NAME-3`, … unless the user named it on the command
    line or the run resumes. Raises RunIsLive when the directory to be used belongs to a run that goes on,
    ConfigError when it cannot be used.
    """
    wanted = settings.run_dir.absolute()
    if is_explicit or settings.checkpoint.resume != "never":
        if is_live(bus_address(settings.model_copy(update={"run_dir": wanted})), settings.bus):
            raise RunIsLive(f"{wanted}: a run goes on here; stop it, or give another run_dir")
        make_run_dir(wanted)
        return wanted
    for candidate in _numbered(wanted):
        if candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
            continue
        make_run_dir(candidate)
        return candidate
    raise AssertionError("directory numbers ran out")


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Keep other `headrace up` out of `run_dir`, also before anything of the run listens. Raises RunIsLive."""
    with ExitStack() as held:
        try:
            held.enter_context(held_alone(run_dir / _LOCK_FILE))
        except BlockingIOError:
            raise RunIsLive(f"{run_dir}: another `headrace up` is at work here; stop it, or give another run_dir") from None
        yield


def address_of(run_dir: Path) -> str:
    """Bus address of the run in `run_dir`: from its settings if they were written there, else its socket."""
    return bus_of(run_dir)[1]


def bus_of(run_dir: Path) -> tuple[BusSettings, str]:
    """Settings and address of the bus of the run in `run_dir`."""
    file = run_dir / SETTINGS_FILE
    settings = load(file, environment={}) if file.is_file() else Settings()
    return settings.bus, bus_address(settings.model_copy(update={"run_dir": run_dir.absolute()}))


def bus_at(address: str, *, keys_dir: Path | None = None) -> tuple[BusSettings, str]:
    """Settings of a bus that is known by its address only; the rest is as the environment says. Raises ConfigError."""
    words = [f"bus.address={address}"]
    if is_redis(address):
        words.append("bus.transport=redis")
    if keys_dir is not None:
        words.append(f"bus.keys_dir={keys_dir}")
    return load(None, words).bus, address


def address_for(settings: Settings) -> str:
    """Bus address of the newest live run that was started with these settings, or where it would be."""
    live = live_of(settings)
    return address_of(live) if live is not None else bus_address(settings)


def live_of(settings: Settings) -> Path | None:
    """The newest run that goes on and was started with these settings."""
    run_dirs = [path for path in _siblings(settings.run_dir) if _goes_on(path)]
    return max(run_dirs, key=_changed_at) if run_dirs else None


def newest_live(root: Path = RUNS) -> Path:
    """The newest run below `root` that goes on. Raises NoRun."""
    candidates = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    for path in sorted(candidates, key=_changed_at, reverse=True):
        if _goes_on(path):
            return path
    raise NoRun(
        f"no run goes on below {root.absolute()} ({len(candidates)} looked at); name one with --run-dir, --config or --address"
    )


def newest(root: Path = RUNS) -> Path:
    """The newest run below `root`, whether it goes on or not. Raises NoRun."""
    candidates = [path for path in root.iterdir() if _is_run(path)] if root.is_dir() else []
    if not candidates:
        raise NoRun(f"no run below {root.absolute()}; name one with --run-dir or --config")
    return max(candidates, key=_changed_at)


def newest_of(settings: Settings) -> Path:
    """The newest run that was started with these settings, whether it goes on or not. Raises NoRun."""
    candidates = [path for path in _siblings(settings.run_dir) if _is_run(path)]
    if not candidates:
        raise NoRun(f"no run in {settings.run_dir.absolute()} or beside it; name one with --run-dir")
    return max(candidates, key=_changed_at)


def is_live(address: str, bus: BusSettings | None = None, *, run_id: str | None = None) -> bool:
    """Whether something accepts connections at `address` (`ipc://PATH` or `tcp://HOST:PORT`); on a Redis server, whether a
    trainer is subscribed there, under that run id if one is given. `bus` holds the credentials for that."""
    if is_redis(address):
        from sample_bus.redis_open import is_served

        return is_served(bus or BusSettings(), address, run_id=run_id, timeout_s=_CONNECT_TIMEOUT_S)
    try:
        if address.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_CONNECT_TIMEOUT_S)
                probe.connect(address.removeprefix("ipc://"))
        else:
            parts = urlsplit(address)
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def goes_on(run_dir: Path) -> bool:
    """Whether the run in `run_dir` goes on. Raises ConfigError for settings that this version does not take."""
    bus, address = bus_of(run_dir)
    try:
        run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    except OSError:
        run_id = None
    return is_live(address, bus, run_id=run_id)


def _goes_on(run_dir: Path) -> bool:
    """The same; settings that this version does not take belong to no run that goes on."""
    try:
        return goes_on(run_dir)
    except ConfigError:
        return False


def _is_run(path: Path) -> bool:
    return (path / SETTINGS_FILE).is_file() or (path / RUN_ID_FILE).is_file()


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for count in range(2, 1_000_000):
        yield path.with_name(f"{path.name}-{count}")


def _siblings(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.name) + r"(-\d+)?")
    parent = path.absolute().parent
    return [other for other in parent.iterdir() if pattern.fullmatch(other.name)] if parent.is_dir() else []


def _changed_at(path: Path) -> float:
    """Of the newest file that each process of the run writes; a directory's own time only tells when files came and went."""
    files = (path, path / "metrics.jsonl", path / RUN_ID_FILE, *(path / "logs").glob("*.log"))
    return max(file.stat().st_mtime for file in files if file.exists())
