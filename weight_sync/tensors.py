"""How a trainer's tensor becomes bytes: full, detached, in the wire dtype, row-major, without a copy of the whole tensor.

Invariant: every tensor takes the same path, whatever its size, layout or device (a tensor larger than a bucket is cut, not
treated apart).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weight_sync.errors import WeightSyncError
from weight_sync.manifest import CAST_DTYPES


def wire_dtype_of(tensor: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which `tensor` travels: floating ones in `wire_dtype` (None: their own), all others in their own."""
    return wire_dtype if wire_dtype is not None and tensor.dtype in CAST_DTYPES else tensor.dtype


def materialize(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The full local tensor, detached. A sharded tensor is gathered, which is a collective of its ranks."""
    gather = getattr(tensor, "full_tensor", None)
    full: torch.Tensor = gather() if callable(gather) else tensor
    if full.layout != torch.strided or full.is_meta:
        raise WeightSyncError(f"tensor {name!r} is {full.layout} on {full.device}; expected a dense tensor with data")
    return full.detach()


def copy_flat(destination: torch.Tensor, source: torch.Tensor, start: int) -> None:
    """Write the elements [start, start + len(destination)) of `source`, counted row-major, to the 1-D `destination`.

    Casts and crosses devices on the way; allocates nothing on a CPU, also for a transposed or strided source.
    """
    count = destination.numel()
    if count == 0:
        return
    if source.is_contiguous():
        part = source.view(-1)[start : start + count]
        if part.dtype == destination.dtype and part.device.type == "cpu" == destination.device.type:
            # the C library's memcpy, which is up to twice as fast as torch's copy of equal dtypes
            np.copyto(destination.view(torch.uint8).numpy(), part.view(torch.uint8).numpy())
        else:
            destination.copy_(part)
        return
    row_elements = source[0].numel()
    done = 0
    while done < count:
        row, within = divmod(start + done, row_elements)
        left = count - done
        if within or left < row_elements:
            taken = min(left, row_elements - within)
            copy_flat(destination[done : done + taken], source[row], within)
        else:
            rows = left // row_elements
            taken = rows * row_elements
            destination[done : done + taken].view(rows, *source.shape[1:]).copy_(source[row : row + rows])
        done += taken


def without_aliases(
    named_tensors: Iterable[tuple[str, torch.Tensor]], aliases: list[tuple[str, str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass each distinct tensor once, under its first name; write (later name, first name) to `aliases`.

    Tied are tensors with the same elements of the same live storage. A storage that was freed in between does not count: its
    address may have been given to another tensor.

    Raises:
        WeightSyncError: a name comes twice.
    """
    first_names: dict[tuple[object, ...], tuple[str, StorageWeakRef]] = {}
    names: set[str] = set()
    for name, tensor in named_tensors:
        if name in names:
            raise WeightSyncError(f"tensor name {name!r} comes twice")
        names.add(name)
        full = materialize(name, tensor)
        if full.numel() == 0:
            yield name, full
            continue
        storage = full.untyped_storage()
        key = (storage.data_ptr(), full.storage_offset(), full.shape, full.stride(), full.dtype, full.device)
        known = first_names.get(key)
        if known is not None and not known[1].expired():  # type: ignore[no-untyped-call]
            aliases.append((name, known[0]))
            continue
        first_names[key] = (name, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        yield name, full
