"""Settings are refused before anything starts, with the key, what was got, and the nearest valid name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.command import as_yaml
from configs.errors import ConfigError
from configs.keys import leaves, listing, live_keys
from configs.loader import dump, load, parse_value
from configs.schema import Settings

REPOSITORY = Path(__file__).resolve().parents[2]


def _refusal(config: Path | None = None, *overrides: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, overrides, environment=environment or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("stalenes_threshold=1", "staleness_threshold"),
        ("learning_rate=1e-4", "trainer.learning_rate"),
        ("trainer.lerning_rate=1e-4", "trainer.learning_rate"),
        ("data.dataset_name=x", "data.source"),
        ("engine.temperature=1", "sampling.temperature"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_valid_one(override: str, nearest: str) -> None:
    """B118: misspelt, moved and nested-wrong keys."""
    key = override.partition("=")[0]
    message = _refusal(None, override)
    assert repr(key) in message
    if key != "data.dataset_name":
        assert f"nearest valid: {nearest}" in message


def test_unknown_key_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    """B118: the message names file and line."""
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\ntrainer:\n  learning_rate: 1e-4\n  warmup_step: 2\n")
    assert _refusal(path) == f"{path}:4: unknown setting 'trainer.warmup_step'; nearest valid: trainer.warmup_steps"


def test_unknown_section_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainr:\n  learning_rate: 1e-4\n")
    assert _refusal(path) == f"{path}:1: unknown section 'trainr'; nearest valid: trainer"


def test_unknown_key_in_the_environment_is_refused() -> None:
    """B118: environment."""
    assert "environment HEADRACE__STALENES_THRESHOLD" in _refusal(environment={"HEADRACE__STALENES_THRESHOLD": "1"})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_rate=fast", "trainer.learning_rate: got 'fast'"),
        ("trainer.learning_rate=.nan", "finite"),
        ("trainer.learning_rate=.inf", "finite"),
        ("seed=-1", "greater than or equal to 0"),
        ("partial_rollout=maybe", "keep | recompute | finish"),
        ("staleness_threshold=-0.5", "greater than or equal to 0"),
        ("name=a b", "name"),
        ("group_size", "expected key=value"),
    ],
)
def test_bad_value_is_refused_naming_key_and_expectation(override: str, words: str) -> None:
    assert words in _refusal(None, override)


def test_contradictions_are_reported_together_with_numbers_and_nearest_values() -> None:
    """B120: every rule broken is told at once, with its numbers."""
    message = _refusal(
        None, "group_size=5", "bus.max_queued_samples=8", "sampling.max_tokens=4096", "trigger_parameter_sync_step=300"
    )
    lines = message.splitlines()
    assert len(lines) == 4
    assert "samples_per_step=64 is no multiple of group_size=5 (nearest: 60 or 65)" in lines[0]


def test_precedence_is_defaults_then_file_then_environment_then_arguments(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nnum_steps: 10\ntrainer:\n  learning_rate: 1e-4\n")
    environment = {"HEADRACE__SEED": "2", "HEADRACE__TRAINER__LEARNING_RATE": "2e-4"}
    settings = load(path, ["seed=3"], environment=environment)
    assert (settings.seed, settings.num_steps, settings.trainer.learning_rate) == (3, 10, 2e-4)


def test_text_settings_keep_numbers_and_lists_as_they_stand() -> None:
    assert parse_value("name", "007") == "007"
    assert parse_value("model.cache_dir", "null") is None
    assert load(None, ["model.source=123", r'sampling.stop=["\n"]'], environment={}).sampling.stop == ("\n",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", ":2: 'seed' is given twice"),
        ("- a\n- b\n", "expected a mapping"),
        ("seed: [1\n", "is not YAML"),
        ("trainer: 3\n", "trainer is a section"),
    ],
)
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert words in _refusal(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"


def test_resolved_settings_load_back_to_the_same(tmp_path: Path) -> None:
    settings = load(None, ["staleness_threshold=0.25", 'sampling.stop=["\\n","x"]'], environment={})
    path = tmp_path / "resolved.yaml"
    path.write_text(as_yaml(settings))
    assert load(path, environment={}) == settings
    assert set(dump(settings)) == set(leaves())


def test_presets_are_valid() -> None:
    presets = sorted((REPOSITORY / "configs").glob("*.yaml"))
    assert presets
    for preset in presets:
        assert isinstance(load(preset, environment={}), Settings)


def test_every_setting_has_a_meaning_and_is_listed() -> None:
    text = listing()
    for key, leaf in leaves().items():
        assert leaf.description.endswith("."), key
        assert f"  {key} (" in text
    assert "staleness_threshold" in live_keys()


@pytest.mark.parametrize("program", ["rollouter", "trainer"])
def test_daemons_check_settings_before_anything_starts(program: str, tmp_path: Path) -> None:
    """Exit 2 and one line per problem; --dry-run prints settings that load; --help lists every key."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"{program}.cli", *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
        )

    bad = call("stalenes_threshold=1", "seed=-1")
    assert (bad.returncode, bad.stdout) == (2, "")
    problem = "argument stalenes_threshold=1: unknown setting 'stalenes_threshold'; nearest valid: staleness_threshold"
    assert bad.stderr == f"{program}: error: {problem}\n"
    dry = call("--dry-run", f"run_dir={tmp_path}/never")
    assert dry.returncode == 0
    assert yaml.safe_load(dry.stdout)["run_dir"] == f"{tmp_path}/never"
    assert not (tmp_path / "never").exists()
    listed = call("--help")
    assert listed.returncode == 0
    assert all(f"  {key} (" in listed.stdout for key in leaves())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("garbage", "expected auto, ipc:///PATH or tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "port 99999, expected 1 to 65535"),
        ("tcp://127.0.0.1:0", "port 0"),
        ("tcp://0.0.0.0:6000", "can be reached from other hosts, and without keys"),
        ("tcp://trainer.lab:6000", "bus.keys_dir=DIR (or set bus.allow_insecure=true)"),
        ("tcp://user:secret@host:6000", "tcp://HOST:PORT"),
        ("tcp://*:6000", "tcp://HOST:PORT"),
        ("tcp://[::x]:6000", "expected an IPv6 address in the brackets"),
        ("ipc://relative", "absolute path"),
        ("ipc://", "absolute path"),
        ("ipc:///" + "x" * 120, "121 bytes, expected at most 107"),
    ],
)
def test_a_bus_address_that_cannot_work_is_refused_before_anything_listens(address: str, expected: str) -> None:
    """B136: a socket's path that the kernel would not take, too. libzmq would take port 99999 for another number."""
    message = _refusal(None, f"bus.address={address}")
    assert "bus.address" in message
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "address", ["auto", "ipc:///run/x/bus", "tcp://127.0.0.1:6000", "tcp://[::1]:6000", "tcp://localhost:1"]
)
def test_a_usable_bus_address_is_kept(address: str) -> None:
    assert load(None, [f"bus.address={address}"], environment={}).bus.address == address


@pytest.mark.parametrize("remedy", ["bus.keys_dir=/keys", "bus.allow_insecure=true"])
def test_an_address_beyond_this_host_is_taken_with_keys_or_on_request(remedy: str) -> None:
    assert load(None, ["bus.address=tcp://0.0.0.0:6000", remedy], environment={}).bus.address == "tcp://0.0.0.0:6000"
