"""From a trainer's tensor to row-major elements, and which tensors are one and the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import WeightSyncError
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_any_range_of_any_layout_is_copied_in_row_major_order(shape: list[int], random: object, data: st.DataObject) -> None:
    """B145: transposed, strided, expanded and sliced sources."""
    source = torch.arange(2 * torch.Size(shape).numel(), dtype=torch.float32).view(*shape, 2)[..., 1]
    order = data.draw(st.permutations(range(len(shape))))
    source = source.permute(order)
    if data.draw(st.booleans()):
        source = source[::2]
    if data.draw(st.booleans()):
        source = source[0].expand(3, *source.shape[1:])
    flat = source.reshape(-1)
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    destination = torch.full((stop - start,), -1.0, dtype=torch.bfloat16)
    copy_flat(destination, source, start)
    assert torch.equal(destination, flat[start:stop].bfloat16())


def test_only_floating_tensors_are_cast() -> None:
    wire = torch.bfloat16
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert {wire_dtype_of(torch.zeros(1, dtype=dtype), wire) for dtype in floats} == {wire}
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn):
        assert wire_dtype_of(torch.zeros(1, dtype=dtype), wire) is dtype
    assert wire_dtype_of(torch.zeros(1), None) is torch.float32


def test_a_tied_tensor_is_passed_once_under_its_first_name() -> None:
    """B139: a nested head that is tied, or named like one, is never skipped by its name."""
    embedding = torch.nn.Parameter(torch.randn(4, 3))
    tensors = {
        "model.embed_tokens.weight": embedding,
        "mtp.lm_head.weight": torch.randn(4, 3),
        "lm_head.weight": embedding,
        "transposed": embedding.t(),
    }
    aliases: list[tuple[str, str]] = []
    passed = dict(without_aliases(tensors.items(), aliases))
    assert list(passed) == ["model.embed_tokens.weight", "mtp.lm_head.weight", "transposed"]
    assert aliases == [("lm_head.weight", "model.embed_tokens.weight")]
    assert not any(tensor.requires_grad for tensor in passed.values())


def test_views_of_one_storage_are_different_tensors() -> None:
    """B154."""
    fused = torch.randn(6, 4)
    aliases: list[tuple[str, str]] = []
    passed = list(without_aliases([("q", fused[:2]), ("k", fused[2:4]), ("v", fused[4:])], aliases))
    assert [name for name, _ in passed] == ["q", "k", "v"]
    assert aliases == []


def test_memory_that_was_freed_and_given_out_again_is_no_tie() -> None:
    """Tensors gathered one by one may all lie at the same address."""
    memory = bytearray(64)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(8):
            yield f"t{index}", torch.frombuffer(memory, dtype=torch.float32).fill_(index)

    aliases: list[tuple[str, str]] = []
    seen = []
    for _, tensor in without_aliases(gathered(), aliases):
        seen.append(float(tensor[0]))
        del tensor
    assert seen == list(map(float, range(8)))
    assert aliases == []


def test_tensors_without_elements_are_never_tied() -> None:
    aliases: list[tuple[str, str]] = []
    assert len(list(without_aliases([("a", torch.empty(0)), ("b", torch.empty(0))], aliases))) == 2
    assert aliases == []


def test_a_sharded_tensor_is_gathered() -> None:
    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return torch.ones(3)

    ((_, tensor),) = without_aliases([("a", torch.zeros(1).as_subclass(Sharded))], [])
    assert torch.equal(tensor, torch.ones(3))


@pytest.mark.parametrize("tensor", [torch.zeros(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_without_dense_data_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(WeightSyncError, match="'a'"):
        list(without_aliases([("a", tensor)], []))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="'a' comes twice"):
        list(without_aliases([("a", torch.zeros(1)), ("a", torch.ones(1))], []))
