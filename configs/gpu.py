"""How a machine's GPUs are shared out: disjoint sets for engines and trainer where there are at least two.

Invariant: names are those of CUDA_VISIBLE_DEVICES (numbers or UUIDs), never renumbered: what this process may not see, no child
is given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """Values for CUDA_VISIBLE_DEVICES."""

    engines: tuple[str, ...]
    """One entry an engine."""
    trainer: str
    """The trainer's own; the same GPU as the engine's where there is only one."""
    shared: bool
    """Whether engine and trainer share a GPU."""


def visible_gpus(environment: Mapping[str, str] | None = None, device_dir: Path = Path("/dev")) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, found without loading a CUDA library; empty on a CPU machine."""
    given = (os.environ if environment is None else environment).get(VISIBLE)
    present = sorted(path.name.removeprefix("nvidia") for path in device_dir.glob("nvidia[0-9]*"))
    if not present:
        return ()
    if given is None:
        return tuple(sorted(present, key=int))
    return tuple(name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1")


def gpu_shares(gpus: Sequence[str], *, num_engines: int) -> GpuShares | None:
    """Split `gpus`: the trainer takes the last one, the engines share the others evenly, in order. None without GPUs.

    Raises ConfigError when there are GPUs, but not one for each engine and one for the trainer (a single GPU is shared).
    """
    if not gpus:
        return None
    if len(set(gpus)) != len(gpus):
        raise ConfigError(f"{VISIBLE}: got {','.join(gpus)}, expected each GPU once")
    if len(gpus) == 1 and num_engines == 1:
        return GpuShares(engines=(gpus[0],), trainer=gpus[0], shared=True)
    each = (len(gpus) - 1) // num_engines
    if each < 1:
        raise ConfigError(
            f"engine.num_engines: got {num_engines} with {len(gpus)} visible GPUs, expected at most {max(1, len(gpus) - 1)}: "
            "each engine and the trainer need a GPU of their own"
        )
    engines = tuple(",".join(gpus[index * each : (index + 1) * each]) for index in range(num_engines))
    return GpuShares(engines=engines, trainer=gpus[-1], shared=False)
