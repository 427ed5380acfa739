"""A real tokenizer from a model's directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from rollouter.codec import _is_plain, load_codec
from rollouter.prompts import encode
from rollouter.tasks import load_rows
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_tokenizer(tmp_path)


def test_tokenizer_of_a_model_directory_encodes_and_decodes(model_dir: Path) -> None:
    codec = load_codec(str(model_dir), trust_remote_code=False)
    tasks = encode(load_rows("sort")[:8], codec, max_prompt_tokens=10)
    assert [codec.decode(task.prompt_ids.tolist()) for task in tasks] == [task.prompt_text for task in tasks]
    ids = codec.encode("12")
    assert codec.decode([*ids, 0]) == "12"
    assert codec.decode([ids[0], 999, ids[1]]) == "1\N{REPLACEMENT CHARACTER}2"
    assert codec.stop_token_ids(["="]) == (0, codec.encode("=")[0])


def test_generic_tokenizer_is_loaded_without_torch(model_dir: Path) -> None:
    program = (
        "import sys; from rollouter.codec import load_codec; "
        f"print(load_codec({str(model_dir)!r}, trust_remote_code=False).encode('1+2='), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split("]")[1].strip() == "False"


def test_tokenizer_with_a_class_of_its_own_is_left_to_transformers(model_dir: Path) -> None:
    config = model_dir / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "GPT2Tokenizer"}))
    assert not _is_plain(model_dir)
    (model_dir / "tokenizer_config.json").unlink()
    assert not _is_plain(model_dir)


def test_directory_without_a_tokenizer_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_codec(str(tmp_path), trust_remote_code=False)
