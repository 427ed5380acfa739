"""`headrace keys new`: makes the keys of a bus over TCP.

Invariant: no key file is ever overwritten, none that holds a secret is ever readable by others, and a client is listed only
after its own files are whole.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import zmq

from configs.errors import ConfigError
from console.errors import ConsoleError
from sample_bus.curve import CLIENT_KEY, CLIENTS, SERVER_KEY, SERVER_PUBLIC
from sample_bus.door import short
from sample_bus.key_file import read_public

THIS_HOST = "this-host"
"""Name of the client that is made with the trainer's keys."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def new_keys(directory: Path) -> str:
    """The trainer's key pair and one for the clients of this host, in `directory`; returns what to tell the user.

    Raises ConsoleError, and changes nothing, if there are keys already or the files cannot be made.
    """
    for name in (SERVER_KEY, SERVER_PUBLIC, CLIENT_KEY, CLIENTS):
        if (directory / name).exists():
            raise ConsoleError(f"{directory / name}: is there already; give another directory, or remove it if no run uses it")
    public, secret = zmq.curve_keypair()
    _make_dir(directory)
    _make_dir(directory / CLIENTS)
    _write(directory / SERVER_KEY, "trainer", public, secret)
    _write(directory / SERVER_PUBLIC, "trainer", public)
    mine = _new_client(directory, THIS_HOST, directory / CLIENT_KEY)
    return (
        f"trainer's key {short(public)} and a client's key {short(mine)} for this host are in {directory}\n"
        f"use them with bus.keys_dir={directory.absolute()}\n"
        f"for each other host: headrace keys new {directory} --client NAME\n"
    )


def new_client(directory: Path, name: str) -> str:
    """Allow one more client and make `directory`/for-NAME, which is its `bus.keys_dir`; returns what to tell the user.

    Raises ConfigError for a name that cannot be one; ConsoleError if that client exists, there are no trainer's keys,
    or the files cannot be made; Insecure for a damaged key file.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--client {name!r}: expected letters, digits, '.', '_' and '-', at most 64, a letter or digit first")
    if not (directory / SERVER_KEY).exists():
        raise ConsoleError(f"{directory}: holds no trainer's keys ({SERVER_KEY}); `headrace keys new {directory}` makes them")
    bundle = directory / f"for-{name}"
    for path in (directory / CLIENTS / f"{name}.pub", bundle):
        if path.exists():
            raise ConsoleError(f"{path}: is there already; give another name, or remove it")
    server_public = read_public(directory / SERVER_PUBLIC)
    _make_dir(bundle)
    _write(bundle / SERVER_PUBLIC, "trainer", server_public)
    public = _new_client(directory, name, bundle / CLIENT_KEY)
    return (
        f"client {name} may connect with key {short(public)}; a trainer that runs knows it at once\n"
        f"move {bundle} to its host over a private way (scp), and set bus.keys_dir to where it lies there\n"
        f"to lock it out again: rm {directory / CLIENTS / name}.pub\n"
    )


def _new_client(directory: Path, name: str, path: Path) -> bytes:
    public, secret = zmq.curve_keypair()
    _write(path, name, public, secret)
    _write(directory / CLIENTS / f"{name}.pub", name, public)
    return public


def _make_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConsoleError(f"{path}: cannot be made: {(error.strerror or str(error)).lower()}") from error


def _write(path: Path, name: str, public: bytes, secret: bytes | None = None) -> None:
    fields = {"kind": "headrace bus key", "name": name, "public": public.decode("ascii")}
    if secret is not None:
        fields["secret"] = secret.decode("ascii")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if secret is not None else 0o644)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps(fields, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConsoleError(f"{path}: cannot be written: {(error.strerror or str(error)).lower()}") from error
