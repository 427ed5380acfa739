"""Fills one environment with packages: uv where it works, pip where it does not. Wheels only, so nothing is compiled.

uv is several times faster but does not read pip's settings, so they are translated for it; pip is asked whenever uv
fails for a reason other than the network.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.bootstrap import plan
from tools.bootstrap.errors import SetupError
from tools.bootstrap.runner import run, say

UV = "uv==0.13.9"
_QUICK_FAILURE = ("--retries", "1", "--timeout", "20")


def pip_settings(python: Path) -> plan.IndexSettings:
    """Where the pip of `python` is told to look for packages."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return plan.index_settings(listed.stdout)


class Installer:
    """One environment's package installation; `held` is the descriptor of the lock that guards it."""

    def __init__(self, path: Path, site: Path, log: Path, held: int) -> None:
        self._path = path
        self._site = site
        self._log = log
        self._held = held
        self._python = path / "bin" / "python"
        self._uv: Path | None = None
        self._settings = plan.IndexSettings()
        self.downloads = path.with_suffix(".downloads")

    def create(self) -> None:
        """The environment exists with pip in it, and with uv when an index offers it. Raises SetupError."""
        self._must([sys.executable, "-m", "venv", self._path], "creating the environment")
        self._settings = pip_settings(self._python)
        status, output = self._run(self._pip("install", "--no-deps", *_QUICK_FAILURE, UV), self._titled("getting uv"))
        if status == 0:
            self._uv = self._path / "bin" / "uv"
        elif plan.network_line(output):
            raise SetupError(f"no package index can be reached ({plan.network_line(output)}); log: {self._log}")
        else:
            say(f"uv is not to be had ({plan.failure_line(output)}); using pip, which is slower")

    def install_locked(self, lock: Path) -> None:
        """Exactly the pins of `lock` are installed, with no resolver. Raises SetupError."""
        total = len(plan.locked_names(lock.read_text()))
        self._install(["--no-deps", "--only-binary", ":all:", "-r", lock], total)

    def install_resolved(self, wanted: Sequence[str], constraints: Path) -> None:
        """`wanted` and all that it needs are installed, within `constraints`. Raises SetupError."""
        self._install(["--prefer-binary", "-c", constraints, *wanted], 0)

    def first_import(self) -> None:
        """The packages load on this machine, and their bytecode is stored. Raises SetupError naming what does not load."""
        script = Path(__file__).with_name("first_import.py")

        def describe(elapsed_s: float, output: str) -> str:
            return f"preparing the first start: {elapsed_s:.0f} s, {plan.current_package(output)}"

        quiet = {"PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        status, output = self._run([self._python, script], describe, quiet)
        if status:
            failed = f"{plan.current_package(output)} does not load here: {plan.failure_line(output)}"
            raise SetupError(f"{failed}; log: {self._log}")

    def _install(self, arguments: list[str | Path], total: int) -> None:
        describe = self._counted(total)
        if self._uv:
            plain = [word for word in arguments if word != "--prefer-binary"]
            status, output = self._with_pytorch_index(lambda extra: self._run(self._uv_install(plain, extra), describe))
            if status == 0:
                return
            if plan.network_line(output):
                raise SetupError(f"an index cannot be reached ({plan.network_line(output)}); log: {self._log}")
            say(f"uv failed ({plan.failure_line(output)}); trying pip, which is slower")
        pip = self._pip("install", "--no-compile", *arguments)
        status, output = self._with_pytorch_index(lambda extra: self._run([*pip, *extra], describe))
        if status:
            raise SetupError(f"pip failed: {plan.failure_line(output)}; log: {self._log}")

    def _with_pytorch_index(self, attempt: Callable[[list[str]], tuple[int, str]]) -> tuple[int, str]:
        """`attempt` with the configured indexes, then, when they lack the pinned torch, with PyTorch's own besides."""
        status, output = attempt([])
        if status and plan.lacks_torch(output):
            say(f"the configured index has no CPU build of torch; adding {plan.PYTORCH_CPU_INDEX}")
            status, output = attempt(["--extra-index-url", plan.PYTORCH_CPU_INDEX])
        return status, output

    def _uv_install(self, arguments: Sequence[str | Path], extra: Sequence[str]) -> list[str | Path]:
        head = [self._uv or "uv", "pip", "install", "--python", self._python, "--cache-dir", self.downloads]
        return [*head, *self._settings.uv_arguments(), *extra, *arguments]

    def _pip(self, command: str, *arguments: str | Path) -> list[str | Path]:
        options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
        return [self._python, "-m", "pip", command, *options, *arguments]

    def _counted(self, total: int) -> Callable[[float, str], str]:
        def describe(elapsed_s: float, output: str) -> str:
            unpacked = self.downloads / "archive-v0"
            fetched = len(list(unpacked.iterdir())) if unpacked.is_dir() else output.count("\nCollecting ")
            installed = max(0, sum(1 for _ in self._site.glob("*.dist-info")) - before)
            return plan.progress("installing", fetched, installed, total, elapsed_s, plan.current_package(output))

        before = sum(1 for _ in self._site.glob("*.dist-info"))
        return describe

    def _titled(self, title: str) -> Callable[[float, str], str]:
        return lambda elapsed_s, output: f"{title}: {elapsed_s:.0f} s"

    def _run(
        self, command: Sequence[str | Path], describe: Callable[[float, str], str], extra: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "UV_NO_PROGRESS": "1"}
        environment = {**fixed, **self._settings.uv_environment(), **(extra or {})}
        return run(command, self._log, describe, environment=environment, held=(self._held,), cwd=self._path.parent)

    def _must(self, command: Sequence[str | Path], title: str) -> None:
        status, output = self._run(command, self._titled(title))
        if status:
            raise SetupError(f"{title} failed: {plan.failure_line(output)}; log: {self._log}")
