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
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.server import Publication, StageFailure, StageReport, WeightServer
from weight_sync.shared_memory import connect
from weight_sync.stream import SendReport, receive_weights, send_weights

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
    "StreamEnd",
    "TensorSpec",
    "TransferTimeout",
    "VersionUnavailable",
    "WeightLoadError",
    "WeightServer",
    "WeightSyncError",
    "connect",
    "receive_weights",
    "send_weights",
]
