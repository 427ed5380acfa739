"""The cached environment: built once per lock, interpreter and platform; complete when its marker says so.

It is built in place, for virtual environments do not move. A build without its marker is thrown away; what had been
downloaded for it is kept beside it until it is complete, so an interrupted build resumes.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from tools.bootstrap import plan
from tools.bootstrap.errors import SetupError
from tools.bootstrap.installer import Installer
from tools.bootstrap.runner import QUIET_S, say

NEEDED_BYTES = {"cpu": 4 * 10**9, "cuda": 16 * 10**9}
MARKER = "COMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Which environment this checkout wants, and where."""

    flavour: str  # "cpu" or "cuda"
    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(self.path)}))

    @property
    def complete(self) -> bool:
        return (self.path / MARKER).exists() and self.python.exists()


def machine_flavour() -> str:
    """`cuda` where an NVIDIA GPU can be used, else `cpu`; HEADRACE_FLAVOUR overrides."""
    asked = os.environ.get("HEADRACE_FLAVOUR", "")
    if asked not in {"", "cpu", "cuda"}:
        raise SetupError(f"HEADRACE_FLAVOUR is {asked!r}; expected cpu or cuda")
    if asked:
        return asked
    program = shutil.which("nvidia-smi")
    if program:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=30)
        if answer.returncode == 0 and "GPU" in answer.stdout:
            return "cuda"
    kernel_side = Path("/proc/driver/nvidia/gpus")
    return "cuda" if Path("/dev/nvidia0").exists() and kernel_side.is_dir() and any(kernel_side.iterdir()) else "cpu"


def wanted_environment(root: Path, cache: Path) -> Environment:
    """The environment that this checkout's requirements ask for on this machine."""
    flavour = machine_flavour()
    text = (root / "requirements" / ("cpu.lock" if flavour == "cpu" else "cuda.txt")).read_text()
    content = "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))
    if flavour == "cuda":
        content += "\n" + "\n".join(plan.requirements((root / "pyproject.toml").read_text(), ("cuda", "dev")))
    base = getattr(sys, "_base_executable", None) or sys.executable
    where = f"{platform.system().lower()}-{platform.machine()}"
    name = plan.environment_name(flavour, content, f"{sys.version_info[:3]} {os.path.realpath(base)}", where)
    return Environment(flavour=flavour, path=cache / name)


def ensure(environment: Environment, root: Path) -> None:
    """`environment` is complete. Waits while another process builds it. Raises SetupError with the reason otherwise."""
    if environment.complete:
        return
    _check_machine(environment)
    environment.path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(environment.path.with_suffix(".lock")) as held:
        if not environment.complete:
            _build(environment, root, held)


def _check_machine(environment: Environment) -> None:
    if environment.flavour == "cpu":
        objection = plan.lock_objection(sys.version_info[:2], f"{platform.system().lower()}-{platform.machine()}")
        if objection:
            raise SetupError(objection)
    if util.find_spec("ensurepip") is None or util.find_spec("venv") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"Python's venv module is incomplete; on Debian or Ubuntu: apt-get install python{version}-venv")
    existing = next(place for place in (environment.path, *environment.path.parents) if place.exists())
    free, needed = shutil.disk_usage(existing).free, NEEDED_BYTES[environment.flavour]
    if free < needed:
        short = f"{existing} has {free / 1e9:.1f} GB free, about {needed / 1e9:.0f} GB are needed"
        raise SetupError(f"{short}; HEADRACE_CACHE names another place")


def _build(environment: Environment, root: Path, held: int) -> None:
    started = time.monotonic()
    size = "about 3 GB" if environment.flavour == "cpu" else "about 12 GB"
    say(f"installing the {environment.flavour} dependencies into {environment.path} ({size}, once)")
    shutil.rmtree(environment.path, ignore_errors=True)
    log = environment.path.with_suffix(".log")
    log.write_text("")
    installer = Installer(environment.path, environment.site, log, held)
    installer.create()
    if environment.flavour == "cpu":
        lock = root / "requirements" / "cpu.lock"
        installer.install_locked(lock)
        _verify_locked(environment, lock.read_text())
    else:
        wanted = plan.requirements((root / "pyproject.toml").read_text(), ("cuda", "dev"))
        installer.install_resolved(wanted, root / "requirements" / "cuda.txt")
    installer.first_import()
    shutil.rmtree(installer.downloads, ignore_errors=True)
    (environment.path / MARKER).write_text(f"{environment.flavour}\n")
    say(f"dependencies ready after {time.monotonic() - started:.0f} s")


def _verify_locked(environment: Environment, lock: str) -> None:
    present = {plan.normalised(item.metadata["Name"]) for item in metadata.distributions(path=[str(environment.site)])}
    missing = [name for name in plan.locked_names(lock) if name not in present]
    if missing:
        raise SetupError(f"the installer left out {', '.join(missing[:5])}; see {environment.path.with_suffix('.log')}")
    objection = plan.torch_objection((environment.site / "torch" / "version.py").read_text())
    if objection:
        raise SetupError(f"{objection}; give pip an index that holds the +cpu build, such as {plan.PYTORCH_CPU_INDEX}")


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Holds the file lock at `path`, saying so every QUIET_S seconds while another holder has it; gives its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        told = -QUIET_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - told >= QUIET_S:
                    say(f"another set-up holds {path}; waiting for it")
                    told = time.monotonic()
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def create_bare(path: Path) -> None:
    """An environment without pip at `path`; an interpreter that was there is replaced, other files stay."""
    for name in ("bin", "lib", "lib64", "include"):
        place = path / name
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
