"""What the rollouter's tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory whose sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="hr-test-", dir="/tmp") as directory:
        yield Path(directory)
