"""What a set of weights is: names, shapes, dtypes and checksums of all tensors, and one digest over them.

Invariant: two manifests have the same digest only if they name the same tensors with the same bytes. The digest does not
depend on the order of the tensors, nor on the policy version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from weight_sync.errors import ProtocolError

MAX_NAME_BYTES = 1024
MAX_DIMS = 8

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
    torch.float8_e4m3fn: 11,
    torch.float8_e5m2: 12,
}
"""Every dtype that travels, and its number on the wire."""

DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

CAST_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Floating dtypes that are cast to the wire dtype; every other tensor travels as it is."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor without its bytes."""

    name: str
    dtype: torch.dtype
    """As it travels."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise ProtocolError(f"tensor {self.name!r} has dtype {self.dtype}, which does not travel")
        if len(self.shape) > MAX_DIMS or any(size < 0 for size in self.shape):
            raise ProtocolError(f"tensor {self.name!r} has shape {self.shape}; expected at most {MAX_DIMS} sizes >= 0")
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES:
            raise ProtocolError(f"tensor name {self.name[:80]!r} has {len(self.name)} letters; expected 1 to {MAX_NAME_BYTES}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of one policy version."""

    specs: tuple[TensorSpec, ...]
    """In the order in which they travel."""
    checksums: tuple[int, ...]
    """xxh3_64 over each tensor's row-major bytes, in the order of `specs`."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(name, name under which its bytes travel): tied tensors, sent once."""

    @property
    def num_tensors(self) -> int:
        return len(self.specs)

    @property
    def total_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def digest(self) -> str:
        """32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        for spec, checksum in sorted(self, key=lambda entry: entry[0].name):
            shape = ",".join(map(str, spec.shape))
            digest.update(f"{spec.name}\0{DTYPE_CODES[spec.dtype]}\0{shape}\0{checksum:016x}\n".encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[TensorSpec, int]]:
        return iter(zip(self.specs, self.checksums, strict=True))

    def encode(self) -> bytes:
        entries = [[spec.name, DTYPE_CODES[spec.dtype], list(spec.shape), checksum] for spec, checksum in self]
        encoded: bytes = msgpack.packb([entries, [list(alias) for alias in self.aliases]])
        return encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """Raises `ProtocolError` on anything that `encode` does not write."""
        try:
            entries, aliases = msgpack.unpackb(encoded, raw=False)
            specs = tuple(_decode_spec(name, code, shape) for name, code, shape, _ in entries)
            checksums = tuple(_expect(int, checksum) for *_, checksum in entries)
            pairs = tuple((_expect(str, name), _expect(str, source)) for name, source in aliases)
            if not {source for _, source in pairs} <= {spec.name for spec in specs}:
                raise ValueError("a tensor is tied to one that is not there")
            return cls(specs=specs, checksums=checksums, aliases=pairs)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"manifest of {len(encoded)} bytes does not decode: {error!r}") from error


def _expect(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"got {value!r}, expected {kind.__name__}")
    return value


def _decode_spec(name: Any, code: Any, shape: Any) -> TensorSpec:
    return TensorSpec(name=_expect(str, name), dtype=DTYPES[code], shape=tuple(_expect(int, size) for size in shape))
