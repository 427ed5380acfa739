"""How engines are started that are given adapters in place of whole weights. Pure.

Invariant: such a server knows one adapter, by the name that requests bear, from its first moment on.
"""

from __future__ import annotations

import json

from configs.paths import adapter_dir
from configs.schema import MAX_ENGINE_LORA_RANK, EngineSettings, Settings

ADAPTER_NAME = "adapter"
"""What a request names as its model."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_ENGINE_LORA_RANK)
"""Those that vLLM reserves memory for."""


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
        *("--additional-config", json.dumps({"headrace_lora_scale": trainer.lora_alpha / trainer.lora_rank})),
    )
    return settings.engine.model_copy(update={"extra_args": (*arguments, *settings.engine.extra_args)})
