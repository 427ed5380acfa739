"""Memory for weights: taken once, reused, aligned."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weight_sync.arena import Arena

sizes = st.lists(st.integers(0, 3 << 20), max_size=12)


@given(sizes)
def test_pieces_of_an_arena_are_aligned_and_do_not_overlap(wanted: list[int]) -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in wanted]
    assert [piece.numel() for piece in pieces] == wanted
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces if piece.numel())
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(sizes)
def test_an_arena_that_is_reset_gives_out_the_same_memory(wanted: list[int]) -> None:
    arena = Arena()
    before = [arena.take(size).data_ptr() for size in wanted]
    held = arena.capacity_bytes
    arena.reset()
    assert [arena.take(size).data_ptr() for size in wanted] == before
    assert arena.capacity_bytes == held


@given(sizes)
def test_an_arena_holds_little_more_than_what_was_taken(wanted: list[int]) -> None:
    arena = Arena()
    for size in wanted:
        arena.take(size)
    assert arena.capacity_bytes <= 3 * sum(wanted) + (1 << 20)


def test_what_was_reserved_is_one_piece_and_enough() -> None:
    arena = Arena()
    arena.reserve(5000)
    held = arena.capacity_bytes
    arena.take(4096)
    arena.take(904)
    assert arena.capacity_bytes == held
    arena.reserve(4000)
    assert arena.capacity_bytes == held


def test_a_process_that_keeps_freed_memory_does_not_fault_it_in_again() -> None:
    program = """
import resource
import torch
from weight_sync.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert keep_freed_memory()
print(min(faults() for _ in range(20)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 100
