"""How engines are started that are given adapters in place of whole weights. Pure.

Invariant: such a server knows one adapter, by the name that requests bear, from its first moment on.
"""

from __future__ import annotations

import json

from configs.paths import adapter_dir
from configs.schema import MAX_ENGINE_LORA_RANK, EngineSettings, Settings

ADAPTER_NAME = "adapter"
"""What a request names as its model."""
SCALE_KEY = "headrace_lora_scale"
"""In vLLM's additional config: alpha / rank."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_ENGINE_LORA_RANK)
"""Those that vLLM reserves memory for."""


def adapter_scale(settings: Settings) -> float | None:
    """How often an adapter counts, alpha / rank; None where engines are given whole weights."""
    if settings.weight_sync.lora != "adapter":
        return None
    return settings.trainer.lora_alpha / settings.trainer.lora_rank


def scale_problem(got: float | None, expected: float | None) -> str | None:
    """What is wrong with an engine that was started to count adapters `got` times; None: nothing."""
    if got == expected:
        return None
    if expected is None:
        return f"was started to be given adapters ({SCALE_KEY}={got:g}), and weight_sync.lora=merged gives it whole weights"
    started = f"counts adapters {got:g} times" if got is not None else "was started to be given whole weights"
    return (
        f"{started}, expected {expected:g} times (trainer.lora_alpha / trainer.lora_rank, weight_sync.lora=adapter): start it "
        f"with --enable-lora and --additional-config {json.dumps({SCALE_KEY: expected})}"
    )


def with_adapter(settings: Settings) -> EngineSettings:
    """The engines' settings, with what adapters need where `weight_sync.lora=adapter`; `engine.extra_args` win."""
    if settings.weight_sync.lora != "adapter":
        return settings.engine
    trainer = settings.trainer
    arguments = (
        "--enable-lora",
        *("--max-loras", "1"),
        *("--max-lora-rank", str(next(rank for rank in _RANKS if rank >= trainer.lora_rank))),
        *("--lora-modules", f"{ADAPTER_NAME}={adapter_dir(settings)}"),
        *("--additional-config", json.dumps({SCALE_KEY: adapter_scale(settings)})),
    )
    return settings.engine.model_copy(update={"extra_args": (*arguments, *settings.engine.extra_args)})
