"""Arguments of engines that are given adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.schema import EngineSettings, Settings, TrainerSettings, WeightSyncSettings
from rollouter.adapter_engine import adapter_scale, scale_problem, with_adapter


def settings(rank: int, *, alpha: float = 32.0, lora: str = "adapter", extra: tuple[str, ...] = ()) -> Settings:
    return Settings(
        run_dir=Path("/runs/one"),
        trainer=TrainerSettings(lora_rank=rank, lora_alpha=alpha),
        weight_sync=WeightSyncSettings(lora=lora),  # type: ignore[arg-type]
        engine=EngineSettings(extra_args=extra),
    )


def test_engines_that_are_given_whole_weights_are_started_as_ever() -> None:
    plain = settings(16, lora="merged", extra=("--seed", "1"))
    assert with_adapter(plain) == plain.engine


@pytest.mark.parametrize(("rank", "reserved"), [(1, "8"), (8, "8"), (9, "16"), (257, "320"), (512, "512")])
def test_memory_is_reserved_for_the_next_rank_that_the_engine_knows(rank: int, reserved: str) -> None:
    arguments = with_adapter(settings(rank)).extra_args
    assert arguments[arguments.index("--max-lora-rank") + 1] == reserved


def test_the_server_knows_one_adapter_and_its_scale_and_the_users_arguments_come_last() -> None:
    arguments = with_adapter(settings(16, alpha=24.0, extra=("--max-loras", "2"))).extra_args
    assert arguments[arguments.index("--lora-modules") + 1] == "adapter=/runs/one/adapter"
    assert json.loads(arguments[arguments.index("--additional-config") + 1]) == {"headrace_lora_scale": 1.5}
    assert arguments[-2:] == ("--max-loras", "2")


@pytest.mark.parametrize("rank", [0, 513])
def test_adapters_without_a_rank_that_engines_take_are_refused(rank: int) -> None:
    with pytest.raises(ValidationError, match=f"trainer.lora_rank={rank}: engines take ranks from 1 to 512"):
        settings(rank)


def test_the_scale_is_alpha_by_rank_where_engines_apply_adapters() -> None:
    assert adapter_scale(settings(16, alpha=24.0)) == 1.5
    assert adapter_scale(settings(16, lora="merged")) is None


@pytest.mark.parametrize("scale", [None, 1.5])
def test_an_engine_that_counts_as_the_trainer_does_is_taken(scale: float | None) -> None:
    assert scale_problem(scale, scale) is None


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (4.0, 2.0, r"^counts adapters 4 times, expected 2 times \(trainer\.lora_alpha / trainer\.lora_rank"),
        (None, 2.0, r"^was started to be given whole weights, expected 2 times .*\{\"headrace_lora_scale\": 2\.0\}$"),
        (4.0, None, r"^was started to be given adapters \(headrace_lora_scale=4\), and weight_sync\.lora=merged"),
    ],
)
def test_both_scales_and_the_remedy_are_named(got: float | None, expected: float | None, words: str) -> None:
    """B141: tensors of the right names and shapes would be taken, and count otherwise, in silence."""
    problem = scale_problem(got, expected)
    assert problem is not None
    assert re.search(words, problem)
