"""`get_weights`: any process reads a version from a server or from its host's cache, tensor by tensor.

Invariant: what is yielded stays what it is for as long as anybody refers to it, also when it was lent.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import torch

from weight_sync.listeners import open_receiver, transport_of
from weight_sync.stream import receive_weights
from weight_sync.transport import Borrowing, StageRequest, Terms


def get_weights(
    address: str, *, policy_version: int, timeout_s: float = 120.0, verify: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of `policy_version`, each verified unless told otherwise; tied tensors come once.

    Tensors that were lent are read in the server's memory, which it may write again when the last of them is gone.

    Raises:
        PeerLost, PeerFailed (such as: not served), TransferTimeout, IntegrityError, ProtocolError.
        ValueError: `address` is none.
    """
    request = StageRequest(
        policy_version=policy_version,
        receiver=f"reader-{os.getpid()}",
        nonce=secrets.token_hex(8),
        terms=Terms(transport=transport_of(address).value),
    )
    with open_receiver(address, request, timeout_s=timeout_s) as channel:
        yield from receive_weights(channel, verify=verify)
        loan = channel.take_loan() if isinstance(channel, Borrowing) else None
    if loan is not None:
        loan.end_when_unread()
