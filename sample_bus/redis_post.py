"""The two connections of an end's control channel: one that is subscribed, one that publishes. Lives in the control thread.

Invariant: a letter reaches those who are subscribed at that moment, in order, or nobody; how many is known to its sender.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from sample_bus.redis_wire import Broker, Reply, Wire

PIPELINE_BYTES = 256 << 10
"""Of one pipeline: a larger one is copied more often than it saves round trips."""
_BATCH = 256

Channel = str | bytes


class Post:
    def __init__(self, broker: Broker, channels: Sequence[Channel]) -> None:
        """Connect and subscribe. Raises what is in `redis_wire.GONE`, or redis.ResponseError."""
        self._patience_s = broker.patience_s
        self._awaited_since: float | None = None
        self.publishing = Wire(broker, patience_s=broker.patience_s)
        try:
            self.subscribed = Wire(broker, patience_s=broker.patience_s)
            try:
                for reply in self.subscribed.calls([("SUBSCRIBE", channel) for channel in channels]):
                    _check(reply)
            except BaseException:
                self.subscribed.close()
                raise
        except BaseException:
            self.publishing.close()
            raise

    def publish(self, letters: Sequence[tuple[Channel, bytes]]) -> list[int]:
        """Send letters; how many received each. Raises as the constructor."""
        receivers: list[int] = []
        at = 0
        while at < len(letters):
            size, end = 0, at
            while end < len(letters) and (end == at or size + len(letters[end][1]) <= PIPELINE_BYTES):
                size += len(letters[end][1])
                end += 1
            for reply in self.publishing.calls([("PUBLISH", channel, data) for channel, data in letters[at:end]]):
                _check(reply)
                receivers.append(int(reply))
            at = end
        return receivers

    def num_subscribers(self, channel: str) -> int:
        return int(self.publishing.call("PUBSUB", "NUMSUB", channel)[1])

    def receive(self) -> list[tuple[bytes, bytes]]:
        """What has arrived: (channel, data), at most a batch."""
        letters: list[tuple[bytes, bytes]] = []
        while len(letters) < _BATCH and self.subscribed.readable():
            reply = self.subscribed.receive()
            self._awaited_since = None  # an error, too, is an answer: a server whose disk is full says so to a PING
            if not isinstance(reply, redis.ResponseError) and reply[0] == b"message":
                letters.append((reply[1], reply[2]))
        return letters

    def check_alive(self, now: float) -> None:
        """Ask for a sign of life on the subscribed connection; call it now and then, after `receive`.

        Raises redis.TimeoutError when one was asked for and did not come.
        """
        if self._awaited_since is None:
            self._awaited_since = now
            self.subscribed.send(("PING",))
        elif now - self._awaited_since > self._patience_s:
            raise redis.TimeoutError(f"no answer for {now - self._awaited_since:.1f} s")

    def abort(self) -> None:
        """Break off what another thread waits for here."""
        self.subscribed.abort()
        self.publishing.abort()

    def close(self) -> None:
        self.subscribed.close()
        self.publishing.close()


def _check(reply: Reply) -> None:
    if isinstance(reply, redis.ResponseError):
        raise reply
