"""What engines ask of Ray, and whether it can be had. All pure.

Invariant: nobody waits for what can never fit. Whatever is not granted is refused in one line that names what was asked and
what each node has. All engines are on this host, because weights travel to them over shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from configs.gpu import VISIBLE, GpuShares
from configs.schema import EngineSettings

LOOPBACK = "127.0.0.1"
_SMALLEST = 1e-4
"""Ray counts in ten-thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """CPUs and GPUs, of a node or asked for by one engine."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{_counted(self.cpus, 'CPU')} and {_counted(self.gpus, 'GPU')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One living node of the cluster."""

    address: str
    is_here: bool
    """Whether it is this host."""
    total: Resources
    available: Resources

    def __str__(self) -> str:
        here = " (this host)" if self.is_here else ""
        cpus = f"CPU {self.available.cpus:g} of {self.total.cpus:g}"
        return f"node {self.address}{here}: {cpus}, GPU {self.available.gpus:g} of {self.total.gpus:g} available"


def asked_bundles(settings: EngineSettings, gpus: GpuShares | None) -> list[Resources]:
    """One bundle an engine. `gpus`: how this machine's GPUs are shared out, None without any."""
    counts = [0] * settings.num_engines if gpus is None else [len(names.split(",")) for names in gpus.engines]
    if settings.num_gpus_per_engine is not None:
        counts = [settings.num_gpus_per_engine] * settings.num_engines
    return [Resources(cpus=settings.num_cpus_per_engine, gpus=count) for count in counts]


def feasible(asked: Sequence[Resources], nodes: Sequence[Node], *, of: Literal["total", "available"] = "total") -> list[str]:
    """Why `asked` does not fit on this host; empty if it does. `of="total"`: whether it could ever fit."""
    here = [node for node in nodes if node.is_here]
    if not here:
        return ["the cluster has no node on this host"]
    problems = []
    for name in ("cpus", "gpus"):
        needed = sum(getattr(bundle, name) for bundle in asked)
        most = max(getattr(node.total if of == "total" else node.available, name) for node in here)
        if needed > most + _SMALLEST / 2:
            problems.append(f"asked for {_counted(needed, _UNITS[name])} in all, {most:g} {_THERE[of]}")
    return problems


def refusal(asked: Sequence[Resources], nodes: Sequence[Node], *, waited_s: float | None) -> str:
    """The one line for an engine set that was not placed. `waited_s` None: it can never fit, so nobody waited."""
    if waited_s is None:
        outcome = "can never be placed on this host: " + "; ".join(feasible(asked, nodes))
    else:
        lacking = feasible(asked, nodes, of="available") or ["Ray did not say why"]
        outcome = f"got no place on this host within engine.placement_timeout_s={waited_s:g} s: {'; '.join(lacking)}"
    each = asked[0] if len(set(asked)) == 1 else Resources(cpus=asked[0].cpus, gpus=max(bundle.gpus for bundle in asked))
    engines = "1 engine" if len(asked) == 1 else f"{len(asked)} engines"
    return f"engine.placement=ray: {engines} of {each} each {outcome} [{'; '.join(str(node) for node in nodes)}]"


def overlap(assigned: str | None, trainer: str | None) -> list[str]:
    """GPUs that Ray gave to an engine although they are the trainer's; both as in CUDA_VISIBLE_DEVICES."""
    if not assigned or not trainer:
        return []
    return sorted(set(assigned.split(",")) & set(trainer.split(",")))


def ray_environment(base: Mapping[str, str], *, address: str | None, token: str, gpus: GpuShares | None) -> dict[str, str]:
    """Environment of Ray's driver, which a Ray of our own inherits.

    Ours listens on loopback only, takes nobody without `token`, reports to nobody, runs its workers at our priority, kills
    none for want of memory (local placement does not either), and knows of no GPU but the engines'.
    """
    common = {**base, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_COLOR_PREFIX": "0"}
    if address is not None:
        return common
    return {
        **{
            name: value
            for name, value in common.items()
            if name not in ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN_PATH")
        },
        "RAY_NODE_IP_ADDRESS": LOOPBACK,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: this node's address is the loopback address
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        VISIBLE: "" if gpus is None else ",".join(gpus.engines),
    }


_UNITS = {"cpus": "CPU", "gpus": "GPU"}
_THERE = {"total": "there", "available": "free"}


def _counted(count: float, unit: str) -> str:
    return f"{count:g} {unit}" + ("" if count == 1 else "s")
