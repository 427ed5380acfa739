"""Running the peer with the settings of a Headrace run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from agent_loop.task import Task
from benchmarks.figures import Figures, figures_of_peer
from benchmarks.peer_trl.environment import PeerUnavailable, ensure_python
from configs.schema import Settings
from console.children import die_with
from rollouter.prompts import split
from rollouter.tasks import load_rows

SCRIPT = Path(__file__).with_name("train.py")


def measure_trl(settings: Settings, model_dir: Path, *, run_dir: Path) -> Figures:
    """Train with TRL on the tasks that the run trained on, with all cores. Raises PeerUnavailable."""
    python = ensure_python()
    run_dir.mkdir(parents=True, exist_ok=True)
    job, result, log = run_dir / "job.json", run_dir / "result.json", run_dir / "trl.log"
    cores = len(os.sched_getaffinity(0))
    job.write_text(json.dumps(job_of(settings, model_dir, run_dir, cores)), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(cores),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads beside any other work slow it down by an order of magnitude
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONPATH", None)
    started = time.monotonic()
    with log.open("wb") as output:
        command = [str(python), str(SCRIPT), str(job), str(result)]
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False, preexec_fn=die_with(os.getpid())
        ).returncode
    wall_s = time.monotonic() - started
    if code:
        raise PeerUnavailable(f"TRL's run: exit code {code}; log: {log}")
    outcome = json.loads(result.read_text())
    return figures_of_peer(
        name="TRL",
        rewards=outcome["rewards"],
        trained_tokens=outcome["trained_tokens"],
        samples_per_step=settings.samples_per_step,
        training_s=outcome["training_s"],
        wall_s=wall_s,
    )


def job_of(settings: Settings, model_dir: Path, run_dir: Path, cores: int) -> dict[str, object]:
    """What the peer is asked to do, as plain values."""
    tasks = [
        Task(
            task_id=str(number),
            prompt_ids=np.zeros(0, np.int32),
            prompt_text=str(row.prompt),
            ground_truth=str(row.ground_truth),
            data_source=row.data_source,
            extra_info={},
        )
        for number, row in enumerate(load_rows(settings.data.source))
    ]
    trained, _ = split(tasks, fraction=settings.data.held_out_fraction, seed=settings.seed)
    trainer = settings.trainer
    return {
        "model_dir": str(model_dir),
        "output_dir": str(run_dir),
        "rows": [{"prompt": task.prompt_text, "truth": task.ground_truth} for task in trained],
        "num_steps": settings.num_steps,
        "samples_per_step": settings.samples_per_step,
        "group_size": settings.group_size,
        "max_tokens": settings.sampling.max_tokens,
        "temperature": settings.sampling.temperature,
        "learning_rate": trainer.learning_rate,
        "warmup_steps": trainer.warmup_steps,
        "beta1": trainer.beta1,
        "beta2": trainer.beta2,
        "max_grad_norm": trainer.max_grad_norm,
        "clip_low": trainer.clip_low,
        "clip_high": trainer.clip_high,
        "seed": settings.seed,
        "num_threads": cores,
        "bf16": settings.model.dtype != "float32" and _has_bfloat16(),
    }


def _has_bfloat16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text() or "amx_bf16" in Path("/proc/cpuinfo").read_text()
