"""A reward model that vLLM serves: its output is what the model's own forward pass gives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import string
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen3Config

from agent_loop.rewards import reward_model
from rollouter.engine_command import EngineShare, server_environment

START_TIMEOUT_S = 240.0
"""Against hangs only."""


def _make_model(directory: Path) -> Path:
    """A Qwen3 with a head of two classes, and a tokenizer of one token a character."""
    characters = ["<pad>", "<unk>", *string.printable]
    tokenizer = Tokenizer(WordLevel({text: number for number, text in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(characters),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        num_labels=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def _expected(directory: Path, text: str) -> float:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
    return float(logits.softmax(-1)[1])


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    directory = _make_model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        *("--model", str(directory), "--served-model-name", "rm", "--runner", "pooling", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--uvicorn-log-level", "warning"),
    ]
    share = EngineShare(cores=None, gpus=None)
    environment = server_environment(os.environ, share=share, root=Path(__file__).parents[3], sockets=tmp_path)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - before anything runs beside it
            [sys.executable, "-m", "rollouter.vllm_serve"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    process.stdin.flush()
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await _is_up(url):
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                await asyncio.sleep(0.5)
        yield directory, url
    finally:
        process.kill()
        process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


async def _is_up(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.slow
async def test_a_served_classifier_scores_as_its_own_forward_pass_does(served: tuple[Path, str]) -> None:
    directory, url = served
    info = {"prompt_text": "What is 3+4? "}
    for solution in ("7", "It is eight."):
        expected = _expected(directory, info["prompt_text"] + solution)
        got = await reward_model("d", solution, None, info, url=url, model="rm")
        assert got == pytest.approx(expected, abs=1e-4)
        other = await reward_model("d", solution, None, info, url=url, model="rm", label=0)
        assert other == pytest.approx(1 - expected, abs=1e-4)
        pooled = await reward_model("d", solution, None, info, url=url, model="rm", kind="pooling")
        assert pooled == pytest.approx(expected, abs=1e-4)
