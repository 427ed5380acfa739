"""The state of the process's random generators (Python, NumPy, torch) as a part of a checkpoint.

Invariant: what draws from the global generators after `load` draws what it would have drawn after `save`. The product itself
draws from none of them while it trains; a model's or a user's code may.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from trainer.durable import fsync
from trainer.errors import CheckpointError

_FILE = "random.json"


class Randomness:
    """Implements `trainer.checkpoint.Part`."""

    def seed(self, seed: int) -> None:
        """Begin anew."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def save(self, directory: Path) -> None:
        """Write into an existing directory, durably."""
        version, internal, gauss = random.getstate()
        legacy = np.random.get_state(legacy=False)
        assert isinstance(legacy, dict)
        inner = legacy["state"]
        state = {
            "python": [version, list(internal), gauss],
            "numpy": {**legacy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "cuda": [one.numpy().tobytes().hex() for one in _cuda_states()],
        }
        path = directory / _FILE
        path.write_text(json.dumps(state))
        fsync(path)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError."""
        path = directory / _FILE
        try:
            state = json.loads(path.read_text())
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            inner = state["numpy"]["state"]
            np.random.set_state({**state["numpy"], "state": {"key": np.array(inner["key"], np.uint32), "pos": inner["pos"]}})
            torch.set_rng_state(_tensor(state["torch"]))
            if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all([_tensor(one) for one in state["cuda"]])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {type(error).__name__} {error}") from error


def _cuda_states() -> list[torch.Tensor]:
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def _tensor(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
