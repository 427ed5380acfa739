"""Key files of CURVE: JSON with a name and Z85 keys.

Invariant: a secret key is used only if nobody but its owner can read the file and it belongs to the public key beside it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from sample_bus.errors import Insecure

MAX_KEY_FILE_BYTES = 4096


def read_secret(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a key file that nobody else may read. Raises Insecure."""
    fields = _read(path, private=True)
    public, secret = _key(fields, "public", path), _key(fields, "secret", path)
    if zmq.curve_public(secret) != public:
        raise Insecure(f"{path}: its public key does not belong to its secret key")
    return public, secret


def read_public(path: Path) -> bytes:
    """Public key of a file. Raises Insecure."""
    return _key(_read(path, private=False), "public", path)


def _read(path: Path, *, private: bool) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check(path, os.fstat(descriptor), private=private)
            text = os.read(descriptor, MAX_KEY_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Insecure(
            f"{path}: cannot be read: {(error.strerror or str(error)).lower()}; `headrace keys new DIR` makes keys"
        ) from error
    try:
        fields = json.loads(text) if len(text) <= MAX_KEY_FILE_BYTES else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Insecure(f"{path}: is no key file")
    return fields


def _check(path: Path, facts: os.stat_result, *, private: bool) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise Insecure(f"{path}: is no regular file")
    if private and stat.S_IMODE(facts.st_mode) & 0o077:
        raise Insecure(
            f"{path}: others may read it (mode {stat.S_IMODE(facts.st_mode):04o}), expected 0600; `chmod 600 {path}`, "
            "and new keys if anyone has"
        )
    if private and facts.st_uid not in (os.geteuid(), 0):
        raise Insecure(f"{path}: belongs to user {facts.st_uid}, expected {os.geteuid()}")


def _key(fields: dict[str, Any], name: str, path: Path) -> bytes:
    value = fields.get(name)
    try:
        key = value.encode("ascii") if isinstance(value, str) else b""
        if len(key) == 40 and len(z85.decode(key)) == 32:
            return key
    except Exception as error:  # z85 raises KeyError, struct.error and more for what is no Z85
        raise Insecure(f"{path}: {name} is no key of 40 characters") from error
    raise Insecure(f"{path}: {name} is no key of 40 characters")
