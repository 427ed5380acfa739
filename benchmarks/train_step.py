"""What one optimizer step costs: siblings as a forest, sequences packed side by side, sequences padded to one length.

`python -m benchmarks.train_step [--quick] [--json] [--dtype auto|float32|bfloat16] [--steps N]`

Data is like the demo's: 8 few-shot addition prompts, 8 answers each, 2 to 4 tokens; the model SmolLM2-135M, or with --quick
a tiny one. The padded way is the plain recipe: float32 weights under autocast, logits of all positions, torch's own AdamW.
First the three ways must give the same gradient, in float32, on two groups. Seconds are wall time, with this process's
processor time beside it: on a busy machine only the latter compares.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.logs import set_up
from configs.schema import LoggingSettings, ModelSettings, Settings, TrainerSettings
from sample_bus.sample import NO_VERSION, Sample, StopReason
from trainer.fsdp import FsdpPolicy
from trainer.losses import token_losses
from trainer.memory import keep_freed_memory
from trainer.models import compute_dtype, prepare_model
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step

OPTIONS = UpdateOptions(learning_rate=1e-6, warmup_steps=0, loss=LossOptions())
PADDED_BATCH = 16
"""Sequences of one padded forward pass: their logits fill half a gigabyte."""
MAX_GRADIENT_DIFFERENCE = 1e-4
"""Largest difference allowed between two ways' gradients, relative to the largest entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians over steps, after one that is not counted."""

    way: str
    wall_s: float
    cpu_s: float
    samples_per_s: float
    tokens_per_s: float
    """Tokens of the samples per second, prompts included, however often they were computed."""
    computed_tokens: int
    microbatches: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; with --json the last line is one JSON object. Exit code 1 when the gradients differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.train_step", description="What one optimizer step costs.")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of each way (default 5, with --quick 2)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", default="forest,packed,padded", help="which ways to time, separated by commas")
    parser.add_argument("--plain-allocator", action="store_true", help="leave the C library's allocator as it is")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    kept = not arguments.plain_allocator and keep_freed_memory()
    set_up(LoggingSettings(level="warning"), daemon="benchmark")
    with TemporaryDirectory() as scratch:
        settings = Settings(
            model=ModelSettings(source="tiny-sort", warm_start_steps=1, cache_dir=Path(scratch))
            if arguments.quick
            else ModelSettings()
        )
        prepared = prepare_model(settings)
        dtype = compute_dtype(arguments.dtype, small=arguments.quick)
        samples = make_samples(prepared.model_dir, quick=arguments.quick)
        advantages = np.random.default_rng(1).normal(size=len(samples)).astype(np.float32)
        differences = compare_gradients(prepared.model_dir, samples[:16], advantages[:16])
        same = all(value <= MAX_GRADIENT_DIFFERENCE for value in differences.values())
        steps = arguments.steps or (2 if arguments.quick else 5)
        timings = [
            measure(way, prepared.model_dir, samples, advantages, dtype=dtype, steps=steps) for way in arguments.ways.split(",")
        ]
    print(
        f"{len(samples)} samples, {sum(s.num_tokens for s in samples)} tokens, "
        f"{sum(s.num_trained_tokens for s in samples)} trained"
    )
    print(f"{str(dtype).removeprefix('torch.')}, {arguments.threads} thread(s), freed memory {'kept' if kept else 'not kept'}")
    print(
        "gradients against forest, largest difference over largest entry: "
        + ", ".join(f"{k} {v:.1e}" for k, v in differences.items())
    )
    print(f"{'way':<8}{'wall s':>9}{'cpu s':>9}{'samples/s':>11}{'tokens/s':>10}{'computed':>10}{'passes':>8}")
    for t in timings:
        print(
            f"{t.way:<8}{t.wall_s:>9.3f}{t.cpu_s:>9.3f}{t.samples_per_s:>11.1f}{t.tokens_per_s:>10.0f}"
            f"{t.computed_tokens:>10}{t.microbatches:>8}"
        )
    if arguments.json:
        print(
            json.dumps(
                {
                    "benchmark": "train_step",
                    "model": prepared.model_dir.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "threads": arguments.threads,
                    "load_average": os.getloadavg()[0],
                    "freed_memory_kept": kept,
                    "same_gradients": same,
                    "gradient_differences": differences,
                    "ways": {timing.way: asdict(timing) for timing in timings},
                }
            )
        )
    return 0 if same else 1


def make_samples(model_dir: Path, *, quick: bool) -> list[Sample]:
    """8 prompts x 8 answers; answers drawn from few tokens, as those of a model that half knows are."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    draw = np.random.default_rng(0)
    samples = []
    for group in range(8):
        a, b = draw.integers(1, 10, 2)
        text = f"s{a}{b}{a}{b}{a}=" if quick else f"2+3=5\n4+1=5\n6+2=8\n{a}+{b}="
        prompt = tokenizer(text)["input_ids"]
        candidates = tokenizer("0123456789")["input_ids"]
        end = tokenizer.eos_token_id if quick else tokenizer("\n")["input_ids"][0]
        for seat in range(8):
            answer = [int(draw.choice(candidates)) for _ in range(int(draw.integers(1, 4)))] + [end]
            mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
            samples.append(
                Sample(
                    task_id=str(group),
                    group_id=f"{group}/0",
                    rollout_id=f"{group}/0/{seat}",
                    attempt=0,
                    seat=seat,
                    group_size=8,
                    data_source="benchmark",
                    tokens=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, -draw.random(mask.shape) * 3, 0).astype(np.float32),
                    version_starts=np.array([0, len(prompt)], np.int32),
                    versions=np.array([NO_VERSION, 0], np.int32),
                    kept_cache=np.zeros(2, np.uint8),
                    reward=0.0,
                    temperature=1.0,
                    stop_reason=StopReason.STOP,
                    num_turns=1,
                    settings_revision=0,
                    incarnation="benchmark",
                    produced_at=0.0,
                )
            )
    return samples


class PaddedTrainer:
    """The plain recipe: right padding, logits everywhere, autocast, one torch optimizer."""

    def __init__(self, model_dir: Path, *, dtype: torch.dtype) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._dtype = dtype
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.computed_tokens = self.microbatches = 0

    def accumulate(self, samples: Sequence[Sample], advantages: npt.NDArray[np.float32]) -> None:
        """Add the gradient of the token mean over all samples."""
        denominator = sum(sample.num_trained_tokens for sample in samples)
        self.computed_tokens = self.microbatches = 0
        for start in range(0, len(samples), PADDED_BATCH):
            self._pass(samples[start : start + PADDED_BATCH], advantages[start : start + PADDED_BATCH], denominator)

    def step(self) -> None:
        """Clip, update, clear."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _pass(self, samples: Sequence[Sample], advantages: npt.NDArray[np.float32], denominator: int) -> None:
        length = max(sample.num_tokens for sample in samples)
        ids, mask, behavior = (np.zeros((len(samples), length), kind) for kind in (np.int64, np.int64, np.float32))
        attended = np.zeros((len(samples), length), np.int64)
        for row, sample in enumerate(samples):
            ids[row, : sample.num_tokens], mask[row, : sample.num_tokens] = sample.tokens, sample.loss_mask
            behavior[row, : sample.num_tokens] = sample.behavior_logprobs
            attended[row, : sample.num_tokens] = 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            logits = self.model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(attended), use_cache=False
            ).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, torch.from_numpy(ids)[:, 1:, None])[..., 0]
        trained = torch.from_numpy(mask)[:, 1:] != 0
        result = token_losses(
            logprobs[trained],
            torch.from_numpy(behavior)[:, 1:][trained],
            torch.from_numpy(advantages)[:, None].expand(-1, length - 1)[trained],
            options=OPTIONS.loss,
        )
        torch.autograd.backward(result.losses.sum() / denominator)
        self.computed_tokens += len(samples) * length
        self.microbatches += 1


def compare_gradients(model_dir: Path, samples: Sequence[Sample], advantages: npt.NDArray[np.float32]) -> dict[str, float]:
    """Way to its largest difference from the forest's gradient, relative to the largest entry, in float32."""
    denominator = sum(sample.num_trained_tokens for sample in samples)

    def packed(share_prefixes: bool) -> dict[str, torch.Tensor]:
        policy = FsdpPolicy(model_dir, TrainerSettings(), dtype=torch.float32, share_prefixes=share_prefixes)
        policy.accumulate(samples, advantages, denominator=denominator, options=OPTIONS.loss)
        return dict(policy.gradients())

    forest = packed(share_prefixes=True)
    padded = PaddedTrainer(model_dir, dtype=torch.float32)
    padded.accumulate(samples, advantages)
    others = {"packed": packed(share_prefixes=False), "padded": {n: p.grad for n, p in padded.model.named_parameters()}}
    largest = max(float(gradient.abs().max()) for gradient in forest.values())
    return {
        way: max(float((gradients[name] - gradient).abs().max()) for name, gradient in forest.items()) / largest
        for way, gradients in others.items()
    }


def measure(
    way: str, model_dir: Path, samples: Sequence[Sample], advantages: npt.NDArray[np.float32], *, dtype: torch.dtype, steps: int
) -> Timing:
    """Time whole steps: packing, forward, backward, clipping, update."""
    facts = {"computed": 0, "microbatches": 0}
    step: Callable[[], None]
    if way == "padded":
        padded = PaddedTrainer(model_dir, dtype=dtype)

        def step() -> None:
            padded.accumulate(samples, advantages)
            padded.step()
            facts.update(computed=padded.computed_tokens, microbatches=padded.microbatches)

    else:
        policy = FsdpPolicy(model_dir, TrainerSettings(), dtype=dtype, share_prefixes=way == "forest")

        def step() -> None:
            report = train_step(policy, samples, advantages, OPTIONS)
            facts.update(computed=report.num_computed_tokens, microbatches=report.num_microbatches)

    walls, cpus = [], []
    for _ in range(steps + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    wall_s, cpu_s = float(np.median(walls[1:])), float(np.median(cpus[1:]))
    structlog.get_logger().info("measured", way=way, wall_s=wall_s, cpu_s=cpu_s)
    return Timing(
        way=way,
        wall_s=wall_s,
        cpu_s=cpu_s,
        samples_per_s=len(samples) / wall_s,
        tokens_per_s=sum(sample.num_tokens for sample in samples) / wall_s,
        computed_tokens=facts["computed"],
        microbatches=facts["microbatches"],
    )


if __name__ == "__main__":
    raise SystemExit(main())
