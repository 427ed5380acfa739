"""GPUs are shared out by name, disjoint, without renumbering. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.gpu import gpu_shares, visible_gpus


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "2", "10")),
        ("4,5,6,7", ("4", "5", "6", "7")),
        ("7,3", ("7", "3")),
        ("GPU-a1,GPU-b2", ("GPU-a1", "GPU-b2")),
        ("", ()),
        ("-1", ()),
    ],
)
def test_visible_gpus_keep_the_names_that_the_process_was_given(
    devices: Path, visible: str | None, expected: tuple[str, ...]
) -> None:
    """B178: numbers, order and UUIDs are taken as they are."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment, devices) == expected


def test_a_machine_without_gpus_has_none_whatever_the_variable_says(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == ()
    assert gpu_shares((), num_engines=1) is None


@pytest.mark.parametrize(
    ("gpus", "num_engines", "engines", "trainer"),
    [
        (("7", "3"), 1, ("7",), "3"),
        (("4", "5", "6", "7"), 1, ("4,5,6",), "7"),
        (("4", "5", "6", "7"), 3, ("4", "5", "6"), "7"),
        (("GPU-a", "GPU-b"), 1, ("GPU-a",), "GPU-b"),
    ],
)
def test_engines_and_trainer_get_disjoint_gpus(
    gpus: tuple[str, ...], num_engines: int, engines: tuple[str, ...], trainer: str
) -> None:
    """B178: rollout and training sets are disjoint."""
    shares = gpu_shares(gpus, num_engines=num_engines)
    assert shares is not None
    assert (shares.engines, shares.trainer, shares.shared) == (engines, trainer, False)


def test_a_single_gpu_is_shared() -> None:
    shares = gpu_shares(("0",), num_engines=1)
    assert shares is not None
    assert (shares.engines, shares.trainer, shares.shared) == (("0",), "0", True)


@pytest.mark.parametrize(("gpus", "num_engines"), [(("0", "1"), 2), (("0",), 2), (("0", "0"), 1)])
def test_too_few_gpus_are_refused_with_the_numbers(gpus: tuple[str, ...], num_engines: int) -> None:
    with pytest.raises(ConfigError, match=r"got .*expected"):
        gpu_shares(gpus, num_engines=num_engines)
