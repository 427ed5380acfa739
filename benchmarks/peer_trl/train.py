"""GRPO with TRL on given tasks; run by the peer environment's interpreter, imports nothing of Headrace.

Reads a job (JSON) and writes what came of it (JSON): the mean reward of each step, trained tokens, seconds of training.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(job_path: str, result_path: str) -> None:
    """Train as the job says."""
    job = json.loads(Path(job_path).read_text())
    import torch

    torch.set_num_threads(job["num_threads"])
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    tokens: list[int] = []

    def exact_match(completions: list[str], completion_ids: list[list[int]], truth: list[str], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(text.split("\n")[0].strip() == expected) for text, expected in zip(completions, truth, strict=True)]

    rewards: list[float] = []

    class Record(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rewards.append(float(logs["reward"]))
                sys.stderr.write(f"step {len(rewards)}/{job['num_steps']} reward {rewards[-1]:.3f}\n")

    config = GRPOConfig(
        output_dir=job["output_dir"],
        use_cpu=True,
        bf16=job["bf16"],
        per_device_train_batch_size=job["samples_per_step"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        adam_beta1=job["beta1"],
        adam_beta2=job["beta2"],
        max_grad_norm=job["max_grad_norm"],
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        beta=0.0,
        max_steps=job["num_steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=job["seed"],
    )
    trainer = GRPOTrainer(
        model=job["model_dir"],
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["model_dir"], padding_side="left"),
        callbacks=[Record()],
    )
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    Path(result_path).write_text(json.dumps({"rewards": rewards, "trained_tokens": sum(tokens), "training_s": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
