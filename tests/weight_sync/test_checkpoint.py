"""Weights that the engine's model could not take are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weight_sync.checkpoint import check_against_checkpoint, checkpoint_shapes
from weight_sync.errors import ManifestMismatch
from weight_sync.manifest import Manifest, TensorSpec

Shapes = dict[str, tuple[int, ...]]

EXPECTED: Shapes = {"embed.weight": (10, 4), "lm_head.weight": (10, 4), "layer.0.weight": (4, 4)}
NO_HEADS: frozenset[str] = frozenset()


def manifest(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> Manifest:
    """Tensors of one shape have the same bytes."""
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items())
    return Manifest(specs=specs, checksums=tuple(hash(shape) % 2**64 for shape in shapes.values()))


def check(offered: Manifest, expected: dict[str, tuple[int, ...]] | None = EXPECTED, **kwargs: frozenset[str]) -> None:
    check_against_checkpoint(offered, expected, dtype=torch.bfloat16, tied_heads=kwargs.get("tied_heads", NO_HEADS))


def test_the_shapes_of_all_files_are_read_from_their_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "layers.0.rotary_emb.inv_freq": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert checkpoint_shapes(tmp_path) == {"a": (2, 3), "b": ()}


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_model_without_safetensors_files_has_no_known_shapes(tmp_path: Path, name: str) -> None:
    assert checkpoint_shapes(tmp_path / name) is None


def test_the_same_names_and_shapes_pass_in_any_order() -> None:
    check(manifest(dict(reversed(EXPECTED.items()))))


def test_unknown_shapes_pass() -> None:
    check(manifest({"anything": (1,)}), None)


@pytest.mark.parametrize("side", ["offered", "expected"])
def test_a_tied_head_may_be_missing_on_either_side(side: str) -> None:
    """B139."""
    headless = {name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}
    offered, expected = (EXPECTED, headless) if side == "offered" else (headless, EXPECTED)
    check(manifest(offered), expected, tied_heads=frozenset({"lm_head.weight"}))
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight"):
        check(manifest(offered), expected)


def test_a_head_with_other_weights_than_the_embedding_is_refused_by_a_model_that_ties_them() -> None:
    """B139: vLLM would load it over the embedding."""
    offered = manifest(EXPECTED)
    offered = replace(offered, checksums=(1, 2, 3))
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight: got weights of its own"):
        check(offered, tied_heads=frozenset({"lm_head.weight"}))
    check(offered)


def test_a_tied_head_is_refused_by_a_model_that_does_not_tie_it() -> None:
    """B139."""
    offered = replace(
        manifest({"embed.weight": (10, 4), "layer.0.weight": (4, 4)}), aliases=(("lm_head.weight", "embed.weight"),)
    )
    check(offered, tied_heads=frozenset({"lm_head.weight"}))
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight: got it tied to embed\.weight"):
        check(offered)


def test_a_tied_tensor_without_a_target_is_refused() -> None:
    """B148."""
    offered = replace(manifest(EXPECTED), aliases=(("layer.0.lora_A", "layer.0.weight"),))
    with pytest.raises(ManifestMismatch, match=r"lora_A: got \[4, 4\], the engine's model has no such tensor"):
        check(offered)


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ({**EXPECTED, "embed.weight": (16, 4)}, r"embed\.weight: got \[16, 4\], the engine's model has \[10, 4\]"),
        ({**EXPECTED, "base.layer.0.lora_A": (2, 4)}, r"lora_A: got \[2, 4\], the engine's model has no such tensor"),
        ({"embed.weight": (10, 4)}, r"2 differences: layer\.0\.weight: not offered"),
    ],
)
def test_differences_are_named(offered: dict[str, tuple[int, ...]], message: str) -> None:
    """B148, B150, B152: a padded vocabulary, names without a target, tensors left out."""
    with pytest.raises(ManifestMismatch, match=message):
        check(manifest(offered))


def test_another_floating_dtype_than_the_engines_is_refused_naming_both() -> None:
    """B148."""
    with pytest.raises(ManifestMismatch, match="got float32, the engine computes in bfloat16"):
        check(manifest(EXPECTED, torch.float32))
    check(manifest(EXPECTED, torch.int64))


def test_the_first_ten_differences_are_listed_and_the_rest_counted() -> None:
    """B148."""
    with pytest.raises(ManifestMismatch) as caught:
        check(manifest({f"extra.{index}": (1,) for index in range(20)}), {})
    assert str(caught.value).startswith("20 differences: ")
    assert str(caught.value).count("no such tensor") == 10
    assert str(caught.value).endswith("and 10 more")
