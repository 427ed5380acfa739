"""What tells one model from another, by what lies in its Hugging Face directory: read by the trainer and the rollouter alike.

Invariant: two directories with the same facts give the same tokens for a text and hold the same weights, as far as their names,
shapes, types and some bytes of each tell; reading takes milliseconds, however large the weights are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from configs.errors import ConfigError

WEIGHTS = "weights"
"""The name under which all files of weights stand."""
_KINDS = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.py",
)
_OTHER_WEIGHTS = ("*.bin", "*.pth")
_MAX_HEADER_BYTES = 100_000_000
_SAMPLE_BYTES = 4096


def model_files(directory: Path) -> dict[str, str]:
    """Each file that decides about tokens or shapes, and the weights as one, to a digest of it. Blocking.

    Raises ConfigError naming the file that cannot be read.
    """
    found = {path.name for kind in _KINDS for path in directory.glob(kind) if path.is_file()}
    try:
        digests = {name: _digest((directory / name).read_bytes()) for name in sorted(found)}
        tensors = sorted(line for path in sorted(directory.glob("*.safetensors")) for line in _tensors(path))
        others = [f"{path.name} {path.stat().st_size}" for kind in _OTHER_WEIGHTS for path in sorted(directory.glob(kind))]
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: cannot be read: {error.strerror or error}") from error
    return digests | {WEIGHTS: _digest("\n".join(tensors or others).encode())}


def other_files(got: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Names of what is not the same in both."""
    return sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))


def _tensors(path: Path) -> Iterator[str]:
    """A line for each tensor: name, type, shape, and a digest of bytes at its beginning, middle and end."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
            specs = [
                (name, spec["dtype"], list(spec["shape"]), *map(int, spec["data_offsets"]))
                for name, spec in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: is no safetensors file: {error!r}") from error
        for name, dtype, shape, begin, end in specs:
            yield f"{name} {dtype} {shape} {_digest(_sampled(file, 8 + length + begin, 8 + length + end))}"


def _sampled(file: BinaryIO, begin: int, end: int) -> bytes:
    size = min(_SAMPLE_BYTES, end - begin)
    parts = []
    for offset in (begin, begin + (end - begin - size) // 2, end - size):
        file.seek(offset)
        parts.append(file.read(size))
    return b"".join(parts)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
