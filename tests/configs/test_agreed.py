"""Daemons started with different arithmetic are told so by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from configs.agreed import agreed_values, check_agreement
from configs.errors import ConfigError
from configs.schema import Settings


def test_equal_settings_agree_whatever_else_differs() -> None:
    check_agreement(Settings(), agreed_values(Settings(seed=5, name="other")))


def test_every_difference_is_named_with_both_values() -> None:
    """B156 for settings: both values stand in the message."""
    with pytest.raises(ConfigError) as caught:
        check_agreement(Settings(group_size=4), agreed_values(Settings(num_steps=7)))
    assert str(caught.value).splitlines() == [
        "group_size: got 4 here and 8 in the trainer, expected the same in both",
        "num_steps: got 100 here and 7 in the trainer, expected the same in both",
    ]


def adapters(**trainer: object) -> Settings:
    values = {"lora_rank": 8, "lora_alpha": 16.0, "lora_targets": ("q_proj",)} | trainer
    return Settings.model_validate({"weight_sync": {"lora": "adapter"}, "trainer": values})


def over_the_bus(settings: Settings) -> Any:
    return json.loads(json.dumps(agreed_values(settings)))


def test_adapters_of_the_same_shape_agree() -> None:
    check_agreement(adapters(), over_the_bus(adapters()))


def test_adapters_that_engines_would_scale_otherwise_are_refused_with_both_values() -> None:
    """B69: alpha / rank is applied by the engines, so a rollouter with another alpha samples from another policy in silence."""
    with pytest.raises(ConfigError) as caught:
        check_agreement(adapters(), over_the_bus(adapters(lora_rank=4, lora_alpha=32.0, lora_targets=("q_proj", "v_proj"))))
    assert str(caught.value).splitlines() == [
        "trainer.lora_rank: got 8 here and 4 in the trainer, expected the same in both",
        "trainer.lora_alpha: got 16.0 here and 32.0 in the trainer, expected the same in both",
        "trainer.lora_targets: got ['q_proj'] here and ['q_proj', 'v_proj'] in the trainer, expected the same in both",
    ]


def test_adapters_and_whole_weights_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.lora: got 'adapter' here and 'merged' in the trainer"):
        check_agreement(adapters(), over_the_bus(Settings()))
    with pytest.raises(ConfigError, match=r"weight_sync\.lora: got 'merged' here and 'adapter' in the trainer"):
        check_agreement(Settings(), over_the_bus(adapters()))


def test_shape_of_adapters_that_travel_merged_is_the_trainers_alone() -> None:
    merged = Settings.model_validate({"trainer": {"lora_rank": 8}})
    check_agreement(Settings(), over_the_bus(merged))
