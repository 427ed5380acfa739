"""A real vLLM engine that is given adapters computes what the trainer computes, or refuses them whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import TinyModel

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = [
    pytest.param((TinyModel.TIED, "float32"), id="tied"),
    pytest.param((TinyModel.UNTIED, "float32"), id="untied"),
    pytest.param((TinyModel.TIED, "bfloat16"), id="tied-bfloat16"),
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
"""Largest difference of a logprob in nats; observed 8e-6 and 0.2. Other adapters, and none, differ by more than 6."""


class Seen:
    """What one engine did in `adapter_scenario`."""

    def __init__(self, dtype: str, seen: dict[str, Any]) -> None:
        self.dtype = dtype
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        return self.seen[key]

    def adapters_at(self, step: str) -> int | None:
        """Whose logprobs the engine gave at `step`: 0 is the base alone."""
        matching = [index for index, error in enumerate(self.seen[step]) if error <= TOLERANCE[self.dtype]]
        assert len(matching) <= 1, self.seen[step]
        return matching[0] if matching else None


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    kind, dtype = request.param
    process = subprocess.run(
        [sys.executable, "-m", "tests.weight_sync.adapter_scenario", kind, dtype, str(tmp_path_factory.mktemp("vllm"))],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return Seen(dtype, json.loads(process.stdout.splitlines()[-1]))


def test_after_a_sync_the_logprobs_are_those_of_the_trainers_forward_with_its_adapters(seen: Seen) -> None:
    """B141: not the base's, not those of the adapters that the server was started with, not those of the version before."""
    assert seen.adapters_at("after the first sync") == 1
    assert seen.adapters_at("after the second sync") == 2
    assert seen.adapters_at("at the end") == 1


def test_a_prompt_may_be_scored_beside_requests_that_generate(seen: Seen) -> None:
    """B141: as the probe is."""
    assert seen["score beside answers"] <= TOLERANCE[seen.dtype]


def test_every_adapter_tensor_is_found_in_the_slot_that_multiplies(seen: Seen) -> None:
    """B140, B141."""
    for step in ("verify", "verify at the end"):
        assert seen[step]["num_equal"] == seen["num_tensors"]
        assert (seen[step]["different"], seen[step]["unread"]) == ([], [])
    assert seen["checksums"]["checksums"] == seen["expected checksums"]


def test_adapters_whose_names_match_no_layer_are_refused_before_they_move(seen: Seen) -> None:
    """B141: a prefix that matches nothing would leave the base's output, in silence."""
    assert "28 adapter tensors do not fit" in seen["staging of other prefixes"]
    assert "the engine has no layer layers.0.self_attn.q_proj that takes an adapter" in seen["staging of other prefixes"]
    assert "without its other half" in seen["staging of a half"]
    assert "got 63 inputs, the engine's layer has 64" in seen["staging of another shape"]


def test_a_slot_that_lost_a_tensor_fails_the_load_and_the_adapters_before_serve_on(seen: Seen) -> None:
    """B140, B148."""
    assert seen["staging"] is None
    assert "1 adapter tensors differ in the engine's slots" in seen["load that loses a tensor"]
    assert seen.adapters_at("after a failed load") == 2
    assert seen["verify after a failed load"]["policy_version"] == 2
