"""What `model.source` may name, as far as it can be told without torch and without a network.

Invariant: a directory that is not there, or holds no model, is refused before anything starts.
"""

from __future__ import annotations

from pathlib import Path

from configs.errors import ConfigError
from configs.schema import ModelSettings

SMOLLM2 = "smollm2-135m-instruct"
TINY_SORT = "tiny-sort"


def check_source(model: ModelSettings) -> Path | None:
    """The Hugging Face directory that `model.source` names; None: it is one of ours, or a name for the hub.

    Raises ConfigError.
    """
    if model.source in (SMOLLM2, TINY_SORT):
        return None
    path = Path(model.source).expanduser()
    if (path / "config.json").is_file():
        return path.absolute()
    if path.exists():
        raise ConfigError(f"model.source={model.source}: no config.json in it, expected a Hugging Face directory")
    if model.source.startswith(("/", ".", "~")) or model.source.count("/") > 1:
        raise ConfigError(
            f"model.source={model.source}: no such directory; "
            f"expected {SMOLLM2}, {TINY_SORT}, a Hugging Face directory or a hub name"
        )
    return None
