"""Models come out of the cache whole, made once, and load as any Hugging Face directory does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import ConfigError
from configs.schema import ModelSettings, Settings
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from trainer.errors import ModelError
from trainer.model_source import check_source
from trainer.models import PreparedModel, compute_dtype, prepare_model
from trainer.tiny_sort import VOCABULARY, spoiled_examples, tiny_sort_name


def tiny_settings(cache: Path, *, steps: int = 2, seed: int = 0) -> Settings:
    return Settings(seed=seed, model=ModelSettings(source="tiny-sort", cache_dir=cache, warm_start_steps=steps))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_model(tiny_settings(tmp_path_factory.mktemp("cache")))


def test_the_tiny_models_tokenizer_is_one_token_a_character_and_lossless(tiny: PreparedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_dir)
    ids = tokenizer("s52713=")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == list("s52713=")
    answer = [*tokenizer("12357")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "12357"
    assert tokenizer.eos_token == "<eos>"


def test_the_tiny_model_loads_as_a_causal_model_with_the_tokenizers_vocabulary(tiny: PreparedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.model_dir)
    assert model.config.vocab_size == len(VOCABULARY)
    assert model.config.eos_token_id == VOCABULARY.index("<eos>")
    assert 100_000 < model.num_parameters() < 150_000
    assert tiny.dtype == torch.float32


def test_the_same_seed_makes_the_same_bits_and_another_one_others(tiny: PreparedModel, tmp_path: Path) -> None:
    same = prepare_model(tiny_settings(tmp_path))
    other = prepare_model(tiny_settings(tmp_path, seed=1))
    first, again, unlike = (checkpoint_tensors(made.model_dir) for made in (tiny, same, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], unlike[name]) for name in first)


def test_a_model_in_the_cache_is_not_made_again(tiny: PreparedModel) -> None:
    before = (tiny.model_dir / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(tiny_settings(tiny.model_dir.parents[1])) == tiny
    assert (tiny.model_dir / "model.safetensors").stat().st_mtime_ns == before


def test_what_a_crash_left_unfinished_is_made_anew(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    leftover = tmp_path / "models" / f".{tiny_sort_name(settings.model, seed=0)}.unfinished"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("junk")
    made = prepare_model(settings)
    assert not (made.model_dir / "junk").exists()
    assert not leftover.exists()


def test_two_that_ask_at_once_get_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock belongs to the open file, so two threads stand for two processes."""
    with ThreadPoolExecutor(2) as executor:
        made = [executor.submit(prepare_model, tiny_settings(tmp_path)) for _ in range(2)]
    assert made[0].result() == made[1].result()
    assert capsys.readouterr().out.count("model kept in the cache") == 1
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")] == [
        tiny_sort_name(tiny_settings(tmp_path).model, seed=0)
    ]


def test_most_examples_of_the_warm_start_are_spoiled_and_none_is_malformed() -> None:
    rows = spoiled_examples(np.random.default_rng(0), 2000)
    digits, answers = rows[:, 1:6], rows[:, 7:12]
    right = (np.sort(digits, axis=1) == answers).all(axis=1)
    assert 0.15 < right.mean() < 0.35
    assert (rows[:, [0, 6, 12]] == [VOCABULARY.index(token) for token in ("s", "=", "<eos>")]).all()


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "mine", TinyModel.TIED, seed=0)
    prepared = prepare_model(Settings(model=ModelSettings(source=str(directory), dtype="bfloat16")))
    assert prepared == PreparedModel(model_dir=directory, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nobody/has-this-model", "neither a directory here nor to be had from the hub"),
    ],
)
def test_a_source_that_is_not_there_is_an_error_of_one_line(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        prepare_model(Settings(model=ModelSettings(source=source, cache_dir=tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["/nowhere/at-all", "./nowhere", "~/no/where", "a/b/c"])
def test_a_directory_that_is_not_there_is_a_wrong_setting(source: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.source={source}: no such directory; expected .*tiny-sort"):
        check_source(ModelSettings(source=source))


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        prepare_model(Settings(model=ModelSettings(source=str(tmp_path))))


def test_the_missing_package_file_is_named_with_what_puts_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"smollm2-135m-instruct\.Q4_1\.gguf: not in .*make setup"):
        prepare_model(Settings(model=ModelSettings(cache_dir=tmp_path / "other")))


def test_the_compute_type_is_taken_as_asked() -> None:
    assert compute_dtype("float32") == torch.float32
    assert compute_dtype("bfloat16") == torch.bfloat16
    assert compute_dtype("auto", small=True) == torch.float32
