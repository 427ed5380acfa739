"""Daemons started with different arithmetic are told so by name."""

from __future__ import annotations

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
