"""Prompts get exactly the special tokens of their form; replies are decoded whatever ids they hold."""

from __future__ import annotations

import pytest

from configs.errors import ConfigError
from rollouter.codec import UNKNOWN_TOKEN_TEXT, Codec
from rollouter.errors import DataError
from tests.fakes.fake_engine import EOS, FakeTokenizer


@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_begin_token_whoever_adds_it(adds_bos: bool) -> None:
    """B61"""
    tokenizer = FakeTokenizer(adds_bos=adds_bos)
    codec = Codec(tokenizer)
    _, chat = codec.encode_prompt(({"role": "user", "content": "hi"},))
    assert chat.tolist().count(tokenizer.bos) == 1
    _, raw = codec.encode_prompt("hi")
    assert raw.tolist().count(tokenizer.bos) == int(adds_bos)


def test_messages_go_through_the_chat_template() -> None:
    text, ids = Codec(FakeTokenizer()).encode_prompt(({"role": "user", "content": "hi"},))
    assert text == "<bos>user:hi\nassistant:"
    assert Codec(FakeTokenizer()).decode(ids.tolist()) == "user:hi\nassistant:"


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(DataError, match=r"the model has no chat template.*rollouter\.agent_loop=single_turn"):
        Codec(FakeTokenizer(chat_template=False)).encode_prompt(({"role": "user", "content": "hi"},))


def test_ids_beyond_the_vocabulary_read_as_a_placeholder() -> None:
    """B116"""
    tokenizer = FakeTokenizer()
    codec = Codec(tokenizer)
    ids = codec.encode("ab")
    assert codec.decode([ids[0], len(tokenizer) + 5, ids[1], EOS]) == f"a{UNKNOWN_TOKEN_TEXT}b"
    assert codec.decode([]) == ""


def test_stop_strings_become_ids_after_the_end_token() -> None:
    codec = Codec(FakeTokenizer())
    assert codec.stop_token_ids(["\n", "=", "\n"]) == (EOS, codec.encode("\n")[0], codec.encode("=")[0])


@pytest.mark.parametrize("text", ["ab", ""])
def test_stop_string_that_is_not_one_token_is_a_setting_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        Codec(FakeTokenizer()).stop_token_ids([text])
