"""A real vLLM engine takes whole versions, and computes with exactly what the trainer sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import TinyModel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

KINDS = [
    pytest.param((TinyModel.TIED, "float32"), id="tied"),
    pytest.param((TinyModel.UNTIED, "float32"), id="untied", marks=pytest.mark.slow),
    pytest.param((TinyModel.MOE, "float32"), id="moe", marks=pytest.mark.slow),
    pytest.param((TinyModel.TIED, "bfloat16"), id="tied-bfloat16", marks=pytest.mark.slow),
    pytest.param((TinyModel.MOE, "bfloat16"), id="moe-bfloat16", marks=pytest.mark.slow),
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
"""Largest difference of a logprob, in nats, between the engine and transformers with the same weights; models of another seed
differ by more than 4."""


class Seen:
    """What one engine did in `vllm_scenario`."""

    def __init__(self, kind: TinyModel, dtype: str, seen: dict[str, Any]) -> None:
        self.kind = kind
        self.dtype = dtype
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        return self.seen[key]

    def model_at(self, step: str) -> int | None:
        """The one model whose logprobs the engine gave at `step`."""
        matching = [model for model, error in enumerate(self.seen[step]) if error <= TOLERANCE[self.dtype]]
        assert len(matching) <= 1, self.seen[step]
        return matching[0] if matching else None


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    kind, dtype = request.param
    directory = tmp_path_factory.mktemp("vllm")
    process = subprocess.run(
        [sys.executable, "-m", "tests.weight_sync.vllm_scenario", kind, dtype, str(directory)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return Seen(kind, dtype, json.loads(process.stdout.splitlines()[-1]))


def test_the_engine_starts_with_the_weights_of_its_checkpoint(seen: Seen) -> None:
    assert seen.model_at("start") == 0


def test_after_an_update_the_logprobs_are_those_of_the_new_weights(seen: Seen) -> None:
    """B139: tied, untied and mixture-of-experts models."""
    assert seen.model_at("after commit") == 1
    assert seen.model_at("at the end") == 1


def test_after_an_update_the_effective_weights_are_the_trainers_tensor_by_tensor(seen: Seen) -> None:
    """B140, B150: read back from the layers that multiply, not from parameters that vLLM may have emptied."""
    for step in ("verify", "verify at the end"):
        found = seen[step]
        assert (found["different"], found["unread"]) == ([], [])
        assert found["num_equal"] == seen["num_tensors"] + (seen.kind is TinyModel.TIED)  # the head beside the embedding


def test_the_engine_confirms_checksums_of_what_it_loaded(seen: Seen) -> None:
    """B140."""
    assert seen["checksums"]["checksums"] == seen["expected checksums"]
    assert seen["checksums"]["policy_version"] == 1
    assert seen["checksums"]["manifest_digest"] == seen["digest"]
    assert seen["status"] == {
        "state": "idle",
        "staged": None,
        "loaded": 1,
        "loaded_digest": seen["digest"],
        "error": "",
        "lora_scale": None,
    }


def test_staging_does_not_change_what_is_served(seen: Seen) -> None:
    assert seen["staging"] is None
    assert seen.model_at("after staging") == 0


@pytest.mark.parametrize("step", ["commit before staging", "commit of another digest", "commit of another version"])
def test_weights_that_are_not_exactly_the_staged_ones_are_refused_and_the_old_ones_serve_on(seen: Seen, step: str) -> None:
    """B03, B140."""
    assert "NotStaged" in seen[step]
    assert seen.model_at("after refusals") == 0


def test_an_update_that_a_lost_client_left_open_does_not_block_the_next_one(seen: Seen) -> None:
    """B03."""
    assert seen.model_at("after a lost client") == 2


def test_finishing_an_update_in_which_nothing_was_loaded_is_an_error(seen: Seen) -> None:
    """B140: otherwise the new version would be stamped on the old weights."""
    assert "the weights did not change" in seen["finish without update"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("staging of another shape", "the engine's model has"),
        ("staging of too few", "not offered"),
        ("staging of too many", "has no such tensor"),
    ],
)
def test_weights_of_another_model_are_refused_when_they_are_staged(seen: Seen, step: str, message: str) -> None:
    """B148, B150, B152."""
    assert "ManifestMismatch: 1 differences" in seen[step]
    assert message in seen[step]


def test_a_load_that_fails_half_way_puts_the_weights_before_back(seen: Seen) -> None:
    """B03, B150: an engine serves all of one version."""
    assert seen["staging unchecked"] is None
    assert "layers.1.self_attn.qkv_proj" in seen["load of too few"]
    assert seen.model_at("after a failed load") == 2
    found = seen["verify after a failed load"]
    assert (found["policy_version"], found["different"], found["unread"]) == (2, [], [])


def test_vllms_own_reload_still_needs_the_repairs(seen: Seen) -> None:
    """When this fails for tied models, `_after_reload` can go; for mixture-of-experts models, `_before_reload`."""
    different = seen["verify without repairs"]["different"]
    match seen.kind:
        case TinyModel.TIED:
            assert different == ["lm_head.weight"]
            assert seen.model_at("without repairs") is None
        case TinyModel.MOE:
            assert different
            assert all(".experts." in name for name in different)
            assert seen.model_at("without repairs") is None
        case TinyModel.UNTIED:
            assert different == []
            assert seen.model_at("without repairs") == 1


def test_a_head_that_keeps_its_old_weights_is_found_when_what_was_loaded_is_read_back(seen: Seen) -> None:
    """B140: a sample of the columns that the engine multiplies with is enough."""
    refusal = seen["verified sync without repairs"]
    if seen.kind is TinyModel.TIED:
        assert "computes with other weights than it was given: lm_head.weight" in refusal
    else:
        assert refusal == ""
