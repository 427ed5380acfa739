from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sample_bus.conformance.brokers import Broker, running
from tests.sample_bus.conformance.disks import Disk, SmallDisk, ToldDisk, can_mount, mounted, unwritable
from tests.sample_bus.conformance.places import Place


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short directory (a test's tmp_path may be too long for a socket)."""
    path = Path(tempfile.mkdtemp(prefix="hr-bus-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def zmq_place(directory: Path) -> Place:
    return Place(transport="zmq", address=f"ipc://{directory}/bus", directory=str(directory))


@pytest.fixture
async def broker(directory: Path) -> AsyncIterator[Broker]:
    async with running(directory) as server:
        yield server


@pytest.fixture(params=["zmq", "redis"])
async def place(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Place]:
    """A bus of each transport, of its own."""
    if request.param == "zmq":
        yield Place(transport="zmq", address=f"ipc://{directory}/bus", directory=str(directory))
    else:
        async with running(directory) as server:
            yield server.place


@pytest.fixture
def disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk of a megabyte, or as near to it as this user comes."""
    if can_mount():
        with mounted(directory / "disk") as path:
            yield SmallDisk(path=path)
    else:
        yield ToldDisk(path=directory, monkeypatch=monkeypatch)


@pytest.fixture
def read_only(directory: Path) -> Iterator[Path]:
    with unwritable(directory / "read-only") as path:
        yield path
