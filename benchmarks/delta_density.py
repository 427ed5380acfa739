"""How much of a model an optimizer step changes, as engines see it: in bfloat16, at the learning rates of RL.

`python -m benchmarks.delta_density [--quick] [--json] [--steps N] [--learning-rates LR …]`

The trainer's own step (AdamW over float32 master weights, gradients of few-shot addition samples, clipped to a norm of 1) on
SmolLM2-135M, or with --quick on a tiny model. After each step the weights are cast to bfloat16 and compared bit by bit with
those before it. Changed is the share of elements that differ; bytes is what a delta round sends of what a full one does. The
first step is the largest, since AdamW then moves every weight by the learning rate itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.train_step import make_samples
from configs.logs import set_up
from configs.schema import LoggingSettings, ModelSettings, Settings, TrainerSettings
from trainer.fsdp import FsdpPolicy
from trainer.models import prepare_model
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step
from weight_sync.arena import Arena
from weight_sync.snapshot import take_snapshot
from weight_sync.version_delta import VersionDelta, delta_between

LEARNING_RATES = (1e-6, 5e-6, 1e-5, 1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """One learning rate. Each list has one entry for each step."""

    learning_rate: float
    changed: list[float]
    """Share of all elements."""
    sent: list[float]
    """Share of all bytes."""
    compared_gb_per_s: float
    """Bytes of the model over the seconds of the comparison, one thread, in the best step."""


def measure(model_dir: Path, learning_rate: float, *, num_steps: int, quick: bool) -> Density:
    samples = make_samples(model_dir, quick=quick)
    draw = np.random.default_rng(1)
    options = UpdateOptions(learning_rate=learning_rate, warmup_steps=0, loss=LossOptions())
    policy = FsdpPolicy(model_dir, TrainerSettings(), dtype=torch.float32 if quick else torch.bfloat16)
    arenas = (Arena(), Arena())
    before = take_snapshot(arenas[0], policy.export_weights(), policy_version=0, dtype=torch.bfloat16)
    deltas: list[VersionDelta] = []
    for step in range(1, num_steps + 1):
        train_step(policy, samples, draw.normal(size=len(samples)).astype(np.float32), options)
        new = take_snapshot(arenas[step % 2], policy.export_weights(), policy_version=step, dtype=torch.bfloat16)
        deltas.append(delta_between(before, new))
        before = new
    return Density(
        learning_rate=learning_rate,
        changed=[delta.num_changed / delta.num_elements for delta in deltas],
        sent=[delta.payload_bytes / delta.total_bytes for delta in deltas],
        compared_gb_per_s=max(delta.total_bytes / delta.seconds for delta in deltas) / 1e9,
    )


def percents(shares: Sequence[float]) -> str:
    return "  ".join(f"{share:7.2%}" for share in shares)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_density", description="What an optimizer step changes.")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    set_up(LoggingSettings(level="warning"), daemon="benchmark")
    with TemporaryDirectory() as scratch:
        tiny = ModelSettings(source="tiny-sort", warm_start_steps=1, cache_dir=Path(scratch))
        prepared = prepare_model(Settings(model=tiny) if arguments.quick else Settings())
        found = [
            measure(prepared.model_dir, rate, num_steps=arguments.steps, quick=arguments.quick)
            for rate in arguments.learning_rates
        ]
    print(f"{prepared.model_dir.name}, {arguments.steps} steps; for each step:")
    for density in found:
        print(f"lr {density.learning_rate:<8g} changed {percents(density.changed)}")
        print(f"            bytes   {percents(density.sent)}   compared at {density.compared_gb_per_s:.2f} GB/s")
    if arguments.json:
        print(json.dumps({"benchmark": "delta_density", "rates": [asdict(density) for density in found]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
