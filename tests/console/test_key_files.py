"""`headrace keys new`: what it makes, what it refuses, and that no secret is ever open to others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from console.cli import main
from sample_bus.curve import load_client, load_server


def _modes(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_new_keys_serve_trainer_and_clients_of_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "new", str(directory)]) == 0
    out = capsys.readouterr().out
    server, client = load_server(directory), load_client(directory)
    assert client.server_public == server.public == zmq.curve_public(server.secret)
    assert server.name_of(client.public) == "this-host"
    assert f"bus.keys_dir={directory}" in out
    assert server.secret.decode() not in out
    assert client.secret.decode() not in out


def test_only_public_keys_can_be_read_by_others(tmp_path: Path) -> None:
    """Whatever the umask says."""
    directory = tmp_path / "keys"
    before = os.umask(0)
    try:
        main(["keys", "new", str(directory)])
        main(["keys", "new", str(directory), "--client", "gpu-2"])
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "for-gpu-2").stat().st_mode) == 0o700
    assert _modes(directory) == {
        "client.key": 0o600,
        "clients/gpu-2.pub": 0o644,
        "clients/this-host.pub": 0o644,
        "for-gpu-2/client.key": 0o600,
        "for-gpu-2/server.pub": 0o644,
        "server.key": 0o600,
        "server.pub": 0o644,
    }


def test_one_more_client_gets_a_directory_to_be_moved_to_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    main(["keys", "new", str(directory)])
    assert main(["keys", "new", str(directory), "--client", "gpu-2"]) == 0
    out = capsys.readouterr().out
    moved = (directory / "for-gpu-2").rename(tmp_path / "elsewhere")
    client = load_client(moved)
    server = load_server(directory)
    assert server.name_of(client.public) == "gpu-2"
    assert client.server_public == server.public
    assert client.secret.decode() not in out
    assert f"rm {directory}/clients/gpu-2.pub" in out


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_no_key_is_ever_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "keys"
    main(["keys", "new", str(directory)])
    main(["keys", "new", str(directory), "--client", "gpu-2"])
    before = _contents(directory)
    for words in ([str(directory)], [str(directory), "--client", "gpu-2"], [str(directory / "for-gpu-2")]):
        assert main(["keys", "new", *words]) == 1
        err = capsys.readouterr().err
        assert "is there already" in err
        assert err.count("\n") == 1
    assert _contents(directory) == before


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 65, "gpu 2", "gpu\n", "größe"])
def test_a_client_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "new", str(tmp_path / "keys")])
    before = _contents(tmp_path)
    assert main(["keys", "new", str(tmp_path / "keys"), f"--client={name}"]) == 2
    assert "expected letters, digits" in capsys.readouterr().err
    assert _contents(tmp_path) == before


def test_a_client_without_trainer_keys_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", str(tmp_path), "--client", "gpu-2"]) == 1
    assert f"`headrace keys new {tmp_path}` makes them" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["keys", "new", str(tmp_path / "file" / "keys")]) == 1
    err = capsys.readouterr().err
    assert str(tmp_path / "file" / "keys") in err
    assert err.count("\n") == 1


def test_keys_of_a_bus_known_by_its_address_only_are_named_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "tcp://192.0.2.1:6000", "--timeout-s", "0.3"]) == 2
    assert "bus.keys_dir" in capsys.readouterr().err
    assert main(["status", "--keys-dir", "/keys"]) == 2
    assert "--keys-dir goes with --address only" in capsys.readouterr().err
