"""What a rollouter and its host's weight cache tell each other: JSON lines over the cache's standard input and output.

Invariant: every line is validated on decode; unknown fields are refused. Without torch: the rollouter imports this.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from configs.schema import WeightSyncSettings
from weight_sync.errors import ProtocolError
from weight_sync.tcp_address import without_secrets


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# ── to the cache ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Open(_Line):
    """The first line: begin to serve. Answered by Ready."""

    kind: Literal["open"] = "open"
    socket_dir: str
    """Private to this user; the cache's socket stands in it."""
    dtype: str
    """In which floating weights travel; `float32` or `bfloat16`."""
    serves_others: bool = False
    """Listen for engines of other hosts too, by tcp."""
    settings: WeightSyncSettings


class Stage(_Line):
    """Have a version here. Ends one under way; answered by Staged or StagingFailed with the same nonce."""

    kind: Literal["stage"] = "stage"
    nonce: str
    address: str
    """Where it is served: by the trainer, or by another host's cache."""
    policy_version: int
    manifest_digest: str
    timeout_s: float = Field(gt=0)


class Ping(_Line):
    """Answered at once by Pong with the same nonce, whatever is being staged."""

    kind: Literal["ping"] = "ping"
    nonce: str


# ── from the cache ───────────────────────────────────────────────────────────────────────────────────────────────────


class Ready(_Line):
    kind: Literal["ready"] = "ready"
    address: str
    """Where engines of this host stage from."""
    tcp_address: str = ""
    """Where those of other hosts do; empty: it does not serve them."""


class Pong(_Line):
    kind: Literal["pong"] = "pong"
    nonce: str


class Staged(_Line):
    """A version is held, verified, and served."""

    kind: Literal["staged"] = "staged"
    nonce: str
    policy_version: int
    seconds: float
    num_bytes: int
    """Of its tensors."""


class StagingFailed(_Line):
    kind: Literal["staging failed"] = "staging failed"
    nonce: str
    reason: str


class Taken(_Line):
    """All workers of an engine have staged a version from here."""

    kind: Literal["taken"] = "taken"
    nonce: str
    """The engine's staging."""
    engine: str
    seconds: float
    num_bytes: int
    """Lent or sent to the last of its workers."""


class NotTaken(_Line):
    kind: Literal["not taken"] = "not taken"
    nonce: str
    engine: str
    reason: str


Command = Open | Stage | Ping
Event = Ready | Pong | Staged | StagingFailed | Taken | NotTaken

_COMMANDS: TypeAdapter[Any] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_EVENTS: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def encode(line: Command | Event) -> bytes:
    """One line, its end included."""
    return line.model_dump_json().encode() + b"\n"


def decode_command(line: bytes) -> Command:
    """Raises ProtocolError."""
    return _decode(_COMMANDS, line)  # type: ignore[no-any-return]


def decode_event(line: bytes) -> Event:
    """Raises ProtocolError."""
    return _decode(_EVENTS, line)  # type: ignore[no-any-return]


def _decode(adapter: TypeAdapter[Any], line: bytes) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        shown = without_secrets(line.decode(errors="replace"))
        raise ProtocolError(f"got {shown[:200]!r}, expected a line of the weight cache: {error.errors()[0]['msg']}") from error
