"""Names and layouts in Redis. Pure.

    headrace:RUN:lock                   who hosts the bus of that run: expires unless renewed
    headrace:RUN:RUN_ID:s:PRODUCER      stream of a producer's records; entry EPOCH-(SEQ + 1), fields f0, f1, … are the frames
    headrace:RUN:c:DB:hub               channel of messages to the trainer (channels are not of a database)
    headrace:RUN:c:DB:run.RUN_ID        its trainer is subscribed: that run goes on
    headrace:RUN:c:DB:all               channel on which the trainer says that it is there
    headrace:RUN:c:DB:CLIENT            channel of messages to one connection of a client

Invariant: a record's place in its stream is its entry id, so what is added twice is there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.redis_address import RedisAddress
from sample_bus.errors import WireError
from sample_bus.packing import pack, unpack

GROUP = "trainer"
CONSUMER = "trainer"
FIELD = b"f"
_MAX_PART = (1 << 64) - 1
_MAX_ID_BYTES = 41

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class RunKeys:
    run: str
    db: int

    @property
    def lock(self) -> str:
        return f"headrace:{self.run}:lock"

    @property
    def hub_channel(self) -> str:
        return f"headrace:{self.run}:c:{self.db}:hub"

    @property
    def all_channel(self) -> str:
        return f"headrace:{self.run}:c:{self.db}:all"

    def run_channel(self, run_id: str) -> str:
        return f"headrace:{self.run}:c:{self.db}:run.{run_id}"

    def client_channel(self, peer: bytes) -> bytes:
        return f"headrace:{self.run}:c:{self.db}:".encode() + peer

    def stream(self, run_id: str, producer: str) -> str:
        return f"headrace:{self.run}:{run_id}:s:{producer}"


def keys_of(address: RedisAddress) -> RunKeys:
    return RunKeys(address.run, address.db)


def entry_id(epoch: int, seq: int) -> str:
    """Id of a record's entry; 0-0 is no id in Redis, so numbers begin with 1 there."""
    return f"{epoch}-{seq + 1}"


def place_of(entry: bytes) -> tuple[int, int]:
    """(epoch, seq) of an entry's id; seq is -1 in the id of a stream that never had one. Raises WireError."""
    epoch, _, number = entry.partition(b"-")
    is_id = len(entry) <= _MAX_ID_BYTES and epoch.isdigit() and number.isdigit()
    if not (is_id and int(epoch) <= _MAX_PART and int(number) <= _MAX_PART):
        raise WireError(f"entry id: got {entry[:60]!r}, expected EPOCH-NUMBER")
    return int(epoch), int(number) - 1


def fields_of(frames: Sequence[Buffer]) -> list[Buffer]:
    """Fields and values of the entry that carries `frames`."""
    fields: list[Buffer] = []
    for index, frame in enumerate(frames):
        fields += (FIELD + str(index).encode(), frame)
    return fields


def frames_of(fields: Sequence[bytes]) -> tuple[bytes, ...]:
    """The frames that an entry carries. Raises WireError for an entry of another make."""
    names, frames = fields[::2], fields[1::2]
    if len(names) != len(frames) or list(names) != [FIELD + str(index).encode() for index in range(len(names))]:
        raise WireError(f"entry fields: got {[bytes(name[:20]) for name in names[:5]]}, expected f0, f1, …")
    return tuple(frames)


def letter(sender: bytes, frame: bytes) -> bytes:
    """A control message with its sender, as it is published."""
    return pack([sender, frame])


def read_letter(data: bytes) -> tuple[bytes, bytes]:
    """(sender, frame) of a published message. Raises WireError."""
    values = unpack(data, "published message")
    match values:
        case [bytes(sender), bytes(frame)] if 0 < len(sender) <= 64 and sender.isascii():
            return sender, frame
    raise WireError(f"published message: got {repr(values)[:80]}, expected [sender, frame]")
