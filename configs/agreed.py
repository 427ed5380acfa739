"""Fixed settings that both daemons must hold alike: the arithmetic of one is checked by the other. Live ones are the trainer's:
the rollouter takes them from topic `settings`, whatever it was started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.loader import dump
from configs.schema import Settings

AGREED_KEYS = ("group_size", "num_steps", "weight_sync.lora")
ADAPTER_KEYS = ("trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets")
"""Where engines are given adapters alone, they make room for a rank and apply alpha / rank by themselves."""


def agreed_values(settings: Settings) -> dict[str, Any]:
    """Dotted key to value of what both daemons must hold alike."""
    values = dump(settings)
    keys = (*AGREED_KEYS, *ADAPTER_KEYS) if settings.weight_sync.lora == "adapter" else AGREED_KEYS
    return {key: values[key] for key in keys}


def check_agreement(settings: Settings, trainers: Mapping[str, Any]) -> None:
    """Raise ConfigError, one line a key, where the trainer was started with another value."""
    problems = [
        f"{key}: got {mine!r} here and {trainers[key]!r} in the trainer, expected the same in both"
        for key, mine in agreed_values(settings).items()
        if key in trainers and trainers[key] != mine
    ]
    if problems:
        raise ConfigError("\n".join(problems))
