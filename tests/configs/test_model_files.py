"""Two models are told apart by their files, whatever their directories are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.errors import ConfigError
from configs.model_files import WEIGHTS, model_files, other_files

ONE = np.arange(6000, dtype=np.float32).reshape(60, 100)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 100}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"one": ONE, "two": np.zeros(3, np.float32)}, directory / "model.safetensors")
    return directory


def _other_weight(directory: Path) -> None:
    changed = ONE.copy()
    changed[-1, -1] = -1
    save_file({"one": changed, "two": np.zeros(3, np.float32)}, directory / "model.safetensors")


def _other_shape(directory: Path) -> None:
    save_file({"one": ONE.reshape(100, 60), "two": np.zeros(3, np.float32)}, directory / "model.safetensors")


def _pytorch_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"12345")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda directory: (directory / "config.json").write_text("{}"), ["config.json"]),
        (lambda directory: (directory / "tokenizer.json").write_text("{} "), ["tokenizer.json"]),
        (lambda directory: (directory / "chat_template.jinja").unlink(), ["chat_template.jinja"]),
        (lambda directory: (directory / "added_tokens.json").write_text("{}"), ["added_tokens.json"]),
        (_other_weight, [WEIGHTS]),
        (_other_shape, [WEIGHTS]),
        (_pytorch_weights, [WEIGHTS]),
    ],
)
def test_what_is_another_is_named(model: Path, tmp_path: Path, change: Callable[[Path], None], named: list[str]) -> None:
    before = model_files(model)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    assert other_files(model_files(other), before) == []
    change(other)
    assert other_files(model_files(other), before) == named


def test_the_same_weights_in_several_files_are_the_same(model: Path) -> None:
    before = model_files(model)
    (model / "model.safetensors").unlink()
    save_file({"two": np.zeros(3, np.float32)}, model / "model-00001-of-00002.safetensors")
    save_file({"one": ONE}, model / "model-00002-of-00002.safetensors")
    (model / "README.md").write_text("another text")
    assert model_files(model) == before


def test_empty_tensors_and_an_empty_directory_are_read(tmp_path: Path) -> None:
    assert list(model_files(tmp_path)) == [WEIGHTS]
    save_file({"none": np.zeros((0, 3), np.float32)}, tmp_path / "model.safetensors")
    assert list(model_files(tmp_path)) == [WEIGHTS]


@pytest.mark.parametrize("header", [b"", b"no", b"[1]", json.dumps({"one": {"dtype": "F32"}}).encode()])
def test_weights_that_are_no_safetensors_are_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=rf"{path}: is no safetensors file"):
        model_files(tmp_path)
