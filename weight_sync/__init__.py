"""Weights from the trainer to the engines: a version is staged while engines generate, then committed whole.

The trainer holds a `WeightServer`. An engine stages a version with the vLLM plugin (`weight_sync.vllm_plugin`, imported by
vLLM only) and commits it through vLLM's own weight-update routes. `send_weights` and `receive_weights` are the stream itself.

Each name is imported when it is asked for, so that modules without tensors, such as `cache_link`, come without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync.channel import BucketKind, ReceiveChannel, SendChannel, StreamEnd
    from weight_sync.errors import (
        AddressTaken,
        IntegrityError,
        ManifestMismatch,
        NotStaged,
        PeerFailed,
        PeerLost,
        ProtocolError,
        TransferTimeout,
        VersionUnavailable,
        WeightLoadError,
        WeightSyncError,
    )
    from weight_sync.listeners import open_listener, open_receiver
    from weight_sync.manifest import Manifest, TensorSpec
    from weight_sync.reading import get_weights
    from weight_sync.server import Publication, StageFailure, StageReport, WeightServer
    from weight_sync.stream import SendReport, receive_weights, send_weights
    from weight_sync.transport import StageRequest, Terms, TransportName

_HOMES = {
    "AddressTaken": "weight_sync.errors",
    "BucketKind": "weight_sync.channel",
    "IntegrityError": "weight_sync.errors",
    "Manifest": "weight_sync.manifest",
    "ManifestMismatch": "weight_sync.errors",
    "NotStaged": "weight_sync.errors",
    "PeerFailed": "weight_sync.errors",
    "PeerLost": "weight_sync.errors",
    "ProtocolError": "weight_sync.errors",
    "Publication": "weight_sync.server",
    "ReceiveChannel": "weight_sync.channel",
    "SendChannel": "weight_sync.channel",
    "SendReport": "weight_sync.stream",
    "StageFailure": "weight_sync.server",
    "StageReport": "weight_sync.server",
    "StageRequest": "weight_sync.transport",
    "StreamEnd": "weight_sync.channel",
    "TensorSpec": "weight_sync.manifest",
    "Terms": "weight_sync.transport",
    "TransferTimeout": "weight_sync.errors",
    "TransportName": "weight_sync.transport",
    "VersionUnavailable": "weight_sync.errors",
    "WeightLoadError": "weight_sync.errors",
    "WeightServer": "weight_sync.server",
    "WeightSyncError": "weight_sync.errors",
    "get_weights": "weight_sync.reading",
    "open_listener": "weight_sync.listeners",
    "open_receiver": "weight_sync.listeners",
    "receive_weights": "weight_sync.stream",
    "send_weights": "weight_sync.stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "AddressTaken",
    "BucketKind",
    "IntegrityError",
    "Manifest",
    "ManifestMismatch",
    "NotStaged",
    "PeerFailed",
    "PeerLost",
    "ProtocolError",
    "Publication",
    "ReceiveChannel",
    "SendChannel",
    "SendReport",
    "StageFailure",
    "StageReport",
    "StageRequest",
    "StreamEnd",
    "TensorSpec",
    "Terms",
    "TransferTimeout",
    "TransportName",
    "VersionUnavailable",
    "WeightLoadError",
    "WeightServer",
    "WeightSyncError",
    "get_weights",
    "open_listener",
    "open_receiver",
    "receive_weights",
    "send_weights",
]
