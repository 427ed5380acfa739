"""Packing: which tokens go through the model together.

Invariant: a micro-batch is a forest of its sequences' distinct prefixes. Each distinct prefix is computed once, no padding is,
and every trained token is predicted from exactly its own sequence. Sibling samples share their prompt, and often more;
so do the segments of one sample.

Nodes are numbered in pre-order, so that "u precedes v in some sequence" is `u <= v < subtree_ends[u]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sample_bus.sample import Sample
from trainer.errors import PackingError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch of N nodes, R logit rows and P trained tokens. P may be 0, N is at least 1."""

    input_ids: npt.NDArray[np.int64]
    """[N] token id of each node."""
    position_ids: npt.NDArray[np.int64]
    """[N] position in its sequences, from 0."""
    subtree_ends: npt.NDArray[np.int64]
    """[N] node u is attended to by the nodes v with u <= v < subtree_ends[u]."""
    row_nodes: npt.NDArray[np.int64]
    """[R] node whose logits are needed, rising; once per distinct sampling temperature."""
    row_temperatures: npt.NDArray[np.float32]
    """[R] temperature that divides the row's logits."""
    token_rows: npt.NDArray[np.int64]
    """[P] row that predicts the trained token."""
    token_ids: npt.NDArray[np.int64]
    """[P] id of the trained token."""
    token_samples: npt.NDArray[np.int64]
    """[P] index of its sample in the sequence given to `pack`."""
    token_positions: npt.NDArray[np.int64]
    """[P] index of the token in its sample."""
    behavior_logprobs: npt.NDArray[np.float32]
    """[P] nats."""

    @property
    def num_nodes(self) -> int:
        return int(self.input_ids.shape[0])

    def of_tokens(self, values: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """[P] each trained token's own of `values`, which has a [T] per sample given to `pack`."""
        if not self.token_ids.size:
            return np.zeros(0, dtype=np.float32)
        starts = np.cumsum([0, *(one.shape[0] for one in values)])
        taken: npt.NDArray[np.float32] = np.concatenate(values)[starts[self.token_samples] + self.token_positions]
        return taken.astype(np.float32, copy=False)


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    max_rows: int,
    share_prefixes: bool = True,
    min_microbatches: int = 1,
) -> list[PackedBatch]:
    """Cut the samples' segments into micro-batches of at most max_tokens nodes and max_rows logit rows.

    A single segment beyond a bound gets a micro-batch of its own. Segments without trained tokens are left out, and only tokens
    that a trained one is predicted from are computed. min_microbatches spreads the work (over ranks): there come a multiple of
    it, filled up with `empty()`. Deterministic in the order of `samples`. Raises PackingError naming the rollout.
    """
    pieces = _pieces(samples)
    inputs = [piece.inputs for piece in pieces]
    trained = list(range(len(pieces)))
    # Byte order big-endian makes bytes compare as token sequences do, and a prefix sorts before its extensions.
    order = sorted(trained, key=lambda index: inputs[index].astype(">u4").tobytes()) if share_prefixes else trained
    shared = [0] * len(order)
    if share_prefixes:
        for place in range(1, len(order)):
            shared[place] = _common_prefix(inputs[order[place - 1]], inputs[order[place]])
    costs = [inputs[index].shape[0] - common for index, common in zip(order, shared, strict=True)]
    rows = [pieces[index].positions.shape[0] for index in order]
    budget = max_tokens if min_microbatches == 1 else min(max_tokens, max(1, -(-sum(costs) // min_microbatches)))
    batches: list[PackedBatch] = []
    start = num_nodes = num_rows = 0
    for place, index in enumerate(order):
        if place > start and (num_nodes + costs[place] > budget or num_rows + rows[place] > max_rows):
            batches.append(_forest(samples, [pieces[k] for k in order[start:place]], [0, *shared[start + 1 : place]]))
            start, num_nodes, num_rows = place, inputs[index].shape[0], rows[place]
        else:
            num_nodes += costs[place] if place > start else inputs[index].shape[0]
            num_rows += rows[place]
    if order:
        batches.append(_forest(samples, [pieces[k] for k in order[start:]], [0, *shared[start + 1 :]]))
    return batches + [empty()] * (-len(batches) % min_microbatches)


def empty() -> PackedBatch:
    """A micro-batch of one node and no trained token: it keeps a rank without work in step with the others."""
    ints = np.zeros(0, dtype=np.int64)
    floats = np.zeros(0, dtype=np.float32)
    return PackedBatch(
        input_ids=np.zeros(1, dtype=np.int64),
        position_ids=np.zeros(1, dtype=np.int64),
        subtree_ends=np.ones(1, dtype=np.int64),
        row_nodes=np.zeros(1, dtype=np.int64),
        row_temperatures=np.ones(1, dtype=np.float32),
        token_rows=ints,
        token_ids=ints,
        token_samples=ints,
        token_positions=ints,
        behavior_logprobs=floats,
    )


def attention_mask(subtree_ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[N, N] True where the row's node attends to the column's: itself and its ancestors."""
    nodes = np.arange(subtree_ends.shape[0])
    mask: npt.NDArray[np.bool_] = (nodes[:, None] >= nodes[None, :]) & (nodes[:, None] < subtree_ends[None, :])
    return mask


def _common_prefix(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    length = min(left.shape[0], right.shape[0])
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """One segment of a sample, as far as its trained tokens need it."""

    index: int
    """Of its sample."""
    start: int
    """First token in its sample."""
    inputs: npt.NDArray[np.int32]
    """[L] the tokens that go through the model: all before the last trained one."""
    positions: npt.NDArray[np.int64]
    """[P] trained tokens, counted from `start`."""


def _pieces(samples: Sequence[Sample]) -> list[_Piece]:
    """The segments that have a trained token."""
    pieces: list[_Piece] = []
    for index, sample in enumerate(samples):
        for start, end in sample.segments():
            positions = np.flatnonzero(sample.loss_mask[start:end])
            if not positions.size:
                continue
            if positions[0] == 0:
                raise PackingError(
                    f"loss_mask[{start}]: got 1, expected 0: nothing predicts a first token (rollout {sample.rollout_id})"
                )
            inputs = sample.tokens[start : start + int(positions[-1])]
            pieces.append(_Piece(index=index, start=start, inputs=inputs, positions=positions))
    return pieces


def _forest(samples: Sequence[Sample], pieces: Sequence[_Piece], shared: Sequence[int]) -> PackedBatch:
    """Build the forest of sequences in pre-order; shared[k] tokens of sequence k are those of sequence k - 1."""
    sizes = [piece.inputs.shape[0] - common for piece, common in zip(pieces, shared, strict=True)]
    num_nodes = sum(sizes)
    ends = np.full(num_nodes, num_nodes, dtype=np.int64)
    path = np.zeros(0, dtype=np.int64)
    first = 0
    nodes, token_ids, token_samples, token_positions, behavior = [], [], [], [], []
    for piece, common, size in zip(pieces, shared, sizes, strict=True):
        ends[path[common:]] = first
        path = np.concatenate((path[:common], np.arange(first, first + size)))
        first += size
        sample = samples[piece.index]
        of_sample = piece.positions + piece.start
        nodes.append(path[piece.positions - 1])
        token_ids.append(sample.tokens[of_sample])
        token_samples.append(np.full(of_sample.shape, piece.index, dtype=np.int64))
        token_positions.append(of_sample)
        behavior.append(sample.behavior_logprobs[of_sample])
    indices = np.concatenate(token_samples)
    temperatures = np.array([sample.temperature for sample in samples], dtype=np.float32)[indices]
    keys = np.empty(indices.shape, dtype=[("node", np.int64), ("temperature", np.float32)])
    keys["node"], keys["temperature"] = np.concatenate(nodes), temperatures
    rows, token_rows = np.unique(keys, return_inverse=True)
    paired = list(zip(pieces, shared, strict=True))
    return PackedBatch(
        input_ids=np.concatenate([piece.inputs[common:] for piece, common in paired]).astype(np.int64),
        position_ids=np.concatenate([np.arange(common, piece.inputs.shape[0]) for piece, common in paired]),
        subtree_ends=ends,
        row_nodes=np.array(rows["node"], order="C"),
        row_temperatures=np.array(rows["temperature"], order="C"),
        token_rows=token_rows.astype(np.int64),
        token_ids=np.concatenate(token_ids).astype(np.int64),
        token_samples=indices,
        token_positions=np.concatenate(token_positions),
        behavior_logprobs=np.concatenate(behavior),
    )
