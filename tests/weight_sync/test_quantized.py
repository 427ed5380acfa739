"""Engines with quantized weights are told apart before anything moves."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from types import SimpleNamespace
import torch
from weight_sync import Manifest, ManifestMismatch, TensorSpec
from weight_sync.vllm_plugin import HeadraceWeightEngine

engine = object.__new__(HeadraceWeightEngine)  # one whose model is not loaded: only its configuration is asked
engine._adapters = None
engine.model_config = SimpleNamespace(quantization="fp8")
spec = TensorSpec(name="model.layers.0.mlp.up_proj.weight", dtype=torch.bfloat16, shape=(4, 4))
try:
    engine._check_manifest(Manifest(specs=(spec,), checksums=(0,)))
except ManifestMismatch as error:
    print(error)
"""


@pytest.mark.slow
def test_a_quantized_engine_refuses_full_precision_weights_before_they_move() -> None:
    """B149"""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert "serves fp8 weights; only unquantized weights can be sent" in done.stdout
