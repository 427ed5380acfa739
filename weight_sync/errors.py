"""Errors of weight sync.

WeightSyncError
├── TransferTimeout      the other side let a deadline pass
├── PeerLost             the connection ended before the transfer did
├── PeerFailed           the other side said why it stopped
├── ProtocolError        bytes that are no valid packet or bucket
├── IntegrityError       a checksum, a digest or the coverage of a tensor is wrong
│   └── DeltaRefused     what changed could not be applied to the base; all of the weights are asked for
├── ManifestMismatch     the names, shapes or dtypes are not those of the engine's model
├── VersionUnavailable   the version asked for is not served (any more)
├── NotStaged            a commit of weights that the engine has not staged
├── WeightLoadError      staged weights that the model did not take whole
└── AddressTaken         another live server answers on the socket
"""

from __future__ import annotations


class WeightSyncError(Exception):
    """Raised when weights cannot be sent, received or loaded."""


class TransferTimeout(WeightSyncError):
    """Raised when a wait passed its deadline. The message names the phase, the peer, the bucket and the seconds waited."""


class PeerLost(WeightSyncError):
    """Raised when the connection ended before the transfer did. The message names the phase, the peer and the bucket."""


class PeerFailed(WeightSyncError):
    """Raised when the other side reported its own failure; the message quotes it."""


class ProtocolError(WeightSyncError):
    """Raised when bytes are not a valid packet or bucket. The message says what was got and what was expected."""


class IntegrityError(WeightSyncError):
    """Raised when what arrived is not what was sent: checksum, digest, or a part of a tensor missing or repeated."""


class DeltaRefused(IntegrityError):
    """Raised when what changed in a tensor does not make the new one from the receiver's base. Its text says so too, by which
    the sender knows that all of the weights will be asked for."""

    MARK = "delta refused"

    def __init__(self, message: str) -> None:
        super().__init__(f"{self.MARK}: {message}")


class ManifestMismatch(WeightSyncError):
    """Raised when the offered names, shapes or dtypes are not those of the engine's model; lists the first ten differences."""


class VersionUnavailable(WeightSyncError):
    """Raised when a policy version is asked for that the server does not hold."""


class NotStaged(WeightSyncError):
    """Raised when a commit names a version and digest other than the staged one."""


class WeightLoadError(WeightSyncError):
    """Raised when the engine's model did not take every staged tensor; the weights served before were put back."""


class AddressTaken(WeightSyncError):
    """Raised when another live server answers on the address to bind."""
