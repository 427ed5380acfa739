"""The thin `.venv`: what it resolves, when it is up to date, and what it refuses to overwrite; and where the cache lies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bootstrap import checkout, places
from tools.bootstrap.environment import Environment
from tools.bootstrap.errors import SetupError

PROJECT = """\
[project]
name = "headrace"
version = "0.1.0"
description = "d"
dependencies = ["numpy>=2"]
[project.scripts]
headrace = "console.cli:main"
[project.entry-points."vllm.general_plugins"]
headrace = "weight_sync.plugin:register"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "a check out"
    (root / "console").mkdir(parents=True)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "console" / "cli.py").write_text("import borrowed\n\ndef main():\n    print(borrowed.NAME)\n    return 3\n")
    return root


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = Environment(flavour="cpu", path=tmp_path / "the cache" / "env-cpu-1")
    (environment.path / "bin").mkdir(parents=True)
    environment.site.mkdir(parents=True)
    (environment.site / "borrowed.py").write_text("NAME = 'from the cache'\n")
    return environment


def test_command_runs_the_checkout_with_the_cached_packages_from_any_directory(root: Path, environment: Environment):
    venv = root / ".venv"
    checkout.write_venv(venv, root, environment)
    done = subprocess.run([venv / "bin" / "headrace"], capture_output=True, text=True, cwd="/", check=False)
    assert (done.returncode, done.stdout) == (3, "from the cache\n")


def test_metadata_and_plugins_are_found_by_importlib(root: Path, environment: Environment):
    venv = root / ".venv"
    checkout.write_venv(venv, root, environment)
    plugin = "m.entry_points(group='vllm.general_plugins')['headrace'].value"
    code = f"import importlib.metadata as m; print(m.version('headrace'), {plugin})"
    done = subprocess.run([venv / "bin" / "python", "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout == "0.1.0 weight_sync.plugin:register\n"


def test_stamp_goes_stale_when_the_project_file_or_the_place_changes(root: Path, environment: Environment):
    venv = root / ".venv"
    checkout.write_venv(venv, root, environment)
    assert checkout.up_to_date(venv, checkout.expected_stamp(root, environment))
    (root / "pyproject.toml").write_text(PROJECT + "\n")
    assert not checkout.up_to_date(venv, checkout.expected_stamp(root, environment))
    checkout.write_venv(venv, root, environment)
    moved = root.rename(root.with_name("moved"))
    assert not checkout.up_to_date(moved / ".venv", checkout.expected_stamp(moved, environment))


def test_an_unfinished_venv_is_made_again(root: Path, environment: Environment):
    venv = root / ".venv"
    checkout.write_venv(venv, root, environment)
    (venv / checkout.STAMP).write_text("{}")
    (venv / "bin" / "headrace").unlink()
    checkout.write_venv(venv, root, environment)
    assert (venv / "bin" / "headrace").exists()
    assert json.loads((venv / checkout.STAMP).read_text())["root"] == str(root)


def test_a_venv_of_someone_else_is_left_alone(root: Path, environment: Environment):
    venv = root / ".venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("mine")
    with pytest.raises(SetupError, match="move it away"):
        checkout.write_venv(venv, root, environment)
    assert (venv / "pyvenv.cfg").read_text() == "mine"


def test_environment_without_its_marker_is_not_complete(environment: Environment):
    environment.python.symlink_to(sys.executable)
    assert not environment.complete
    (environment.path / "COMPLETE").write_text("cpu\n")
    assert environment.complete


def test_cache_is_where_the_product_looks_for_it():
    assert places.preferred_cache({"HEADRACE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/c")
    assert places.preferred_cache({"HEADRACE_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/headrace")
    assert places.preferred_cache({"HOME": "/h"}) == Path("/h/.cache/headrace")


def test_cache_falls_back_to_the_checkout_and_then_gives_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(places, "writable", lambda path: path == tmp_path / ".cache")
    assert places.usable_cache({"HEADRACE_CACHE": "/nowhere"}, tmp_path) == tmp_path / ".cache"
    monkeypatch.setattr(places, "writable", lambda path: False)
    with pytest.raises(SetupError, match="HEADRACE_CACHE"):
        places.usable_cache({"HEADRACE_CACHE": "/nowhere"}, tmp_path)


def test_venv_that_cannot_be_written_moves_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert places.usable_venv(tmp_path, tmp_path / "c") == tmp_path / ".venv"
    monkeypatch.setattr(places, "writable", lambda path: False)
    assert places.usable_venv(tmp_path, tmp_path / "c").parent == tmp_path / "c"
