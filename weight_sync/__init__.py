"""Weights from the trainer to the engines: a version is staged while engines generate, then committed whole.

The trainer holds a `WeightServer`. An engine stages a version with the vLLM plugin (`weight_sync.vllm_plugin`, imported by
vLLM only) and commits it through vLLM's own weight-update routes. `send_weights` and `receive_weights` are the stream itself.
"""

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
