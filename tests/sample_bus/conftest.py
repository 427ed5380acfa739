from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address in a short directory of its own (a test's tmp_path may be too long for a socket)."""
    directory = Path(tempfile.mkdtemp(prefix="hr-bus-"))
    yield f"ipc://{directory}/bus"
    shutil.rmtree(directory)
