"""The thin `.venv` of one checkout: it borrows the cached environment's packages and holds headrace itself, editable.

Headrace's own entry is written by hand instead of by a build: a `.pth` file, a dist-info directory that
importlib.metadata reads, and the commands. That takes a tenth of a second and leaves nothing in the checkout.
"""

import fcntl
import hashlib
import json
import os
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.bootstrap.environment import Environment, create_bare
from tools.bootstrap.errors import SetupError

STAMP = "headrace-setup.json"
_COMMAND = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys

from {module} import {first}

sys.exit({attribute}())
"""


def expected_stamp(root: Path, environment: Environment) -> dict[str, str]:
    """What the stamp of an up-to-date `.venv` says; it changes with the checkout's place, its project file and its packages."""
    sources = [root / "pyproject.toml", *sorted((root / "tools" / "bootstrap").glob("*.py"))]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    return {"root": str(root), "environment": str(environment.path), "sources": digest}


def up_to_date(venv: Path, stamp: dict[str, str]) -> bool:
    """Whether `venv` was finished with exactly this stamp."""
    try:
        return bool(json.loads((venv / STAMP).read_text()) == stamp) and (venv / "bin" / "python").exists()
    except (OSError, ValueError):
        return False


def write_venv(venv: Path, root: Path, environment: Environment) -> None:
    """`venv` runs headrace from `root` with the packages of `environment`. Raises SetupError when `venv` is someone else's."""
    if (venv / "pyvenv.cfg").exists() and not (venv / STAMP).exists():
        raise SetupError(f"{venv} was not made by this set-up; move it away and run again")
    venv.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(venv, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        stamp = expected_stamp(root, environment)
        if up_to_date(venv, stamp):
            return
        (venv / STAMP).write_text("{}\n")
        create_bare(venv)
        site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv)}))
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        _write_distribution(site, root, project)
        (site / "headrace.pth").write_text(
            # The interpreter reads this file twice in a virtual environment, hence the conditions.
            f"import sys; p = {str(root)!a}; p in sys.path or sys.path.append(p)\n"
            f"import site, sys; p = {str(environment.site)!a}; p in sys.path or site.addsitedir(p)\n"
        )
        _write_commands(venv, environment, project)
        (venv / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    finally:
        os.close(descriptor)


def entry_points_text(project: dict[str, Any]) -> str:
    """The entry_points.txt of a project table: its commands and its plugins."""
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, items in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in items.items()), ""]
    return "\n".join(lines)


def _write_distribution(site: Path, root: Path, project: dict[str, Any]) -> None:
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    requires = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\nSummary: {project['description']}\n"
    (info / "METADATA").write_text(head + requires)
    (info / "entry_points.txt").write_text(entry_points_text(project))
    (info / "INSTALLER").write_text("headrace-setup\n")
    (info / "direct_url.json").write_text(json.dumps({"url": root.as_uri(), "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("".join(f"{info.name}/{path.name},,\n" for path in sorted(info.iterdir())))


def _write_commands(venv: Path, environment: Environment, project: dict[str, Any]) -> None:
    """headrace's commands and those of every installed package, each run by this environment's own interpreter."""
    installed = metadata.distributions(path=[str(environment.site)])
    points = [point for item in installed for point in item.entry_points if point.group == "console_scripts"]
    commands = {point.name: point.value for point in points if not point.name.startswith("pip")} | project["scripts"]
    taken = {path.name for path in (venv / "bin").iterdir()}
    for name, target in commands.items():
        module, _, attribute = target.split("[")[0].strip().partition(":")
        if attribute and name not in taken:
            path = venv / "bin" / name
            python = str(venv / "bin" / "python")
            path.write_text(_COMMAND.format(python=python, module=module, first=attribute.split(".")[0], attribute=attribute))
            path.chmod(0o755)
    for program in (environment.path / "bin").iterdir():
        is_binary = program.is_file() and not program.is_symlink() and program.read_bytes()[:4] == b"\x7fELF"
        if is_binary and program.name not in taken | commands.keys():
            (venv / "bin" / program.name).symlink_to(program)
