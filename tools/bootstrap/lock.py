"""Renews requirements/cpu.lock by resolving pyproject.toml's core, `cpu` and `dev` requirements for the oldest Python."""

from pathlib import Path

from tools.bootstrap import plan
from tools.bootstrap.environment import Environment
from tools.bootstrap.errors import SetupError
from tools.bootstrap.installer import pip_settings
from tools.bootstrap.runner import run, say

HEADER = """\
# Everything that Headrace needs on a CPU machine (Linux x86-64, Python 3.11 to 3.13), to the last package.
# Made by `make lock` with uv from pyproject.toml (core, cpu, dev) and requirements/overrides.txt; do not edit by hand.
# Installed without a resolver: pip install --no-deps -r requirements/cpu.lock
# (torch's CPU build lies on https://download.pytorch.org/whl/cpu: name it with --extra-index-url)
"""


def renew(root: Path, environment: Environment, log: Path) -> None:
    """Rewrites the lock with the newest versions that fit. Needs a finished environment, for its uv. Raises SetupError."""
    uv = environment.path / "bin" / "uv"
    if not uv.exists():
        raise SetupError(f"{uv} is missing: run make setup first (or pip install uv into that environment)")
    settings = pip_settings(environment.python)
    target = root / "requirements" / "cpu.lock"
    log.write_text("")
    resolve: list[str | Path] = [
        uv,
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "cpu",
        "--extra",
        "dev",
        "--python-version",
        "3.11",
    ]
    form = ["--no-header", "--no-annotate", "--upgrade", "--override", "requirements/overrides.txt", "--quiet"]
    index = [*settings.uv_arguments(), "--extra-index-url", plan.PYTORCH_CPU_INDEX]
    output = ""
    for sources in (settings.uv_arguments(), index):
        status, output = run(
            [*resolve, *form, *sources],
            log,
            lambda elapsed_s, _: f"resolving: {elapsed_s:.0f} s",
            environment=settings.uv_environment(),
            cwd=root,
        )
        if status == 0:
            target.write_text(HEADER + output)
            say(f"{target} holds {len(plan.locked_names(output))} pins; run make check, then commit it")
            return
    raise SetupError(f"the requirements cannot be resolved: {plan.failure_line(output)}; log: {log}")
